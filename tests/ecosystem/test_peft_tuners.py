"""Each of PEFT's tuners, on accelerated models and on our own classes: as in transformers, or the reason why not.

A tuner that is not in the table fails the first test: read in PEFT whether it goes by more than a token's own values,
and put it where it belongs, here and in fastbert/layers/adapters.py.
"""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from family_configs import config_for
from full import left_to_full
from hf import make_hf, make_ours
from precise import assert_close_to_theirs
from seeds import manual_seed, torch_generator
from torch import nn

import fastbert
from fastbert.errors import InputError

peft = pytest.importorskip("peft", minversion="0.21")
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING  # noqa: E402
from peft.tuners.lora import variants  # noqa: E402

IDS = torch.tensor([[5, 6, 7, 8, 9], [9, 10, 11, 0, 0], [4, 5, 3, 2, 0]])
MASK = (IDS != 0).long()
TWO = {"target_modules": ["query", "value"]}
RANKED = {**TWO, "r": 4}

BLOCKS = {"nblocks": 2, "target_modules_bd_a": ["query"], "target_modules_bd_b": ["value"]}

# By the tuner's name: the settings with which a token's result depends on its own values alone.
BY_TOKEN: dict[str, dict[str, Any]] = {
    "ADALORA": {**TWO, "target_r": 4, "total_step": 100},
    "ADAMSS": RANKED,
    "BEFT": TWO,
    "BOFT": {**TWO, "boft_block_size": 4},
    "C3A": {**TWO, "block_size": 8},
    "DEFT": RANKED,
    "DELORA": RANKED,
    "FOURIERFT": {**TWO, "n_frequency": 10},
    "FROD": TWO,
    "GLORA": RANKED,
    "GRALORA": RANKED,
    "HIRA": RANKED,
    "HRA": RANKED,
    "IA3": {**TWO, "feedforward_modules": []},
    "LN_TUNING": {"target_modules": ["LayerNorm"]},
    "LOHA": RANKED,
    "LOKR": RANKED,
    "LORA": RANKED,
    "LORA bdlora": {
        **RANKED,
        "use_bdlora": {"nblocks": 2, "target_modules_bd_a": ["query"], "target_modules_bd_b": ["value"]},
    },
    "LORA dora": {**RANKED, "use_dora": True},
    "LORA kasa": {**RANKED, "kasa_config": {}},
    "LORA mica": {**RANKED, "init_lora_weights": "mica"},
    "LORA monteclora": {**RANKED, "monteclora_config": {}},
    "MISS": RANKED,
    "OFT": {**TWO, "oft_block_size": 4},
    "OSF": TWO,
    "PEANUT": TWO,
    "PSOFT": RANKED,
    "PVERA": RANKED,
    "P_TUNING": {"num_virtual_tokens": 3},
    "PROMPT_TUNING": {"num_virtual_tokens": 3},
    "RANDLORA": RANKED,
    "ROAD": TWO,
    "SHIRA": RANKED,
    "SUPERTUNING": TWO,
    "TINYLORA": TWO,
    "TRAINABLE_TOKENS": {"token_indices": [5, 6], "target_modules": ["word_embeddings"]},
    "UNILORA": RANKED,
    "VBLORA": {**RANKED, "vector_length": 4, "num_vectors": 20},
    "VERA": RANKED,
    "WAVEFT": {**TWO, "n_frequency": 10},
}
# What else they go by: the settings, what a call is given besides, and how the reason begins on our own classes.
BY_PLACE: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "LILY": (RANKED, {}, "PEFT's Lily chooses by the mean over all tokens"),
    "POLY": (
        {**RANKED, "n_tasks": 2, "n_splits": 1, "n_skills": 2},
        {"task_ids": torch.tensor([0, 1, 0])},
        r"PEFT's Poly chooses by the row of a padded batch \(task_ids\)",
    ),
    "LORA velora": ({**RANKED, "velora_config": {"num_groups": 4}}, {}, "PEFT's VeLoRA projects by the mean"),
    "LORA alora": (
        {**RANKED, "alora_invocation_tokens": [6, 7]},
        {"alora_offsets": [3, None, None]},
        "adapter_names and alora_offsets choose by the row",
    ),
}
# Tuners that PEFT has for other models, for causal ones, or for keys and values of a cache.
PROMPTS = {"ADAPTION_PROMPT", "CARTRIDGE", "CPT", "MULTITASK_PROMPT_TUNING", "PREFIX_TUNING"}
FOR_OTHERS = PROMPTS | {"SHADOW", "XLORA", "LORA arrow", "LORA qalora"}


