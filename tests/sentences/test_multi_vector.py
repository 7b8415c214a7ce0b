"""MultiVectorEncoder against sentence-transformers', of its folders and of older ones; tiny random models."""

from __future__ import annotations

import itertools
import json
import random
import shutil
import string
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from full import left_to_full
from precise import assert_as_theirs, assert_close_to_theirs, in_float64
from safetensors.torch import save_file

import fastbert
from fastbert import Windows
from fastbert.errors import CheckpointError, ConfigError, InputError
from fastbert.sentences.multi_vector.folder import QueryExpansion, TokenPooling
from fastbert.sentences.multi_vector.vectors import TokenVectors, similarity, similarity_pairwise

library = pytest.importorskip("sentence_transformers", minversion="6")
from sentence_transformers.base.modules import Dense, Normalize, Transformer  # noqa: E402
from sentence_transformers.multi_vector_encoder import modules as theirs_modules  # noqa: E402

TEXTS = ["the cat sat on the mat.", "a dog ran", "who sat in the old house, we?" * 2, "", "Zebra , CATS"]
EXPANSIONS = {
    "none": None,
    "fixed": {"strategy": "fixed", "length": 12},
    "fixed, attended to": {"strategy": "fixed", "length": 12, "attend": True},
    "min": {"strategy": "min", "length": 9},
    "min, attended to": {"strategy": "min", "length": 9, "attend": True, "token": "[UNK]"},
}


def texts(count: int) -> list[str]:
    draw, words = random.Random(3), tiny.WORDS.split()
    return [" ".join(draw.choices(words, k=draw.choice((0, 1, 3, 8, 8, 20, 70)))) for _ in range(count)]


