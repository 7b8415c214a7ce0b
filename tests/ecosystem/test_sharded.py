"""Both routes under torch's DDP and FSDP2: two processes, the losses of transformers' own code, all calls packed."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path

import packed_layers
import pytest
import torch
from batches import make_batch
from family_configs import config_for
from hf import make_hf, make_ours
from seeds import manual_seed
from torch import distributed as dist
from torch import multiprocessing, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

import fastbert
from fastbert.testing.numerics import GRADIENT_FACTOR, assert_close_to_reference

pytestmark = [
    pytest.mark.full,  # tests/training has two ranks by DDP and by FSDP2
    pytest.mark.dear_to_set_up,
    pytest.mark.skipif(not dist.is_gloo_available(), reason="torch.distributed is without gloo"),
]
WORLD, STEPS = 2, 4


def fully_sharded(*inner: str, **options):
    """A function that shards the modules of a BERT at these paths, each by itself, and then the whole model."""

    def shard(model: nn.Module) -> nn.Module:
        from torch.distributed.fsdp import fully_shard

        for path in inner:
            module = model.bert.get_submodule(path) if path else model.bert
            for each in module if isinstance(module, nn.ModuleList) else [module]:
                fully_shard(each, **options)
        return fully_shard(model, **options)

    return shard


def in_bfloat16(model: nn.Module) -> nn.Module:
    from torch.distributed.fsdp import MixedPrecisionPolicy

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return fully_sharded("encoder.layer", mp_policy=policy)(model)


WAYS = {
    "ddp": nn.parallel.DistributedDataParallel,
    "fsdp-root": fully_sharded(),
    "fsdp-layers": fully_sharded("encoder.layer"),
    "fsdp-no-split": fully_sharded("embeddings", "encoder.layer", "pooler"),  # HF accelerate's policy, and more
    "fsdp-base": fully_sharded("encoder", ""),
    "fsdp-checkpointing": fully_sharded("encoder.layer"),
    "fsdp-bfloat16": in_bfloat16,
}
ORDERS = ("accelerated-first", "accelerated-last")
CONFIG = config_for("bert", "SequenceClassification")


def losses(way: str, order: str, model: nn.Module) -> tuple[list[float], tuple[int, int]]:
    """Of a few steps, with a call in eval mode behind each: between two steps no weights of before may be kept. Then
    of a call after weights were gathered and let go of by hand, and of transformers' own model with the whole state.
    """
    plain, model = copy.deepcopy(model).eval(), copy.deepcopy(model).train()
    if way == "fsdp-checkpointing":
        model.gradient_checkpointing_enable()
    if order == ORDERS[0]:
        fastbert.accelerate(model)
    wrapped = model if way == "none" else WAYS[way](model)
    if order == ORDERS[1]:
        fastbert.accelerate(wrapped)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.05, momentum=0.9)
    found = []
    for step in range(STEPS):
        manual_seed(10 * step + dist.get_rank())
        inputs = make_batch(CONFIG, "right").inputs
        ids, mask = inputs["input_ids"], inputs["attention_mask"]
        inputs["input_ids"] = torch.randint(3, 43, ids.shape) * mask
        labels = torch.randint(3, ids.shape[:1])
        loss = wrapped.train()(**inputs, labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            found += [loss.item(), wrapped.eval()(**inputs, labels=labels).loss.item()]
    if isinstance(wrapped, torch.distributed.fsdp.FSDPModule):
        wrapped.unshard()
        wrapped.reshard()
    with torch.no_grad():
        found.append(wrapped(**inputs, labels=labels).loss.item())
        state = get_model_state_dict(wrapped, options=StateDictOptions(full_state_dict=True))
        assert list(state) == list(plain.state_dict())
        plain.load_state_dict(state)
        found.append(plain(**inputs, labels=labels).loss.item())
    status = fastbert.status(wrapped)
    return found, (status.packed, status.others)


def work(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", WORLD)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD)
    model, results = make_hf(CONFIG, "SequenceClassification"), {}
    ours = make_ours(CONFIG, "SequenceClassification", model)
    with warnings.catch_warnings(), pytest.MonkeyPatch.context() as patch:
        layers = packed_layers.count(patch)
        warnings.filterwarnings("error", message="fastbert: ")
        warnings.filterwarnings("error", message="FSDP2-wrapped module")
        for way in WAYS:
            exact = model if way == "fsdp-bfloat16" else copy.deepcopy(model).double()
            results[way] = {"exact": losses("ddp", "plain", exact), "plain": losses(way, "plain", model)}
            for order in ORDERS:
                results[way][order] = losses(way, order, model)
            layers.clear()
            results[way]["own"] = losses(way, "plain", ours)[0], len(layers)
    torch.save(results, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> list[dict]:
    folder: Path = tmp_path_factory.mktemp("sharded")
    multiprocessing.spawn(work, (str(folder),), nprocs=WORLD)
    return [torch.load(folder / f"{rank}.pt") for rank in range(WORLD)]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("way", WAYS)
def test_losses_are_transformers_and_every_call_is_packed(way, order, results):
    for of_rank in results:
        actual, calls = of_rank[way][order]
        oracle, near = (torch.tensor(of_rank[way][name][0]) for name in ("exact", "plain"))
        assert_close_to_reference(torch.tensor(actual), oracle.double(), near, GRADIENT_FACTOR)
        assert calls == (2 * STEPS + 1, 0)
        assert oracle[: 2 * STEPS].unique().numel() == 2 * STEPS  # other batches, other weights


@pytest.mark.parametrize("way", WAYS)
def test_own_classes_have_the_losses_of_transformers_and_every_layer_is_packed(way, results):
    for of_rank in results:
        actual, layers = of_rank[way]["own"]
        oracle, near = (torch.tensor(of_rank[way][name][0]) for name in ("exact", "plain"))
        assert_close_to_reference(torch.tensor(actual), oracle.double(), near, GRADIENT_FACTOR)
        # In training, again in backward, in eval mode; sharded, and in a plain model, with the last weights.
        calls = STEPS * (3 if way == "fsdp-checkpointing" else 2) + 2
        assert layers == CONFIG.num_hidden_layers * calls
