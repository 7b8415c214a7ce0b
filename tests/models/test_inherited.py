"""What our classes inherit where transformers is imported: each name has its meaning for our models, or one error."""

from __future__ import annotations

import copy
import inspect
import pickle
import sys
import textwrap

import pytest
import torch
import transformers
import warm
from family_configs import config_for
from hf import make_hf, make_ours
from precise import assert_as_theirs
from seeds import manual_seed
from torch import nn

import fastbert
from fastbert import ConfigError
from fastbert.families import FAMILIES

IDS = torch.tensor([[5, 6, 7, 8]])

# Looked at one by one: they do with our models what they do with transformers'.
RIGHT = {
    "active_adapters",
    "add_adapter",
    "add_model_tags",
    "delete_adapter",
    "disable_adapters",
    "enable_adapters",
    "enable_peft_hotswap",
    "get_adapter_state_dict",
    "load_adapter",
    "set_adapter",  # peft: tested below
    "cuda",
    "eval",
    "float",
    "half",
    "to",
    "train",
    "dummy_inputs",
    "enable_input_require_grads",
    "disable_input_require_grads",
    "get_memory_footprint",
    "get_parameter_or_buffer",
    "named_non_persistent_buffers",
    "retrieve_modules_from_names",
    "warn_if_padding_and_no_attention_mask",
    "input_modalities",
    "main_input_name",
    "model_tags",
    "use_kernels",
    "get_decoder",
    "get_encoder",
    "set_decoder",
    "set_encoder",
    "can_record_outputs",
    # They say that the classes are not transformers', without plans for many devices, and do not generate.
    "can_generate",
    "get_compiled_call",
    "generation_config_class",
    "is_backend_compatible",
    "is_custom_code",
    "is_remote_code",
    "ep_plan",
    "fsdp_plan",
    "fsdp_size",
    "pp_plan",
    "tp_plan",
    "tp_size",
    "supports_context_parallel",
    # Parts of from_pretrained and save_pretrained of transformers, which are ours here.
    "barrier_after_gathered_checkpoint_save",
    "gather_sharded_state_dict_for_save",
    "get_init_context",
    "get_correct_experts_implementation",
    "init_parallel_plans",
    "is_distributed_loading_by_transformers",
    "mark_tied_weights_as_initialized",
    "maybe_distribute_model",
    "prepare_distribute_model",
    "should_save_on_this_rank",
}


def pair(head: str = "MaskedLM") -> tuple[nn.Module, nn.Module]:
    config = config_for("bert", head)
    theirs = make_hf(config, head).eval()
    return make_ours(config, head, theirs).eval(), theirs


def test_all_that_is_inherited_has_been_looked_at():
    kind = fastbert.BertForMaskedLM
    homes = {name: next(k for k in kind.__mro__ if name in vars(k)) for name in dir(transformers.PreTrainedModel)}
    theirs = {name for name, k in homes.items() if k.__module__.startswith("transformers") and not name.startswith("_")}
    assert not theirs - RIGHT, "give them their meaning in fastbert/models/hf/methods.py, or one clear error"


def test_answers_are_those_of_transformers():
    ours, theirs = pair()
    for ask in (
        lambda m: m.base_model_prefix,
        lambda m: m.base_model is getattr(m, m.base_model_prefix),
        lambda m: m._tied_weights_keys,
        lambda m: m.get_expanded_tied_weights_keys(),
        lambda m: m.get_correct_attn_implementation("sdpa"),
        lambda m: m.loss_function,
        lambda m: (m.supports_tp_plan, m.supports_pp_plan),
        lambda m: m.get_memory_footprint(return_buffers=False),
        lambda m: m.get_parameter_or_buffer("bert.embeddings.word_embeddings.weight").shape,
        lambda m: m.half().dtype,
        lambda m: m.to(torch.bfloat16).dtype,
        lambda m: m.float().dtype,
    ):
        assert ask(ours) == ask(theirs)
    for family in FAMILIES.values():
        for end in ("Model", *(f"For{head}" for head in family.heads)):
            kind = getattr(fastbert, f"{family.classes}{end}")
            assert kind.base_model_prefix == family.prefix and kind.config_class is fastbert.EncoderConfig


