"""SentenceEncoder as the SentenceTransformer of tools that take no other class: real weights of sentence-transformers'
form, its own trainer, its evaluators.
"""

from __future__ import annotations

import copy
import pickle
import re

import numpy as np
import pytest
import tiny
import torch
from precise import assert_as_theirs, assert_close_to_theirs, in_float64
from seeds import manual_seed, python_random, shifted, torch_generator
from tokenizers import normalizers

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
    assert np.array_equal(ours.encode(TEXTS), ours._encoder.encode(TEXTS))
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


def test_it_knows_where_it_is_from(folder):
    """Their losses and cards read the name; a model that was not trained keeps the card of its folder."""
    (folder / "README.md").write_text("A card.\n", encoding="utf-8")
    ours, theirs = pair(folder)
    names = [model.transformers_model.config._name_or_path for model in (ours, theirs)]
    assert names == [str(folder)] * 2
    ours.save_pretrained(str(folder.parent / "saved"))
    assert (folder.parent / "saved/README.md").read_text(encoding="utf-8") == "A card.\n"


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


def write_folder(path, *modules: str):
    """Of modules behind the Transformer, in a folder that both classes read."""
    tiny.write_modules(tiny.write_model(path), *modules)
    tiny.write_json(path / "1_Pooling/config.json", {"embedding_dimension": 32, "pooling_mode": "mean"})
    tiny.write_json(path / "config_sentence_transformers.json", {"prompts": {"query": "who? "}})
    return path


def append_dense(model) -> None:
    manual_seed(0)
    model.append(library.sentence_transformer.modules.Dense(32, 16).to(model.device))


def add_tokens(model) -> None:
    model.tokenizer.add_tokens(["sat on", "zebra"])
    table = model[0].auto_model.resize_token_embeddings(len(model.tokenizer))
    table.weight.data[-2:] = torch.randn(2, 32, generator=torch_generator(0))


def replace_model(model) -> None:
    other = type(model[0].auto_model)(model[0].auto_model.config)
    for one, parameter in enumerate(other.parameters()):
        parameter.data = 0.3 * torch.randn(parameter.shape, generator=torch_generator(one))
    model[0].model = other.eval()


def double_first_column(module, args, out):
    changed = out["token_embeddings"].clone()
    changed[:, 0] *= 2
    return {**out, "token_embeddings": changed}


def scale_words(module, args, out):
    return out * 1.5


def cut_on_the_left(model) -> None:
    model.tokenizer.truncation_side, model.tokenizer.model_max_length = "left", 6


def replace_cats(model) -> None:
    model.tokenizer.backend_tokenizer.normalizer = normalizers.Replace("cat", "dog")


CHANGES = {
    "append": append_dense,
    "pooling_mode": lambda model: setattr(model[1], "pooling_mode", "max"),
    "del": lambda model: model.__delitem__(2),
    "truncation_side": cut_on_the_left,
    "model_max_length": lambda model: setattr(model.tokenizer, "model_max_length", 6),
    "max_seq_length": lambda model: setattr(model, "max_seq_length", 6),
    "tokens": add_tokens,
    "normalizer": replace_cats,
    "hook": lambda model: model[0].register_forward_hook(double_first_column),
    "hook inside": lambda model: model[0].auto_model.embeddings.word_embeddings.register_forward_hook(scale_words),
    "auto_model": replace_model,
    "prompts": lambda model: (model.prompts.update(new="we "), setattr(model, "default_prompt_name", "new")),
    "truncate_dim": lambda model: setattr(model, "truncate_dim", 5),
}
STILL_QUICK = ("truncation_side", "model_max_length", "max_seq_length", "normalizer", "prompts", "truncate_dim")


