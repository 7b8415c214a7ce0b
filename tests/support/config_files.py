"""A config.json in three hands: transformers' model of it, our own class and an accelerated model."""

from __future__ import annotations

import copy
import warnings

import torch
from family_configs import few_heads
from hf import cast, hf_class, hf_config_class, make_oracle, make_ours, randomise
from judging import NUDGES, Results, assert_all_close, judge, nudged
from torch import nn

import fastbert
from fastbert.config import EncoderConfig

SMALL = {
    "vocab_size": 43, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 32,
    "max_position_embeddings": 64, "pad_token_id": 2, "bos_token_id": 1, "eos_token_id": 1,
}  # fmt: skip
IDS = torch.randint(3, 43, (2, 40), generator=torch.Generator().manual_seed(5))


def file_of(model_type: str, **entries) -> dict:
    return {"model_type": model_type, **SMALL, **few_heads(model_type, **SMALL), **copy.deepcopy(entries)}


def built(file: dict) -> nn.Module:
    """transformers' model of a config.json, as it makes its weights."""
    config = hf_config_class(file["model_type"]).from_dict(copy.deepcopy(file))
    config._attn_implementation = "eager"
    return hf_class(file["model_type"], "Model")(config)


def theirs_of(file: dict) -> nn.Module:
    return cast(randomise(built(file)), torch.float32).eval()


def check(file: dict) -> None:
    """Raises AssertionError where one of our two routes is not as near to transformers in float64 as it must be, and
    ConfigError where the file is refused.

    Scores that a file makes large saturate, and a few of them then decide all of a result: it is judged over nudged
    weights (judging.py).
    """
    config = EncoderConfig.from_dict(copy.deepcopy(file))
    weights = theirs_of(file)

    def results_of(draw: int) -> Results:
        theirs = copy.deepcopy(weights)
        with torch.no_grad():
            for p in theirs.parameters():
                p.copy_(nudged(p, draw))
        ours = make_ours(config, "Model", theirs).eval()
        accelerated = fastbert.accelerate(copy.deepcopy(theirs))
        with torch.no_grad(), warnings.catch_warnings():
            warnings.filterwarnings("error", message="fastbert: .* runs transformers' own forward")
            own, live, baseline, oracle = (m(IDS)[0] for m in (ours, accelerated, theirs, make_oracle(theirs)))
        names = ("own class", "accelerated")
        return {"own class": own, "accelerated": live}, dict.fromkeys(names, oracle), dict.fromkeys(names, baseline)

    judge(results_of, assert_all_close, NUDGES)
