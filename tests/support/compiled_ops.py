"""Every Triton kernel, compiled for a GPU that need not be here: ops called as on a GPU, up to the launch itself.

Triton's driver is replaced by one that says which GPU there is, takes what is compiled, and looks at it. What a launch
specialises on and which blocks it takes are those of a GPU. The results are memory that no kernel has written. It is a
program of its own, since a process has either Triton's compiler or its interpreter:

    python tests/support/compiled_ops.py 90 bfloat16 [once]

It prints the kernels that nothing has compiled, and those that spill. One that takes more shared memory than the GPU
has ends it with Triton's own error. once: of each kernel the first form that is launched, for a quick look.
"""

from __future__ import annotations

import importlib
import json
import os
import pkgutil
import re
import subprocess
import sys
import tempfile

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import JITFunction, driver

import fastbert
import fastbert.kernels
from fastbert import ops
from fastbert.backend import use_backend
from fastbert.models.classes import CLASSES

SHARED_LIMIT = {80: 166912, 90: 232448, 100: 232448}  # bytes of a program
LARGEST_GRID = (2**31 - 1, 65535, 65535)


class DryDriver:
    """A GPU of one architecture that takes whatever is given to it, and runs nothing."""

    def __init__(self, capability: int):
        self.target, self.utils = GPUTarget("cuda", capability, 32), self
        self.compiled: set[str] = set()
        self.spilling: list[str] = []
        self.loading = ""

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": SHARED_LIMIT[self.target.arch]}  # Triton refuses what takes more

    def load_binary(self, name: str, binary: bytes, shared: int, device: int) -> tuple[int, int, int, int, int]:
        self.compiled.add(name)
        with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
            cubin.write(binary)
            cubin.flush()
            command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", cubin.name]
            usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        if spills := re.search(r"STACK:[1-9]\d*|LOCAL:[1-9]\d*", usage):
            self.spilling.append(f"{self.loading}: {spills.group()}")
        return 1, 1, 0, 0, 1024

    def launcher_cls(self, source, metadata):
        names = source.fn.arg_names
        constants = {names[path[0]]: value for path, value in source.constants.items()}
        self.loading = f"{source.name} {source.signature} {constants} {metadata.num_warps} warps"

        def launch(x: int, y: int, z: int, *others) -> None:
            for size, limit in zip((x, y, z), LARGEST_GRID, strict=True):
                assert 0 < size <= limit, f"{source.name}: a grid of {(x, y, z)}"

        return launch


def kernels() -> set[str]:
    """Those of the folder kernels/."""
    names = [module.name for module in pkgutil.iter_modules(fastbert.kernels.__path__)]
    members = [vars(importlib.import_module(f"fastbert.kernels.{name}")).items() for name in names]
    return {
        name
        for module in members
        for name, value in module
        if name.endswith("_kernel") and isinstance(value, JITFunction)
    }


def as_gpu(capability: int) -> DryDriver:
    """From here on the Triton kernels take tensors on the CPU, as on a GPU of that architecture."""
    from fastbert.kernels import blocks

    os.environ["TRITON_INTERPRET"] = "1"  # read by Triton when a kernel is made, and by ops in each call
    blocks._majors[torch.device("cpu")] = capability // 10
    dry = DryDriver(capability)
    driver.set_active(dry)
    return dry


def compile_once(dry: DryDriver) -> None:
    """Leave out the launches of a kernel that has been compiled."""
    run = JITFunction.run

    def run_once(self, *arguments, **options):
        return None if self.__name__ in dry.compiled else run(self, *arguments, **options)

    JITFunction.run = run_once


# --------------------------------------------------------------------------------------------------------------------
# What is called

LENGTHS = (130, 1, 700, 300)


def train(model_type: str, dtype: torch.dtype, lengths: tuple[int, ...] = LENGTHS, **changes) -> None:
    shape = {"hidden_size": 768, "num_attention_heads": 12, "intermediate_size": 1024, "num_hidden_layers": 1}
    config = {"model_type": model_type, "vocab_size": 100, "pad_token_id": 0, "max_position_embeddings": 2100}
    model = CLASSES[model_type, "MaskedLM"](fastbert.EncoderConfig.from_dict({**config, **shape, **changes})).to(dtype)
    ids, offsets = torch.randint(1, 100, (sum(lengths),)), torch.tensor((0, *lengths)).cumsum(0).int()
    labels = ids.where(torch.arange(len(ids)) % 7 == 0, -100)
    model.train()(input_ids=ids, cu_seqlens=offsets, labels=labels).loss.backward()
    with torch.no_grad():
        model.eval()(input_ids=ids, cu_seqlens=offsets)


