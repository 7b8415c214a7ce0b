"""What SentenceEncoder.save_pretrained writes, read by fastbert and by sentence-transformers."""

from __future__ import annotations

import numpy as np
import pytest
import tiny
import torch
from precise import assert_as_theirs
from test_sentence_options import TEXTS, write

import fastbert


def theirs(folder):
    return pytest.importorskip("sentence_transformers").SentenceTransformer(str(folder), device="cpu")


@pytest.mark.parametrize("modes", ["mean", ["cls", "weightedmean"]], ids=str)
def test_a_whole_folder(tmp_path, modes):
    """Dense, Normalize, prompts, a similarity, a length and a truncation that were set since: all come back."""
    pooling = {"pooling_mode": modes}
    if not isinstance(modes, str):  # a Dense of another width
        tiny.write_modules(tiny.write_model(tmp_path / "old"), "Pooling", "Normalize")
        tiny.write_json(tmp_path / "old/1_Pooling/config.json", {"embedding_dimension": 32, **pooling})
    else:
        write(tmp_path / "old", **pooling)
    encoder = fastbert.SentenceEncoder.from_pretrained(tmp_path / "old", device="cpu")
    encoder.max_seq_length, encoder.truncate_dim, encoder.similarity_fn_name = 9, 6, "manhattan"
    encoder.prompts["new"] = "we "
    encoder.save_pretrained(tmp_path / "new")
    again, their = fastbert.SentenceEncoder.from_pretrained(tmp_path / "new", device="cpu"), theirs(tmp_path / "new")
    for model in (again, their):
        assert model.max_seq_length == 9 and model.truncate_dim == 6 and model.similarity_fn_name == "manhattan"
        assert model.prompts == encoder.prompts and model.default_prompt_name is None
    wanted = encoder.encode(TEXTS, prompt_name="new")
    assert np.array_equal(again.encode(TEXTS, prompt_name="new"), wanted)
    assert_as_theirs(again, their, lambda model: model.encode(TEXTS, prompt_name="new"))


@pytest.mark.parametrize("model_type", ["roberta", "distilbert"])
def test_a_plain_folder(tmp_path, model_type):
    encoder = fastbert.SentenceEncoder.from_pretrained(tiny.write_model(tmp_path / "old", model_type=model_type))
    encoder.save_pretrained(tmp_path / "new")
    assert_as_theirs(encoder, theirs(tmp_path / "new"), lambda model: model.encode(TEXTS))


def test_int8(tmp_path):
    encoder = fastbert.SentenceEncoder.from_pretrained(write(tmp_path / "old"), dtype="int8", device="cpu")
    encoder.save_pretrained(tmp_path / "new")
    again = fastbert.SentenceEncoder.from_pretrained(tmp_path / "new", device="cpu")
    assert np.array_equal(again.encode(TEXTS), encoder.encode(TEXTS))


def test_saving_into_the_folder_that_it_came_from(tmp_path):
    """Also one whose tokenizer lowers case by sentence-transformers' setting, and one that holds other modules."""
    write(tmp_path)
    tiny.write_tokenizer(tmp_path, lowercase=False)
    tiny.write_json(tmp_path / "sentence_bert_config.json", {"max_seq_length": 64, "do_lower_case": True})
    encoder = fastbert.SentenceEncoder.from_pretrained(tmp_path, device="cpu")
    wanted = encoder.encode(TEXTS)
    with torch.no_grad():
        next(encoder.model.parameters()).mul_(1.5)
    assert not np.array_equal(encoder.encode(TEXTS), wanted)
    encoder.save_pretrained(tmp_path)
    again = fastbert.SentenceEncoder.from_pretrained(tmp_path, device="cpu")
    assert np.array_equal(again.encode(TEXTS), encoder.encode(TEXTS))
    assert_as_theirs(again, theirs(tmp_path), lambda model: model.encode(TEXTS))
    assert not [path.name for path in tmp_path.iterdir() if path.name.startswith(".")]
