"""What cannot be fine-tuned: one clear error before the first step, with the row and what is allowed."""

from __future__ import annotations

import sys

import pytest
from command_line import fails
from finetuning_runs import TEXTS, base, task_of, write_rows
from tiny import write_json, write_model

from fastbert.errors import CheckpointError, ConfigError, InputError

ROWS = [{"text": text, "label": i % 2} for i, text in enumerate(TEXTS)]


def changed(row: int, **fields) -> list[dict]:
    return [{**one, **fields} if i == row else one for i, one in enumerate(ROWS)]


@pytest.mark.parametrize(
    "train,held_out,options,error",
    (
        (changed(2, label=None), None, {}, r"a.jsonl, row 3: label is missing"),
        (ROWS, changed(1, label=7), {}, r"b.jsonl, row 2: label is 7, which is none of the 2 labels .*: 0, 1"),
        (ROWS, changed(1, label=None), {}, r"b.jsonl, row 2: label is missing"),
        (changed(3, text=" "), None, {}, r"a.jsonl, row 4: text is empty"),
        (changed(3, text=None), None, {}, r"a.jsonl, row 4: text is missing"),
        (ROWS, [{"sentence": "a", "label": 0}], {}, r"b.jsonl has no column 'text'; it has: sentence, label"),
        ([{"a": "x", "label": 0}], None, {}, r"choose one, or two, with --text-columns: a, label"),
        ([{"text": "x", "b": 0}], None, {}, r"choose one with --label-column: b"),
        (ROWS, None, {"text_columns": ("nothing",)}, r"has no column 'nothing'; it has: text, label"),
        (ROWS, None, {"text_columns": ("a", "b", "c")}, r"text_columns has 3 names"),
        (ROWS, None, {"label_column": "nothing"}, r"has no column 'nothing'"),
        ([{"text": t, "label": 1} for t in TEXTS], None, {}, r"label has one label alone, '1'"),
        (
            [{"text": t, "label": "x"} for t in TEXTS],
            None,
            {"problem_type": "regression"},
            r"row 1: label is 'x'; it must be a number",
        ),
        ([{"text": "a", "label": ["x", "y"]}], None, {"problem_type": "single_label_classification"}, r"holds lists"),
        (ROWS, None, {"class_weights": ("1", "2", "3")}, r"class_weights has 3 numbers for 2 labels \(0, 1\)"),
        (ROWS, None, {"class_weights": ("heavy",)}, r"must be balanced, or a number a label"),
        (
            changed(0, label=0.5),
            None,
            {"class_weights": ("balanced",)},
            r"are for one label a row; this is a regression",
        ),
        (ROWS, None, {"max_length": 100}, r"max_length is 100; .* has positions for 64 tokens"),
        (ROWS, None, {"max_length": 2}, r"max_length is 2; the special tokens alone take 2"),
        (ROWS, None, {"task": "tokens"}, r"has a name that words usually have"),
        ([{"tokens": ["a", "b"], "tags": ["O"]}], None, {"task": "tokens"}, r"text 1 has 2 words and 1 tags"),
        ([{"tokens": [], "tags": []}], None, {"task": "tokens"}, r"text 1 has no words"),
        (
            [{"tokens": ["a", "b"], "tags": ["O", "B-X"]}],
            [{"tokens": ["a"], "tags": ["B-Y"]}],
            {"task": "tokens"},
            r"b.jsonl, text 1: the tag 'B-Y' is none of the 2 of the training data: O, B-X",
        ),
        (ROWS, None, {"task": "qa"}, r"has no column 'question'"),
        (
            [{"question": "q", "context": "a b", "answers": {"text": ["b"], "answer_start": [0]}}],
            None,
            {"task": "qa"},
            r"no answer stands where its answer_start says, for example 1's",
        ),
        (
            [{"question": "q", "context": "", "answers": {"text": ["b"], "answer_start": [0]}}],
            None,
            {"task": "qa"},
            r"question 1: the context is empty",
        ),
    ),
)
def test_data_that_cannot_be_learnt(tmp_path, train, held_out, options, error):
    path = write_rows(tmp_path / "a.jsonl", train)
    held = None if held_out is None else write_rows(tmp_path / "b.jsonl", held_out)
    with pytest.raises((InputError, ConfigError), match=error):
        task_of(base(tmp_path), path, held, **options)