REFUSED = {
    "set_use_kernels": (True,),
    "set_experts_implementation": ("eager",),
    "set_attn_implementation": ("paged",),
    "get_correct_attn_implementation": ("paged",),
    "register_for_auto_class": (),
    "save_distributed_checkpoint": ("folder",),
    "dequantize": (),
    "resize_position_embeddings": (-1,),
}


@pytest.mark.parametrize("name", REFUSED)
def test_one_error(name):
    model = fastbert.BertForMaskedLM(config_for("bert", "MaskedLM"))
    with pytest.raises(ValueError):
        getattr(model, name)(*REFUSED[name])


def test_a_loss_of_ones_own_is_not_ignored():
    ours, _ = pair()
    with pytest.raises(ConfigError, match="loss_function cannot be assigned"):
        ours.loss_function = nn.functional.cross_entropy


class Around(transformers.BertPreTrainedModel):
    """A user's model around one of ours, or of transformers, that has been loaded."""

    def __init__(self, config, model):
        super().__init__(config)
        self.bert, self.more = model, nn.Linear(config.hidden_size, 1000)
        self.post_init()


class OursAround(fastbert.BertModel):
    def __init__(self, config, model):
        super().__init__(config)
        self.other, self.more = model, nn.Linear(self.config.hidden_size, 1000)
        self.post_init()


@pytest.mark.parametrize("around", [Around, OursAround])
@pytest.mark.parametrize("inner", [0, 1], ids=["ours", "theirs"])
def test_a_model_around_keeps_what_is_initialised(around, inner, tmp_path):
    made, config = pair("Model")[inner], transformers.BertConfig(hidden_size=64, num_attention_heads=2)
    made.save_pretrained(tmp_path)
    loaded = type(made).from_pretrained(tmp_path)
    expected = {key: t.clone() for key, t in loaded.state_dict().items()}
    outer = around(config, loaded)
    assert all(torch.equal(t, expected[key]) for key, t in loaded.state_dict().items())
    std = float(outer.more.weight.detach().std())  # torch's own first values have 0.072
    assert abs(std - config.initializer_range) < config.initializer_range / 10 and not outer.more.bias.any()


def test_weights_are_made_once():
    for name in ("init_weights", "initialize_weights", "post_init"):
        ours, theirs = pair()
        expected = {key: t.clone() for key, t in ours.state_dict().items()}
        getattr(ours, name)()
        assert all(torch.equal(t, expected[key]) for key, t in ours.state_dict().items())
        assert ours.cls.predictions.decoder.weight is ours.get_input_embeddings().weight
    theirs = transformers.BertConfig.from_dict(ours.config.to_dict())
    made = fastbert.BertForMaskedLM._from_config(theirs, dtype=torch.bfloat16, attn_implementation="sdpa")
    assert isinstance(made, fastbert.BertForMaskedLM) and made.dtype is torch.bfloat16


class WithMore(fastbert.BertForSequenceClassification):
    """As transformers' users write a model of their own."""

    def __init__(self, config):
        super().__init__(config)
        self.more = nn.Linear(config.hidden_size, 3)
        self.post_init()

    def forward(self, *args, **kwargs):
        output = super().forward(*args, **kwargs)
        return {"logits": output.logits, "more": self.more(output.logits.new_ones(1, self.config.hidden_size))}


