"""Fine-tuning for answers in texts: labels and losses against transformers, the best span against all spans."""

from __future__ import annotations

import itertools
import json
import math

import numpy as np
import pytest
import torch
from finetuning_runs import base, check_loss, task_of, theirs, write_rows
from precise import assert_close_to_theirs, in_float64
from seeds import numpy_generator

from fastbert.data.chunks.answers import MAX_ANSWER, best_span
from fastbert.testing.numerics import GRADIENT_FACTOR
from fastbert.training.finetuning.inputs.squad import exact_match, f1, normalized, squad_metrics

CONTEXT = "the cat sat on the mat . a dog ran in to the old house , and we ran . " * 2
QUESTIONS = [("who sat ?", "the cat"), ("who ran ?", "a dog"), ("where ?", "the old house")]


def rows_of(shift: int = 0) -> list[dict]:
    return [
        {"question": q, "context": CONTEXT, "answers": {"text": [a], "answer_start": [CONTEXT.index(a) + shift]}}
        for q, a in QUESTIONS
    ]


def write_squad(path, rows) -> str:
    paragraphs = [
        {
            "context": row["context"],
            "qas": [
                {
                    "id": str(i),
                    "question": row["question"],
                    "answers": [
                        {"text": t, "answer_start": s}
                        for t, s in zip(row["answers"]["text"], row["answers"]["answer_start"], strict=True)
                    ],
                }
            ],
        }
        for i, row in enumerate(rows)
    ]
    path.write_text(json.dumps({"version": "1.1", "data": [{"title": "t", "paragraphs": paragraphs}]}))
    return str(path)


def test_windows_and_labels_are_those_of_transformers_tokenizer(tmp_path):
    """As its run_qa example makes them; a window without the answer has its first token as the label."""
    from transformers import AutoTokenizer

    with pytest.warns(UserWarning, match="too long go on in 3 more windows"):
        task = task_of(base(tmp_path), write_squad(tmp_path / "a.json", rows_of()), task="qa", doc_stride=6)
    task.save(task.model, tmp_path / "saved")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "saved")
    pairs = [row["question"] for row in rows_of()], [row["context"] for row in rows_of()]
    made = tokenizer(*pairs, truncation="only_second", max_length=32, stride=6, return_overflowing_tokens=True)
    assert [task.train[i]["input_ids"].tolist() for i in range(len(task.train))] == made["input_ids"]
    expected = []
    for i, sample in enumerate(made["overflow_to_sample_mapping"]):
        answer = QUESTIONS[sample][1]
        begin = CONTEXT.index(answer)
        start, end = made.char_to_token(i, begin, 1), made.char_to_token(i, begin + len(answer) - 1, 1)
        expected.append((0, 0) if start is None or end is None else (start, end))
    assert [
        (task.train[i]["start_positions"], task.train[i]["end_positions"]) for i in range(len(expected))
    ] == expected
    assert sum(e > 0 for _, e in expected) >= 3
    rows = task_of(base(tmp_path), write_rows(tmp_path / "a.jsonl", rows_of()), task="qa", doc_stride=6)
    np.testing.assert_array_equal(rows.train.labels["end_positions"], task.train.labels["end_positions"])


def test_losses_and_gradients_are_transformers(tmp_path):
    """Of windows of one length: its loss counts padding as possible ends."""
    task = task_of(base(tmp_path), write_squad(tmp_path / "a.json", rows_of()), task="qa", doc_stride=6)
    full = [i for i in range(len(task.train)) if task.train.sequences.lengths[i] == 32]
    found = theirs(task, tmp_path / "saved", "AutoModelForQuestionAnswering")
    examples = [task.train[i] for i in full[:2]]
    made = {name: torch.from_numpy(np.array([example[name] for example in examples])) for name in examples[0]}
    check_loss(task, found, lambda model: made, indices=full[:2])


def test_an_answer_that_is_not_where_the_data_say_is_left_out(tmp_path):
    rows = [*rows_of()[:2], rows_of(shift=1)[2]]
    with pytest.warns(UserWarning, match="1 of 3 questions of .* are left out: their answers do not stand where"):
        task = task_of(base(tmp_path), write_squad(tmp_path / "a.json", rows), task="qa", max_length=64)
    assert len(task.train) == 2


def test_the_best_span_is_the_best_of_all():
    draw = numpy_generator(0)
    for size in (1, 2, 50):
        start, stop, in_text = draw.normal(size=size), draw.normal(size=size), draw.random(size) < 0.8
        in_text[0] = True
        spans = [
            (start[a] + stop[b], a, b)
            for a, b in itertools.product(range(size), repeat=2)
            if a <= b < a + MAX_ANSWER and in_text[a] and in_text[b]
        ]
        best, a, b = max(spans)
        assert best_span(start, stop, in_text) == (a, b, best)


