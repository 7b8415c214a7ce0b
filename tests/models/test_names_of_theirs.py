"""Names that transformers' users read and assign on configs and models, beside the methods."""

from __future__ import annotations

import json

import pytest
import torch
from family_configs import config_for
from hf import IS_OLD, hf_class, hf_config, models_axis

import fastbert
from fastbert.models.classes import CLASSES
from fastbert.models.inputs import IGNORED

IDS = torch.tensor([[5, 6, 7, 8]])


def make(head: str = "MaskedLM"):
    return CLASSES["bert", head](config_for("bert", head, num_hidden_layers=2))


@pytest.mark.parametrize("name", ["eager", "sdpa"])
def test_the_attention_that_was_asked_for(tmp_path, name):
    config = config_for("bert", "MaskedLM", num_hidden_layers=2)
    ours, theirs = make(), hf_class("bert", "MaskedLM")(hf_config(config))
    for model in (ours, theirs):
        model.set_attn_implementation(name)
        assert model.config._attn_implementation == model.base_model.config._attn_implementation == name
    ours.save_pretrained(tmp_path)
    assert "_attn_implementation" not in json.loads((tmp_path / "config.json").read_text())
    for library in (fastbert, pytest.importorskip("transformers")):
        model = library.AutoModelForMaskedLM.from_pretrained(tmp_path, attn_implementation=name)
        assert model.config._attn_implementation == name


@pytest.mark.parametrize("head", ["Model", "MaskedLM"])
def test_a_config_turns_checkpointing_on(tmp_path, head):
    """Before the model is made. A folder does not say it: it is the training's."""
    config = config_for("bert", head, num_hidden_layers=2)
    other = hf_config(config)
    config.gradient_checkpointing = other.gradient_checkpointing = True
    word = "gradient" if IS_OLD else "activation"  # both are in use; transformers warns of the old one
    for model in (CLASSES["bert", head](config), hf_class("bert", head)(other)):
        assert getattr(model, f"is_{word}_checkpointing") and getattr(model.base_model, f"is_{word}_checkpointing")
        getattr(model, f"{word}_checkpointing_disable")()
        assert not getattr(model, f"is_{word}_checkpointing")
        model.save_pretrained(tmp_path / type(model).__module__)
        entries = json.loads((tmp_path / type(model).__module__ / "config.json").read_text())
        assert not entries.get("gradient_checkpointing")
    assert not make(head).is_activation_checkpointing


def test_words_after_a_resize():
    ours, theirs = make(), hf_class("bert", "MaskedLM")(hf_config(config_for("bert", "MaskedLM", num_hidden_layers=2)))
    for model in (ours, theirs):
        model.resize_token_embeddings(70)
        assert model.vocab_size == model.config.vocab_size == 70


@pytest.mark.parametrize("model_type", ["bert", "modernbert", "roformer", "deberta-v2"])
def test_models_without_memory(model_type):
    """Made under torch.device("meta"), then filled: the same numbers as of one that was made with memory."""
    config = config_for(model_type, "MaskedLM")
    whole = CLASSES[model_type, "MaskedLM"](config).eval()
    with torch.device("meta"):
        model = CLASSES[model_type, "MaskedLM"](config).eval()
    assert {t.device.type for t in (*model.parameters(), *model.buffers())} == {"meta"}
    model.load_state_dict(whole.state_dict(), assign=True)
    model.tie_weights()
    assert torch.equal(model(IDS).logits, whole(IDS).logits)


@pytest.mark.parametrize("head", ["Model", "MaskedLM"])
def test_features_with_results_of_before(head):
    """sentence-transformers leaves them there, and transformers' classes read none of them."""
    model = CLASSES["bert", head](config_for("bert", head, num_hidden_layers=2)).eval()
    expected = model(IDS)[0]
    for name in IGNORED:
        assert torch.equal(model(IDS, **{name: expected})[0], expected)
    with pytest.raises(TypeError, match=f"^{type(model).__name__} takes no past, scoring(; it has labels)?$"):
        model(IDS, scoring=expected, past=1)


SETS = ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict", "_no_split_modules", "_skip_keys_device_placement")
SETS = (*SETS, *(f"_keys_to_ignore_on_{when}" for when in ("save", "load_missing", "load_unexpected")))
PLANS = ("_tp_plan", "_ep_plan", "_pp_plan", "_fsdp_plan")


@models_axis
def test_what_a_model_has_from_the_start(model_type, head):
    """Dicts and sets of its own, which transformers' code adds to; the loss by name; the number of labels."""
    with torch.device("meta"):
        config = config_for(model_type, head)
        theirs, (ours, other) = (
            hf_class(model_type, head)(hf_config(config)),
            (CLASSES[model_type, head](config) for _ in range(2)),
        )
    for name in (*SETS, *PLANS):
        found = getattr(ours, name)
        assert type(found) is type(getattr(theirs, name, found)), name
        assert found is not getattr(other, name), name
    assert ours._can_record_outputs == ours.can_record_outputs == {}
    assert ours.loss_type == theirs.loss_type and ours.loss_function is (ours.loss_type and theirs.loss_function)
    if "num_labels" in vars(theirs):
        assert ours.num_labels == theirs.num_labels
        ours.num_labels = 7
        assert ours.config.num_labels == 7 and len(ours.config.id2label) == 7
