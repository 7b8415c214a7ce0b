"""What sentence-transformers' folders say beside modules and weights: as sentence-transformers has it, or one error."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest
import tiny
from precise import assert_as_theirs
from tokenizers import Tokenizer

import fastbert
from fastbert.errors import ConfigError

TEXTS = ["the cat sat on the mat.", "who sat in the old house and ran to the new house, we? " * 8, "a Dog RAN", ""]
PLAIN = {"embedding_dimension": 32, "pooling_mode": "mean"}


@pytest.fixture
def folder(tmp_path):
    tiny.write_modules(tiny.write_model(tmp_path), "Pooling")
    tiny.write_json(tmp_path / "1_Pooling/config.json", PLAIN)
    return tmp_path


def both(folder, **options):
    theirs = pytest.importorskip("sentence_transformers").SentenceTransformer(str(folder), device="cpu", **options)
    return fastbert.SentenceEncoder(folder, device="cpu", **options), theirs


def same(ours, theirs, call="encode", **options):
    return assert_as_theirs(ours, theirs, lambda model: getattr(model, call)(TEXTS, **options))


def test_lengths_of_queries_and_documents(folder, tmp_path):
    tiny.write_json(
        folder / "sentence_bert_config.json", {"max_seq_length": 40, "query_length": 7, "document_length": 20}
    )
    ours, theirs = both(folder)
    vectors = [same(ours, theirs, call) for call in ("encode", "encode_query", "encode_document")]
    vectors.append(same(ours, theirs, task="query"))
    assert np.array_equal(vectors[1], vectors[3])
    assert all(not np.allclose(vectors[a][1], vectors[b][1]) for a, b in ((0, 1), (0, 2), (1, 2)))
    as_theirs = ours.as_sentence_transformer()
    assert np.array_equal(as_theirs.encode_query(TEXTS), vectors[1])
    assert as_theirs.preprocess(TEXTS, task="query")["input_ids"].shape[1] == 7
    ours.save_pretrained(tmp_path / "saved")
    assert np.array_equal(fastbert.SentenceEncoder(tmp_path / "saved", device="cpu").encode_query(TEXTS), vectors[1])
    with pytest.raises(fastbert.InputError, match="unknown task 'passage'; there are query and document"):
        ours.encode(TEXTS, task="passage")
    tiny.write_json(folder / "sentence_bert_config.json", {"query_length": 65})
    with pytest.raises(ConfigError, match="query_length is 65; this model allows 3 to 64"):
        fastbert.SentenceEncoder(folder, device="cpu")


@pytest.mark.parametrize("where", ["tokenizer_config.json", "tokenizer.json", "sentence_bert_config.json"])
def test_the_side_at_which_texts_are_cut(folder, where):
    tiny.write_json(folder / "sentence_bert_config.json", {"max_seq_length": 12})
    right = fastbert.SentenceEncoder(folder, device="cpu").encode(TEXTS)
    if where == "tokenizer.json":
        tokenizer = Tokenizer.from_file(str(folder / where))
        tokenizer.enable_truncation(30, direction="left")
        tokenizer.save(str(folder / where))
    else:
        entries = json.loads((folder / where).read_text())
        side = {"truncation_side": "left"}
        tiny.write_json(folder / where, {**entries, **(side if where[0] == "t" else {"processor_kwargs": side})})
    left = same(*both(folder))
    assert not np.allclose(left[1], right[1]) and np.array_equal(left[0], right[0])
    other = fastbert.SentenceEncoder(folder, device="cpu", processor_kwargs={"truncation_side": "right"})
    assert np.array_equal(other.encode(TEXTS), right)


@pytest.mark.parametrize("kind", ["BertTokenizer", "PreTrainedTokenizerFast"])
@pytest.mark.parametrize(
    "entry", [{"do_lower_case": False}, {"strip_accents": False}, {"tokenize_chinese_chars": False}]
)
def test_a_tokenizer_config_that_contradicts(folder, kind, entry):
    """transformers makes a BERT tokenizer's normalizer of it, and that of a tokenizer without a class not."""
    tokens = {"tokenizer_class": kind, "cls_token": "[CLS]", "sep_token": "[SEP]", "pad_token": "[PAD]"}
    tiny.write_json(folder / "tokenizer_config.json", {**tokens, "unk_token": "[UNK]", "mask_token": "[MASK]", **entry})
    ours, theirs = both(folder)
    for text in ("Zebra CATS é 自然 cat", "the cat"):
        assert ours.tokenize([text]).ids.tolist() == theirs.tokenizer(text)["input_ids"]


