"""First values of models that FSDP2 shards before they have memory, its recipe for models that fit on no one rank."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from family_configs import config_for, make_config
from hf import families_axis
from test_initialisation import assert_as_drawn, filled_with_nan
from torch import distributed as dist
from torch import multiprocessing, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

import fastbert
from fastbert.families import FAMILIES

RANKS = 2


def of_family(model_type: str) -> tuple[type[nn.Module], fastbert.EncoderConfig]:
    """With a head that shares the embedding's weight, where there is one."""
    family = FAMILIES[model_type]
    if "MaskedLM" in family.heads:
        return getattr(fastbert, f"{family.classes}ForMaskedLM"), config_for(model_type, "MaskedLM")
    return getattr(fastbert, f"{family.classes}Model"), make_config(model_type)


def drawn_in_shards(model_type: str) -> dict[str, torch.Tensor]:
    """The whole state of a model that was sharded layer by layer, and drawn then."""
    from torch.distributed.fsdp import fully_shard

    kind, config = of_family(model_type)
    with torch.device("meta"):
        model = kind(config)
    for layer in (one for m in model.modules() if isinstance(m, nn.ModuleList) for one in m if is_layer(one)):
        fully_shard(layer)
    model = filled_with_nan(fully_shard(model).to_empty(device="cpu"))
    model.init_weights()
    return get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))


def is_layer(module: nn.Module) -> bool:
    """With weights, and none of them in a list of its own, which ALBERT's groups of layers have."""
    return any(True for _ in module.parameters()) and not any(isinstance(m, nn.ModuleList) for m in module.modules())


def check(model_type: str, state: dict[str, torch.Tensor]) -> None:
    kind, config = of_family(model_type)
    model, fresh = kind(config), kind(config)
    model.load_state_dict(state)
    assert_as_drawn(model, fresh)
    for path, leaf in model.named_modules():
        if isinstance(leaf, nn.Embedding) and leaf.padding_idx is not None:
            assert not leaf.weight[leaf.padding_idx].any() and leaf.weight[leaf.padding_idx - 1].any(), path


@pytest.mark.parametrize("model_type", ["bert", "xlm-roberta", "roformer"])
def test_shards_are_drawn(model_type, one_rank):
    """The row of padding kept what was drawn, and RoFormer's table raised RuntimeError."""
    check(model_type, drawn_in_shards(model_type))


def work(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", RANKS), rank=rank, world_size=RANKS)
    torch.save({model_type: drawn_in_shards(model_type) for model_type in FAMILIES}, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def states(tmp_path_factory) -> list[dict[str, dict[str, torch.Tensor]]]:
    folder: Path = tmp_path_factory.mktemp("sharded")
    multiprocessing.spawn(work, (str(folder),), nprocs=RANKS)
    return [torch.load(folder / f"{rank}.pt") for rank in range(RANKS)]


@pytest.mark.full
@pytest.mark.dear_to_set_up
@families_axis
def test_shards_of_two_ranks_are_drawn(model_type, states):
    first, second = (of_rank[model_type] for of_rank in states)
    assert all(torch.equal(t, second[key]) for key, t in first.items())
    check(model_type, first)
    words = next(t for key, t in first.items() if "word_embeddings.weight" in key or "tok" in key)
    half = words.shape[0] // 2
    assert not torch.equal(words[:half], words[half : 2 * half])  # ranks draw other numbers
