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
from seeds import manual_seed

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


def close(a, b):
    np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-4, atol=2e-6)


def test_it_is_one_and_gives_the_same(folder):
    ours, theirs = pair(folder)
    assert isinstance(ours, library.SentenceTransformer) and "sentence_transformers" in str(type(ours))
    assert np.array_equal(ours.encode(TEXTS), ours.encoder.encode(TEXTS))
    close(ours.encode(sentences=TEXTS), theirs.encode(TEXTS))
    close(ours.encode_query(TEXTS), theirs.encode_query(TEXTS))
    close(
        ours.encode(TEXTS, truncate_dim=5, normalize_embeddings=True),
        theirs.encode(TEXTS, truncate_dim=5, normalize_embeddings=True),
    )
    close(
        ours.similarity(ours.encode(TEXTS), ours.encode(TEXTS)),
        theirs.similarity(theirs.encode(TEXTS), theirs.encode(TEXTS)),
    )
    assert ours.get_embedding_dimension() == 32 and ours.get_max_seq_length() == 64
    features = [model.preprocess(TEXTS, prompt="a ") for model in (ours, theirs)]
    assert torch.equal(features[0]["input_ids"], features[1]["input_ids"])
    close(ours(features[0])["sentence_embedding"].detach(), theirs(features[1])["sentence_embedding"].detach())
    ours.save_pretrained(str(folder.parent / "saved"))
    close(library.SentenceTransformer(str(folder.parent / "saved"), device="cpu").encode(TEXTS), theirs.encode(TEXTS))
    assert np.array_equal(pickle.loads(pickle.dumps(ours)).encode(TEXTS), ours.encode(TEXTS))


def train(model, folder):
    from datasets import Dataset
    from sentence_transformers.losses import CoSENTLoss

    rows = {"sentence1": TEXTS * 4, "sentence2": TEXTS[1:] * 5, "score": [i % 5 / 4 for i in range(20)]}
    manual_seed(0)
    arguments = library.SentenceTransformerTrainingArguments(
        str(folder), max_steps=3, per_device_train_batch_size=4, logging_steps=1, report_to=[], use_cpu=True, seed=1,
        save_strategy="no", learning_rate=1e-3, disable_tqdm=True, dataloader_num_workers=0,
    )  # fmt: skip
    trainer = library.SentenceTransformerTrainer(model, arguments, Dataset.from_dict(rows), loss=CoSENTLoss(model))
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def test_their_trainer_trains_it(folder, tmp_path):
    """Dropout 0: the losses are theirs to five decimals, and the encoder encodes with what was learnt."""
    pytest.importorskip("datasets")
    tiny.edit_config(folder, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    ours, theirs = pair(folder)
    before = ours.encode(TEXTS)
    np.testing.assert_allclose(train(ours, tmp_path / "a"), train(theirs, tmp_path / "b"), atol=1e-5)
    assert not np.allclose(ours.encode(TEXTS), before)
    np.testing.assert_allclose(ours.encode(TEXTS), theirs.encode(TEXTS), rtol=1e-3, atol=1e-4)


def test_their_evaluator_takes_it(folder):
    from sentence_transformers.evaluation import EmbeddingSimilarityEvaluator

    evaluator = EmbeddingSimilarityEvaluator(TEXTS, TEXTS[::-1], [0.1, 0.7, 1.0, 0.6, 0.3], write_csv=False)
    found, wanted = (evaluator(model) for model in pair(folder))
    assert re.search("spearman", " ".join(found)) and found.keys() == wanted.keys()
    close(list(found.values()), list(wanted.values()))


def test_int8_stays_frozen(folder):
    encoder = fastbert.SentenceEncoder.from_pretrained(folder, dtype="int8", device="cpu")
    ours = encoder.as_sentence_transformer()
    assert np.array_equal(ours.encode(TEXTS), encoder.encode(TEXTS))
    assert not any(parameter.requires_grad for parameter in ours.parameters())