def test_answers_come_from_the_best_window(tmp_path):
    """Against all spans of all windows, by transformers' model."""
    path = write_squad(tmp_path / "a.json", rows_of())
    task = task_of(base(tmp_path), path, path, task="qa", doc_stride=6)
    torch.nn.init.normal_(task.model.qa_outputs.weight)
    _, model = theirs(task, tmp_path / "saved", "AutoModelForQuestionAnswering")
    pairs = [(q, CONTEXT) for q, _ in QUESTIONS]
    made = task.finder.cut(pairs)
    task.model.eval()
    found = task.finder.answers_job(pairs).run(task.model.device)
    with torch.no_grad():
        metrics = task.evaluate(task.model)

    def best_of(model, i):
        """Begin, end and probability."""
        spans = []
        for window in np.flatnonzero(made.source == i):
            inputs = {name: torch.from_numpy(value)[None] for name, value in made[window].items()}
            with torch.no_grad():
                out = model(**inputs)
            start, stop = out.start_logits[0].double(), out.end_logits[0].double()
            largest.append(float(torch.stack((start, stop)).abs().max()))
            places = made.spans[made.offsets[window] : made.offsets[window + 1]]
            for a, b in itertools.product(np.flatnonzero(places[:, 0] >= 0), repeat=2):
                if a <= b < a + MAX_ANSWER:
                    score = start.softmax(0)[a] * stop.softmax(0)[b]
                    spans.append((float(start[a] + stop[b]), int(places[a, 0]), int(places[b, 1]), float(score)))
        return max(spans)[1:]

    largest: list[float] = []
    exact_model = in_float64(model)
    for i in range(3):
        (begin, end, near), (*_, exact) = best_of(model, i), best_of(exact_model, i)
        assert (found["start"][i], found["end"][i]) == (begin, end) and found["answer"][i] == CONTEXT[begin:end]
        # The logarithm of a probability is the sum of four terms as large as the scores.
        error, theirs_error = (abs(math.log(float(score) / exact)) for score in (found["score"][i], near))
        assert error <= GRADIENT_FACTOR * (theirs_error + 4 * torch.finfo(torch.float32).eps * max(largest))
    assert metrics == squad_metrics(found["answer"], [[a] for _, a in QUESTIONS])


def test_questions_without_an_answer(tmp_path):
    """They teach the first token, and are answered by nothing where it is likelier than all spans."""
    rows = [*rows_of(), {"question": "why ?", "context": "we ran .", "answers": {"text": [], "answer_start": []}}]
    path = write_squad(tmp_path / "a.json", rows)
    task = task_of(base(tmp_path), path, path, task="qa", max_length=64)
    assert task.usage.no_answer and task.train[3]["end_positions"] == 0
    model = task.model.eval()
    made = task.finder.cut([("why ?", "we ran .")])
    with torch.no_grad():
        out = model(**made.pack([0]))
        totals = [
            float(out.start_logits.softmax(0, dtype)[0] * out.end_logits.softmax(0, dtype)[0])
            for dtype in (torch.float32, torch.float64)
        ]
    found = task.finder.answers_job([("why ?", "we ran .")]).run(model.device)
    in_text = np.flatnonzero(made.spans[:, 0] >= 0)
    pairs = ((a, b) for a, b in itertools.product(in_text, repeat=2) if a <= b)
    best = max(float(out.start_logits[a] + out.end_logits[b]) for a, b in pairs)
    if float(out.start_logits[0] + out.end_logits[0]) > best:
        assert (found["answer"], found["end"]) == ([""], [0])
        assert_close_to_theirs([float(found["score"][0])], *([total] for total in totals))
    else:
        assert found["answer"][0]


def test_squads_measure():
    assert normalized("The  Old-House, a!") == "oldhouse"
    assert exact_match("The cat.", "cat") == 1 and exact_match("a cat", "dog") == 0
    assert f1("the old brown house", "an old house") == pytest.approx(2 * (2 / 3) * 1 / (2 / 3 + 1))
    assert f1("", "the") == 1 and f1("", "cat") == 0
    found = squad_metrics(["cat", "", "x y"], [["dog", "the cat"], [], ["y z", "x"]])
    assert found == {"exact_match": pytest.approx(200 / 3), "f1": pytest.approx(100 * (1 + 1 + 2 / 3) / 3)}
