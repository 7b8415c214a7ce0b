"""Which backend would serve each op: the report behind `fastbert.backends()` and `fastbert doctor`."""

from __future__ import annotations

import torch

import fastbert.ops  # noqa: F401  (which registers every op)
from fastbert import backend as registry
from fastbert.backend import Backend, first_to_serve, select
from fastbert.errors import BackendError


def backends(device: str | torch.device = "cpu", dtype: torch.dtype = torch.float32) -> dict[str, dict[str, str]]:
    """Which backend would serve each op for contiguous tensors of `device` and `dtype`, and why others would not.

    Returns:
        {op: {"selected": backend, other backend: reason, ...}}. "none" is selected if use_backend() or FASTBERT_BACKEND
        asks for a backend that cannot serve the op. Calls of the op then raise BackendError with the reason.

        For an op that stands for several, "torch" means that these run one by one.
    """
    x, vector = torch.empty(2, 64, device=device, dtype=dtype), torch.empty(64, device=device, dtype=dtype)
    report = {}
    for op, table in sorted(registry.SUPPORTS.items()):
        probe = registry.PROBES[op](x, vector) if op in registry.PROBES else (x, None, vector, vector)
        try:
            chosen = first_to_serve(op, *probe) or Backend.TORCH if op in registry.FUSED else select(op, None, *probe)
            selected = chosen.value
        except BackendError:
            selected = "none"
        report[op] = {"selected": selected}
        for backend in Backend:
            if backend.value not in (selected, "torch"):
                asked = table[backend](*probe) if backend in table else "no kernel for this op yet"
                report[op][backend.value] = asked or "only when asked for by name"
    return report
