"""Vectors of long texts: against a literal loop over transformers' model, window by window."""

from __future__ import annotations

import re

import numpy as np
import pytest
import tiny
import torch
from full import left_to_full
from literal_windows import counted, owners, windows_of
from precise import assert_close_to_theirs, in_float64
from seeds import numpy_generator

import fastbert
from fastbert import Windows
from fastbert.errors import InputError
from fastbert.sentences.documents import cutter_of

SIZES = ((64, 16), (20, 0), (16, 9))
SHORT = ["", "the cat sat on the mat.", "a dog ran"]


def documents() -> list[str]:
    draw, words = numpy_generator(0), np.array(tiny.WORDS.split() * 3 + ["Zebras", "housecat", "\n"])
    return [*SHORT, *(" ".join(draw.choice(words, n)) for n in (61, 62, 63, 250, *draw.integers(64, 200, 3)))]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny.write_sentence_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def encoder(folder):
    return fastbert.SentenceEncoder(folder, device="cpu")


@pytest.fixture(scope="module")
def theirs(folder):
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModel.from_pretrained(folder).eval()
    return model, transformers.AutoTokenizer.from_pretrained(folder)


def literal(parts, text: str, length: int, overlap: int) -> dict[str, torch.Tensor]:
    """The vector of each pool. All tokens count once in the mean, and the special ones of each window."""
    model, tokenizer = parts
    windows = windows_of(tokenizer, text, length=length, overlap=overlap)
    with torch.no_grad():
        hidden = [model(**window.inputs).last_hidden_state[0] for window in windows]
    kept = [rows[which] for rows, which in zip(hidden, counted(windows), strict=True)]
    found = {
        "mean": torch.cat(kept).mean(0),
        "max": torch.stack([rows.mean(0) for rows in kept]).max(0).values,
        "first": hidden[0].mean(0),
    }
    return {pool: torch.nn.functional.normalize(vector, dim=0) for pool, vector in found.items()}


@left_to_full(lambda p: p["length"] != 16)
@pytest.mark.parametrize("length,overlap", SIZES)
def test_vectors_are_those_of_a_loop_over_windows(encoder, theirs, length, overlap):
    model, tokenizer = theirs
    texts = documents()
    near, exact = (
        [literal((m, tokenizer), text, length, overlap) for text in texts] for m in (model, in_float64(model))
    )
    for pool in ("mean", "max", "first"):
        found = encoder.encode(texts, windows=Windows(length, overlap, pool))
        assert_close_to_theirs(found, *(torch.stack([one[pool] for one in each]).numpy() for each in (near, exact)))
    cut = fastbert.SentenceEncoder.from_pretrained(encoder.folder, device="cpu", max_seq_length=length)
    assert np.array_equal(found, cut.encode(texts))


def test_a_text_that_fits_has_the_same_bits(encoder):
    plain = encoder.encode(SHORT)
    for pool in ("mean", "max", "first"):
        assert np.array_equal(encoder.encode(SHORT, windows=Windows(pool=pool)), plain)
    assert np.array_equal(encoder.encode("", windows=Windows()), encoder.encode(""))
    prompted = [encoder.encode(SHORT, prompt="the old ", **given) for given in ({}, {"windows": Windows()})]
    assert np.array_equal(*prompted)


def test_alone_and_in_a_batch(encoder):
    """In float64, where batches of other sizes change the last bits too little to see in float32."""
    precise = fastbert.SentenceEncoder(encoder.folder, device="cpu", dtype="float64")
    texts, windows = documents(), Windows(30, 8)
    found = precise.encode(texts, windows=windows)
    assert np.array_equal(found, np.stack([precise.encode(text, windows=windows) for text in texts]))
    assert np.array_equal(found, precise.encode(texts, windows=windows, batch_tokens=70))
    whole, parts = precise.encode_chunks(texts, windows), [precise.encode_chunks(text, windows) for text in texts]
    assert np.array_equal(whole.vectors, np.concatenate([part.vectors for part in parts]))
    assert whole.documents.tolist() == [i for i, part in enumerate(parts) for _ in range(len(part))]


@pytest.mark.full  # test_sentence_options.py has a pool
def test_by_processes(encoder):
    texts, windows = documents(), Windows(30, 8)
    with encoder.start_multi_process_pool(["cpu"]) as pool:
        found = encoder.encode(texts, windows=windows, pool=pool, chunk_size=len(texts))
    assert np.array_equal(found, encoder.encode(texts, windows=windows))


