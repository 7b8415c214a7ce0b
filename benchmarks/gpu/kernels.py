"""Every kernel for GPUs, forward and backward, against the float64 oracle on the GPU itself; and under a sanitizer.

A job is one op in one dtype with one backend, in a process of its own: what a broken kernel leaves behind ends with it.
Jobs run beside each other, since most of their time is the compiler's. `python -m benchmarks.gpu.kernels '{...}'`
is such a process: it writes a line of JSON for every check.
"""

from __future__ import annotations

import importlib
import json
import os
import pkgutil
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

import fastbert
from benchmarks.gpu import rowwise, sequences
from benchmarks.gpu.checks import Checks, Function, Tensors, Where, assert_keep_rate, compare, isolates_rows, repeats
from benchmarks.gpu.record import Record, failures_of_a_kernel, results_in, results_of, run_limited, say_result
from benchmarks.gpu.simulated.interpreter import mend_triton_interpreter
from fastbert import ops
from fastbert.backend import ORDER, SUPPORTS, Backend
from fastbert.testing import reference
from fastbert.testing.cases import ROWS

# --------------------------------------------------------------------------------------------------------------------
# add_layer_norm and add_rms_norm; the other ops' checks are in rowwise.py and sequences.py


def _operands(where: Where, rows: int, hidden_size: int, rms: bool) -> Tensors:
    matrices = {name: where.randn(rows, hidden_size, seed=i) for i, name in enumerate(("x", "residual"))}
    names = ("weight", *(() if rms else ("bias",)), "x_bias")
    return {**matrices, **{name: where.randn(hidden_size, seed=2 + i) for i, name in enumerate(names)}}


def norm_of(where: Where, rms: bool, x, residual=None, weight=None, bias=None, **options: Any) -> Any:
    """The op that `rms` names."""
    if rms:
        return ops.add_rms_norm(x, residual, weight, backend=where.backend, **options)
    return ops.add_layer_norm(x, residual, weight, bias, backend=where.backend, **options)


def _ours(where: Where, rms: bool, eps: float, dropout_p: float = 0.0, seed: int = 0) -> Function:
    """out and the sum, side by side: both get a gradient."""

    def ours(**tensors) -> torch.Tensor:
        torch.manual_seed(seed)
        return torch.stack(norm_of(where, rms, **tensors, dropout_p=dropout_p, eps=eps, prenorm=True))

    return ours


def _literal(rms: bool, eps: float, dropout_p: float = 0.0, keep: torch.Tensor | None = None) -> Function:
    def literal(x, residual=None, weight=None, **vectors) -> torch.Tensor:
        options: dict[str, Any] = {"eps": eps, "keep": keep, "dropout_p": dropout_p}
        if rms:
            return torch.stack(reference.add_rms_norm(x, residual, weight, **vectors, **options))
        bias = vectors.pop("bias", None)
        return torch.stack(reference.add_layer_norm(x, residual, weight, bias, **vectors, **options))

    return literal


def _against_oracle(where: Where, rms: bool, rows: int, hidden_size: int, mean: float = 0.0) -> None:
    eps = 1e-5 if where.dtype is torch.float16 else 1e-12
    tensors = _operands(where, rows, hidden_size, rms)
    tensors["x"] = tensors["x"] + mean
    variants = (tuple(tensors), ("x", "weight", "bias"), ("x", "residual", "weight", "x_bias"))
    for names in variants if rows < 10000 else variants[:1]:
        given = {name: t for name, t in tensors.items() if name in names}
        compare(_ours(where, rms, eps), _literal(rms, eps), given)


