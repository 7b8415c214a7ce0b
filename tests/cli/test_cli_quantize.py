"""fastbert quantize: a folder in int8, which the other commands read."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest
import tiny
import torch
from command_line import fails
from command_line import run_here as run_cli_here
from safetensors.torch import save_file

from fastbert import ConfigError, SentenceEncoder
from fastbert.models.auto import AutoModel
from fastbert.models.quantized import is_quantized


def test_command_line(tmp_path):
    """quantize writes a folder that encode reads; --dtype int8 gives the same vectors from the float folder."""
    folder = tiny.write_model(tmp_path / "float")
    tiny.write_modules(folder, "Pooling", "Dense")
    tiny.write_json(folder / "1_Pooling/config.json", {"word_embedding_dimension": 32})
    tiny.write_json(folder / "2_Dense/config.json", {"in_features": 32, "out_features": 8})
    dense = {"linear.weight": torch.randn(8, 32), "linear.bias": torch.randn(8)}
    save_file(dense, folder / "2_Dense/model.safetensors")
    texts, out = tmp_path / "texts.txt", tmp_path / "int8"
    texts.write_text("the cat sat on the mat.\na dog ran in\nwho?\n")
    done = run_cli_here("quantize", folder, out, "--report", texts, "--keep", "*.layer.1.output")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].endswith("of each layer, over 3 texts") and len(lines) == 13
    assert re.search(r"^ +\d\.\d\d%  encoder\.layer\.1\.output\.dense   kept$", done.stdout, re.MULTILINE)
    assert "11 layers in int8" in done.stderr and str(out) in done.stderr
    files, copied = ({path.relative_to(root) for path in root.rglob("*")} for root in (folder, out))
    assert files == copied
    vectors = {}
    for name, model, *options in (("a", out), ("b", out, "--dtype", "int8"), ("c", folder, "--dtype", "int8")):
        arguments = ("encode", texts, "--model", model, "--output", tmp_path / f"{name}.npy", "--device", "cpu")
        assert run_cli_here(*arguments, *options).returncode == 0
        vectors[name] = np.load(tmp_path / f"{name}.npy")
    assert np.array_equal(vectors["a"], vectors["b"]) and vectors["c"].shape == (3, 8)
    quantized = SentenceEncoder.from_pretrained(folder, dtype=torch.int8, device="cpu")
    assert is_quantized(quantized.model)
    assert np.array_equal(quantized.encode(texts.read_text().splitlines()), vectors["c"])
    assert "names no layer" in fails("quantize", folder, tmp_path / "x", "--keep", "nothing")
    assert "is int8 already" in fails("quantize", out, tmp_path / "x")
    assert "exists already" in fails("quantize", folder, out)
    assert "is not a folder" in fails("quantize", folder, tmp_path / "nowhere" / "x")
    assert "No such file" in fails("quantize", folder, tmp_path / "x", "--report", tmp_path / "gone.txt")
    assert not (tmp_path / "x").exists()
    with pytest.raises(ConfigError, match=r"fastbert\.quantize\(model, .int8.\) comes after that"):
        AutoModel.from_pretrained(folder, dtype="int8")


def test_a_sentence_model_whose_config_names_a_head_that_is_not_there(tmp_path):
    """As all-mpnet-base-v2 has it. A model by itself is refused then: its head would be random."""
    folder = tiny.write_model(tmp_path / "float")
    config = json.loads((folder / "config.json").read_text())
    tiny.write_json(folder / "config.json", config | {"architectures": ["BertForMaskedLM"]})
    assert "train its head first" in fails("quantize", folder, tmp_path / "int8")
    tiny.write_modules(folder, "Pooling")
    tiny.write_json(folder / "1_Pooling/config.json", {"word_embedding_dimension": 32})
    done = run_cli_here("quantize", folder, tmp_path / "int8")
    assert done.returncode == 0 and done.stderr.count("\n") == 1, done.stderr
    assert is_quantized(SentenceEncoder(tmp_path / "int8", device="cpu").model)
