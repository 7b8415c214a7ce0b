"""fastbert.accelerate on what not every family has: rotary positions, windows, numbers on modules.

Heads, masks, attentions, tuples and autocast of all families are in test_accelerate.py.
"""

# ruff: noqa: F811  (a fixture that is imported is also an argument)
from __future__ import annotations

import copy
import inspect
from pathlib import Path

import pytest
import torch
from batches import make_batch
from family_configs import config_for, head_of, make_config
from full import halved, left_to_full
from hf import FAMILIES, families_axis, is_alike, make_hf, make_oracle
from kinds import of_every_kind, of_few_kinds
from seeds import torch_generator
from test_accelerate import assert_as_transformers, dtype_axis, no_fallback, one_thread, run  # noqa: F401
from test_accelerate_integrations import STEPS, fine_tune
from tiny import write_json, write_model, write_modules
from torch import nn

import fastbert
from fastbert import families
from fastbert.layer_spec import Distances
from fastbert.testing.cases import DTYPES, MASKS
from fastbert.testing.numerics import GRADIENT_FACTOR, assert_close_to_reference

DISTANCES = {name: make_config(name).distances or Distances() for name in FAMILIES}
ROTARY = [name for name in FAMILIES if DISTANCES[name].rotaries]
IDS = torch.randint(3, 43, (4, 11), generator=torch_generator(5))


def accelerated(model_type: str, index: int = 0, dtype=torch.float32, **changes) -> nn.Module:
    return fastbert.accelerate(make_hf(make_config(model_type, index, **changes), "Model", dtype)).eval()


def assert_falls_back(model, reason: str, **inputs) -> None:
    """With a warning that holds `reason`, and to what transformers computes."""
    inputs = inputs or {"input_ids": IDS}
    expected = fastbert.restore(copy.deepcopy(model))(**inputs)
    with pytest.warns(UserWarning, match=f"runs transformers' own forward: .*{reason}"):
        actual = model(**inputs)
    assert torch.equal(actual[0], expected[0])


# Each family has one mask, in one dtype or the other.
@of_every_kind()
@left_to_full(
    lambda p: (FAMILIES.index(p["model_type"]) + 2 + MASKS.index(p["pattern"])) % 12 != 6 * DTYPES.index(p["dtype"])
)
@dtype_axis
@pytest.mark.parametrize("pattern", MASKS)
@families_axis
def test_inference(model_type, pattern, dtype, no_fallback):
    """What runs as whole layers without gradients; the last of the hidden states is the one behind a final norm."""
    head = head_of(model_type, other="Model")
    config = config_for(model_type, head, 1)
    plain = make_hf(config, head, dtype).eval()
    batch, model = make_batch(config, pattern), fastbert.accelerate(copy.deepcopy(plain))
    with torch.inference_mode():
        assert_as_transformers(model, **batch.inputs)
        ours, theirs, exact = (m(**batch.inputs, output_hidden_states=True) for m in (model, plain, make_oracle(plain)))
    for actual, near, oracle in zip(ours.hidden_states, theirs.hidden_states, exact.hidden_states, strict=True):
        real = batch.real
        assert_close_to_reference(actual[real], oracle[real].double(), near[real], GRADIENT_FACTOR)


@left_to_full(is_alike)
@pytest.mark.parametrize("model_type", ROTARY)
def test_positions(model_type, no_fallback):
    model = accelerated(model_type)
    again = torch.tensor([0, 1, 2, 0, 1, 2, 3, 4, 0, 1, 2])  # which start again
    # Without a mask decoders take them for several sequences: test_accelerate_decoders.py.
    mask = {"attention_mask": torch.ones_like(IDS)} if families.FAMILIES[model_type].hf_class.caches else {}
    for positions in (
        torch.arange(3, 14)[None],
        again[None],
        torch.stack([again, again + 1, again.flip(0), again * 2]),
    ):
        assert_as_transformers(model, input_ids=IDS, position_ids=positions, **mask)
    takes_them = "position_ids" in inspect.signature(type(model).forward).parameters  # RoFormer's does not
    assert torch.equal(model(IDS, position_ids=again[None], **mask)[0], model(IDS)[0]) != takes_them


@pytest.mark.parametrize("model_type", ROTARY)
def test_longer_than_the_config_says(model_type, no_fallback):
    config = make_config(model_type)
    model, longest = accelerated(model_type), config.max_position_embeddings
    if config.embeddings.position or any(rotary.table for rotary in DISTANCES[model_type].rotaries):
        with pytest.raises(fastbert.InputError):
            model(torch.full((1, longest + 1), 5))
    else:
        assert_as_transformers(model, input_ids=torch.randint(3, 43, (2, 3 * longest)))


@left_to_full(is_alike)
@pytest.mark.parametrize("model_type", ROTARY)
def test_frequencies_are_those_of_the_tree(model_type, no_fallback):
    """Written to, replaced, or rounded by a conversion of the model: transformers computes with what is there."""
    model = accelerated(model_type)
    before = assert_as_transformers(model, input_ids=IDS)
    found = [(m, name) for m in model.modules() for name in m._buffers if name.endswith("inv_freq")]
    found = [(m, name) for m, name in found if "original" not in name]
    for module, name in found:
        getattr(module, name).mul_(0.5)
    assert torch.equal(assert_as_transformers(model, input_ids=IDS), before) != bool(found)
    for module, name in found:
        setattr(module, name, getattr(module, name) * 3)
    assert_as_transformers(model, input_ids=IDS)
    assert_as_transformers(model.to(torch.bfloat16), input_ids=torch.randint(3, 43, (2, 19)))


