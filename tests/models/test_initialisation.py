"""First values of weights: of models that were made without memory, and of what a user's subclass adds to ours."""

from __future__ import annotations

import pytest
import torch
import transformers
from family_configs import config_for, make_config
from hf import families_axis
from kinds import of_every_kind
from seeds import manual_seed
from torch import nn

import fastbert
from fastbert.families import FAMILIES


def filled_with_nan(model: nn.Module) -> nn.Module:
    """What `to_empty` leaves may be anything."""
    with torch.no_grad():
        for t in (*model.parameters(), *model.buffers()):
            if t.is_floating_point():
                (t.to_local() if hasattr(t, "to_local") else t).fill_(torch.nan)
    return model


def assert_as_drawn(model: nn.Module, fresh: nn.Module) -> None:
    """Constants are equal, and what is drawn has the same spread."""
    expected = dict([*fresh.named_parameters(), *fresh.named_buffers()])
    found = dict([*model.named_parameters(), *model.named_buffers()])
    assert found.keys() == expected.keys() and all(t.isfinite().all() for t in found.values())
    drawn = {key: t for key, t in dict(fresh.named_parameters()).items() if t.numel() > 1 and t.std() > 0}
    assert all(torch.equal(found[key], t) for key, t in expected.items() if key not in drawn)
    ours, new = (torch.cat([named[key].detach().flatten() for key in drawn]).std() for named in (found, expected))
    assert abs(ours - new) < new / 10


@of_every_kind()
@families_axis
def test_a_model_without_memory_is_drawn_later(model_type):
    """FSDP2's recipe: the weights were what the memory held."""
    config = config_for(model_type, "MaskedLM") if "MaskedLM" in FAMILIES[model_type].heads else make_config(model_type)
    end = "ForMaskedLM" if "MaskedLM" in FAMILIES[model_type].heads else "Model"
    kind = getattr(fastbert, f"{FAMILIES[model_type].classes}{end}")
    with torch.device("meta"):
        model = kind(config)
    model = filled_with_nan(model.to_empty(device="cpu"))
    model.init_weights()
    assert_as_drawn(model, kind(config))
    assert all(model.get_parameter(copy) is model.get_parameter(key) for copy, key in model.tied_keys().items())


@pytest.mark.parametrize("how", ["init_weights", "initialize_weights", "post_init"])
def test_emptied_weights_are_drawn_again(how):
    config = make_config("bert", num_hidden_layers=2)
    model = fastbert.BertForSequenceClassification(config)
    getattr(filled_with_nan(model.to_empty(device="cpu")), how)()
    assert_as_drawn(model, fastbert.BertForSequenceClassification(config))


class Around(transformers.BertPreTrainedModel):
    def __init__(self, config):
        super().__init__(config)
        self.inner = fastbert.BertModel(make_config("bert", num_hidden_layers=2))
        self.post_init()


class OursAround(fastbert.BertModel):
    def __init__(self, config):
        super().__init__(config)
        self.inner = fastbert.BertModel(config)
        self.post_init()


@pytest.mark.parametrize("around", [Around, OursAround])
def test_a_model_in_another_one(around, tmp_path):
    config = make_config("bert", num_hidden_layers=2) if around is OursAround else transformers.BertConfig()
    with torch.device("meta"):
        model = around(config)
    filled_with_nan(model.to_empty(device="cpu")).init_weights()
    assert_as_drawn(model.inner, fastbert.BertModel(make_config("bert", num_hidden_layers=2)))
    model.save_pretrained(tmp_path)
    loaded = around.from_pretrained(tmp_path)  # with marks on tensors, where transformers loads
    assert all(torch.equal(t, loaded.state_dict()[key]) for key, t in model.state_dict().items())
    loaded.init_weights()
    assert all(torch.equal(t, loaded.state_dict()[key]) for key, t in model.state_dict().items())


