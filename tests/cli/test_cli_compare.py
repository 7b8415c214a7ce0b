"""`fastbert compare`: counts, turns, the report, and models that cannot be loaded among several."""

from __future__ import annotations

import json

import pytest
import tiny
import torch
from command_line import fails, run_here
from hf import make_hf
from scipy.stats import spearmanr
from torch.utils.flop_counter import FlopCounterMode

from fastbert import SentenceEncoder
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


def test_a_model_that_cannot_be_loaded_is_said_and_the_others_go_on(tmp_path):
    done = run_here("compare", "tiny", tmp_path / "nothing", "--rounds", 1, "--workload", "1x16")
    assert done.returncode == 2 and done.stdout.count("| tiny |") == 1
    assert f"error: {tmp_path / 'nothing'}" in done.stderr and done.stderr.count("\n") == 1
    assert "unknown '3x3'; known are 1x16" in fails("compare", "tiny", "--workload", "3x3")
    assert "is no folder" in fails("compare", "tiny", "--output", __file__)


def test_quality_beside_speed(tmp_path):
    folder, pairs = tiny.write_model(tmp_path / "encoder"), tmp_path / "pairs.csv"
    texts = [("the cat sat", "a dog ran"), ("who sat on the mat", "the cat sat on the mat"), ("we", "they who ran in")]
    rows = [f"{a},{b},{score}" for (a, b), score in zip(texts, (1.0, 4.5, 2.0), strict=True)]
    pairs.write_text("\n".join(("sentence1,sentence2,score", *rows)) + "\n")
    options = ("--rounds", 1, "--workload", "1x16", "--pairs", pairs, "--output", tmp_path / "out")
    done = run_here("compare", folder, "tiny", *options)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "out/comparison.json").read_text())["rows"]
    encoder = SentenceEncoder(folder)
    left, right = (torch.from_numpy(encoder.encode(list(column))) for column in zip(*texts, strict=True))
    cosines = torch.nn.functional.cosine_similarity(left, right)
    assert found[0]["spearman"] == pytest.approx(float(spearmanr(cosines, (1.0, 4.5, 2.0))[0]))
    assert found[1]["spearman"] is None and f"| {100 * found[0]['spearman']:.2f} |" in done.stdout
    pairs.write_text("text,label\na,1\nb,0\n")
    done = run_here("compare", folder, "--pairs", pairs)  # datasets says what it reads
    assert done.returncode == 2 and "error: " in done.stderr and "has one text a row, 'text'" in done.stderr
    pairs.write_text("sentence1,sentence2,score\na,b,good\nb,c,bad\n")
    assert "score holds what is no number" in run_here("compare", folder, "--pairs", pairs).stderr


@pytest.mark.parametrize(
    "name", ("bert-base", "distilbert-base", "albert-base", "electra-base", "modernbert-base", "deberta-v3-base")
)
def test_what_transformers_executes_is_what_torch_counts(name):
    """Of two layers: the others have the same."""
    fields = {**MODELS[name], "vocab_size": 100, "num_hidden_layers": 2, "pad_token_id": 0}
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