def attend(dtype: torch.dtype) -> None:
    """What those models do not have: heads of k that q's share, holes, rotary embedding of both layouts, lone queries,
    and wide heads; each tile."""
    offsets = torch.tensor([0, 64, 70], dtype=torch.int32)
    by_position, by_token = (ops.Rotary(*torch.ones(2, rows, 32).unbind()) for rows in (64, 70))
    window = {"window_size": (3, 5), "window_positions": torch.arange(70, dtype=torch.int32)}
    num_keys = torch.tensor([50, 6], dtype=torch.int32)
    for head_dim, kv_heads, longest, options in (
        (64, 4, 64, {"rotary": by_position, "dropout_p": 0.1}),
        (64, 1, 64, {"rotary": by_token._replace(interleaved=True, by_token=True), **window}),
        (64, 4, 64, {"num_keys": num_keys}),
        (64, 4, 16, {}),
        (64, 4, 32, {"dropout_p": 0.1}),
        (32, 4, 2048, {"dropout_p": 0.1}),
        (128, 1, 2048, {"dropout_p": 0.1}),
        (256, 4, 2048, {}),
    ):
        qkv = torch.ones(70, 4 + 2 * kv_heads, head_dim, dtype=dtype, requires_grad=True)
        parts = qkv.split((4, kv_heads, kv_heads), 1)
        ops.attention(*parts, offsets, longest, **options).sum().backward()


def attend_by_distance(dtype: torch.dtype) -> None:
    offsets = torch.tensor([0, 64, 70], dtype=torch.int32)
    rows = (torch.arange(2 * 90 - 1) // 8).int()
    shapes = {"key": (23, 2, 64), "query": (23, 2, 64), "bias": (23, 2)}
    for terms, options in (
        (("key", "query"), {"dropout_p": 0.1}),
        (("bias",), {}),
        (("key", "query", "bias"), {"dropout_p": 0.1, "window_size": (3, 5)}),
    ):
        places = torch.arange(70, dtype=torch.int32) if len(terms) == 3 else None
        tables = {name: torch.ones(shapes[name], dtype=dtype, requires_grad=True) for name in terms}
        qkv = torch.ones(70, 6, 64, dtype=dtype, requires_grad=True)
        relative = ops.Relative(rows, **tables, positions=places)
        ops.attention(*qkv.split(2, 1), offsets, 64, relative=relative, **options).sum().backward()


def pack(dtype: torch.dtype) -> None:
    x = torch.ones(4, 128, dtype=dtype, requires_grad=True)
    indices = torch.tensor([0, 1, 4, 7])
    ops.pack(ops.unpack(x, indices, 9), indices).sum().backward()


def pool(dtype: torch.dtype) -> None:
    """One long text, which several programs share, and short ones."""
    for offsets in ((0, 2000), (0, 60, 60, 100)):
        for mode in ("mean", "max"):
            x = torch.ones(offsets[-1], 128, dtype=dtype, requires_grad=True)
            ops.pooling(x, torch.tensor(offsets, dtype=torch.int32), mode=mode).sum().backward()


def score(dtype: torch.dtype) -> None:
    """All pairs and listed ones; documents in int8."""
    offsets = [torch.tensor(cuts, dtype=torch.int32) for cuts in ((0, 32, 64), (0, 70, 100, 230))]
    queries, documents = (torch.ones(rows, 128, dtype=dtype, requires_grad=True) for rows in (64, 230))
    for pairs in (None, torch.tensor([[0, 1], [2, 0]])):
        ops.maxsim(queries, offsets[0], documents, offsets[1], pairs=pairs).sum().backward()
    whole, scales = torch.ones(230, 128, dtype=torch.int8), torch.ones(230)
    ops.maxsim(queries.detach(), offsets[0], whole, offsets[1], scales=scales)


def main() -> None:
    dtype = getattr(torch, sys.argv[2])
    wanted = kernels()  # which makes them
    dry = as_gpu(int(sys.argv[1]))
    if sys.argv[3:] == ["once"]:
        compile_once(dry)
    with use_backend("triton"):
        train("bert", dtype)
        train("modernbert", dtype, global_attn_every_n_layers=1)
        train("deberta-v2", dtype, lengths=(40, 7))
        for part in (attend, attend_by_distance, pack, pool, score):
            part(dtype)
    sys.stdout.write(json.dumps({"missing": sorted(wanted - dry.compiled), "spilling": dry.spilling}) + "\n")


if __name__ == "__main__":
    main()