@pytest.mark.parametrize("name", CHANGES)
def test_what_is_changed_on_it_holds(tmp_path, name):
    """In `encode`, in `forward` and in the folder that it saves, as on theirs."""
    write_folder(tmp_path / "model", "Pooling", "Normalize")
    ours, theirs = pair(tmp_path / "model")
    before = ours.encode(TEXTS)
    assert fastbert.status(ours).models[0].texts == 1
    for model in (ours, theirs):
        CHANGES[name](model)
    vectors = assert_as_theirs(ours, theirs, lambda model: model.encode(TEXTS))
    assert vectors.shape != before.shape or not np.allclose(vectors, before)
    status = fastbert.status(ours)
    if name != "auto_model":
        assert status.models[0].texts == 1 + (name in STILL_QUICK)
        assert bool(status.models[0].ways.get("texts")) != (name in STILL_QUICK)
    for made in (pickle.loads(pickle.dumps(ours)), copy.deepcopy(ours)) if "hook" not in name else ():
        assert_close_to_theirs(made.encode(TEXTS), vectors, in_float64(theirs).encode(TEXTS))
    again = []
    for i, model in enumerate((ours, theirs)):
        model.save_pretrained(str(tmp_path / f"saved-{i}"))
        again.append(library.SentenceTransformer(str(tmp_path / f"saved-{i}"), device="cpu"))
    assert_as_theirs(*again, lambda model: model.encode(TEXTS))


def test_a_dense_that_is_appended_is_trained_and_saved(tmp_path):
    pytest.importorskip("datasets")
    write_folder(tmp_path / "model", "Pooling", "Normalize")
    tiny.edit_config(tmp_path / "model", hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    models = list(pair(tmp_path / "model"))
    for model in models:
        append_dense(model)
    models.append(in_float64(models[1]))
    assert_close_to_theirs(*(train(model, tmp_path / str(i)) for i, model in enumerate(models)))
    assert_close_to_theirs(*(model.encode(TEXTS) for model in models))
    models[0].save_pretrained(str(tmp_path / "saved"))
    for again in (library.SentenceTransformer(str(tmp_path / "saved"), device="cpu"), models[0]):
        assert again.encode(TEXTS).shape == (5, 16)
        assert_close_to_theirs(again.encode(TEXTS), models[1].encode(TEXTS), models[2].encode(TEXTS))


def test_arguments_that_theirs_has(tmp_path):
    ours, theirs = pair(write_folder(tmp_path / "model", "Pooling", "Normalize"))
    assert_as_theirs(ours, theirs, lambda model: model.encode(TEXTS, chunk_size=2))
    assert_as_theirs(ours, theirs, lambda model: model.encode([{"text": one} for one in TEXTS]))
    assert_as_theirs(ours, theirs, lambda model: model.encode({"text": TEXTS[0]}))
    assert_as_theirs(ours, theirs, lambda model: model.encode(TEXTS, None, "who? ", 2, False))
    for model in (ours, theirs):
        model.similarity_fn_name = None
    assert ours.similarity_fn_name == theirs.similarity_fn_name == "cosine"
    assert_as_theirs(ours, theirs, lambda model: model.similarity(*[model.encode(TEXTS)] * 2))


def test_what_is_set_on_the_tokenizer_of_an_encoder(tmp_path):
    """By the names of transformers' tokenizers."""
    encoder = fastbert.SentenceEncoder(write_folder(tmp_path / "model", "Pooling"), device="cpu")
    theirs = library.SentenceTransformer(str(tmp_path / "model"), device="cpu")
    for name, value in {"model_max_length": 6, "truncation_side": "left"}.items():
        for tokenizer in (encoder.tokenizer, theirs.tokenizer):
            setattr(tokenizer, name, value)
        assert_close_to_theirs(encoder.encode(TEXTS), theirs.encode(TEXTS), in_float64(theirs).encode(TEXTS))
    assert encoder.max_seq_length == 6
    encoder.save_pretrained(tmp_path / "saved")
    again = fastbert.SentenceEncoder(tmp_path / "saved", device="cpu")
    assert np.array_equal(again.encode(TEXTS), encoder.encode(TEXTS))
    encoder.tokenizer.padding_side = "left"
    with pytest.raises(fastbert.InputError, match="padding_side"):
        encoder.encode(TEXTS)