def test_windows_that_overlap_too_much(tmp_path):
    path = write_rows(tmp_path / "a.jsonl", [{"tokens": ["a", "b"], "tags": ["O", "B-X"]}])
    message = "doc_stride is 40: chunks of 32 tokens, 2 special tokens among them, may overlap by 0 to 29"
    with pytest.raises(ConfigError, match=message):
        task_of(base(tmp_path), path, task="tokens", doc_stride=40)


def test_checkpoints_that_do_not_fit(tmp_path):
    path = write_rows(tmp_path / "a.jsonl", ROWS)
    three = str(write_model(tmp_path / "three", head="SequenceClassification", num_labels=3))
    with pytest.raises(ConfigError, match=r"for 3 labels, and the data have 2: start from a checkpoint"):
        task_of(three, path)
    names = {"num_labels": 2, "id2label": {0: "x", 1: "y"}}
    other = str(write_model(tmp_path / "other", head="SequenceClassification", **names))
    with pytest.raises(ConfigError, match=r"has a head for x, y; the data have 0, 1"):
        task_of(other, path)
    with pytest.raises(ConfigError, match="model is missing"):
        task_of("", path)
    write_json(tmp_path / "strange" / "config.json", {"model_type": "gpt2"})
    with pytest.raises(ConfigError, match="gpt2"):
        task_of(str(tmp_path / "strange"), path)
    with pytest.raises(CheckpointError, match="is not a folder"):
        task_of(str(tmp_path / "nothing"), path)


def test_files_that_cannot_be_read(tmp_path):
    model = base(tmp_path)
    (tmp_path / "a.conll").write_text("word\n")
    with pytest.raises(InputError, match=r"a.conll, line 1: 'word' is no word with a tag"):
        task_of(model, str(tmp_path / "a.conll"), task="tokens")
    (tmp_path / "a.json").write_text('{"version": 1}')
    with pytest.raises(InputError, match="is no SQuAD file, which has data, paragraphs, qas"):
        task_of(model, str(tmp_path / "a.json"), task="qa")
    with pytest.raises(InputError, match="is not a file"):
        task_of(model, str(tmp_path / "nothing.jsonl"))


def test_no_label_of_a_data_set_is_minus_one(tmp_path):
    """As GLUE's test sets have it."""
    import datasets

    features = datasets.Features({"text": datasets.Value("string"), "label": datasets.ClassLabel(names=["z", "a"])})
    rows = datasets.Dataset.from_dict({"text": list(TEXTS), "label": [0, 1, 0, 1, 0, -1]}, features=features)
    rows.to_parquet(tmp_path / "a.parquet")
    with pytest.raises(InputError, match="row 6: label is missing"):
        task_of(base(tmp_path), str(tmp_path / "a.parquet"))


def test_names_of_the_hub(tmp_path, monkeypatch):
    """To learn from `train`; to judge by `validation`, or `test` where that is all there is."""
    import datasets

    asked = []

    def load(path, config, split):
        asked.append((path, config, split))
        return datasets.Dataset.from_list(ROWS)

    splits = {"glue": ["train", "validation", "test"], "bank": ["train", "test"]}
    monkeypatch.setattr(datasets, "load_dataset", load)
    monkeypatch.setattr(datasets, "get_dataset_split_names", lambda path, config: splits[path])
    task_of(base(tmp_path), "glue:sst2", "glue:sst2")
    task_of(base(tmp_path), "bank", "bank")
    assert asked == [
        ("glue", "sst2", "train"),
        ("glue", "sst2", "validation"),
        ("bank", None, "train"),
        ("bank", None, "test"),
    ]


@pytest.mark.parametrize(
    "missing,options",
    (
        (["scipy"], {}),
        (["sklearn"], {"held_out": True}),
        (["scipy", "seqeval"], {"task": "tokens", "held_out": True}),
    ),
)
def test_packages_that_are_missed_later_are_named_first(tmp_path, monkeypatch, missing, options):
    """Before an evaluation fails behind all steps of an epoch."""
    for name in missing:
        monkeypatch.setitem(sys.modules, name, None)
    path = write_rows(tmp_path / "a.jsonl", ROWS)
    held_out = path if options.pop("held_out", False) else None
    said = rf"needs {', '.join(missing)}: pip install -e '\.\[train\]' in a clone"
    with pytest.raises(ConfigError, match=said):
        task_of(base(tmp_path), path, held_out, **options)
    if "scipy" in missing:
        assert "predict needs scipy: " in fails("predict", tmp_path, path)
