"""`fastbert compare`: counts, turns, the report, and models that cannot be loaded among several."""

from __future__ import annotations

import json

import pytest
import tiny
import torch
from command_line import fails, run_here
from full import left_to_full
from hf import make_hf
from scipy.stats import spearmanr
from torch.utils.flop_counter import FlopCounterMode

from fastbert import Reranker, SentenceEncoder, TextClassifier, inspect
from fastbert.bench.comparison import Candidate, facts_of
from fastbert.bench.jobs import fields_without_type
from fastbert.config import EncoderConfig
from fastbert.models.auto import AutoModel
from fastbert.testing.cases import MODELS


def test_models_side_by_side(tmp_path):
    folder = tiny.write_model(tmp_path / "encoder")
    tiny.write_json(tmp_path / "config.json", json.loads((folder / "config.json").read_text()))
    models = ("tiny", folder, tmp_path / "config.json")
    done = run_here("compare", *models, "--rounds", 1, "--workload", "1x128", "--output", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "out/comparison.json").read_text())
    rows = {row["name"]: row for row in report["rows"]}
    assert list(rows) == list(map(str, models)) and all(row["tokens_per_second"] > 0 for row in rows.values())
    config = EncoderConfig(**MODELS["tiny"])
    model = AutoModel.from_config(config)
    assert rows["tiny"]["parameters"]["all"] == sum(p.numel() for p in model.parameters())
    assert rows[str(folder)]["texts_cut"] == 1 and f"{folder}: 1 of 1 texts are cut to 64 tokens." in done.stdout
    assert (tmp_path / "out/comparison.md").read_text() == done.stdout
    assert (tmp_path / "out/comparison.png").read_bytes()[:4] == b"\x89PNG"


