"""A subclass's own `_init_weights`, and what it must leave alone, each as a subclass of transformers' class has it."""

from __future__ import annotations

import pytest
import torch
import transformers
from family_configs import make_config
from torch import nn

import fastbert

CONFIG = make_config("bert", num_hidden_layers=2)
BASES = {"ours": fastbert.BertModel, "theirs": transformers.BertModel}


def config_of(base: str) -> fastbert.EncoderConfig | transformers.BertConfig:
    return CONFIG if base == "ours" else transformers.BertConfig(**CONFIG.to_dict())


class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.own, self.out, self.plain = nn.Parameter(torch.full((1,), 7.0)), nn.Linear(32, 2), nn.Linear(32, 2)


def subclass_of(base: type, calls_post_init: bool) -> type:
    class Mine(base):
        def __init__(self, config):
            super().__init__(config)
            self.scale, self.head = nn.Parameter(torch.full((3,), 7.0)), Head()
            self.register_buffer("steps", torch.arange(3.0) / 3, persistent=False)
            if calls_post_init:
                self.post_init()

        def _init_weights(self, module):
            super()._init_weights(module)
            if isinstance(module, Mine):  # whose parameters a base's constructor does not know yet
                module.scale.data.fill_(0.5)
            if isinstance(module, Head):
                module.own.data.fill_(0.25)
                module.out.weight.data.zero_()

    return Mine


def assert_by_its_rule(model: nn.Module, scale: float = 0.5) -> None:
    assert (model.scale == scale).all() and (model.head.own == 0.25).all()
    assert not model.head.out.weight.any()  # a parent comes behind its children
    assert 0.01 < model.head.plain.weight.std() < 0.03 and not model.head.plain.bias.any()


@pytest.mark.parametrize("base", BASES)
def test_new_models(base):
    """The constructor of transformers' base has said that the model is done: what it holds itself stays as it was."""
    model = subclass_of(BASES[base], calls_post_init=True)(config_of(base))
    assert_by_its_rule(model, scale=0.5 if base == "ours" else 7.0)


@pytest.mark.parametrize("calls_post_init", [True, False])
@pytest.mark.parametrize("base", BASES)
def test_what_a_checkpoint_lacks(base, calls_post_init, tmp_path):
    fastbert.BertModel(CONFIG).to(torch.bfloat16).save_pretrained(tmp_path)
    kind = subclass_of(BASES[base], calls_post_init)
    model, _ = kind.from_pretrained(tmp_path, output_loading_info=True)
    assert_by_its_rule(model.float())
    for dtype in (None, torch.float32):
        loaded = kind.from_pretrained(tmp_path, **({"dtype": dtype} if dtype else {}))
        assert {t.dtype for t in (*loaded.parameters(), loaded.steps)} == {dtype or torch.bfloat16}


@pytest.mark.parametrize("base", BASES)
def test_dtypes_that_a_constructor_names_stay(base, tmp_path):
    """And what names none has the model's; so in a loaded model and in a new one."""

    class WithTables(BASES[base]):
        def __init__(self, config):
            super().__init__(config)
            self.scale = nn.Parameter(torch.ones(3, dtype=torch.float64))
            for name, persistent in (("kept", True), ("made", False)):
                self.register_buffer(f"{name}_table", torch.arange(3, dtype=torch.float32) / 3, persistent=persistent)
                self.register_buffer(f"{name}_plain", torch.ones(3) / 3, persistent=persistent)
            self.post_init()

    plain, config = fastbert.BertModel(CONFIG).to(torch.bfloat16), config_of(base)
    plain.save_pretrained(tmp_path)
    models = [(torch.bfloat16, WithTables.from_pretrained(tmp_path, dtype="auto"))]
    for dtype in (torch.float16, torch.float32):
        models.append((dtype, WithTables.from_pretrained(tmp_path, dtype=dtype)))
        models.append((dtype, WithTables._from_config(config, dtype=dtype)))
    for dtype, model in models:
        assert model.scale.dtype == torch.float64 and model.kept_table.dtype == model.made_table.dtype == torch.float32
        assert {t.dtype for key, t in model.state_dict().items() if key in plain.state_dict()} == {dtype}
        assert model.kept_plain.dtype == model.made_plain.dtype == dtype
        if base == "ours":  # transformers' has what the memory held
            assert torch.equal(model.made_table, torch.arange(3, dtype=torch.float32) / 3)
    assert torch.get_default_dtype() == torch.float32


def test_what_is_loaded_after_to_empty_stays():
    """Also in a module around the model, and of one whose weights are tied; the rest is drawn."""
    config = make_config("bert")
    state = fastbert.BertForMaskedLM(config).state_dict()
    for wraps in (False, True):
        model = fastbert.BertForMaskedLM(config).to_empty(device="cpu")
        given = {key: t for key, t in state.items() if "LayerNorm" not in key and "decoder.weight" not in key}
        outer = nn.ModuleDict({"model": model}) if wraps else model
        outer.load_state_dict({f"model.{key}" if wraps else key: t for key, t in given.items()}, strict=False)
        with torch.no_grad():
            model.bert.encoder.layer[0].output.LayerNorm.weight.fill_(torch.nan)
        model.init_weights()
        found = model.state_dict()
        assert all(torch.equal(found[key], state[key]) for key in state)


def test_each_model_in_another_has_its_own_rule():
    class Outer(fastbert.BertForMaskedLM):
        def _init_weights(self, module):
            if isinstance(module, nn.Linear):
                module.weight.fill_(3)
                module.bias.fill_(3)

    with torch.device("meta"):
        model = Outer(CONFIG)
    model.to_empty(device="cpu").init_weights()
    assert (model.cls.predictions.transform.dense.weight == 3).all()
    assert model.bert.encoder.layer[0].output.dense.weight.abs().max() < 1
