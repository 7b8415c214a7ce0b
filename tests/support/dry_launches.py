"""Whole models on the Triton kernels with the real compiler and no GPU: everything happens but the launch itself.

Triton's driver is replaced by one that says which GPU there is, takes what is compiled, and counts launches. What the
interpreter does not see shows here: what a launch specialises on, what then compiles, and when it compiles again. The
results are memory that no kernel has written. Run as a program, since a process has either compiler or interpreter.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
import triton
from aot_cases import SHARED_LIMIT
from dry_ops import run_ops
from seeds import manual_seed
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

import fastbert
from fastbert.backend import FUSED, SUPPORTS, Backend, use_backend
from fastbert.kernels import blocks
from fastbert.models.classes import CLASSES
from fastbert.ops import layer_norm, loss
from fastbert.ops.layers.gpu import encoder_layers_training as encoder_layers_training_gpu

LARGEST_GRID = (2**31 - 1, 65535, 65535)


class DryDriver:
    """A GPU of one architecture that loads whatever is given to it, runs nothing, and counts what is launched."""

    def __init__(self, capability: int):
        self.target, self.utils = GPUTarget("cuda", capability, 32), self
        self.launches: Counter[str] = Counter()
        self.compiled: Counter[str] = Counter()
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
        self.compiled[name] += 1
        with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
            cubin.write(binary)
            cubin.flush()
            command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", cubin.name]
            usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        if re.search(r"STACK:[1-9]|LOCAL:[1-9]", usage):
            self.spilling.append(f"{self.loading}: {re.search(r'STACK:.*? LOCAL:.*? ', usage).group()}")  # type: ignore[union-attr]
        return 1, 1, 0, 0, 1024

    def launcher_cls(self, source, metadata):
        names = source.fn.arg_names
        constants = {names[path[0]]: value for path, value in source.constants.items()}
        self.loading = f"{source.name} {source.signature.get('q_ptr', '')} {constants} {metadata.num_warps} warps"
        return partial(self.launch, source.name)

    def launch(self, name: str, x: int, y: int, z: int, *others) -> None:
        for size, limit in zip((x, y, z), LARGEST_GRID, strict=True):
            assert 0 < size <= limit, f"{name}: a grid of {(x, y, z)}"
        self.launches[name] += 1


def make(model_type: str, head: str, dtype: torch.dtype, **changes) -> torch.nn.Module:
    shape = {"hidden_size": 128, "num_attention_heads": 2, "intermediate_size": 512, "num_hidden_layers": 2}
    shape |= {"dim": 128, "n_heads": 2, "hidden_dim": 512, "n_layers": 2} if model_type == "distilbert" else {}
    config = {"model_type": model_type, "vocab_size": 100, "pad_token_id": 0, "max_position_embeddings": 2100}
    manual_seed(0)
    return CLASSES[model_type, head](fastbert.EncoderConfig.from_dict({**config, **shape, **changes})).to(dtype)


def batch(lengths: tuple[int, ...]) -> dict[str, torch.Tensor]:
    offsets = torch.tensor((0, *lengths)).cumsum(0).int()
    return {"input_ids": torch.randint(1, 100, (sum(lengths),)), "cu_seqlens": offsets}


def infer(model: torch.nn.Module, lengths: tuple[int, ...]) -> None:
    with torch.no_grad(), use_backend("triton"):
        model.eval()(**batch(lengths))


def train(model: torch.nn.Module, lengths: tuple[int, ...]) -> None:
    inputs = batch(lengths)
    labels = torch.where(torch.arange(sum(lengths)) % 7 == 0, inputs["input_ids"], -100)
    with use_backend("triton"):
        model.train()(**inputs, labels=labels).loss.backward()


def run(model: torch.nn.Module, lengths: tuple[int, ...]) -> None:
    infer(model, lengths)
    train(model, lengths)


def train_recomputing(model: torch.nn.Module, lengths: tuple[int, ...]) -> None:
    model.gradient_checkpointing_enable()
    train(model, lengths)
    model.gradient_checkpointing_disable()


def train_op_by_op(model: torch.nn.Module, lengths: tuple[int, ...]) -> None:
    """Without what stands for several ops, but for products that are merged."""
    with without_layers_as_one_op():
        train(model, lengths)


@contextmanager
def without_layers_as_one_op() -> Iterator[None]:
    kept = {op: SUPPORTS.pop(op) for op in ("encoder_layers_training", "encoder_layers_recomputing")}
    SUPPORTS.update({op: {} for op in kept})
    try:
        yield
    finally:
        SUPPORTS.update(kept)


def layers_in_mixed_precision(model: torch.nn.Module) -> None:
    """Weights in float32, which are cast; three steps, of which the first compiles and the others are known."""
    for _ in range(3):
        with torch.autocast("cpu", torch.bfloat16):
            train(model, (100, 28))


def launches_of_a_layer(dry: DryDriver, call: Callable) -> dict[str, int]:
    """Those of three layers less those of two."""
    counts = []
    for layers in (2, 3):
        model = make("bert", "MaskedLM", torch.bfloat16, num_hidden_layers=layers)
        dry.launches.clear()
        call(model, (100, 28))
        counts.append(Counter(dry.launches))
    return dict(counts[1] - counts[0])


def traced() -> int:
    """How many graphs torch.compile makes of a model, without a break, whose batches change from call to call."""
    model, lengths = make("bert", "Model", torch.bfloat16).eval(), [(40, 7), (33, 90, 21), (55,) * 5, (64, 64)]
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend="aot_eager")
    with torch.no_grad(), use_backend("triton"):
        for i in lengths:
            inputs = batch(i)
            torch._dynamo.mark_dynamic(inputs["input_ids"], 0)
            torch._dynamo.mark_dynamic(inputs["cu_seqlens"], 0)
            compiled(**inputs, max_seqlen=max(i))
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def pad_and_pack() -> None:
    """A padded batch of embeddings: packed first, unpacked last."""
    model = make("bert", "Model", torch.bfloat16)
    embeds = torch.ones(2, 9, 128, dtype=torch.bfloat16, requires_grad=True)
    mask = torch.tensor([[1] * 9, [1] * 4 + [0] * 5])
    with use_backend("triton"):
        model(inputs_embeds=embeds, attention_mask=mask).last_hidden_state.sum().backward()


def as_gpu(capability: int) -> DryDriver:
    """From here on the Triton kernels take tensors on the CPU, as on a GPU of that architecture."""
    dry = DryDriver(capability)
    driver.set_active(dry)
    blocks._majors[torch.device("cpu")] = dry.target.arch // 10
    for op, table in SUPPORTS.items():  # whose reason is that tensors are on a CPU
        if Backend.TRITON in table and op not in FUSED:
            table[Backend.TRITON] = lambda *operands, **options: None
    for module in (encoder_layers_training_gpu, layer_norm, loss):  # which go by the process's modes, too
        module.triton_unsupported = lambda x: None
    SUPPORTS["merged_linears"][Backend.TRITON] = lambda x: None
    return dry


def main() -> None:
    dry = as_gpu(int(sys.argv[1]))
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        run(make("bert", "MaskedLM", dtype), (130, 1, 700, 300))
    for model_type, head in (("albert", "MaskedLM"), ("distilbert", "MaskedLM"), ("electra", "MaskedLM")):
        run(make(model_type, head, torch.bfloat16), (130, 1, 70))
    run_ops()
    pad_and_pack()
    layers_in_mixed_precision(make("bert", "MaskedLM", torch.float32))
    model = make("bert", "MaskedLM", torch.bfloat16, num_hidden_layers=1)  # a second one would launch the same
    for longest in (1, 17, 33, 65, 129, 2048):  # every tile, few tokens and many
        for count in (1, 3, 1200 // longest + 1):
            run(model, (longest,) * count)
    before = Counter(dry.compiled)
    for seed in range(12):
        manual_seed(seed)
        run(model, tuple(torch.randint(1, 2048, (1 + seed % 4,)).tolist()))
    facts = {
        "kernels": sorted(dry.compiled),
        "spilling": dry.spilling,
        "compiled again": dict(dry.compiled - before),
        "inference": launches_of_a_layer(dry, infer),
        "training": launches_of_a_layer(dry, train),
        "training op by op": launches_of_a_layer(dry, train_op_by_op),
        "training recomputing": launches_of_a_layer(dry, train_recomputing),
        "graphs": traced(),
    }
    sys.stdout.write(json.dumps(facts) + "\n")


if __name__ == "__main__":
    main()