@pytest.mark.parametrize("lower", [True, False])
def test_case_as_the_caller_says(folder, lower):
    """BERT's tokenizer that lowers takes accents off, too."""
    tiny.write_tokenizer(folder, lowercase=not lower)
    ours, theirs = both(folder, processor_kwargs={"do_lower_case": lower})
    for text in ("Zebra CATS é", "the Cat"):
        assert ours.tokenize([text]).ids.tolist() == theirs.tokenizer(text)["input_ids"]


def test_what_is_handed_on(folder):
    given = {
        "model_args": {"torch_dtype": "bfloat16", "trust_remote_code": True},
        "tokenizer_args": {"model_max_length": 9},
    }
    tiny.write_json(folder / "sentence_bert_config.json", {"do_lower_case": False, "unpad_inputs": True, **given})
    ours, theirs = both(folder)
    assert str(ours.dtype) == str(theirs.dtype) == "torch.bfloat16"
    assert ours.max_seq_length == theirs.max_seq_length == 9
    assert str(fastbert.SentenceEncoder(folder, device="cpu", dtype="float32").dtype) == "torch.float32"


REFUSED = {
    "query_expansion is {": ("sentence_bert_config.json", {"query_expansion": {"strategy": "min", "length": 9}}),
    "processing_kwargs is {": ("sentence_bert_config.json", {"processing_kwargs": {"text": {"max_length": 9}}}),
    "modality_config is {": ("sentence_bert_config.json", {"modality_config": {"message": {}}}),
    "tokenizer_name_or_path is 'x'": ("sentence_bert_config.json", {"tokenizer_name_or_path": "x"}),
    "unknown entry 'max_len'": ("sentence_bert_config.json", {"max_len": 5}),
    "model_kwargs has 'default_task'": ("sentence_bert_config.json", {"model_kwargs": {"default_task": 1}}),
    "processor_kwargs has 'split'": ("sentence_bert_config.json", {"tokenizer_args": {"split": 1}}),
    "unknown entry 'pooling_layer'": ("1_Pooling/config.json", {**PLAIN, "pooling_layer": 3}),
    "embedding_dimension is 33; the model's is 32": ("1_Pooling/config.json", {**PLAIN, "embedding_dimension": 33}),
    "default_prompt_name is 'b'; this model has: query, document": (
        "config_sentence_transformers.json",
        {"default_prompt_name": "b"},
    ),
    "unknown similarity 'maxsim'": ("config_sentence_transformers.json", {"similarity_fn_name": "maxsim"}),
    "adapter of PEFT": ("adapter_config.json", {}),
    "names 'custom_st.Transformer': code that is not": (
        "modules.json",
        [{"idx": 0, "name": "0", "path": "", "type": "custom_st.Transformer"}],
    ),
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_is_refused(folder, message):
    name, entries = REFUSED[message]
    tiny.write_json(folder / name, entries)
    with pytest.raises(ConfigError, match=re.escape(message)):
        fastbert.SentenceEncoder(folder, device="cpu")


@pytest.mark.parametrize(
    "kind",
    [
        "Router",
        "Asym",
        "StaticEmbedding",
        "WordEmbeddings",
        "BoW",
        "CLIPModel",
        "WordWeights",
        "CNN",
        "LSTM",
        "WeightedLayerPooling",
        "LayerNorm",
        "MultiVectorMask",
    ],
)
def test_modules_that_fastbert_does_not_have(folder, kind):
    first = kind in ("Router", "Asym", "StaticEmbedding", "WordEmbeddings", "BoW", "CLIPModel")
    entries = json.loads((folder / "modules.json").read_text())
    new = {"idx": 9, "name": "9", "path": "" if first else "9_It", "type": f"sentence_transformers.models.{kind}"}
    behind = [*entries, new] if kind in ("LayerNorm", "MultiVectorMask") else [entries[0], new, entries[1]]
    tiny.write_json(folder / "modules.json", [new, entries[1]] if first else behind)
    with pytest.raises(ConfigError, match=kind):
        fastbert.SentenceEncoder(folder, device="cpu")