def add_parts(model: nn.Module) -> None:
    """Of every kind that transformers speaks of, and of some that it leaves as they are."""
    manual_seed(0)
    model.parts = nn.ModuleDict({
        "linear": nn.Linear(32, 32), "conv": nn.Conv2d(8, 8, 3), "transposed": nn.ConvTranspose1d(8, 8, 9),
        "embedding": nn.Embedding(40, 8, padding_idx=0), "lstm": nn.LSTM(16, 16), "gru": nn.GRU(16, 16),
        "batch": nn.BatchNorm1d(32), "group": nn.GroupNorm(2, 32), "layer": nn.LayerNorm(32), "prelu": nn.PReLU(4),
        "attention": nn.MultiheadAttention(32, 2), "bilinear": nn.Bilinear(8, 8, 8),
        "plain": nn.BatchNorm1d(4, affine=False),
    })  # fmt: skip
    model.scale = nn.Parameter(torch.ones(3))
    model.register_buffer("steps", torch.arange(5) / float(torch.ones(2).sum()))
    with torch.no_grad():
        model.parts["batch"].running_mean.fill_(3)
        model.parts["group"].weight.fill_(3)
    model.first = {key: t.clone() for key, t in model.state_dict().items()}


class Ours(fastbert.BertForSequenceClassification):
    def __init__(self, config):
        super().__init__(config)
        add_parts(self)
        self.post_init()


class Theirs(transformers.BertForSequenceClassification):
    def __init__(self, config):
        super().__init__(config)
        add_parts(self)
        self.post_init()


ADDED = ("parts.", "scale", "steps")
DRAWN = ("linear", "conv", "transposed", "embedding", "lstm", "attention.in_proj", "attention.out_proj")
KEPT = ("parts.gru", "parts.prelu", "parts.bilinear", "scale", "steps")


def is_drawn(key: str) -> bool:
    return "weight" in key and key.removeprefix("parts.").startswith(DRAWN)


def test_what_a_subclass_adds():
    """As transformers has it: batch norms, GRUs and a parameter of one's own were set to 0."""
    config = make_config("bert", num_hidden_layers=2)
    ours, theirs = Ours(config), Theirs(transformers.BertConfig(**config.to_dict()))
    keys = [key for key in ours.state_dict() if key.startswith(ADDED)]
    assert [key for key in theirs.state_dict() if key.startswith(ADDED)] == keys
    for key in keys:
        found, expected = ours.state_dict()[key], theirs.state_dict()[key]
        if key.startswith(KEPT):
            assert torch.equal(found, ours.first[key]) and torch.equal(found, expected)
        elif is_drawn(key):
            assert abs(found.std() - expected.std()) < expected.std() / 4, key
        else:
            assert torch.equal(found, expected), key
    assert not ours.parts["embedding"].weight[0].any()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_a_subclass_adds_to_a_checkpoint(dtype, tmp_path):
    """It was made without values, and then set to 0; running means were what the memory held, or an error."""
    config = config_for("bert", "SequenceClassification")
    base = fastbert.BertForSequenceClassification(config).to(getattr(torch, dtype))
    base.save_pretrained(tmp_path / "base")
    with pytest.warns(UserWarning, match="not in the checkpoint, so initialised: .*parts"):
        loaded = Ours.from_pretrained(tmp_path / "base")
    made = Ours.from_config(config, dtype=dtype)
    for key, t in loaded.state_dict().items():
        assert not t.is_floating_point() or t.dtype is base.dtype
        if not key.startswith(ADDED):
            assert torch.equal(t, base.state_dict()[key])
        elif is_drawn(key):
            assert abs(t.float().std() - made.state_dict()[key].float().std()) < t.float().std() / 4, key
        else:
            assert torch.equal(t, made.state_dict()[key]), key
    loaded.post_init()
    loaded.save_pretrained(tmp_path / "own")
    again = Ours.from_pretrained(tmp_path / "own")
    assert all(torch.equal(t, again.state_dict()[key]) for key, t in loaded.state_dict().items())


def test_a_subclass_has_a_rule_of_its_own(tmp_path):
    class Own(fastbert.BertModel):
        def __init__(self, config):
            super().__init__(config)
            self.more, self.scale = nn.Linear(4, 4), nn.Parameter(torch.empty(3))
            self.post_init()

        def _init_weights(self, module):
            super()._init_weights(module)
            if module is self.__dict__["_modules"].get("more"):
                module.weight.data.fill_(7)
            elif module is self and "scale" in self._parameters:
                self.scale.data.fill_(5)

    config = make_config("bert", num_hidden_layers=2)
    fastbert.BertModel(config).save_pretrained(tmp_path)
    with pytest.warns(UserWarning, match="not in the checkpoint"):
        loaded = Own.from_pretrained(tmp_path)
    for model in (Own(config), loaded):
        assert (model.more.weight == 7).all() and not model.more.bias.any() and (model.scale == 5).all()
