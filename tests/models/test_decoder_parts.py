"""What Qwen3 and Gemma 3 have that other families have not: the factor of the words, a window that is read as half of
what a file says, and norms of heads in layers that run op by op.
"""

from __future__ import annotations

import pytest
import torch
import transformers
from batches import make_batch
from family_configs import config_for, make_config
from hf import make_hf, make_ours, make_trio

import fastbert
from fastbert.testing.cases import DTYPES
from fastbert.testing.numerics import GRADIENT_FACTOR, assert_close_to_reference


@pytest.mark.parametrize("dtype", (*DTYPES, torch.float64), ids=str)
def test_the_factor_is_rounded_as_transformers_rounds_it(dtype):
    """sqrt(160) is 12.649..., and 12.625 in bfloat16; what a caller embeds is not multiplied."""
    config = make_config("gemma3_text", 1)
    theirs = make_hf(config, "Model", dtype)
    ours = make_ours(config, "Model", theirs)
    ids = torch.arange(43).view(1, -1)
    found, expected = (model.get_input_embeddings()(ids) for model in (ours, theirs))
    assert torch.equal(found, expected) and found.dtype is dtype
    with torch.no_grad():
        embedded, by_ids = ours(inputs_embeds=expected)[0], ours(ids)[0]
    assert torch.equal(embedded, by_ids)


@pytest.mark.parametrize("stored", (256, 257))
def test_a_window_that_goes_both_ways_is_half_of_what_a_file_says(stored):
    """An odd one comes back as one less, as from transformers."""
    file = {"sliding_window": stored, "use_bidirectional_attention": True}
    config = fastbert.EncoderConfig.from_dict({"model_type": "gemma3_text", **file})
    theirs = transformers.Gemma3TextConfig.from_dict(file)
    assert config.sliding_window == theirs.sliding_window == 129
    assert config.layer_specs[0].attention.window_size == (128, 128)
    assert config.to_dict()["sliding_window"] == theirs.to_dict()["sliding_window"] == 256
    causal = fastbert.EncoderConfig.from_dict({"model_type": "gemma3_text", "sliding_window": stored})
    assert causal.layer_specs[0].attention.window_size == (stored - 1, 0)
    assert causal.to_dict()["sliding_window"] == stored


def test_masked_words_behind_a_text_are_not_its_last_token():
    """transformers reads them there, by their ids; ours has no hidden states of masked tokens."""
    config = config_for("qwen3", "SequenceClassification")
    ours = make_ours(config, "SequenceClassification", make_hf(config, "SequenceClassification")).eval()
    batch = make_batch(config, "right")
    ids, mask = batch.inputs["input_ids"], batch.inputs["attention_mask"]
    words = ids.where(batch.real, 5)
    with torch.no_grad():
        found, expected = (ours(given, mask).logits for given in (words, ids))
    assert config.pad_token_id != 5 and torch.equal(found, expected)


@pytest.mark.parametrize("index", range(4))
@pytest.mark.parametrize("model_type", ("gemma3_text", "qwen3"))
def test_layers_op_by_op(model_type, index):
    """They run so where attention probabilities are wanted: these, and the gradients, against transformers."""
    config = make_config(model_type, index)
    trio, batch = make_trio(config, "Model", torch.float32), make_batch(config, "right")
    real, results = batch.real, []
    for model in (trio.ours, trio.baseline, trio.oracle):
        out = model(**batch.inputs, output_attentions=True)
        shown = [t.transpose(1, 2)[real] for t in out.attentions]
        (out[0][real].square().sum() + sum(t.square().sum() for t in shown)).backward()
        names = [name for name, _ in model.named_parameters() if name.endswith("_norm.weight")]
        gradients = [model.get_parameter(name).grad for name in sorted(names)]
        assert len(gradients) == (2 * len(shown)), names
        results.append([out[0][real], *shown, *gradients])
    for found, near, exact in zip(*results, strict=True):
        assert_close_to_reference(found, exact.double(), near, GRADIENT_FACTOR)
