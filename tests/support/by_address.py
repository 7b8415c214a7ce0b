"""All layers as one op: what it launches by addresses, as on a GPU, beside what it launches by tensors, as in Triton's
interpreter, where its numbers are checked. Both should launch the same on the same memory.

Run as a program, which has Triton's own launching. Its last line is JSON: by the name of a case how many launches there
are, in which of them (launch_trace.differences) the two ways differ, and which take memory that nobody has made.
"""

from __future__ import annotations

import json
import re
import sys

import torch
from dry_launches import as_gpu
from launch_trace import Recorder, Trace, differences, without_compiler
from layer_specs import CASES, HIDDEN, TOKENS, WITH_HOLES, fused, make
from seeds import manual_seed, torch_generator

from fastbert.backend import use_backend
from fastbert.ops._layer_kernels import LayerKernels

OPS = ("encoder_layers_training", "encoder_layers_recomputing")
STACKS = {
    "post": ("post", "post"),
    "post, of several kinds": ("post", "post, no biases", "post, no attention norm", "post, grouped"),
    "post, some gated": ("post", "post, merged", "post"),
    "modernbert": ("global", "local", "local"),
    "pre": ("pre", "pre, local", "pre, grouped, merged"),
    "rms": ("rms, grouped", "rms, grouped"),
    "interleaved": ("interleaved",),
    "nomic": ("nomic", "nomic"),
}
DROPOUTS = {"without dropout": (0.0,) * 4, "with dropout": (0.1, 0.2, 0.3, 0.4), "of three kinds": (0.1, 0.2, 0.0, 0.4)}


def traced(recorder: Recorder, op: str, cases: tuple[str, ...], dropouts: tuple[float, ...], autocast: bool) -> Trace:
    layers = [make(CASES[name].with_dropouts(*dropouts), i) for i, name in enumerate(cases)]
    layers = [layer.map(lambda t: t.requires_grad_()) for layer in layers]
    x = torch.randn(TOKENS, HIDDEN, generator=torch_generator(1)).requires_grad_()
    named = {f"{name} of {i}": t.detach() for i, layer in enumerate(layers) for name, t in layer.tensors().items()}
    recorder.name(named | {"x": x.detach()})
    manual_seed(0)
    with recorder.step() as trace, use_backend("triton"), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        out = fused(op, layers, x, positions=WITH_HOLES)
        out.backward(torch.ones_like(out))
    return trace


def main() -> None:
    launches = without_compiler(as_gpu(90))
    by_address = LayerKernels._has_addresses
    found = {}
    for name, cases in STACKS.items():
        for op in OPS:
            for kind, dropouts in DROPOUTS.items():
                for autocast in (False, True):
                    LayerKernels._has_addresses = by_address
                    one = traced(Recorder(launches), op, cases, dropouts, autocast)
                    LayerKernels._has_addresses = lambda kernels: False
                    other = traced(Recorder(launches), op, cases, dropouts, autocast)
                    case = f"{name}, {op}, {kind}{', autocast' * autocast}"
                    unknown = [line for line in one.launches if re.search("nothing that is known, at [1-9]", line)]
                    found[case] = {
                        "launches": len(one.launches), "differences": differences(one, other), "unknown": unknown,
                    }  # fmt: skip
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
