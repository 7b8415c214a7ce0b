"""The cost model of docs/scaling.md: the page has its numbers, and they follow from sums that are done by hand here."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest

import fastbert

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def scaling():
    spec = importlib.util.spec_from_file_location("scaling", ROOT / "benchmarks/scaling.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["scaling"] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["scaling"]


@pytest.mark.parametrize("name", ["efficiencies", "runs", "published", "measured"])
def test_the_page_has_the_models_numbers(name, scaling):
    given = [json.loads(scaling.MEASURED.read_text(encoding="utf-8"))] if name == "measured" else []
    table = getattr(scaling, name)(*given)
    assert f": written by benchmarks/scaling.py -->\n{table}\n<!-- end -->" in scaling.PAGE.read_text(encoding="utf-8")


@pytest.mark.full
def test_the_page_has_the_balance(scaling):
    assert f"\n{scaling.balances()}\n<!-- end -->" in scaling.PAGE.read_text(encoding="utf-8")


@pytest.mark.parametrize("name,layers,hidden", [("BASE", 12, 768), ("LARGE", 24, 1024)])
def test_weights_are_the_models(name, layers, hidden, scaling):
    import torch

    shape = {"hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": hidden // 64}
    with torch.device("meta"):
        model = fastbert.BertForMaskedLM(fastbert.EncoderConfig(intermediate_size=4 * hidden, **shape))
    counted = sum(p.numel() for p in model.parameters())
    assert getattr(scaling, name).weights == pytest.approx(counted, rel=1e-4)


def test_sums_by_hand(scaling):
    """A step that hides nothing, one that hides all but the last bucket, and the bytes of a ring."""
    link = scaling.Network("", local=1e9, local_latency=0.0, taken=0.0, memory=float("inf"))
    shape = scaling.Shape("", 12, 768, 1e3)
    size = 4 * shape.weights
    assert link.all_reduce(1e9, 8) == pytest.approx(2 * 7 / 8) and link.half(1e9, 8) == pytest.approx(7 / 8)
    buckets = -(-size // scaling.BUCKET)
    last = link.all_reduce(size / buckets, 8)
    assert scaling.ddp(shape, 1e6, 8, link) == pytest.approx(1e3 + last)
    first = 1e-3 * (1 / 3 + 2 / 3 / buckets)  # forward, and what comes before the first bucket
    assert scaling.ddp(shape, 1.0, 8, link) == pytest.approx(first + buckets * last)
    gathered = link.half(2 * (shape.weights - 12 * shape.layer), 8)
    assert scaling.fsdp(shape, 1e6, 8, link) == pytest.approx(
        1e3
        + gathered
        + link.half(2 * shape.layer, 8)
        + link.half(4 * shape.layer, 8)
        + link.half(4 * (shape.weights - 12 * shape.layer), 8)
    )


def test_one_gpu_is_whole(scaling):
    for how in (scaling.ddp, scaling.fsdp):
        assert scaling.efficiency(scaling.BASE, 16384, 1, scaling.DENSE, how) == pytest.approx(1.0)


def test_what_was_measured_agrees(scaling):
    """Within a fifth, which is what a shared machine of two cores shows."""
    for row in json.loads(scaling.MEASURED.read_text(encoding="utf-8"))["rows"]:
        assert 0.8 < row["ratio"] < 1.25
