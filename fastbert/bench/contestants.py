"""The contestants of `fastbert bench`, their precisions, and how fastbert and transformers are loaded.

Each computes the last hidden states of one padded batch and nothing else. It is used as its own documentation
recommends for the shortest time of a batch. `runtimes.py` has the contestants that run an exported model.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from fastbert.bench.jobs import PRECISIONS, BenchJob, Call, load_peer
from fastbert.bench.runtimes import load_onnxruntime, load_openvino, prepare_onnxruntime, prepare_openvino
from fastbert.messages import absent, install

FLOATS = ("float32", "bfloat16")


@dataclass(frozen=True)
class Contestant:
    """`load(job, input_ids, attention_mask)` gives the timed call; attention_mask is None unless `job.masked`.

    `prepare(job)` runs once for all batches, writes what `load` reads, and returns what to note beside the results.
    """

    precisions: tuple[str, ...]
    load: Callable[[BenchJob, torch.Tensor, torch.Tensor | None], Call]
    packages: tuple[str, ...] = ()
    prepare: Callable[[BenchJob], dict[str, Any]] | None = None

    def missing(self) -> str | None:
        """Why it cannot run on this machine; None when it can."""
        missing = absent(*self.packages)
        return f"not installed: {', '.join(missing)} ({install('bench')})" if missing else None


def load_fastbert(backend: str, job: BenchJob, input_ids: torch.Tensor, attention_mask: torch.Tensor | None) -> Call:
    """Ours with a backend of `use_backend`; int8 quantises the bfloat16 model as it is loaded."""
    from fastbert.backend import use_backend
    from fastbert.models.auto import AutoModel
    from fastbert.quantization import quantize

    model = AutoModel.from_pretrained(str(job.checkpoint), dtype=job.dtype, add_pooling_layer=False)
    if job.precision == "int8":
        model = quantize(model, "int8")

    def call() -> torch.Tensor:
        with use_backend(backend):
            out: torch.Tensor = model(input_ids, attention_mask).last_hidden_state
        return out

    return call


def load_transformers(
    attention: str, compiled: bool, job: BenchJob, input_ids: torch.Tensor, attention_mask: torch.Tensor | None
) -> Call:
    """transformers with its attention "eager" or "sdpa".

    torch.compile runs with frozen weights, which it then prepacks for oneDNN: 2 to 7 % faster than without. Of
    mode="max-autotune" (MiniLM, 8x128): 2 % faster in bfloat16, 13 % slower in float32.
    """
    model = load_peer(job.checkpoint, job.dtype, attention)
    if compiled:
        import torch._inductor.config as inductor

        inductor.freezing = True
        model = torch.compile(model)
    return lambda: model(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state


def _transformers(attention: str, compiled: bool = False) -> Contestant:
    return Contestant(FLOATS, partial(load_transformers, attention, compiled), ("transformers",))


def _openvino(variant: str, precisions: tuple[str, ...]) -> Contestant:
    return Contestant(
        precisions,
        partial(load_openvino, variant),
        ("openvino", "transformers", *(("nncf",) if variant != "float" else ())),
        partial(prepare_openvino, variant),
    )


CONTESTANTS = {
    "fastbert": Contestant(PRECISIONS, partial(load_fastbert, "auto")),
    "fastbert-torch": Contestant(PRECISIONS, partial(load_fastbert, "torch")),
    "transformers-eager": _transformers("eager"),
    "transformers-sdpa": _transformers("sdpa"),
    "transformers-compile": _transformers("sdpa", compiled=True),
    # Its CPU kernels have no bfloat16.
    "onnxruntime": Contestant(
        ("float32", "int8"), load_onnxruntime, ("onnxruntime", "onnx", "transformers"), prepare_onnxruntime
    ),
    "openvino": _openvino("float", FLOATS),
    "openvino-weights": _openvino("weights", ("int8",)),
    "openvino-calibrated": _openvino("calibrated", ("int8",)),
}


def is_ours(name: str) -> bool:
    return name.startswith("fastbert")