def test_each_tuner_is_in_the_table():
    kinds = [name.removesuffix("LinearVariant").lower() for name in dir(variants) if name.endswith("LinearVariant")]
    names = {str(name.value) for name in PEFT_TYPE_TO_CONFIG_MAPPING} | {f"LORA {kind}" for kind in kinds}
    assert names == set(BY_TOKEN) | set(BY_PLACE) | FOR_OTHERS


def config_of(name: str, settings: dict[str, Any]):
    made = dict(settings)
    classes = {"use_bdlora": "BdLoraConfig", "kasa_config": "KasaConfig"}
    classes |= {"monteclora_config": "MontecloraConfig", "velora_config": "VeloraConfig"}
    for field, cls in classes.items():
        if field in made:
            made[field] = getattr(peft.tuners.lora.config, cls)(**made[field])
    tuner = PEFT_TYPE_TO_CONFIG_MAPPING[peft.PeftType(name.partition(" ")[0])]
    return tuner(task_type="SEQ_CLS", **made)


def with_tuner(model: nn.Module, name: str, settings: dict[str, Any]) -> nn.Module:
    """In PEFT, with numbers of its own where it would begin with zeros."""
    manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = peft.get_peft_model(model, config_of(name, settings)).eval()
    generator = torch_generator(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad and parameter.is_floating_point():
                parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
    return model


def made(name: str, settings: dict[str, Any]) -> tuple[nn.Module, nn.Module]:
    """transformers' model and our own, with the same numbers in the tuner."""
    config = config_for("bert", "SequenceClassification", 3)
    theirs = make_hf(config, "SequenceClassification").eval()
    ours = make_ours(config, "SequenceClassification", theirs).eval()
    theirs, ours = with_tuner(theirs, name, settings), with_tuner(ours, name, settings)
    ours.load_state_dict(theirs.state_dict())
    return theirs, ours


@left_to_full(lambda given: given["name"] not in ("LORA", "GRALORA", "ADAMSS"))
@pytest.mark.parametrize("name", BY_TOKEN)
def test_a_tuner_that_goes_by_the_token(name, packed_layers):
    theirs, ours = made(name, BY_TOKEN[name])
    exact = copy.deepcopy(theirs).double()
    for module in exact.modules():
        if module.__dict__.get("dtype") is torch.float32:  # AdaMSS keeps the dtype that it computes in
            module.dtype = torch.float64
    with torch.no_grad():
        near, oracle = (model(input_ids=IDS, attention_mask=MASK).logits for model in (theirs, exact))
        for model in (ours, fastbert.accelerate(theirs)):
            packed_layers.clear()
            assert_close_to_theirs(model(input_ids=IDS, attention_mask=MASK).logits, near, oracle)
            assert packed_layers
        assert not torch.equal(near, theirs.get_base_model()(input_ids=IDS).logits)


@pytest.mark.parametrize("name", BY_PLACE)
def test_a_tuner_that_goes_by_more(name, packed_layers):
    settings, given, reason = BY_PLACE[name]
    theirs, ours = made(name, settings)
    theirs.train(), ours.train()
    for module in (*theirs.modules(), *ours.modules()):
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    plain = copy.deepcopy(theirs)
    fastbert.accelerate(theirs)
    values = []
    for model in (plain, theirs):
        manual_seed(2)  # Poly draws which of its skills a task has
        logits = model(input_ids=IDS, attention_mask=MASK, **given).logits
        logits.sum().backward()
        values.append([logits, *(p.grad for p in model.parameters() if p.grad is not None)])
    assert all(torch.equal(one, other) for one, other in zip(*values, strict=True)) and not packed_layers
    assert fastbert.status(theirs).others == 1
    with pytest.raises(InputError, match=f"^{reason}.*use transformers' class and fastbert.accelerate"):
        ours(input_ids=IDS, attention_mask=MASK, **given)


def test_neftune_on_our_own_classes(tmp_path):
    transformers = pytest.importorskip("transformers")
    model = fastbert.BertForSequenceClassification(config_for("bert", "SequenceClassification", 3))
    rows = [{"input_ids": [5, 6, 7], "labels": 1}] * 4
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path), max_steps=1, neftune_noise_alpha=5, report_to=[], use_cpu=True
    )
    trainer = transformers.Trainer(model=model, args=arguments, train_dataset=rows)
    with pytest.raises(InputError, match=r"^NEFTune draws noise .* use transformers' class and fastbert.accelerate"):
        trainer.train()