def write(root: Path, *, model_type: str = "bert", expansion=None, skiplist=(), pooled=0.0, **options: Any) -> Path:
    """A folder of sentence-transformers' own making."""
    plain = tiny.write_model(root / "plain", model_type=model_type, **options.pop("fields", {}))
    if model_type == "modernbert":  # whose class in transformers takes no tokens for granted
        special = {f"{name}_token": f"[{name.upper()}]" for name in ("pad", "unk", "cls", "sep", "mask")}
        tiny.write_json(plain / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", **special})
    first = Transformer(str(plain), query_expansion=expansion, **options.pop("transformer", {}))
    torch.manual_seed(5)
    project = Dense(32, 16, False, torch.nn.Identity(), module_input_name="token_embeddings")
    mask = theirs_modules.MultiVectorMask(skiplist_words=list(skiplist), **options.pop("mask", {}))
    modules = [first, project, mask, Normalize(module_input_name="token_embeddings")]
    if pooled:
        modules.append(theirs_modules.HierarchicalTokenPooling(pooled))
    library.MultiVectorEncoder(modules=modules, device="cpu", **options).save_pretrained(str(root / "saved"))
    return root / "saved"


def both(folder: Path, **options: Any) -> tuple[Any, Any]:
    return fastbert.MultiVectorEncoder(folder, device="cpu", **options), library.MultiVectorEncoder(
        str(folder), device="cpu", **options
    )


GRID = list(itertools.product(EXPANSIONS, (False, True), (False, True), (0.0, 2.0), (None, 5)))


def is_one_of_all(case: tuple) -> bool:
    """Two of each expansion: the settings of one are all the other's opposites."""
    number = sum(2**i for i, value in enumerate(case[1:]) if value)
    return number in (3 * list(EXPANSIONS).index(case[0]), 15 - 3 * list(EXPANSIONS).index(case[0]))


@left_to_full(lambda p: p["count"] == 1000 or not is_one_of_all(p["case"]))
@pytest.mark.parametrize("count", (60, 1000))
@pytest.mark.parametrize("case", GRID, ids=str)
def test_every_setting(case, count, tmp_path):
    """Of `count` texts, the vectors and the scores. Of theirs, the first numbers are all that a truncation leaves."""
    name, skips, prompts, pooled, width = case
    folder = write(
        tmp_path,
        expansion=EXPANSIONS[name],
        skiplist=list(".,!?") if skips else (),
        pooled=pooled,
        prompts={"query": "who ", "document": "the cat "} if prompts else None,
    )
    ours, theirs = both(folder)
    exact, queries, documents = in_float64(theirs), texts(40), texts(count)
    for task, given in (("query", queries), ("document", documents)):
        found = getattr(ours, f"encode_{task}")(given, truncate_dim=width)
        near, wanted = (
            [rows[:, :width] for rows in getattr(model, f"encode_{task}")(given)] for model in (theirs, exact)
        )
        if pooled and task == "document":  # a tie of two clusters may go either way
            same = [i for i, (a, b) in enumerate(zip(found, wanted, strict=True)) if _is_alike(a, b)]
            assert len(same) >= len(given) - max(2, len(given) // 50)
            found, near, wanted = ([rows[i] for i in same] for rows in (found, near, wanted))
        assert_close_to_theirs(found, near, wanted)
    vectors = [model.encode_query(queries) for model in (ours, theirs, exact)]
    stored = [model.encode_document(documents[:50]) for model in (ours, theirs, exact)]
    if not pooled:
        for each in ("similarity", "similarity_pairwise"):
            few = slice(None) if each == "similarity" else slice(len(queries))
            scores = [
                getattr(model, each)(a, b[few])
                for model, a, b in zip((ours, theirs, theirs), vectors, stored, strict=True)
            ]
            torch.testing.assert_close(scores[0], scores[1], rtol=1e-5, atol=1e-4)


def _is_alike(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and bool((a - b).abs().max() < 1e-3) if len(a) else a.shape == b.shape


@left_to_full(lambda p: p["model_type"] not in ("modernbert", "roberta", "mpnet"))
@pytest.mark.parametrize("model_type", ("modernbert", "roberta", "mpnet", "distilbert", "electra", "nomic_bert", "gte"))
def test_families(model_type, tmp_path):
    if model_type in ("nomic_bert", "gte"):
        pytest.importorskip("transformers", minversion="5.23")
    fields = {"max_position_embeddings": 80}
    folder = write(tmp_path, model_type=model_type, expansion=EXPANSIONS["fixed"], fields=fields)
    ours, theirs = both(folder)
    theirs[0].max_seq_length = ours.max_seq_length = 60
    for task in ("query", "document"):
        assert_as_theirs(ours, theirs, lambda model, task=task: getattr(model, f"encode_{task}")(TEXTS))
    assert fastbert.status(ours.model).packed >= 2


def test_lengths_options_and_one_text(tmp_path):
    folder = write(tmp_path, expansion=EXPANSIONS["fixed"], skiplist=".", transformer={"document_length": 7})
    ours, theirs = both(folder)
    for options in (
        {},
        {"batch_size": 2},
        {"prompt": "a "},
        {"normalize_embeddings": True},
        {"convert_to_numpy": True},
    ):
        for name in ("encode", "encode_query", "encode_document"):
            assert_as_theirs(ours, theirs, lambda model, n=name, o=options: getattr(model, n)(TEXTS, **o))
            assert_as_theirs(ours, theirs, lambda model, n=name, o=options: getattr(model, n)(TEXTS[0], **o))
    assert ours.encode_document(TEXTS)[2].shape == (7, 16) and ours.encode_query(TEXTS)[2].shape == (12, 16)
    assert ours.dim == ours.get_embedding_dimension() == theirs.get_embedding_dimension() == 16
    assert ours.encode([]) == [] and len(ours.encode([], output="packed")) == 0
    longer = fastbert.MultiVectorEncoder(folder, query_expansion=None, query_length=6, document_length=30)
    assert [len(one) for one in longer.encode_query(TEXTS)] == [6, 5, 6, 2, 6]
    assert len(longer.encode_document(TEXTS[2])) == 20
    chosen = QueryExpansion("min", 8)
    assert [len(one) for one in fastbert.MultiVectorEncoder(folder, query_expansion=chosen).encode_query(TEXTS)] == [
        *(9, 8, 20, 8, 10)
    ]


def test_skiplists_of_queries_and_kept_tokens(tmp_path):
    cat, the = tiny.VOCAB.index("cat"), tiny.VOCAB.index("the")
    for name, mask in (
        ("both", {"skiplist_tasks": ["query", "document"]}),
        ("kept", {"keep_only_token_ids": [cat, the]}),
    ):
        ours, theirs = both(write(tmp_path / name, skiplist=[*".,", "no-such-word"], mask=mask))
        for task in ("query", "document"):
            assert_as_theirs(ours, theirs, lambda model, task=task: getattr(model, f"encode_{task}")(TEXTS))


@pytest.mark.parametrize("residual", (False, True))
def test_dense_layers_with_and_without_a_residual(residual, tmp_path):
    """As mxbai-edge-colbert has them."""
    first, name = Transformer(str(tiny.write_model(tmp_path / "plain"))), {"module_input_name": "token_embeddings"}
    dense = [Dense(32, width, width != 8, torch.nn.GELU(), use_residual=residual, **name) for width in (32,)]
    dense.append(Dense(32, 8, False, torch.nn.Identity(), use_residual=residual, **name))
    modules = [first, *dense, theirs_modules.MultiVectorMask(), Normalize(**name)]
    library.MultiVectorEncoder(modules=modules, device="cpu").save_pretrained(str(tmp_path / "saved"))
    ours, theirs = both(tmp_path / "saved")
    assert_as_theirs(ours, theirs, lambda model: model.encode_document(TEXTS))
    ours.save_pretrained(tmp_path / "again")
    again, read = both(tmp_path / "again")
    assert all(map(torch.equal, again.encode(TEXTS), ours.encode(TEXTS)))
    assert_as_theirs(again, read, lambda model: model.encode_document(TEXTS))


def test_saved_folders_are_both_libraries(tmp_path):
    folder = write(
        tmp_path,
        expansion=EXPANSIONS["min, attended to"],
        skiplist=".,",
        pooled=1.5,
        prompts={"query": "who ", "document": "the "},
        similarity_fn_name="meanmaxsim",
        transformer={"query_length": 20, "document_length": 15},
    )
    ours, theirs = both(folder)
    ours.save_pretrained(tmp_path / "again")
    again, read = both(tmp_path / "again")
    for name in ("encode_query", "encode_document"):
        assert all(map(torch.equal, getattr(again, name)(TEXTS), getattr(ours, name)(TEXTS)))
        for a, b in zip(getattr(read, name)(TEXTS), getattr(theirs, name)(TEXTS), strict=True):
            assert torch.equal(a, b)
    assert again.similarity_fn_name == read.similarity_fn_name == "meanmaxsim" and again.prompts == ours.prompts


# --------------------------------------------------------------------------------------------------------------------
# Folders of PyLate and of Stanford's ColBERT


def write_pylate(root: Path, **entries: Any) -> Path:
    """As PyLate up to 3 writes them: a Transformer and a Dense, and all else in one file."""
    folder = write(root)
    shutil.rmtree(folder / "2_MultiVectorMask")
    modules = json.loads((folder / "modules.json").read_text())[:2]
    modules[0]["type"] = "sentence_transformers.models.Transformer"
    modules[1]["type"] = "pylate.models.Dense.Dense"
    tiny.write_json(folder / "modules.json", modules)
    dense = json.loads((folder / "1_Dense/config.json").read_text())
    kept = {name: dense[name] for name in ("in_features", "out_features", "bias", "activation_function")}
    tiny.write_json(folder / "1_Dense/config.json", kept)
    tiny.write_json(folder / "sentence_bert_config.json", {"max_seq_length": 30, "do_lower_case": False})
    own = {"model_type": "ColBERT", "prompts": {}, "similarity_fn_name": "MaxSim", **entries}
    tiny.write_json(folder / "config_sentence_transformers.json", own)
    return folder


PYLATE = {
    "as it is": {"query_prefix": "[unused0] ", "document_prefix": "cat ", "query_length": 11, "document_length": 9},
    "attended to": {"query_length": 14, "attend_to_expansion_tokens": True, "skiplist_words": [".", "the"]},
    "not expanded": {"do_query_expansion": False, "document_length": 20, "prompts": {"query": "we "}},
    "of nothing": {},
}


@pytest.mark.parametrize("name", PYLATE)
def test_folders_of_pylate(name, tmp_path):
    ours, theirs = both(write_pylate(tmp_path, **PYLATE[name]))
    given = [*TEXTS, f"the cat{string.punctuation}"]
    for task in ("query", "document"):
        assert_as_theirs(ours, theirs, lambda model, task=task: getattr(model, f"encode_{task}")(given))
    ours.save_pretrained(tmp_path / "again")
    again = fastbert.MultiVectorEncoder(tmp_path / "again")
    for task in ("query", "document"):
        found, expected = (getattr(model, f"encode_{task}")(given) for model in (again, ours))
        assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize(
    "metadata",
    (
        None,
        {"query_maxlen": 16, "doc_maxlen": 18, "mask_punctuation": True, "attend_to_mask_tokens": False},
        {"query_maxlen": 16, "mask_punctuation": False, "attend_to_mask_tokens": True, "query_token_id": "cat"},
    ),
    ids=("absent", "as published", "other"),
)
def test_folders_of_stanford(metadata, tmp_path, recwarn):
    ours, theirs = both(tiny.write_stanford(tmp_path, metadata))
    assert not [one for one in recwarn if "not used" in str(one.message)]  # of the projection, which is
    with pytest.raises(ConfigError, match=r"fastbert\.MultiVectorEncoder loads it"):
        fastbert.SentenceEncoder(tmp_path)
    for task in ("query", "document"):
        assert_as_theirs(ours, theirs, lambda model, task=task: getattr(model, f"encode_{task}")(TEXTS))
    ids = ours.tokenize(["cat"], ours.prompts["document"], "document").ids.tolist()
    assert ids[1] == ours.tokenizer.token_to_id("[unused1]")


# --------------------------------------------------------------------------------------------------------------------
# What is ours alone


@pytest.fixture
def encoder(tmp_path) -> Any:
    return fastbert.MultiVectorEncoder(write(tmp_path, expansion=EXPANSIONS["fixed"], skiplist=".,"), device="cpu")


def test_packed_vectors(encoder):
    found, listed = encoder.encode_document(TEXTS, output="packed"), encoder.encode_document(TEXTS)
    assert len(found) == 5 and all(map(torch.equal, found, listed))
    assert found.cu_seqlens.tolist() == [0, *itertools.accumulate(map(len, listed))]
    chosen = found.select([4, 0, 4])
    assert all(map(torch.equal, chosen, (listed[4], listed[0], listed[4])))
    joined = fastbert.TokenVectors.joined([found, chosen])
    assert len(joined) == 8 and torch.equal(joined[5], listed[4])
    rows, real = found.padded()
    assert torch.equal(rows[real], found.vectors) and real.sum(1).tolist() == list(map(len, listed))
    integers = encoder.encode_document(TEXTS, output="packed", precision="int8")
    assert integers.vectors.dtype is torch.int8 and (integers.vectors.abs().amax(1) == 127).all()
    assert (integers[0] - listed[0]).abs().max() < 1 / 127 / 2
    queries = encoder.encode_query(TEXTS)
    exact = encoder.similarity(queries, found)
    torch.testing.assert_close(encoder.similarity(queries, integers), exact, rtol=0.01, atol=0.05)
    for form in (listed, rows, [row.numpy() for row in listed]):
        torch.testing.assert_close(encoder.similarity(queries, form), exact)


def test_ranking(encoder):
    ranked = encoder.rank(TEXTS[0], TEXTS, top_k=3, return_documents=True)
    assert ranked[0]["text"] == TEXTS[0] and [row["score"] for row in ranked] == sorted(
        (row["score"] for row in ranked), reverse=True
    )
    stored = encoder.encode_document(TEXTS, output="packed")
    assert [row["corpus_id"] for row in encoder.rank(TEXTS[0], stored)][:3] == [row["corpus_id"] for row in ranked]


def test_windows_have_each_token_once(encoder):
    """A text that fits has the vectors that it has by itself."""
    long = " ".join(texts(40))
    windows = Windows(length=20, overlap=4)
    short, found = encoder.encode_document([TEXTS[0], long], windows=windows)
    assert torch.equal(short, encoder.encode_document(TEXTS[0]))
    plain = encoder.tokenizer
    plain.no_truncation()
    ids = torch.tensor(plain.encode(long, add_special_tokens=False).ids)
    special = 2 * -(-(len(ids) - 4) // (18 - 4))  # of each window
    assert len(found) == (~torch.isin(ids, encoder._skipped)).sum() + special
    with pytest.raises(InputError, match="windows are for documents"):
        encoder.encode_query(TEXTS, windows=windows)


def test_token_pooling_of_a_call(encoder):
    folder = encoder.folder
    theirs = library.MultiVectorEncoder(str(folder), device="cpu")
    pooling = theirs_modules.HierarchicalTokenPooling(1.7, num_protected_tokens=2)
    expected = theirs.encode_document(TEXTS, token_pooling=pooling)
    found = encoder.encode_document(TEXTS, token_pooling=TokenPooling(1.7, 2))
    for ours, near in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, near, rtol=1e-4, atol=1e-5)
    assert all(
        map(torch.equal, encoder.encode_query(TEXTS, token_pooling=TokenPooling(2)), encoder.encode_query(TEXTS))
    )


def test_a_pool_of_processes_gives_the_same(encoder):
    with encoder.start_multi_process_pool(["cpu"]) as pool:
        found = encoder.encode_query(TEXTS, pool=pool, chunk_size=2)
    assert all(map(torch.equal, found, encoder.encode_query(TEXTS)))


@pytest.mark.parametrize("dtype", ("bfloat16", "int8"))
def test_other_dtypes(encoder, dtype):
    found = fastbert.MultiVectorEncoder(encoder.folder, dtype=dtype, device="cpu").encode_query(TEXTS)
    for ours, exact in zip(found, encoder.encode_query(TEXTS), strict=True):
        assert ours.dtype is torch.float32 and torch.nn.functional.cosine_similarity(ours, exact).min() > 0.97


# --------------------------------------------------------------------------------------------------------------------
# Bad input


def test_vectors_in_a_file(encoder, tmp_path):
    found = encoder.encode_document(TEXTS, output="packed")
    for one in (found, replace(found, vectors=found.vectors.bfloat16()), found.in_int8()):
        one.save(tmp_path / "v.safetensors")
        read = TokenVectors.load(tmp_path / "v.safetensors")
        assert torch.equal(read.vectors, one.vectors) and torch.equal(read.cu_seqlens, one.cu_seqlens)
        assert (read.scales is None) == (one.scales is None) and all(map(torch.equal, read, one))
        assert torch.equal(encoder.similarity(found, read), encoder.similarity(found, one))
    assert all(map(torch.equal, found.part(1, 4), list(found)[1:4]))
    with pytest.raises(InputError, match=r"v\.npz: the name must end in \.safetensors"):
        found.save(tmp_path / "v.npz")
    (tmp_path / "bad.safetensors").write_bytes(b"nothing")
    for path in (tmp_path / "bad.safetensors", tmp_path / "absent.safetensors"):
        with pytest.raises(InputError, match=path.name):
            TokenVectors.load(path)
    save_file({"vectors": torch.zeros(2, 3)}, tmp_path / "other.safetensors")
    with pytest.raises(InputError, match="holds vectors, and no vectors that TokenVectors"):
        TokenVectors.load(tmp_path / "other.safetensors")


@pytest.mark.parametrize("prompts", (None, {"query": "who ", "document": "the cat "}), ids=("plain", "prompts"))
def test_tokens_that_matched(prompts, tmp_path):
    folder = write(tmp_path, expansion=EXPANSIONS["min"], skiplist=".,", prompts=prompts)
    encoder = fastbert.MultiVectorEncoder(folder, device="cpu")
    query, document = "cat dog", "A dog. sat on the old Mat"
    found = encoder.matches(query, document)
    assert {match["query"] for match in found} <= {"cat", "dog"}
    assert [match["score"] for match in found] == sorted((match["score"] for match in found), reverse=True)
    products = encoder.encode_query(query) @ encoder.encode_document(document).T
    for match in found:
        assert document[match["start"] : match["end"]].lower() == match["document"] and match["document"] not in ".,"
        assert match["score"] in products.max(-1).values.tolist()
    assert found and encoder.matches(query, "") == [] and encoder.matches("", document) == []
    with pytest.raises(InputError, match="none of them has matched alone"):
        fastbert.MultiVectorEncoder(write(tmp_path / "pooled", pooled=2.0)).matches(query, document)


def test_vectors_that_are_longer_than_the_models(encoder):
    query, found = encoder.encode_query(TEXTS), encoder.encode_document(TEXTS, output="packed")
    longer = replace(found, vectors=found.vectors * torch.where(torch.arange(len(found.vectors)) == 3, 2, 1)[:, None])
    for documents in (longer, longer.in_int8(), list(longer)):
        with pytest.raises(InputError, match="documents' token 3 has length 2; this model's have length 1"):
            encoder.similarity(query, documents)
    with pytest.raises(InputError, match="has length 2"):
        encoder.similarity_pairwise(query, longer)
    shorter = encoder.encode_document(TEXTS, truncate_dim=5, output="packed")
    assert encoder.similarity([one[:, :5] for one in query], shorter).isfinite().all()


def change(folder: Path, name: str, **entries: Any) -> None:
    path = folder / name
    tiny.write_json(path, {**json.loads(path.read_text()), **entries})


BAD = {
    "the length of query_expansion is 99; this model allows 64 tokens": (
        "sentence_bert_config.json",
        {"query_expansion": {"strategy": "fixed", "length": 99}},
    ),
    "query_length is 5, less than the 12 tokens": ("sentence_bert_config.json", {"query_length": 5}),
    "strategy of query_expansion is 'most'": (
        "sentence_bert_config.json",
        {"query_expansion": {"strategy": "most", "length": 9}},
    ),
    "query_expansion is {'size': 3}": ("sentence_bert_config.json", {"query_expansion": {"size": 3}}),
    "the token of query_expansion is 'no such'": (
        "sentence_bert_config.json",
        {"query_expansion": {"strategy": "min", "length": 9, "token": "no such"}},
    ),
    "skiplist_tasks is 'texts'": ("2_MultiVectorMask/config.json", {"skiplist_tasks": "texts"}),
    "keep_only_token_ids is ": ("2_MultiVectorMask/config.json", {"keep_only_token_ids": ["a"]}),
    "unknown entry 'marks'": ("2_MultiVectorMask/config.json", {"marks": 1}),
    "module_input_name 'sentence_embedding'; fastbert takes 'token_embeddings'": (
        "1_Dense/config.json",
        {"module_input_name": "sentence_embedding"},
    ),
    "in_features 31; fastbert takes 32": ("1_Dense/config.json", {"in_features": 31}),
    "padding_side 'right', behind a query": ("tokenizer_config.json", {"padding_side": "left"}),
    "pool_factor is 0.5": ("4_HierarchicalTokenPooling/config.json", {"pool_factor": 0.5}),
}


@pytest.mark.parametrize("message", BAD)
def test_settings_that_fastbert_does_not_have(message, tmp_path):
    folder = write(tmp_path, expansion=EXPANSIONS["fixed"], pooled=2.0)
    name, entries = BAD[message]
    change(folder, name, **entries)
    with pytest.raises((ConfigError, CheckpointError), match=message):
        fastbert.MultiVectorEncoder(folder)


@pytest.mark.parametrize("order", ((0, 1, 3), (0, 1, 2, 3, 4, 3), (0, 4, 1, 2, 3), (0, 1, 2, 2, 3)))
def test_modules_in_another_order(order, tmp_path):
    folder = write(tmp_path, pooled=2.0)
    modules = json.loads((folder / "modules.json").read_text())
    tiny.write_json(folder / "modules.json", [modules[i] for i in order])
    if order == (0, 1, 3):  # nothing is skipped then, as in sentence-transformers
        ours, theirs = both(folder)
        assert_as_theirs(ours, theirs, lambda model: model.encode_query(TEXTS))
        return
    with pytest.raises(ConfigError, match=r"modules\.json has Transformer, "):
        fastbert.MultiVectorEncoder(folder)


def test_folders_of_other_models(tmp_path):
    plain = tiny.write_model(tmp_path / "plain")
    with pytest.raises(ConfigError, match="it is no multi-vector encoder, whose projection would be random"):
        fastbert.MultiVectorEncoder(plain)
    with pytest.raises(ConfigError, match="Pooling, Normalize; a multi-vector encoder has"):
        fastbert.MultiVectorEncoder(tiny.write_sentence_model(tmp_path / "sentences"))
    folder = write(tmp_path, expansion=EXPANSIONS["fixed"])
    for cls in (fastbert.SentenceEncoder, fastbert.Reranker):
        with pytest.raises(ConfigError, match="MultiVectorEncoder"):
            cls(folder)
    with pytest.raises(ConfigError, match=r"a vector for each token: fastbert\.MultiVectorEncoder loads it"):
        fastbert.SentenceEncoder(write(tmp_path / "plain one"))
    with pytest.raises(ConfigError, match="query_expansion with attend=False: esm clears"):
        fastbert.MultiVectorEncoder(write(tmp_path / "esm", model_type="esm"), query_expansion=EXPANSIONS["fixed"])


def test_calls_that_do_not_fit(encoder):
    for options, message in (
        ({"precision": "int8"}, "it goes with output='packed'"),
        ({"precision": "int4", "output": "packed"}, "precision 'int4'"),
        ({"output": "array"}, "output 'array'"),
        ({"output": "packed", "convert_to_numpy": True}, "exclude each other"),
        ({"output_value": "sentence_embedding"}, "unknown output_value"),
        ({"task": "title"}, "unknown task 'title'"),
        ({"windows": Windows(pool="mean")}, "pool of windows is 'mean'"),
    ):
        with pytest.raises(InputError, match=message):
            encoder.encode(TEXTS, **options)
    with pytest.raises(TypeError, match=r"texts\[1\] is a int, not a string"):
        encoder.encode(["a", 3])
    with pytest.raises(InputError, match="top_k is 0"):
        encoder.rank("a", TEXTS, top_k=0)
    with pytest.raises(ConfigError, match="unknown similarity 'cosine'; there are maxsim, meanmaxsim"):
        encoder.similarity_fn_name = "cosine"


def test_vectors_that_do_not_fit():
    a, b = torch.randn(3, 8), torch.randn(4, 8)
    with pytest.raises(InputError, match="the vectors of queries have 8 numbers, those of documents 7"):
        similarity([a], [b[:, :7]])
    with pytest.raises(InputError, match="there are 1 queries and 2 documents"):
        similarity_pairwise([a], [a, b])
    with pytest.raises(InputError, match=r"of several shapes: \(7,\), \(8,\)"):
        similarity([a, b[:, :7]], [a])
    with pytest.raises(InputError, match=r"have shape \(1, 1, 3, 8\)"):
        similarity(a[None, None], [a])
    assert similarity([], [a]).shape == (0, 1) and similarity([a], []).shape == (1, 0)
    assert similarity([a[:0]], [a]).tolist() == [[0.0]] and similarity([a], [a[:0]]).item() == -1e9