@pytest.mark.parametrize("windows", (Windows(20, 0, at="sentences"), Windows(20, 8, at="sentences"), None), ids=str)
@pytest.mark.parametrize("prompt", ("", "the old "))
def test_chunks_are_texts_by_themselves(encoder, windows, prompt):
    """Cut at blanks, their tokens are those of their own text."""
    texts = documents()
    chunks = encoder.encode_chunks(texts, *(() if windows is None else (windows,)), prompt=prompt)
    parts = [texts[d][a:b] for d, a, b in zip(chunks.documents, chunks.starts, chunks.ends, strict=True)]
    assert set(chunks.documents.tolist()) == set(range(1, len(texts)))  # the empty one has none
    longest = 64 if windows is None else 20
    assert max(len(made.ids) for made in encoder.tokenizer.encode_batch([prompt + part for part in parts])) <= longest
    exact = fastbert.SentenceEncoder(encoder.folder, device="cpu", dtype="float64").encode(parts, prompt=prompt)
    near = encoder.encode(parts, prompt=prompt)
    assert_close_to_theirs(chunks.vectors, near, exact)
    for i in range(1, len(texts)):
        own = np.flatnonzero(chunks.documents == i)
        starts, ends = chunks.starts[own], chunks.ends[own]
        assert not texts[i][: starts[0]].strip() and not texts[i][ends[-1] :].strip()
        assert all(not texts[i][end:start].strip() for end, start in zip(ends[:-1], starts[1:], strict=True))


def test_sentence_transformers_has_these_vectors_for_chunks_cut_by_hand(encoder):
    theirs = pytest.importorskip("sentence_transformers").SentenceTransformer(str(encoder.folder), device="cpu")
    texts = documents()
    chunks = encoder.encode_chunks(texts, Windows(20, 8, at="sentences"))
    parts = [texts[i][a:b] for i, a, b in zip(chunks.documents, chunks.starts, chunks.ends, strict=True)]
    cosine = (chunks.vectors * theirs.encode(parts, normalize_embeddings=True)).sum(-1)
    assert len(parts) > 50 and cosine.min() >= 0.99999


def test_chunks_end_with_sentences(encoder):
    text = "The cat sat. A dog ran to the house! Who ran? We ran. " * 4
    chunks = encoder.encode_chunks(text, Windows(16, 0, at="sentences"))
    parts = [text[a:b] for a, b in zip(chunks.starts, chunks.ends, strict=True)]
    assert parts[:3] == [
        "The cat sat. A dog ran to the house! Who ran?",
        "We ran. The cat sat. A dog ran to the house!",
        "Who ran? We ran. The cat sat.",
    ]
    overlapping = encoder.encode_chunks(text, Windows(16, 5, at="sentences"))
    parts = [text[a:b] for a, b in zip(overlapping.starts, overlapping.ends, strict=True)]
    assert parts[:3] == [
        "The cat sat. A dog ran to the house! Who ran?",
        "Who ran? We ran. The cat sat.",
        "The cat sat. A dog ran to the house! Who ran?",
    ]


@pytest.mark.parametrize("overlap", (0, 5))
def test_late_chunks_are_means_of_the_whole_texts_tokens(encoder, theirs, overlap):
    model, tokenizer = theirs
    texts, windows = documents(), Windows(16, overlap, at="sentences")
    late, plain = (encoder.encode_chunks(texts, windows, late=each) for each in (True, False))
    assert all(np.array_equal(getattr(late, n), getattr(plain, n)) for n in ("documents", "starts", "ends"))

    def rows(m) -> np.ndarray:
        found = []
        for i, text in enumerate(texts):
            context = windows_of(tokenizer, text, length=64, overlap=16)
            owner, hidden = owners(context), {}
            for w, window in enumerate(context):
                with torch.no_grad():
                    states = m(**window.inputs).last_hidden_state[0]
                hidden |= {n: states[t] for t, n in enumerate(window.numbers.tolist()) if n >= 0 and owner[n] == w}
            spans = encoder.tokenizer.encode(text, add_special_tokens=False)
            spans = [s for part in (spans, *spans.overflowing) for s in part.offsets]
            spans = sorted(set(spans))
            for c in np.flatnonzero(late.documents == i):
                inside = [n for n, (a, b) in enumerate(spans) if late.starts[c] <= a and b <= late.ends[c]]
                found.append(torch.nn.functional.normalize(torch.stack([hidden[n] for n in inside]).mean(0), dim=0))
        return torch.stack(found).numpy()

    assert_close_to_theirs(late.vectors, rows(model), rows(in_float64(model)))