def _kept(
    where: Where, rms: bool, rows: int, hidden_size: int, dropout_p: float, seed: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Which elements of a matrix of ones are left in the sum, and which take a gradient."""
    x = torch.ones(rows, hidden_size, dtype=where.dtype, device=where.device).requires_grad_()
    torch.manual_seed(seed)
    _, summed = norm_of(where, rms, x, None, torch.ones_like(x[0]), dropout_p=dropout_p, prenorm=True)
    (dx,) = torch.autograd.grad(summed, x, torch.ones_like(summed))
    return summed.detach() != 0, dx != 0


def _dropout(where: Where, rms: bool) -> None:
    rows, hidden_size = where.choose((9, 80), (4096, 768))
    for dropout_p in (0.1, 0.5):
        forward, backward = _kept(where, rms, rows, hidden_size, dropout_p, 3)
        assert torch.equal(forward, backward), "backward has another dropout mask than forward"
        assert torch.equal(forward, _kept(where, rms, rows, hidden_size, dropout_p, 3)[0]), "one seed gave two masks"
        assert not torch.equal(forward, _kept(where, rms, rows, hidden_size, dropout_p, 4)[0]), (
            "two seeds gave one mask"
        )
        assert_keep_rate(forward, dropout_p)
    keep = _kept(where, rms, rows, hidden_size, 0.25, 5)[0]
    tensors = _operands(where, rows, hidden_size, rms)
    compare(_ours(where, rms, 1e-5, 0.25, 5), _literal(rms, 1e-5, 0.25, keep), tensors)


def _beyond_int32(where: Where, rms: bool) -> None:
    rows, hidden_size = 2**31 // 768 + 4096, 768
    x, weight = where.randn(rows, hidden_size), where.randn(hidden_size)
    out = norm_of(where, rms, x, None, weight, eps=1e-5)
    alone = norm_of(where, rms, x[-64:].clone(), None, weight, eps=1e-5)
    assert torch.equal(out[-64:], alone), "the last rows' bits depend on how many come before them"


def add_norm(rms: bool, where: Where) -> Checks:
    for rows, hidden_size in where.choose(ROWS[2:3], (*ROWS[1:], (65536, 768), (8193, 1024), (4096, 4100))):
        yield f"{rows}x{hidden_size}", partial(_against_oracle, where, rms, rows, hidden_size)
    rows, hidden_size = where.choose((5, 64), (1000, 768))
    yield "large mean", partial(_against_oracle, where, rms, rows, hidden_size, 100.0)
    yield "same bits", lambda: repeats(_ours(where, rms, 1e-5, 0.1), _operands(where, rows, hidden_size, rms))
    spoilt = _operands(where, *where.choose((9, 80), (4097, 768)), rms)
    yield "isolation", partial(isolates_rows, _ours(where, rms, 1e-5), spoilt)
    yield "dropout", partial(_dropout, where, rms)
    if not where.smoke and where.dtype is torch.bfloat16:
        yield "beyond 2^31 elements", partial(_beyond_int32, where, rms)


# --------------------------------------------------------------------------------------------------------------------
# The jobs

DTYPES = ("bfloat16", "float16", "float32")
CHECKS = {
    **sequences.CHECKS,
    "add_layer_norm": partial(add_norm, False),
    "add_rms_norm": partial(add_norm, True),
    **rowwise.CHECKS,
}
SERIALISED = "serialised wgmma"
LIMIT_SECONDS = 200.0  # of a job
SANITIZER_SECONDS = 180.0  # of a job under it


@dataclass(frozen=True)
class Job:
    checks: str  # a key of CHECKS: an op, and what of it
    dtype: str
    backend: str
    smoke: bool

    @property
    def id(self) -> str:
        return f"{self.checks} {self.dtype} {self.backend}"


def unsupported(device: torch.device) -> dict[str, dict[Backend, str | None]]:
    """{op: {backend for GPUs that has a kernel for it: why that cannot run here, or None}}."""
    report = fastbert.backends(device, torch.bfloat16)
    found: dict[str, dict[Backend, str | None]] = {}
    for op, said in report.items():
        backends = [b for b in ORDER["cuda"] if b in SUPPORTS[op]]
        found[op] = {b: said.get(b.value) if b.value != said["selected"] else None for b in backends}
        found[op] = {b: None if why == "only when asked for by name" else why for b, why in found[op].items()}
    return found


def jobs(smoke: bool, device: torch.device) -> Iterator[Job]:
    """Of every op and backend for GPUs; torch where an op has no kernel, which is what a GPU then runs.

    An epilogue is never chosen for fp32, whose products are torch's.
    """
    has = unsupported(device)
    for checks in CHECKS:
        kernels = has[checks.partition("/")[0]]
        backends = [b for b, unsupported in kernels.items() if unsupported is None] or [Backend.TORCH]
        if checks == "feed_forward/epilogue":  # of Triton's alone
            backends = [b for b in backends if b is Backend.TRITON]
        dtypes = DTYPES[:1] if smoke else DTYPES[:2] if checks == "feed_forward/epilogue" else DTYPES
        if checks == "adamw_flat":
            dtypes = DTYPES[2:]
        for dtype in dtypes:
            for backend in backends:
                yield Job(checks, dtype, backend.value, smoke)


def run_checks(job: Job) -> Iterator[tuple[str, str | None]]:
    """(check, None or why it failed). After an error of the GPU itself nothing can run in this process."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    where = Where(device, getattr(torch, job.dtype), job.backend, job.smoke)
    for name, check in CHECKS[job.checks](where):
        try:
            check()
            if device.type == "cuda":
                torch.cuda.synchronize()
        except failures_of_a_kernel() as error:
            message = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
            yield name, message
            if "CUDA error" in message:
                return
        else:
            yield name, None
        if device.type == "cuda":
            torch.cuda.empty_cache()  # jobs share the GPU


def summary(results: Sequence[tuple[str, str | None]], died: str | None = None) -> dict[str, Any]:
    """A job's entry."""
    failed = [f"{name}: {why}" for name, why in results if why is not None]
    if died is not None:
        failed.append(died)
    entry: dict[str, Any] = {"checks": [name for name, _ in results]}
    if failed or not results:
        entry["failed"] = "; ".join(failed) or "no check ran"
    return entry


def in_a_process(record: Record, job: Job) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.gpu.kernels", json.dumps(asdict(job))]
    return summary(*results_of(command, min(LIMIT_SECONDS, record.left)))


def run_part(record: Record) -> None:
    """The part `kernels`."""
    for op, kernels in unsupported(record.device).items():
        for backend, reason in kernels.items():
            if reason is not None:
                record.add(f"{op} {backend.value}", {"skipped": reason})
        if kernels and op not in {checks.partition("/")[0] for checks in CHECKS}:
            record.add(op, {"failed": "has a kernel for GPUs, and no check here"})
    done = {name for name, entry in record.entries.items() if "failed" not in entry}
    asked = [job for job in jobs(record.smoke, record.device) if job.id not in done]
    if record.smoke:  # starting a process takes longer than the checks
        for job in asked:
            record.run(job.id, lambda job=job: summary(list(run_checks(job))))  # type: ignore[misc]
        asked = []
    with ThreadPoolExecutor(max(1, min(15, (os.cpu_count() or 2) - 1))) as pool:
        futures = {pool.submit(in_a_process, record, job): job for job in asked}
        for future in as_completed(futures):
            record.add(futures[future].id, future.result())
    if record.device.type == "cpu":
        record.add(SERIALISED, {"skipped": "Triton's interpreter compiles nothing"})
    else:
        record.run(SERIALISED, partial(serialised, triton_cache()))


# --------------------------------------------------------------------------------------------------------------------
# What ptxas says of products: on sm_90 they run beside other work, unless it had to make them wait for each other


def complaints(ptx: Path, arch: int) -> list[str]:
    """The assembler's lines on wgmma: serialised products, waits and fences of its own between them."""
    import triton

    target = f"sm_{arch}a" if arch >= 90 else f"sm_{arch}"
    tool = (triton.knobs.nvidia.ptxas_blackwell if arch >= 100 else triton.knobs.nvidia.ptxas).path
    command = [tool, "-v", f"--gpu-name={target}", "-o", os.devnull, str(ptx)]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    return [line.split(":", 1)[-1].strip() for line in said.splitlines() if re.search("wgmma|warpgroup|GMMA", line)]


def triton_cache() -> Path:
    import triton

    return Path(triton.knobs.cache.dir)


def compiled_products(cache: Path) -> Iterator[tuple[str, Path, int]]:
    """(label, PTX, architecture) of our kernels with wgmma in them, as Triton keeps what it has compiled."""
    import fastbert.kernels as package

    modules = [importlib.import_module(f"fastbert.kernels.{m.name}") for m in pkgutil.iter_modules(package.__path__)]
    ours = {name for module in modules for name in vars(module) if name.endswith("_kernel")}
    for ptx in sorted(cache.glob("*/*.ptx")):
        if ptx.stem in ours and "wgmma.mma_async" in ptx.read_text(encoding="utf-8"):
            made = json.loads(ptx.with_suffix(".json").read_text(encoding="utf-8"))
            label = f"{ptx.stem}, {made['num_warps']} warps, {made['num_stages']} stages, {ptx.parent.name[:8]}"
            yield label, ptx, made["target"]["arch"]


def serialised(cache: Path) -> dict[str, Any]:
    """An entry: the kernels that ptxas complains of, among all with wgmma."""
    found = list(compiled_products(cache))
    if not found:
        return {"skipped": "no kernel with wgmma has been compiled"}
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        said = list(pool.map(lambda each: complaints(each[1], each[2]), found))
    numbers = {
        label: {"ptxas": "; ".join(lines)[:300]} for (label, _, _), lines in zip(found, said, strict=True) if lines
    }
    return {"numbers": numbers, "note": f"of {len(found)} kernels with wgmma ptxas complains of {len(numbers)}"}


# --------------------------------------------------------------------------------------------------------------------
# compute-sanitizer: small cases in bf16, since everything is ten times slower under it

SANITIZED = (
    "attention/small-16",
    "attention/small-64",
    "attention/features",
    "attention/kinds",
    "attention/relative",
    "add_layer_norm",
    "add_rms_norm",
    "feed_forward/elementwise",
    "feed_forward/epilogue",
    "cross_entropy",
    "adamw_flat",
    "embed_layer_norm",
    "pooling",
    "dropout",
)


def sanitizer() -> str | None:
    """Where compute-sanitizer is: on PATH, or beside nvcc, which may not be."""
    toolkit = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    return shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path=f"{toolkit}/bin")


