"""Folders of models, damaged: they load and give what the whole ones give, or there is one documented error.

A file that fastbert wrote holds checksums: other numbers than those that were saved never load. Foreign files have
none: there it is the kind of the outcome that counts.
"""

from __future__ import annotations

import atexit
import shutil
import signal
import tempfile
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import tiny
import torch
from draw import Draw
from fuzz_damage import copy_of, damage_bytes, damage_header, damage_json, read_header
from fuzz_driver import Fuzzer
from safetensors.torch import load_file, save_file

import fastbert
from fastbert import CheckpointError, ConfigError, InputError
from fastbert.checkpoint.pretrained import load_weights  # noqa: F401  (imported here, so that no case pays for it)
from fastbert.models.auto import AutoModel, AutoModelForMaskedLM

ERRORS = (CheckpointError, ConfigError, InputError)
NO_END = 120  # seconds, for what takes a few milliseconds
TEXTS = ["the cat sat on the mat.", "", "we ran"]
IDS = torch.tensor([[5, 9, 4, 1], [2, 7, 3, 8]])
ENCODERS = ("ours", "albert", "masked_lm", "int8", "foreign", "pickle")


@cache
def templates() -> dict[str, Path]:
    """Whole folders, made once a process."""
    root = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, root)
    made = {
        "ours": tiny.write_model(root / "ours"),
        "more layers": tiny.write_model(root / "more", num_hidden_layers=3, seed=1),
        "albert": tiny.write_model(root / "albert", model_type="albert", embedding_size=16, num_hidden_groups=1),
        "masked_lm": tiny.write_model(root / "masked_lm", head="MaskedLM", model_type="roberta"),
    }
    made["foreign"] = copy_of(made["ours"], root / "foreign")
    weights = load_file(made["ours"] / "model.safetensors")
    save_file({name: t.clone() for name, t in weights.items()}, made["foreign"] / "model.safetensors")
    made["pickle"] = copy_of(made["ours"], root / "pickle")
    (made["pickle"] / "model.safetensors").unlink()
    torch.save({name: t.clone() for name, t in weights.items()}, made["pickle"] / "pytorch_model.bin")
    made["int8"] = copy_of(made["ours"], root / "int8")
    fastbert.quantize(AutoModel.from_pretrained(made["ours"]), "int8").save_pretrained(made["int8"])
    made["sentences"] = copy_of(made["ours"], root / "sentences")
    tiny.write_modules(made["sentences"], "Pooling", "Dense", "Normalize")
    tiny.write_json(
        made["sentences"] / "1_Pooling/config.json", {"word_embedding_dimension": 32, "pooling_mode": "mean"}
    )
    dense = {"in_features": 32, "out_features": 8, "activation_function": "torch.nn.modules.activation.Tanh"}
    tiny.write_json(made["sentences"] / "2_Dense/config.json", dense)
    torch.manual_seed(0)
    linear = {"linear.weight": torch.randn(8, 32), "linear.bias": torch.randn(8)}
    save_file(linear, made["sentences"] / "2_Dense/model.safetensors")
    tiny.write_json(made["sentences"] / "sentence_bert_config.json", {"max_seq_length": 40, "do_lower_case": False})
    tiny.write_json(made["sentences"] / "config_sentence_transformers.json", {"prompts": {"query": "a "}})
    return made


def outputs(kind: str, folder: Path) -> np.ndarray:
    if kind == "sentences":
        return fastbert.SentenceEncoder.from_pretrained(folder, device="cpu").encode(TEXTS)
    auto = AutoModelForMaskedLM if kind == "masked_lm" else AutoModel
    with torch.inference_mode():
        out = auto.from_pretrained(folder)(IDS)
    return (out.logits if kind == "masked_lm" else out.last_hidden_state).float().numpy()


@cache
def whole_outputs(kind: str) -> np.ndarray:
    return outputs(kind, templates()[kind])


def files_of(folder: Path, *suffixes: str) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file() and path.suffix in suffixes)


def weights_bytes(draw: Draw, folder: Path) -> None:
    damage_bytes(draw, draw.choice(files_of(folder, ".safetensors", ".bin")))


def weights_header(draw: Draw, folder: Path) -> None:
    found = files_of(folder, ".safetensors")
    if found:
        damage_header(draw, draw.choice(found))


