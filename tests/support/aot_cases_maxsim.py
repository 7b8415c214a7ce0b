"""aot_cases.py's cases of late interaction: widths of 128, vectors in 16 and 32 bits, and int8 with scales."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


def cases() -> Iterator[dict[str, Any]]:
    from fastbert.kernels.maxsim import BLOCK_D, BLOCK_Q, BLOCK_W, NUM_STAGES

    offsets = dict.fromkeys(("cu_seqlens_q_ptr", "cu_seqlens_d_ptr"), "*i32")
    sizes = dict.fromkeys(("num_query_tokens", "num_document_tokens", "longest", "num_queries", "width"), "i32")
    for dtype in ("bf16", "fp32", "i8"):
        scales = dict.fromkeys(("query_scales_ptr", "scales_ptr"), "*fp32" if dtype == "i8" else None)
        types = {"queries_ptr": f"*{dtype}", "documents_ptr": f"*{dtype}", **offsets, **sizes, "num_documents": "i32"}
        types |= {"pairs_ptr": "*i64", "scores_ptr": "*fp32", "winners_ptr": "*i32"}
        types |= {name: pointer for name, pointer in scales.items() if pointer}
        constants = {"BLOCK_Q": BLOCK_Q, "BLOCK_D": BLOCK_D, "BLOCK_W": BLOCK_W, "IS_INT8": dtype == "i8"}
        constants |= {
            "RETURN_WINNERS": dtype != "i8",
            **{name: None for name, pointer in scales.items() if not pointer},
        }
        yield {
            "kernel": "maxsim._maxsim_fwd_kernel",
            "dtype": dtype,
            "types": types,
            "constants": constants,
            "num_warps": 4,
            "num_stages": NUM_STAGES,
            "wide_loads": 2,
        }
    winners = {"dscores_ptr": "*fp32", "winners_ptr": "*i32", "order_ptr": "*i64", "offsets_ptr": "*i64"}
    for dtype in ("bf16", "fp32"):
        types = {**winners, "documents_ptr": f"*{dtype}", "cu_seqlens_q_ptr": "*i32", "query_ptr": "*i64"}
        types |= {"dqueries_ptr": f"*{dtype}", **dict.fromkeys(("num_query_tokens", "longest", "width"), "i32")}
        yield {
            "kernel": "maxsim._maxsim_dqueries_kernel",
            "dtype": dtype,
            "types": types,
            "constants": {"BLOCK_W": BLOCK_W},
            "num_warps": 4,
            "wide_loads": 0,  # a row of 64 numbers is less than one a thread
            "narrow_loads": 8 if dtype == "bf16" else 0,
        }
        types = {**winners, **offsets, "queries_ptr": f"*{dtype}", "pairs_ptr": "*i64", "ddocuments_ptr": f"*{dtype}"}
        types |= {**sizes, "num_pairs": "i32"}
        yield {
            "kernel": "maxsim._maxsim_ddocuments_kernel",
            "dtype": dtype,
            "types": types,
            "constants": {"BLOCK_Q": BLOCK_Q, "BLOCK_D": BLOCK_Q, "BLOCK_W": BLOCK_W},
            "num_warps": 4,
            "wide_loads": 1,
        }
