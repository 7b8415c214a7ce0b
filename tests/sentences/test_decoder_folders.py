"""Folders as Qwen3-Embedding's and EmbeddingGemma's: their tokenizers, prompts, pooling and Dense layers, by
sentence-transformers.
"""

from __future__ import annotations

import functools
from pathlib import Path

import numpy as np
import pytest
import tiny
import torch
from checkout import ROOT
from precise import assert_as_theirs
from safetensors.torch import save_file
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

import fastbert
from fastbert.errors import ConfigError

# As the files of Qwen2's tokenizer have it.
QWEN_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEXTS = ["The capital of China is Beijing.", "naïve café", "a", "x = {'k': [1, 22, 333]}\n\n  y", "Grüße 你好 🙂 " * 3]
PROMPTS = {"query": "Instruct: Find it.\nQuery:", "document": ""}


def lines(count: int) -> list[str]:
    """Of this checkout's own texts: prose, code, tables."""
    paths = sorted([*(ROOT / "docs").rglob("*.md"), *(ROOT / "fastbert").rglob("*.py"), *(ROOT / "csrc").rglob("*.h")])
    found = [line for path in paths for line in path.read_text(encoding="utf-8").splitlines()]
    assert len(found) >= count
    return found[:: len(found) // count][:count]


@functools.cache
def qwen_tokenizer() -> Tokenizer:
    """Byte-level BPE whose texts end in the token that is padding, too."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    words = pre_tokenizers.Split(Regex(QWEN_WORDS), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([words, pre_tokenizers.ByteLevel(False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    special, alphabet = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"], pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=600, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(lines(400), trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A <|endoftext|>", pair="$A <|endoftext|> $B <|endoftext|>", special_tokens=[("<|endoftext|>", 0)]
    )
    return tokenizer


@functools.cache
def gemma_tokenizer() -> Tokenizer:
    """BPE with bytes for what it does not know, blanks as a letter, and a token at each end."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    special = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>"]  # transformers adds those that are not there
    trainer = trainers.BpeTrainer(
        vocab_size=700, special_tokens=[*special, *(f"<0x{i:02X}>" for i in range(256))], show_progress=False
    )
    tokenizer.train_from_iterator(lines(400), trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A <eos>", pair="<bos> $A <eos> <bos>:1 $B:1 <eos>:1", special_tokens=[("<bos>", 2), ("<eos>", 1)]
    )
    return tokenizer


def write(folder: Path, kind: str, side: str) -> Path:
    """A random model in a folder as its kind has it; padding on `side`."""
    tokenizer = qwen_tokenizer() if kind == "qwen3" else gemma_tokenizer()
    folder.mkdir(exist_ok=True)
    fields = {"vocab_size": tokenizer.get_vocab_size(), "pad_token_id": 0, "num_key_value_heads": 1}
    bidirectional = {"use_bidirectional_attention": True, "sliding_window": 9, "sliding_window_pattern": 2}
    tiny.write_model(folder, model_type=kind, **fields, **(bidirectional if kind == "gemma3_text" else {}))
    for name in ("vocab.txt", "tokenizer.json"):
        (folder / name).unlink()
    tokenizer.save(str(folder / "tokenizer.json"))
    qwen = {"tokenizer_class": "Qwen2Tokenizer", "pad_token": "<|endoftext|>", "eos_token": "<|im_end|>"}
    gemma = {"tokenizer_class": "GemmaTokenizerFast", "pad_token": "<pad>", "eos_token": "<eos>", "bos_token": "<bos>"}
    settings = {"padding_side": side, "model_max_length": 64, "clean_up_tokenization_spaces": False}
    tiny.write_json(folder / "tokenizer_config.json", {**(qwen if kind == "qwen3" else gemma), **settings})
    tiny.write_json(folder / "config_sentence_transformers.json", {"prompts": PROMPTS, "similarity_fn_name": "cosine"})
    dense = [] if kind == "qwen3" else ["Dense", "Dense"]
    tiny.write_modules(folder, "Pooling", *dense, "Normalize")
    mode = "pooling_mode_lasttoken" if kind == "qwen3" else "pooling_mode_mean_tokens"
    pooling = {"word_embedding_dimension": 32, mode: True, "include_prompt": True}
    tiny.write_json(folder / "1_Pooling/config.json", pooling)
    width = 32
    for i, out in enumerate((48, 32) if dense else (), 2):
        entries = {"in_features": width, "out_features": out, "bias": False}
        entries["activation_function"] = "torch.nn.modules.linear.Identity"
        tiny.write_json(folder / f"{i}_Dense/config.json", entries)
        noise = torch.randn(out, width, generator=torch.Generator().manual_seed(i))
        save_file({"linear.weight": noise * width**-0.5}, folder / f"{i}_Dense/model.safetensors")
        width = out
    return folder


@pytest.mark.parametrize("side", ("left", "right"))
@pytest.mark.parametrize("kind", ("qwen3", "gemma3_text"))
def test_vectors_are_sentence_transformers(kind, side, tmp_path):
    folder = write(tmp_path, kind, side)
    library = pytest.importorskip("sentence_transformers")
    ours = fastbert.SentenceEncoder(folder, device="cpu")
    theirs = library.SentenceTransformer(str(folder), device="cpu")
    assert ours.prompts == theirs.prompts
    vectors = {
        name: assert_as_theirs(ours, theirs, lambda model, name=name: getattr(model, name)(TEXTS))
        for name in ("encode", "encode_query", "encode_document")
    }
    assert np.array_equal(vectors["encode"], vectors["encode_document"])
    assert not np.allclose(vectors["encode"], vectors["encode_query"], atol=1e-3)
    accelerated = fastbert.accelerate(library.SentenceTransformer(str(folder), device="cpu"))
    assert_as_theirs(accelerated, theirs, lambda model: model.encode(TEXTS))
    found = fastbert.status(accelerated)
    assert found.packed and not found.others, found.why_not


@pytest.mark.parametrize("load", (fastbert.SentenceEncoder, fastbert.AutoModel.from_pretrained))
def test_float16_is_refused_where_hidden_states_leave_its_range(load, tmp_path):
    gemma, qwen = write(tmp_path / "gemma", "gemma3_text", "left"), write(tmp_path / "qwen", "qwen3", "left")
    for dtype in ("float16", torch.float16):
        with pytest.raises(ConfigError, match=r"float16 is too narrow for gemma3_text.* load it with dtype='bfloat16'"):
            load(gemma, dtype=dtype)
    fastbert.AutoModel.from_pretrained(gemma).half().save_pretrained(tmp_path / "gemma")
    with pytest.raises(ConfigError, match="float16 is too narrow"):
        load(gemma)
    assert load(gemma, dtype="bfloat16") is not None and load(qwen, dtype="float16") is not None


@pytest.mark.parametrize("count", (500, pytest.param(10_000, marks=pytest.mark.full)))
@pytest.mark.parametrize("kind", ("qwen3", "gemma3_text"))
def test_ids_are_transformers(kind, count, tmp_path):
    from transformers import AutoTokenizer

    folder = write(tmp_path, kind, "left")
    theirs, ours = AutoTokenizer.from_pretrained(folder), fastbert.SentenceEncoder(folder, device="cpu")
    texts = [*lines(count), 'unk="<unk>", mask="<mask>", <pad> <|endoftext|>']
    found, limit = ours.tokenizer.encode_batch(texts), ours.max_seq_length
    expected = theirs(texts, truncation=True, max_length=limit)["input_ids"]
    assert [one.ids for one in found] == expected