def sanitize(record: Record, tool: str, job: Job) -> dict[str, Any]:
    """One op under one tool. Memory is taken from CUDA piece by piece, so that a read beyond a tensor is seen.

    Calls of CUDA that fail are not reported: libraries ask it for functions that a driver may lack, and ours raise.
    """
    program = [sys.executable, "-m", "benchmarks.gpu.kernels", json.dumps(asdict(job))]
    options = ["--report-api-errors", "no"] if tool == "memcheck" else []
    command = [sanitizer() or "", "--tool", tool, "--error-exitcode", "86", *options, *program]
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    seconds = min(SANITIZER_SECONDS, record.left)
    done = run_limited(command, seconds, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment)
    found = [line for line in done.stdout.splitlines() if line.startswith("=========")]
    results = results_in(done.stdout)
    wrong = [f"{name}: {why}" for name, why in results if why is not None]
    if done.returncode != 0 or wrong or not results:
        last = (done.stderr.strip().splitlines() or [""])[-1]
        said = [line.removeprefix("=========").strip() for line in found if "COMPUTE-SANITIZER" not in line][:3]
        return {
            "failed": f"exit code {done.returncode}: {'; '.join([*wrong, *said]) or last}"[:500],
            "said": found[:60],
        }
    return {"checks": [name for name, _ in results]}