@pytest.mark.parametrize("call", ("encode", "encode_chunks"))
def test_a_bar_counts_tokens(encoder, capsys, call):
    """A text may take hours. Windows have the tokens of their overlap, and special ones, too."""
    texts = documents()
    given = {"windows": Windows(20, 8), "show_progress_bar": True}
    getattr(encoder, call)(texts, **given)
    total = len(cutter_of(encoder, given["windows"]).cut(texts).ids)
    assert f"{total / 1000:.2f}k tokens" in capsys.readouterr().err


@pytest.mark.parametrize("late", (False, True))
def test_a_stream_of_chunks(encoder, monkeypatch, late):
    """Some at a time, of texts that come one by one; all of them are those of a list."""
    monkeypatch.setattr("fastbert.sentences.documents.SECTION", 7)
    monkeypatch.setattr("fastbert.sentences.documents.CHUNK_TEXTS", 4)
    texts, windows, counted = documents(), Windows(16, 0, at="sentences"), list[int]()
    parts = list(encoder.encode_chunks_stream(iter(texts), windows, late=late, on_tokens=counted.append))
    whole = encoder.encode_chunks(texts, windows, late=late)
    assert len(parts) > 2 and max(map(len, parts)) <= (99 if late else 7) and sum(counted) > 500
    for name in ("documents", "starts", "ends", "vectors"):
        assert np.array_equal(np.concatenate([getattr(part, name) for part in parts]), getattr(whole, name))
    monkeypatch.undo()
    at_once = encoder.encode_chunks(texts, windows, late=late)
    np.testing.assert_allclose(whole.vectors, at_once.vectors, atol=1e-6)
    assert np.array_equal(whole.documents, at_once.documents) and np.array_equal(whole.starts, at_once.starts)


def test_what_a_limit_leaves_out_is_said(encoder):
    texts = documents()
    with pytest.warns(UserWarning, match=r"of 10 texts have more than limit=1 chunks; their last [\d,]+ tokens"):
        found = encoder.encode(texts, windows=Windows(limit=1))
    assert np.array_equal(found, encoder.encode(texts))


BAD = {
    "length of windows is 65; this model takes 64 tokens": (Windows(65), {}),
    "chunks of 64 tokens, 2 special tokens among them, may overlap by 0 to 61, not by 62": (Windows(overlap=62), {}),
    "chunks of 2 tokens, 2 special tokens among them, have no room for a text": (Windows(2), {}),
    "excludes a pool, several devices, a precision and windows": (Windows(), {"output_value": "token_embeddings"}),
    "chunks of 8 tokens, 2 special tokens and 6 of another text among them, have no room": (
        Windows(8, 0),
        {"prompt": "the old the old the old "},
    ),
}


@pytest.mark.parametrize("message", BAD)
def test_what_cannot_be_is_refused(encoder, message):
    windows, given = BAD[message]
    with pytest.raises(InputError, match=re.escape(message)):
        encoder.encode(documents(), windows=windows, **given)


def test_late_chunks_need_the_mean(tmp_path):
    folder = tiny.write_sentence_model(tmp_path)
    tiny.write_json(folder / "1_Pooling/config.json", {"word_embedding_dimension": 32, "pooling_mode_cls_token": True})
    encoder = fastbert.SentenceEncoder(folder, device="cpu")
    message = "late chunking takes the mean of a chunk's tokens, and this model pools by cls"
    with pytest.raises(InputError, match=re.escape(message)):
        encoder.encode_chunks("the cat", late=True)


@pytest.mark.parametrize("text", ("   \n ", "a" * 3000, "\u200d" * 500), ids=("spaces", "one word", "nothing to see"))
def test_odd_texts(encoder, text):
    for given in ({}, {"windows": Windows()}):
        assert np.isfinite(encoder.encode(text, **given)).all()
    for late in (False, True):
        chunks = encoder.encode_chunks(text, late=late)
        assert np.isfinite(chunks.vectors).all() and len(chunks) == len(chunks.starts) == len(chunks.vectors)


@pytest.mark.parametrize("late", (False, True))
def test_nothing_has_no_chunk(encoder, late):
    for texts in ([], [""], ["", "  "]):
        chunks = encoder.encode_chunks(texts, late=late)
        assert len(chunks) == 0 and chunks.vectors.shape == (0, encoder.dim)
    chunks = encoder.encode_chunks(["", "a dog ran", ""], late=late, batch_tokens=1)
    assert chunks.documents.tolist() == [1] and (chunks.starts[0], chunks.ends[0]) == (0, 9)