@pytest.mark.parametrize("model_type", [name for name in FAMILIES if DISTANCES[name].has_windows])
def test_another_window(model_type):
    model = accelerated(model_type)
    model.config.sliding_window = 1
    assert_falls_back(model, "its config's sliding_window is 1")


def test_layers_that_are_moved_take_their_form_along():
    model = accelerated("modernbert")
    model.layers = nn.ModuleList([model.layers[i] for i in (0, 3, 2, 1)])
    assert_falls_back(model, "layers.1")
    model = accelerated("modernbert")
    model.layers = model.layers[:2]
    assert_as_transformers(model, input_ids=IDS)


@of_few_kinds()
@families_axis
def test_a_config_that_counts_fewer_layers(model_type):
    """Some families' forwards count by it, others run the layers that are there."""
    model = accelerated(model_type)
    model.config.num_hidden_layers = 2
    assert_as_transformers(model, input_ids=IDS)


def test_numbers_on_modules():
    model = accelerated("nomic_bert")
    model.layers[1].self_attn.scaling *= 2
    assert_falls_back(model, "layers.1.self_attn.scaling is")
    plain = make_hf(make_config("eurobert"), "Model")
    plain.config.num_key_value_heads = 2
    with pytest.raises(ValueError, match="num_key_value_groups is 2; by its config it must be 1"):
        fastbert.accelerate(plain)


def test_the_state_before_the_final_norm():
    model = accelerated("modernbert")
    states = model(IDS, output_hidden_states=True)
    assert torch.equal(states.hidden_states[-1], states[0])
    model.config.tie_last_hidden_states = False
    assert_falls_back(model, "as it is before the final norm", input_ids=IDS, output_hidden_states=True)


@halved
@pytest.mark.parametrize("reentrant", (False, True))
@pytest.mark.parametrize("model_type", ROTARY)
def test_gradient_checkpointing(model_type, reentrant, packed_layers, no_fallback):
    head = head_of(model_type, other="Model")
    config = config_for(model_type, head)
    batch = make_batch(config, "right")
    model = fastbert.accelerate(make_hf(config, head))
    _, _, expected = run(model, head, batch, {})
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    packed_layers.clear()
    _, _, grads = run(model, head, batch, {})
    assert len(packed_layers) == 2 * config.num_hidden_layers
    assert all(torch.equal(grads[name], expected[name]) for name in grads if grads[name] is not None)


TARGETS = {"modernbert": ["Wqkv", "attn.Wo", "Wi"], "nomic_bert": ["q_proj", "v_proj", "gate_proj"]}


@pytest.mark.parametrize("model_type", TARGETS)
def test_lora(model_type, packed_layers, no_fallback):
    peft = pytest.importorskip("peft")
    settings = peft.LoraConfig(r=4, init_lora_weights=False, target_modules=TARGETS[model_type])
    model = make_hf(make_config(model_type), "Model").eval()
    model = fastbert.accelerate(peft.get_peft_model(model, settings)).train()
    model(IDS)[0].square().sum().backward()
    adapters = [p for name, p in model.named_parameters() if "lora_" in name]
    assert adapters and all(p.grad is not None and p.grad.any() for p in adapters)
    assert_as_transformers(model.eval(), input_ids=IDS)
    assert_as_transformers(model.merge_and_unload(), input_ids=IDS)
    assert len(packed_layers) == 3 * 4


@pytest.mark.full  # test_accelerate_integrations compiles, too
def test_compile(no_fallback):
    model = accelerated("modernbert")
    compiled = torch.compile(model, backend="aot_eager")
    for columns in (11, 7):
        ids = IDS[:, :columns]
        exact = make_oracle(fastbert.restore(copy.deepcopy(model)))
        actual, near, oracle = (m(ids)[0] for m in (compiled, model, exact))
        assert_close_to_reference(actual, oracle, near)


@pytest.mark.full  # test_accelerate_integrations has their Trainer, and test_every_head this family's gradients
def test_trainer(tmp_path, packed_layers, no_fallback):
    model = make_hf(config_for("modernbert", "SequenceClassification", num_labels=2), "SequenceClassification")
    plain, exact = copy.deepcopy(model), make_oracle(model)
    actual = fine_tune(fastbert.accelerate(model), tmp_path)
    assert len(packed_layers) == 4 * STEPS
    losses = (torch.tensor(actual), torch.tensor(fine_tune(exact, tmp_path)).double())
    assert_close_to_reference(*losses, torch.tensor(fine_tune(plain, tmp_path)), GRADIENT_FACTOR)


def test_sentence_transformer(tmp_path: Path, packed_layers, no_fallback):
    library = pytest.importorskip("sentence_transformers")
    write_model(tmp_path, model_type="modernbert", local_attention=6)
    write_json(tmp_path / "special_tokens_map.json", {"pad_token": "[PAD]"})
    write_modules(tmp_path, "Pooling")
    write_json(
        tmp_path / "1_Pooling" / "config.json", {"word_embedding_dimension": 32, "pooling_mode_mean_tokens": True}
    )
    model = library.SentenceTransformer(str(tmp_path), device="cpu")
    texts = ["a cat sat on the mat .", "the dog", "", "old dogs , new cats and a house ! " * 3]
    plain = model.encode(texts, convert_to_tensor=True)
    exact = copy.deepcopy(model).double().encode(texts, convert_to_tensor=True)
    packed = fastbert.accelerate(model).encode(texts, convert_to_tensor=True)
    assert len(packed_layers) == 2
    assert_close_to_reference(packed, exact, plain, GRADIENT_FACTOR)