def test_int8_weights_count_as_parameters(tmp_path):
    folder = tiny.write_model(tmp_path / "float")
    assert run_here("quantize", folder, tmp_path / "int8").returncode == 0
    models = (folder, tmp_path / "int8")
    done = run_here("compare", *models, "--rounds", 1, "--workload", "1x16", "--output", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    plain, int8 = json.loads((tmp_path / "out/comparison.json").read_text())["rows"]
    assert int8["parameters"] == plain["parameters"] and int8["training_bytes"] is None
    layers = plain["parameters"]["layers"]
    assert plain["weight_bytes"] - 3 * layers < int8["weight_bytes"] < plain["weight_bytes"] - 2 * layers


def test_a_model_that_cannot_be_loaded_is_said_and_the_others_go_on(tmp_path):
    done = run_here("compare", "tiny", tmp_path / "nothing", "--rounds", 1, "--workload", "1x16")
    assert done.returncode == 2 and done.stdout.count("| tiny |") == 1
    assert f"error: {tmp_path / 'nothing'}" in done.stderr and done.stderr.count("\n") == 1
    assert "unknown '3x3'; known are 1x16" in fails("compare", "tiny", "--workload", "3x3")
    assert "is no folder" in fails("compare", "tiny", "--output", __file__)


TEXTS = [("the cat sat", "a dog ran"), ("who sat on the mat", "the cat sat on the mat"), ("we", "they who ran in")]
SCORES = (1.0, 4.5, 2.0)


def report_of(folder):
    rows = json.loads((folder / "comparison.json").read_text())["rows"]
    return {row["name"]: row.get("quality") for row in rows}


def write_csv(path, header, rows):
    path.write_text("\n".join((header, *(",".join(map(str, row)) for row in rows))) + "\n")
    return path


@pytest.mark.full
def test_pairs_with_scores_judge_encoders_and_rerankers(tmp_path):
    folder, reranker = (
        tiny.write_model(tmp_path / "encoder"),
        tiny.write_model(tmp_path / "reranker", head="SequenceClassification", num_labels=1),
    )
    rows = [(*both, score) for both, score in zip(TEXTS, SCORES, strict=True)]
    pairs = write_csv(tmp_path / "pairs.csv", "sentence1,sentence2,score", rows)
    options = ("--rounds", 1, "--workload", "1x16", "--labelled", pairs, "--output", tmp_path / "out")
    done = run_here("compare", folder, "tiny", reranker, *options)
    assert done.returncode == 0, done.stderr
    found = report_of(tmp_path / "out")
    encoder = SentenceEncoder(folder)
    left, right = (torch.from_numpy(encoder.encode(list(column))) for column in zip(*TEXTS, strict=True))
    cosines = torch.nn.functional.cosine_similarity(left, right)
    value = float(spearmanr(cosines, SCORES)[0])
    assert found[str(folder)] == {"measure": "Spearman of cosines", "value": pytest.approx(value)}
    value = float(spearmanr(Reranker(reranker).predict(TEXTS), SCORES)[0])
    assert found[str(reranker)] == {"measure": "Spearman of scores", "value": pytest.approx(value)}
    assert found["tiny"] is None and f"| {100 * value:.2f} (Spearman of scores) |" in done.stdout


def test_texts_with_labels_judge_encoders_and_classifiers(tmp_path):
    folder, classifier = (
        tiny.write_model(tmp_path / "encoder"),
        tiny.write_model(tmp_path / "classifier", head="SequenceClassification", num_labels=3),
    )
    texts, labels = [text for pair in TEXTS for text in pair] * 2, [f"LABEL_{i % 2}" for i in range(12)]
    file = write_csv(tmp_path / "labels.csv", "text,label", zip(texts, labels, strict=True))
    options = ("--rounds", 1, "--workload", "1x16", "--labelled", file, "--output", tmp_path / "out")
    done = run_here("compare", folder, classifier, *options)
    assert done.returncode == 0, done.stderr
    found, loaded = report_of(tmp_path / "out"), TextClassifier(classifier)
    said = [loaded.labels[i] for i in loaded.predict(texts).argmax(-1)]
    share = sum(a == b for a, b in zip(said, labels, strict=True)) / 12
    assert found[str(classifier)] == {"measure": "accuracy", "value": pytest.approx(share)}
    vectors = SentenceEncoder(folder).encode(texts, convert_to_tensor=True)
    probed = float(inspect.linear_probe(vectors[None], labels)[0])
    assert found[str(folder)] == {"measure": "linear probe", "value": pytest.approx(probed)}
    write_csv(file, "text,label", [("the cat", "LABEL_0"), ("a dog", "fish")])
    done = run_here("compare", folder, classifier, "--rounds", 1, "--workload", "1x16", "--labelled", file)
    assert done.returncode == 2 and done.stdout.count("\n| ") == 3  # both are measured all the same
    assert "row 2 has the label 'fish'; the model has LABEL_0, LABEL_1, LABEL_2" in done.stderr
    assert "each with at least 5 vectors" in done.stderr


def test_labelled_rows_that_judge_nothing_are_errors(tmp_path):
    folder = tiny.write_model(tmp_path / "encoder")
    file = write_csv(tmp_path / "rows.csv", "sentence1,sentence2,score", [("a", "b", "1.0")])
    assert "at least two rows with a finite score" in run_here("compare", folder, "--labelled", file).stderr
    write_csv(file, "text,label", [("a", "x"), ("b", "")])
    assert "row 2: label is missing" in run_here("compare", folder, "--labelled", file).stderr


def test_speed_on_texts_of_ones_own(tmp_path):
    folder, texts = tiny.write_model(tmp_path / "encoder"), tmp_path / "texts.txt"
    lines = ["the cat sat on the mat"] * 3 + ["the " * 100]
    texts.write_text("\n".join(lines) + "\n")
    done = run_here("compare", "tiny", folder, "--rounds", 1, "--texts", texts, "--output", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    first, second = json.loads((tmp_path / "out/comparison.json").read_text())["rows"]
    assert first["tokens"] == 3 * 8 + 102 and second["tokens"] == 3 * 8 + 64 and second["texts_cut"] == 1
    assert second["texts_per_second"] == pytest.approx(second["tokens_per_second"] * 4 / second["tokens"])
    assert "none of these has a tokenizer" in fails("compare", "tiny", "--texts", texts)
    texts.write_text("")
    assert "holds no texts" in fails("compare", folder, "--texts", texts)


@left_to_full(lambda p: p["name"] in ("distilbert-base", "electra-base"))  # BERT's layers
@pytest.mark.parametrize(
    "name", ("bert-base", "distilbert-base", "albert-base", "electra-base", "modernbert-base", "deberta-v3-base")
)
def test_what_transformers_executes_is_what_torch_counts(name):
    """Of two layers, which the others are like, a quarter as wide: the formula goes by the widths."""
    fields = {**MODELS[name], "vocab_size": 100, "num_hidden_layers": 2, "pad_token_id": 0}
    fields |= {width: fields[width] // 4 for width in ("hidden_size", "intermediate_size")}
    config = EncoderConfig.of_family(fields.get("model_type", "bert"), **fields_without_type(fields))
    theirs = make_hf(config, "Model").eval()
    ids = torch.randint(5, 100, (1, 128))
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        theirs(ids, attention_mask=torch.ones_like(ids))
    counted = counter.get_total_flops()
    said = facts_of(Candidate(name, AutoModel.from_config(config)), [128])["operations_per_token"][128]["transformers"]
    pooled = 2 * config.hidden_size**2 * (theirs.config.model_type in ("bert", "albert"))
    projected = 2 * 128 * config.embedding_width * config.hidden_size * (config.embedding_width != config.hidden_size)
    assert abs(counted - pooled - projected - 128 * said) <= 0.01 * counted, (counted, 128 * said)