def run_sanitizer(record: Record) -> None:
    """The part `sanitizer`: memcheck on every kernel, racecheck on those in CUDA C++."""
    if sanitizer() is None:
        record.add("compute-sanitizer", {"skipped": "compute-sanitizer is neither on PATH nor in CUDA_HOME/bin"})
        return
    has = unsupported(record.device)
    asked: list[tuple[str, Job]] = []
    for checks in SANITIZED:
        kernels = has[checks.partition("/")[0]]
        for backend in (b for b, unsupported in kernels.items() if unsupported is None):
            job = Job(checks, "bfloat16", backend.value, smoke=True)
            asked += [(tool, job) for tool in ("memcheck", *(("racecheck",) if backend is Backend.CUDA else ()))]
    if not any(tool == "racecheck" for tool, _ in asked):
        record.add("racecheck", {"skipped": "no op has a kernel in CUDA C++"})
    with ThreadPoolExecutor(max(1, min(8, (os.cpu_count() or 2) - 2))) as pool:
        futures = {f"{tool} {job.id}": pool.submit(sanitize, record, tool, job) for tool, job in asked}
        for name, future in futures.items():
            try:
                record.run(name, future.result)
            except subprocess.TimeoutExpired:
                record.add(name, {"failed": "not ready in time"})


def main() -> None:
    if not torch.cuda.is_available():
        mend_triton_interpreter()
    job = Job(**json.loads(sys.argv[1]))
    for result in run_checks(job):
        say_result(result)


if __name__ == "__main__":
    main()
