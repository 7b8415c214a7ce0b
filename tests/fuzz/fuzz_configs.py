"""config.json files with random entries for rotary embedding, nested and flat, at places where they may stand: our own
classes and accelerated models must compute what transformers makes of the file, or refuse it by the entry's name.
"""

from __future__ import annotations

import resource
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from config_files import IDS, built, check, file_of
from draw import Draw
from fuzz_driver import Fuzzer
from huggingface_hub.errors import StrictDataclassError

import fastbert
from fastbert.config import EncoderConfig
from fastbert.errors import ConfigError
from fastbert.families import FAMILIES

# Its code has no error of its own for a file that it cannot run.
THEIR_ERRORS = (
    ArithmeticError,
    AttributeError,
    LookupError,
    MemoryError,
    RuntimeError,
    StrictDataclassError,
    TypeError,
    ValueError,
)
THEIR_MEMORY = 2**31  # bytes that it may take for a file: it multiplies "3", a string, by the width of a head
ROTARY = tuple(name for name, family in FAMILIES.items() if "rope_parameters" in family.fields)
LAYER_TYPES = ("full_attention", "sliding_attention")
TYPES = ("default", "linear", "llama3", "yarn", "proportional", "dynamic", "longrope", "axial", None)
NUMBERS = (4.0, 1, 1.5, 2, 8, 16, 24, 64, 0.5, 0, None, -1, "3", True, [1.0])
# Each with the values that it has most often; a number of `NUMBERS` otherwise.
VALUES: dict[str, tuple[Any, ...]] = {
    "factor": (2.0, 4, 1.5, 1.0),
    "original_max_position_embeddings": (32, 16, 64, 20),
    "low_freq_factor": (1.0, 2, 4.0),
    "high_freq_factor": (4.0, 8, 2.0),
    "attention_factor": (1.3, 0.8, None),
    "beta_fast": (32, 8, 4.0, None),
    "beta_slow": (1, 2, 16, None),
    "mscale": (1.0, 0.7, 0),
    "mscale_all_dim": (0.5, 1.0, 0),
    "truncate": (False, True, None),
    "partial_rotary_factor": (1.0, 0.5, None),
    "rope_theta": (1000.0, 50, 160_000.0),
    "xyzzy": (5,),
}
BESIDE = (
    "partial_rotary_factor",
    "rope_theta",
    "original_max_position_embeddings",
    "truncate",
    "global_rope_theta",
    "local_rope_theta",
    "sliding_window",
    "head_dim",
)
NEEDED = {
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor",),
}


def value_of(draw: Draw, name: str) -> Any:
    if name in ("global_rope_theta", "local_rope_theta"):
        name = "rope_theta"
    usual = VALUES.get(name, (16, 4, 8))
    return draw.choice(NUMBERS) if draw.flag(12) else draw.choice(usual)


def parameters(draw: Draw) -> Any:
    """One object of rope parameters."""
    if draw.flag(20):
        return draw.choice((None, {}, 5, "default"))
    kind = draw.choice(TYPES) if draw.flag(6) else draw.choice(TYPES[:5])
    made = {draw.choice(("rope_type", "rope_type", "type")): kind}
    names = dict.fromkeys(NEEDED.get(str(kind), ())) if not draw.flag(12) else {}
    names |= dict.fromkeys(draw.choice(VALUES) for _ in range(draw.integer(0, 4)))
    return {**made, **{name: value_of(draw, name) for name in names}}


def entries(draw: Draw, model_type: str) -> dict[str, Any]:
    is_nested = (model_type == "modernbert") != draw.flag(12)
    made: dict[str, Any] = {}
    if draw.flag(5):
        made["rope_scaling"] = parameters(draw)
    if not draw.flag(6):
        kinds = [kind for kind in LAYER_TYPES if not draw.flag(4)]
        made["rope_parameters"] = {kind: parameters(draw) for kind in kinds} if is_nested else parameters(draw)
        if is_nested and draw.flag(12):
            made["rope_parameters"]["truncate"] = False
    for name in dict.fromkeys(draw.choice(BESIDE) for _ in range(draw.integer(0, 2))):
        made[name] = value_of(draw, name)
    return {**made, "local_attention": 12} if model_type == "modernbert" else made


@contextmanager
def _memory_limit(more: int) -> Iterator[None]:
    """Allocations fail once this process has so many bytes more, instead of the machine's memory running out."""
    now = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[0]) * resource.getpagesize()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (now + more, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def _their_output(file: dict) -> torch.Tensor | None:
    """What transformers computes in float64; None where it fails."""
    try:
        with torch.no_grad(), _memory_limit(THEIR_MEMORY):
            return built(file).double().eval()(IDS)[0]
    except THEIR_ERRORS:
        return None


def run_case(draw: Draw) -> None:
    transformers.logging.set_verbosity_error()
    model_type = draw.choice(ROTARY)
    file = file_of(model_type, **entries(draw, model_type))
    draw.doing = model_type
    draw.note(f"{file}")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        expected = _their_output(file)
        if expected is None or not expected.isfinite().all():
            try:
                EncoderConfig.from_dict(file)
            except ConfigError as error:
                draw.note(f"  refused, as there: {error}")
            return
        try:
            check(file)
        except ConfigError as error:
            draw.note(f"  refused: {error}")
            try:
                fastbert.accelerate(built(file))
            except ValueError as reason:
                assert str(error) in str(reason), f"two reasons: {error}; {reason}"
            else:
                raise AssertionError(f"accelerate takes what the own class refuses: {error}") from error


FUZZER = Fuzzer("configs", run_case, cases=15)