def config_fields(draw: Draw, folder: Path) -> None:
    damage_json(draw, folder / "config.json")


def config_bytes(draw: Draw, folder: Path) -> None:
    damage_bytes(draw, folder / "config.json")


def other_json(draw: Draw, folder: Path) -> None:
    damage_json(draw, draw.choice([path for path in files_of(folder, ".json") if path != folder / "config.json"]))


def other_bytes(draw: Draw, folder: Path) -> None:
    damage_bytes(draw, draw.choice(files_of(folder, ".json", ".txt")))


def a_folder_for_a_file(draw: Draw, folder: Path) -> None:
    path = draw.choice(files_of(folder, ".json", ".txt", ".safetensors", ".bin"))
    draw.note(f"  {path.name}")
    path.unlink()
    path.mkdir()


DAMAGES: dict[str, Callable[[Draw, Path], None]] = {
    damage.__name__: damage
    for damage in (
        weights_bytes,
        weights_header,
        config_fields,
        config_bytes,
        other_json,
        other_bytes,
        a_folder_for_a_file,
    )
}


def mixed(draw: Draw, folder: Path) -> None:
    """The config of one model with the weights of another, which has more layers or fewer: never a model."""
    names = ["ours", "more layers"]
    first = names.pop(draw.integer(0, 1))
    for source, name in ((first, "config.json"), (names[0], "model.safetensors")):
        shutil.copy(templates()[source] / name, folder / name)
    try:
        outputs("ours", folder)
    except ERRORS as error:
        assert str(error)
        return
    raise AssertionError(f"config of {first!r}, weights of {names[0]!r}: loaded")


def still_vouched_for(folder: Path, template: Path) -> bool:
    """Whether all that decides the numbers is as it was: the config's bytes, the checksums, the tokenizer."""
    for path in files_of(template, ".json", ".txt", ".safetensors"):
        now = folder / path.relative_to(template)
        if not now.is_file():
            continue  # what is gone must have been of no use
        if path.suffix != ".safetensors" and now.read_bytes() != path.read_bytes():
            return False
        try:
            same = (
                path.suffix != ".safetensors"
                or read_header(now.read_bytes())[0]["__metadata__"]
                == (read_header(path.read_bytes())[0]["__metadata__"])
            )
        except (ValueError, LookupError, TypeError, OverflowError, RecursionError):
            return True  # the header is no header: nothing may come of it
        if not same:
            return False
    return True


def no_end(number, frame) -> None:
    raise TimeoutError(f"no end after {NO_END} seconds")


def run_case(draw: Draw) -> None:
    kind = draw.choice((*ENCODERS, "sentences", "sentences"))
    with tempfile.TemporaryDirectory() as beside, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of missing keys
        folder = copy_of(templates()[kind], Path(beside) / "model")
        if draw.flag(20):
            draw.doing = "mixed"
            draw.note("the config of one, the weights of the other")
            mixed(draw, folder)
            return
        has_sums, is_damaged = kind not in ("foreign", "pickle", "sentences"), False
        for _ in range(draw.choice((1, 1, 1, 2))):
            name = draw.choice(DAMAGES)
            is_damaged |= name.startswith("weights")
            draw.doing = f"{name} of {kind}"
            draw.note(f"{name}: of {kind}")
            if name in ("config_fields", "config_bytes") and not (folder / "config.json").is_file():
                continue
            try:
                DAMAGES[name](draw, folder)
            except (ValueError, LookupError, OSError, RecursionError):
                draw.note("  cannot be damaged more")
        previous = signal.signal(signal.SIGALRM, no_end)
        signal.alarm(NO_END)
        try:
            found = outputs(kind, folder)
        except ERRORS as error:
            assert str(error), "an error without a word"
            draw.note(f"  refused: {error}")
            return
        except IsADirectoryError as error:  # which names the file
            draw.note(f"  {error}")
            return
        finally:
            signal.alarm(0)
            signal.signal(signal.SIGALRM, previous)
        # Without checksums a flipped bit of an exponent is a weight like any other.
        assert (is_damaged and not has_sums) or np.isfinite(found).all(), "it loaded, and gives what is not finite"
        if has_sums and still_vouched_for(folder, templates()[kind]):
            assert np.array_equal(found, whole_outputs(kind)), "it loaded, and gives other numbers than what was saved"


FUZZER = Fuzzer("files", run_case, cases=60)
