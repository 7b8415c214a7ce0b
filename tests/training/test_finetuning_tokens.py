"""Fine-tuning for tags of words: alignment and losses against transformers, entities against seqeval."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from finetuning_runs import base, check_loss, padded, task_of, theirs, write_rows
from seqeval.metrics import f1_score, precision_score, recall_score

from fastbert.data.chunks.words import Words, words_of

AUTO = "AutoModelForTokenClassification"
WORDS = [["the", "Zebra", "sat", "on", "Old", "Matt"], ["we", "ran"], ["Katz", "and", "dogs", "ran", "in", "Housten"]]
TAGS = [["O", "B-PER", "O", "O", "B-LOC", "I-LOC"], ["O", "O"], ["B-PER", "O", "O", "O", "O", "B-LOC"]]


def write_conll(path: Path, words=WORDS, tags=TAGS, separator: str = "\t") -> str:
    texts = (
        "".join(f"{w}{separator}{t}\n" for w, t in zip(*one, strict=True)) for one in zip(words, tags, strict=True)
    )
    path.write_text("-DOCSTART- -X- O\n\n" + "\n".join(texts))
    return str(path)


def test_both_kinds_of_files_are_the_same_examples(tmp_path):
    rows = [{"tokens": w, "ner_tags": t} for w, t in zip(WORDS, TAGS, strict=True)]
    model = base(tmp_path)
    found = [
        task_of(model, path, task="tokens")
        for path in (
            write_conll(tmp_path / "a.conll"),
            write_conll(tmp_path / "b.txt", separator=" -X- "),
            write_rows(tmp_path / "c.jsonl", rows),
        )
    ]
    for task in found:
        assert list(task.model.config.id2label.values()) == ["O", "B-LOC", "B-PER", "I-LOC"]
        np.testing.assert_array_equal(task.train.labels["labels"], found[0].train.labels["labels"])


def test_labels_losses_and_gradients_are_transformers(tmp_path):
    from transformers import AutoTokenizer

    task = task_of(base(tmp_path), write_conll(tmp_path / "a.conll"), task="tokens")
    found = theirs(task, tmp_path / "saved", AUTO)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "saved")
    made = tokenizer(WORDS, is_split_into_words=True, padding=True, return_tensors="pt")
    assert torch.equal(padded(task, found[1])["input_ids"], made["input_ids"])
    labels = torch.full_like(made["input_ids"], -100)
    for i, tags in enumerate(TAGS):
        before = None
        for j, word in enumerate(made.word_ids(i)):
            if word is not None and word != before:
                labels[i, j] = found[1].config.label2id[tags[word]]
            before = word
    assert task.train.labels["labels"].tolist() == labels[made["attention_mask"] == 1].tolist()
    check_loss(task, found, lambda model: {**made, "labels": labels})


def test_metrics_are_seqevals(tmp_path):
    path = write_conll(tmp_path / "a.conll")
    task = task_of(base(tmp_path), path, path, task="tokens")
    torch.nn.init.normal_(task.model.classifier.weight)  # else all tags are the same one
    _, model = theirs(task, tmp_path / "saved", AUTO)
    with torch.no_grad():
        found = task.evaluate(task.model.eval())
        best = model(**padded(task, model)).logits.argmax(-1)
    mask = padded(task, model)["attention_mask"] == 1
    labels = torch.from_numpy(task.train.labels["labels"])
    names = model.config.id2label
    said = iter([names[i] for i in best[mask][labels != -100].tolist()])
    said = [[next(said) for _ in tags] for tags in TAGS]
    assert any(tag != "O" for tags in said for tag in tags)
    expected = {"precision": precision_score, "recall": recall_score, "f1": f1_score}
    for name, score in expected.items():
        assert found[name] == score(TAGS, said, zero_division=0), name
    flat = [a == b for x, y in zip(said, TAGS, strict=True) for a, b in zip(x, y, strict=True)]
    assert found["accuracy"] == sum(flat) / len(flat)


def test_long_texts_go_on_in_windows_and_each_word_counts_once(tmp_path):
    words, tags = [[w for one in WORDS * 4 for w in one], WORDS[1]], [[t for one in TAGS * 4 for t in one], TAGS[1]]
    with pytest.warns(UserWarning, match="go on in . more windows"):
        task = task_of(base(tmp_path), write_conll(tmp_path / "a.conll", words, tags), task="tokens", doc_stride=8)
    names, labels = task.labels.names, task.train.labels["labels"]
    assert task.train.sequences.lengths.max() == 32
    counts = np.bincount(labels[labels >= 0], minlength=len(names))
    flat = [tag for one in tags for tag in one]
    assert {name: int(n) for name, n in zip(names, counts, strict=True)} == {n: flat.count(n) for n in names}
    found = task.tagger.words(words)
    spoken = found.tokens[np.argsort(found.of_word)]
    assert sorted(found.of_word) == list(range(len(flat))) and len(set(spoken.tolist())) == len(flat)
    # A word speaks where it has most words around it: at least half of the overlap is on each side.
    made = task.train.sequences
    edge = np.minimum(
        spoken - made.offsets[made.of_token[spoken]], made.offsets[made.of_token[spoken] + 1] - 1 - spoken
    )
    inner = slice(8, len(words[0]) - 8)
    assert edge[inner].min() >= 3


def test_a_word_without_tokens_has_no_label_and_is_outside(tmp_path):
    words, tags = [["the", "\u200d", "Zebra"]], [["O", "B-PER", "B-PER"]]
    path = write_conll(tmp_path / "a.conll", words, tags)
    with pytest.warns(UserWarning, match="the tokenizer makes nothing of 1 words"):
        task = task_of(base(tmp_path), path, path, task="tokens")
    labels = task.train.labels["labels"]
    assert labels[labels >= 0].tolist() == [0, 1]
    assert task.tagger.words(words).tags(np.eye(2)[[0, 1, 1]], ["O", "B-PER"]) == [["O", "O", "B-PER"]]


@pytest.mark.parametrize(
    "text,words",
    (
        ("Paris, (the U.S.A.) isn't Bob's.", "Paris , ( the U.S.A . ) isn't Bob 's ."),
        ("a-b @x $5.00!? \u201cno\u201d", "a-b @x $5.00 ! ? \u201c no \u201d"),
        ("\u6211\u5728\u5317\u4eac ok", "\u6211 \u5728 \u5317 \u4eac ok"),
        ("'s", "'s"),
    ),
)
def test_words_of_texts_as_people_write_them(text, words):
    found = [text[a:b] for a, b in words_of(text)]
    assert found == words.split() and "".join(found) == "".join(text.split())


def test_answers_have_the_places_of_entities(tmp_path):
    task = task_of(base(tmp_path), write_conll(tmp_path / "a.conll"), task="tokens")
    torch.nn.init.normal_(task.model.classifier.weight)
    texts = ["The  cat, Zebra (old) sat.", ""]
    task.model.eval()
    found = task.tagger.predict(texts)
    again = task.tagger.predict([" ".join(text) for text in WORDS])
    split = task.tagger.predict(WORDS)
    assert found[1] == [] and found[0]
    for entity in found[0]:
        assert texts[0][entity["start"] : entity["end"]] == entity["text"] and 0 < entity["score"] <= 1
    assert again == split  # of words with blanks between them


def test_words_are_found_in_tokens_that_begin_with_their_blank():
    """Where the blank before a word is a token alone, it stands for the first character of the word."""
    from fastbert.data.chunks import CORE, TokenChunks

    spans = np.array([[-1, -1], [0, 2], [3, 6], [7, 8], [7, 9], [9, 11], [-1, -1]], np.int32)
    parts, begins = np.full(7, CORE), np.zeros(1, np.int64)
    made = TokenChunks(
        np.zeros(7, np.int32), None, np.array([0, 7]), np.array([0]), spans=spans, parts=parts, begins=begins
    )
    words = Words(made, ["ab cde fghi"], np.array([0, 3, 7]), np.array([2, 6, 11]), np.array([3]))
    assert words.tokens.tolist() == [1, 2, 3] and words.of_word.tolist() == [0, 1, 2]
