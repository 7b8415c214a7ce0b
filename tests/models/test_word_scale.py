"""The factor of Gemma's words."""

from __future__ import annotations

import pytest
import torch
from family_configs import make_config
from hf import make_hf, make_ours

from fastbert.testing.cases import DTYPES


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