def test_a_subclass_of_a_user(tmp_path):
    model = WithMore(config_for("bert", "SequenceClassification")).eval()
    model.save_pretrained(tmp_path)
    again = WithMore.from_pretrained(tmp_path)
    for other in (again, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert isinstance(other, transformers.PreTrainedModel)
        assert all(torch.equal(t, model(IDS)[key]) for key, t in other(IDS).items())


def test_positions_are_resized(tmp_path):
    """As transformers' DistilBERT, which alone of the families has it there."""
    config = config_for("distilbert", "MaskedLM")
    theirs = make_hf(config, "MaskedLM").eval()
    ours = make_ours(config, "MaskedLM", theirs).eval()
    rows = config.max_position_embeddings
    for count in (rows + 9, rows - 3):
        for model in (ours, theirs):
            model.resize_position_embeddings(count)
        tables = [m.get_position_embeddings().weight for m in (ours, theirs)]
        assert tables[0].shape == tables[1].shape and torch.equal(tables[0][: rows - 3], tables[1][: rows - 3])
        ids = torch.randint(5, 43, (1, count))
        ours.save_pretrained(tmp_path)
        expected, again = ours(ids).logits, fastbert.DistilBertForMaskedLM.from_pretrained(tmp_path)
        assert again.config.max_position_embeddings == count and torch.equal(again(ids).logits, expected)
        with pytest.raises(fastbert.InputError):
            ours(torch.randint(5, 43, (1, count + 1)))
    rotary = fastbert.NomicBertModel(config_for("nomic_bert", "Model"))
    with pytest.raises(ConfigError, match="nomic_bert has no table of positions"):
        rotary.get_position_embeddings()


def test_adapters_without_peft_model(tmp_path):
    """transformers' own way to PEFT: add_adapter, save_pretrained (the adapter alone), load_adapter."""
    least = pytest.importorskip("transformers.integrations.peft").MIN_PEFT_VERSION
    peft = pytest.importorskip("peft", minversion=least)
    lora = peft.LoraConfig(r=4, target_modules=["query", "value"], init_lora_weights=False)
    (ours, theirs), (fresh, _) = pair(), pair()
    plain = ours(IDS).logits
    for model in (ours, theirs):
        manual_seed(0)
        model.add_adapter(lora)
    adapted = ours(IDS).logits
    assert_as_theirs(ours, theirs, lambda model: model(IDS).logits)
    assert not torch.equal(adapted, plain)
    ours.save_pretrained(tmp_path / "adapter")
    names = {path.name for path in (tmp_path / "adapter").iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors"} == names - {"README.md"}
    fresh.load_adapter(str(tmp_path / "adapter"))
    assert torch.equal(fresh.eval()(IDS).logits, adapted)
    loaded = peft.PeftModel.from_pretrained(pair()[0], tmp_path / "adapter").eval()
    assert torch.equal(loaded(IDS).logits, adapted)
    # PEFT's layers stay, and compute by their base layers, leaf by leaf.
    for change in ("disable_adapters", "delete_adapter"):
        for model in (ours, theirs):
            getattr(model, change)(*["default"] * (change == "delete_adapter"))
        assert_as_theirs(ours, theirs, lambda model: model(IDS).logits)
    with pytest.raises(fastbert.CheckpointError, match=r"an adapter of PEFT.*PeftModel\.from_pretrained"):
        fastbert.AutoModelForMaskedLM.from_pretrained(tmp_path / "adapter")


def test_gradients_reach_the_inputs_of_a_frozen_model():
    ours, _ = pair()
    ours.requires_grad_(False).enable_input_require_grads()
    assert ours(IDS, labels=IDS).loss.requires_grad
    ours.disable_input_require_grads()
    assert not ours(IDS, labels=IDS).loss.requires_grad


def test_model_tags_are_on_the_card():
    ours, _ = pair()
    ours.add_model_tags(["films"])
    assert "- films\n" in ours.model_card("me/x") and "- more\n" in ours.model_card("me/x", "more")


def test_forward_names_what_the_trainer_looks_for():
    for family in FAMILIES.values():
        for head in family.heads:
            kind = getattr(fastbert, f"{family.classes}For{head}")
            labels = [name for name in kind.option_names if name != "num_choices"]
            assert set(labels) <= set(inspect.signature(kind.forward).parameters), kind


@pytest.mark.full
def test_a_class_that_is_only_looked_for_and_a_process_without_transformers():
    program = """
        import importlib.util, pickle, sys
        import fastbert
        shape = {"num_hidden_layers": 1, "hidden_size": 8, "num_attention_heads": 1, "intermediate_size": 8}
        model = fastbert.BertForMaskedLM(fastbert.EncoderConfig(**shape))
        model.post_init()
        assert model.base_model_prefix == "bert" and not hasattr(model, "add_adapter")
        pickled = pickle.dumps(model)
        importlib.util.find_spec("transformers.modeling_utils")
        assert "transformers.modeling_utils" not in sys.modules
        import transformers
        assert isinstance(model, transformers.PreTrainedModel) and hasattr(model, "add_adapter")
        assert isinstance(pickle.loads(pickled), transformers.PreTrainedModel)
    """
    done = warm.run([sys.executable, "-c", textwrap.dedent(program)])
    assert done.returncode == 0, done.stderr
