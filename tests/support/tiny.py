"""Tiny random models in folders, with a tokenizer, for tests of what reads folders."""

from __future__ import annotations

import json
import string
from pathlib import Path

import torch
from family_configs import few_heads
from safetensors.torch import load_file, save_file
from seeds import manual_seed

from fastbert.config import EncoderConfig
from fastbert.data.tokenization import load_tokenizer
from fastbert.models.auto import model_class

WORDS = "the cat sat on mat a dog ran in to house and who we they old new . , ! ?"
VOCAB = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS.split()]
VOCAB += [letter for letter in string.ascii_letters if letter not in VOCAB]
VOCAB += [f"##{letter}" for letter in string.ascii_letters]


FILES = ("config.json", "model.safetensors", "vocab.txt", "tokenizer_config.json", "tokenizer.json")
# By what was asked for: hundreds of tests begin with one of a few folders, whose making takes half of their time.
_WRITTEN: dict[str, tuple[dict[str, bytes], torch.Tensor]] = {}


def write_model(folder: Path, *, model_type: str = "bert", head: str = "Model", seed: int = 0, **fields) -> Path:
    """A random model of hidden size 32 with 64 positions, tokenizer.json and vocab.txt; returns its folder."""
    folder.mkdir(parents=True, exist_ok=True)
    manual_seed(seed)
    asked = repr((model_type, head, torch.initial_seed(), sorted(fields.items())))
    if asked not in _WRITTEN:
        _write_model(folder, model_type, head, fields)
        files = {name: (folder / name).read_bytes() for name in FILES}
        _WRITTEN[asked] = files, torch.get_rng_state()
    files, state = _WRITTEN[asked]
    for name, content in files.items():
        (folder / name).write_bytes(content)
    torch.set_rng_state(state)  # what a test draws next does not go by who was here before
    return folder


def _write_model(folder: Path, model_type: str, head: str, fields: dict) -> None:
    shape = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    own = {"vocab_size": len(VOCAB), "max_position_embeddings": 64, "initializer_range": 0.2, "pad_token_id": 0}
    config = EncoderConfig.of_family(model_type, **{**shape, **few_heads(model_type, **shape), **own, **fields})
    model_class(model_type, head)(config).save_pretrained(folder)
    write_tokenizer(folder)


def write_tokenizer(folder: Path, lowercase: bool = True) -> None:
    (folder / "vocab.txt").write_text("\n".join(VOCAB) + "\n")
    settings = {"tokenizer_class": "BertTokenizer", "do_lower_case": lowercase, "model_max_length": 512}
    write_json(folder / "tokenizer_config.json", settings)
    (folder / "tokenizer.json").unlink(missing_ok=True)
    load_tokenizer(folder).save(str(folder / "tokenizer.json"))


def write_json(path: Path, entries: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(entries))


def write_modules(root: Path, *names: str) -> None:
    """modules.json for a Transformer in `root` itself and modules in folders 1_Name, 2_Name, ..."""
    entries = [{"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"}]
    for i, name in enumerate(names, 1):
        entries.append(
            {"idx": i, "name": str(i), "path": f"{i}_{name}", "type": f"sentence_transformers.models.{name}"}
        )
        (root / f"{i}_{name}").mkdir(exist_ok=True)
    write_json(root / "modules.json", entries)


def write_sentence_model(folder: Path) -> Path:
    """A sentence-transformers folder: mean pooling, normalised."""
    write_model(folder)
    write_modules(folder, "Pooling", "Normalize")
    write_json(folder / "1_Pooling/config.json", {"word_embedding_dimension": 32})
    return folder


def write_stanford(folder: Path, metadata: dict | None = None) -> Path:
    """colbert-ai's: an encoder below `bert.`, its projection beside it, and artifact.metadata."""
    write_model(folder)
    vocabulary = (folder / "vocab.txt").read_text().split("\n")
    vocabulary[-3:-1] = ["[unused0]", "[unused1]"]
    (folder / "vocab.txt").write_text("\n".join(vocabulary))
    (folder / "tokenizer.json").unlink()
    config = json.loads((folder / "config.json").read_text())
    write_json(folder / "config.json", {**config, "architectures": ["HF_ColBERT"]})
    weights = {f"bert.{name.removeprefix('bert.')}": t for name, t in load_file(folder / "model.safetensors").items()}
    linear = torch.randn(16, 32, generator=torch.Generator().manual_seed(2))
    save_file({**weights, "linear.weight": linear}, folder / "model.safetensors", {"format": "pt"})
    if metadata is not None:
        write_json(folder / "artifact.metadata", metadata)
    return folder


def edit_config(folder: Path, **changes) -> None:
    """Change entries of a folder's config.json."""
    path = folder / "config.json"
    write_json(path, {**json.loads(path.read_text()), **changes})
