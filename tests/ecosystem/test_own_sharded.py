"""fastbert's own classes under torch's DDP and FSDP2: two processes, the losses of transformers' own code."""

from __future__ import annotations

import warnings

import packed_layers
import pytest
import torch
from hf import config_for, make_hf, make_ours
from test_accelerated_sharded import STEPS, WAYS, WORLD, losses
from torch import distributed as dist
from torch import multiprocessing

from fastbert.testing.numerics import GRADIENT_FACTOR, assert_close_to_reference

pytestmark = [
    pytest.mark.dear_to_set_up,
    pytest.mark.skipif(not dist.is_gloo_available(), reason="torch.distributed is without gloo"),
]
CONFIG = config_for("bert", "SequenceClassification")


def work(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", WORLD), rank=rank, world_size=WORLD)
    theirs, results = make_hf(CONFIG, "SequenceClassification"), {}
    ours, exact = (
        make_ours(CONFIG, "SequenceClassification", theirs),
        make_hf(CONFIG, "SequenceClassification").double(),
    )
    with warnings.catch_warnings(), pytest.MonkeyPatch.context() as patch:
        warnings.filterwarnings("error", message="fastbert: ")
        warnings.filterwarnings("error", message="FSDP2-wrapped module")
        layers = packed_layers.count(patch)
        for way in WAYS:
            oracle, near = losses("ddp", "plain", exact)[0], losses(way, "plain", theirs)[0]
            assert not layers
            results[way] = losses(way, "plain", ours)[0], oracle, near, len(layers)
            layers.clear()
    torch.save(results, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> list[dict]:
    folder = tmp_path_factory.mktemp("sharded")
    multiprocessing.spawn(work, (str(folder),), nprocs=WORLD)
    return [torch.load(folder / f"{rank}.pt") for rank in range(WORLD)]


@pytest.mark.parametrize("way", WAYS)
def test_losses_are_transformers_and_every_layer_is_packed(way, results):
    for of_rank in results:
        actual, oracle, near, layers = of_rank[way]
        tensors = torch.tensor(actual), torch.tensor(oracle).double(), torch.tensor(near)
        assert_close_to_reference(*tensors, GRADIENT_FACTOR)
        calls = STEPS * (3 if way == "fsdp-checkpointing" else 2)  # in training, again in backward, in eval mode
        assert layers == CONFIG.num_hidden_layers * calls
        assert len(set(actual)) == len(actual) == 2 * STEPS  # other batches, other weights
