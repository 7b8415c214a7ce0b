"""What is said to those who take the wrong way in: the right one."""

from __future__ import annotations

import inspect
import itertools

import pytest
import torch
from family_configs import config_for, make_config
from tiny import write_model, write_sentence_model
from torch import nn

import fastbert
from fastbert.errors import ConfigError, InputError
from fastbert.models.classes import CLASSES
from fastbert.packed_inputs import ModelInputs


def test_accelerate_of_our_own_classes():
    ours = fastbert.BertModel(make_config("bert"))
    for model in (ours, nn.ModuleDict({"encoder": ours})):
        with pytest.raises(ValueError, match=r"^\w+ runs on fastbert's kernels already: .* need no accelerate$"):
            fastbert.accelerate(model)


def test_accelerate_of_classes_for_texts(tmp_path):
    encoder = fastbert.SentenceEncoder(write_sentence_model(tmp_path / "encoder"), device="cpu")
    folder = write_model(tmp_path / "classes", head="SequenceClassification", num_labels=1)
    for model in (encoder, fastbert.Reranker(folder, device="cpu"), fastbert.TextClassifier(folder, device="cpu")):
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


HEADS = ("Model", "MaskedLM", "PreTraining", "MultipleChoice", "QuestionAnswering", "SequenceClassification")


@pytest.mark.parametrize("head", HEADS)
def test_what_is_no_tensor(head):
    """A list of labels was an AttributeError of torch's, and so was a mask of NumPy's."""
    model = CLASSES["bert", head](config_for("bert", head, 0))
    ids = torch.full((2, 3, 4), 5) if head == "MultipleChoice" else torch.full((2, 4), 5)
    rows = inspect.signature(model.forward).parameters
    labels = set() if head == "Model" else set(model.option_names)
    names = {*ModelInputs._fields, *labels} - {"max_seqlen", "batch", "num_choices"}
    for name, value in itertools.product(sorted(names), ([[0, 1]], ids.numpy(), "a cat")):
        given = {"input_ids": ids, "start_positions": ids[:, 0], "end_positions": ids[:, 0]}
        given = {key: t for key, t in given.items() if key in rows} | {name: value}
        given = {key: t for key, t in given.items() if (key, name) != ("input_ids", "inputs_embeds")}
        with pytest.raises(InputError, match=f"^{name} is a {type(value).__name__}; it must be a tensor"):
            model(**given)
    with pytest.raises(InputError, match=r"^batch is a int; it must be the PackedBatch of a PackedInputs$"):
        model(ids.flatten(), batch=3, **({"num_choices": 3} if head == "MultipleChoice" else {}))


def test_labels_of_joint_pre_training():
    models = (CLASSES["electra", head](make_config("electra")) for head in ("MaskedLM", "PreTraining"))
    with pytest.raises(InputError, match=r"^labels is a list; it must be a tensor$"):
        fastbert.ElectraForJointPreTraining(*models)(torch.full((1, 3), 5), labels=[[-100, 5, -100]])


def test_an_encoder_is_no_reranker(tmp_path):
    folder = write_sentence_model(tmp_path / "encoder")
    for kind in (fastbert.Reranker, fastbert.TextClassifier):
        with pytest.raises(ConfigError, match=r"is an encoder of texts.*Pooling.*Load it as a SentenceEncoder$"):
            kind(folder)


def test_dtypes_are_those_that_the_class_takes(tmp_path):
    folder = write_sentence_model(tmp_path / "encoder")
    with pytest.raises(ConfigError, match=r"^unknown dtype 'int4'; valid names: auto, float32, .*, int8$"):
        fastbert.SentenceEncoder(folder, dtype="int4")
    with pytest.raises(ConfigError, match=r"^unknown dtype 'int4'; valid names: auto, float32, .*, float64, double$"):
        fastbert.AutoModel.from_pretrained(folder, dtype="int4")


def test_an_encoder_shows_what_it_is(tmp_path):
    found = repr(fastbert.SentenceEncoder(write_sentence_model(tmp_path / "encoder"), device="cpu"))
    assert found == "SentenceEncoder(bert, 2 layers of 32, max_seq_length=64, float32 on cpu)"
