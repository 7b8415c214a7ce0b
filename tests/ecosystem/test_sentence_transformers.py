"""SentenceEncoder as the SentenceTransformer of tools that take no other class: real weights of sentence-transformers'
form, its own trainer, its evaluators.
"""

from __future__ import annotations

import pickle
import re

import numpy as np
import pytest
import tiny
import torch
from precise import assert_as_theirs, assert_close_to_theirs, in_float64
from seeds import manual_seed, python_random, shifted

import fastbert

library = pytest.importorskip("sentence_transformers")
TEXTS = [
    "the cat sat on the mat.",
    "a dog ran",
    "",
    "who sat in the old house and ran to the new house, we?",
    "Zebra CATS",
]


@pytest.fixture
def folder(tmp_path):
    tiny.write_modules(tiny.write_model(tmp_path / "model"), "Pooling", "Normalize")
    tiny.write_json(tmp_path / "model/1_Pooling/config.json", {"embedding_dimension": 32, "pooling_mode": "mean"})
    prompts = {"prompts": {"query": "who? "}, "similarity_fn_name": "dot"}
    tiny.write_json(tmp_path / "model/config_sentence_transformers.json", prompts)
    return tmp_path / "model"


def pair(folder):
    """Ours as theirs, and theirs."""
    ours = fastbert.SentenceEncoder.from_pretrained(folder, device="cpu").as_sentence_transformer()
    return ours, library.SentenceTransformer(str(folder), device="cpu")


def test_it_is_one_and_gives_the_same(folder):
    ours, theirs = pair(folder)
    assert isinstance(ours, library.SentenceTransformer) and "sentence_transformers" in str(type(ours))
    assert np.array_equal(ours.encode(TEXTS), ours.encoder.encode(TEXTS))
    assert_as_theirs(ours, theirs, lambda model: model.encode(sentences=TEXTS))
    assert_as_theirs(ours, theirs, lambda model: model.encode_query(TEXTS))
    assert_as_theirs(ours, theirs, lambda model: model.encode(TEXTS, truncate_dim=5, normalize_embeddings=True))
    assert_as_theirs(ours, theirs, lambda model: model.similarity(*[model.encode(TEXTS)] * 2))
    assert ours.get_embedding_dimension() == 32 and ours.get_max_seq_length() == 64
    features = [model.preprocess(TEXTS, prompt="a ") for model in (ours, theirs)]
    assert torch.equal(features[0]["input_ids"], features[1]["input_ids"])
    assert_as_theirs(ours, theirs, lambda model: model(model.preprocess(TEXTS, prompt="a "))["sentence_embedding"])
    ours.save_pretrained(str(folder.parent / "saved"))
    again = library.SentenceTransformer(str(folder.parent / "saved"), device="cpu")
    assert_as_theirs(again, theirs, lambda model: model.encode(TEXTS))
    assert np.array_equal(pickle.loads(pickle.dumps(ours)).encode(TEXTS), ours.encode(TEXTS))


def train(model, folder):
    from datasets import Dataset
    from sentence_transformers.losses import CoSENTLoss

    rows = {"sentence1": TEXTS * 4, "sentence2": TEXTS[1:] * 5, "score": [i % 5 / 4 for i in range(20)]}
    manual_seed(0)
    arguments = library.SentenceTransformerTrainingArguments(
        str(folder),
        max_steps=3,
        per_device_train_batch_size=4,
        logging_steps=1,
        report_to=[],
        use_cpu=True,
        seed=shifted(1),
        save_strategy="no",
        learning_rate=1e-4,
        disable_tqdm=True,
        dataloader_num_workers=0,
    )
    trainer = library.SentenceTransformerTrainer(model, arguments, Dataset.from_dict(rows), loss=CoSENTLoss(model))
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def test_their_trainer_trains_it(folder, tmp_path):
    """Dropout 0: the losses are theirs, and the encoder encodes with what was learnt."""
    pytest.importorskip("datasets")
    tiny.edit_config(folder, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    ours, theirs = pair(folder)
    before, models = ours.encode(TEXTS), (ours, theirs, in_float64(theirs))
    assert_close_to_theirs(*(train(model, tmp_path / str(i)) for i, model in enumerate(models)))
    assert not np.array_equal(ours.encode(TEXTS), before)
    assert_close_to_theirs(*(model.encode(TEXTS) for model in models))


def test_their_evaluator_takes_it(folder):
    from sentence_transformers.evaluation import EmbeddingSimilarityEvaluator

    draw = python_random(0)
    evaluators = [
        EmbeddingSimilarityEvaluator(TEXTS, draw.sample(TEXTS, 5), [draw.random() for _ in TEXTS], write_csv=False)
        for _ in range(30)
    ]
    ours, theirs = pair(folder)
    found, wanted = evaluators[0](ours), evaluators[0](theirs)
    assert re.search("spearman", " ".join(found)) and found.keys() == wanted.keys()
    # All figures together: of one, how far theirs is off is luck.
    assert_as_theirs(
        ours, theirs, lambda model: [float(figure) for each in evaluators for figure in each(model).values()]
    )


def test_int8_stays_frozen(folder):
    encoder = fastbert.SentenceEncoder.from_pretrained(folder, dtype="int8", device="cpu")
    ours = encoder.as_sentence_transformer()
    assert np.array_equal(ours.encode(TEXTS), encoder.encode(TEXTS))
    assert not any(parameter.requires_grad for parameter in ours.parameters())


@pytest.mark.parametrize("inner", (False, True))
def test_what_trains_is_in_eval_mode_behind_encode_as_theirs(folder, inner):
    """Also where the training mode is that of a module inside alone; and where none trains, none is written to."""
    ours = fastbert.SentenceEncoder.from_pretrained(folder, device="cpu").as_sentence_transformer()
    expected = ours.encode(TEXTS)
    (ours[0].auto_model if inner else ours).train()
    assert np.array_equal(ours.encode(TEXTS), expected)
    assert not any(module.training for module in ours.modules())
    ours.eval = None  # what would be called
    assert np.array_equal(ours.encode(TEXTS), expected)
