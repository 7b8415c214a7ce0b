"""What is said to those who take the wrong way in: the right one."""

from __future__ import annotations

import pytest
from family_configs import config_for, make_config
from tiny import write_sentence_model
from torch import nn

import fastbert
from fastbert.errors import ConfigError, InputError


def test_accelerate_of_our_own_classes():
    ours = fastbert.BertModel(make_config("bert"))
    for model in (ours, nn.ModuleDict({"encoder": ours})):
        with pytest.raises(ValueError, match=r"^\w+ runs on fastbert's kernels already: .* need no accelerate$"):
            fastbert.accelerate(model)


def test_texts_instead_of_ids():
    config = config_for("bert", "MultipleChoice", 0)
    for model in (fastbert.BertModel(config), fastbert.BertForMaskedLM(config), fastbert.BertForMultipleChoice(config)):
        for texts in ("a cat", ["a cat", "a dog"], ("a cat",)):
            with pytest.raises(InputError, match=r"^input_ids is a (str|list|tuple);.* a tokenizer makes ids"):
                model(texts)
        with pytest.raises(InputError, match=r"^input_ids is a list; it must be a tensor$"):
            model([[2, 5, 3]])


def test_an_encoder_is_no_reranker(tmp_path):
    folder = write_sentence_model(tmp_path / "encoder")
    for kind in (fastbert.Reranker, fastbert.TextClassifier):
        with pytest.raises(ConfigError, match=r"is an encoder of texts.*Pooling.*Load it as a SentenceEncoder$"):
            kind(folder)


def test_dtypes_are_those_that_the_class_takes(tmp_path):
    folder = write_sentence_model(tmp_path / "encoder")
    with pytest.raises(ConfigError, match=r"^unknown dtype 'int4'; valid names: auto, float32, .*, int8$"):
        fastbert.SentenceEncoder(folder, dtype="int4")
    with pytest.raises(ConfigError, match=r"^unknown dtype 'int4'; valid names: auto, float32, .*, float64$"):
        fastbert.AutoModel.from_pretrained(folder, dtype="int4")


def test_an_encoder_shows_what_it_is(tmp_path):
    found = repr(fastbert.SentenceEncoder(write_sentence_model(tmp_path / "encoder"), device="cpu"))
    assert found == "SentenceEncoder(bert, 2 layers of 32, max_seq_length=64, float32 on cpu)"
