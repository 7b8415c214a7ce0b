"""Attention with terms by distance, for aot_cases.py: as fields of its `Case`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

# Terms, and what a kernel has beside them.
KINDS: dict[str, tuple[str, tuple[str, ...]]] = {
    "both": ("key query", ()),
    "both-dropout": ("key query", ("DROPOUT",)),
    "bias-dropout": ("bias", ("DROPOUT",)),
    "all-dropout": ("key query bias", ("DROPOUT",)),
    "holes": ("key query", ("HOLES", "DROPOUT")),
    "everything": ("key query bias", ("HOLES", "WINDOW", "POSITIONS", "DROPOUT")),
}
# (dtype, head_dim, tile, kind, the only architecture or 0)
VARIANTS = [
    ("bf16", 64, 64, "both", 0), ("bf16", 64, 64, "both-dropout", 0), ("bf16", 64, 64, "bias-dropout", 0),
    ("bf16", 64, 64, "all-dropout", 0), ("bf16", 64, 64, "everything", 0), ("bf16", 64, 32, "both-dropout", 0),
    ("bf16", 64, 16, "both-dropout", 0), ("bf16", 32, 64, "both", 9), ("bf16", 128, 32, "both-dropout", 0),
    ("bf16", 128, 32, "everything", 0), ("bf16", 64, 16, "everything", 0), ("fp16", 64, 64, "both-dropout", 9),
    ("fp32", 64, 16, "all-dropout", 0), ("fp32", 64, 16, "holes", 0),
]  # fmt: skip
STRIDES = [f"stride_{name}{axis}" for name in ("q", "k", "v", "d", "a", "ao", "b", "bo") for axis in "th"]


def _types(dtype: str) -> dict[str, str]:
    matrices = ("q", "k", "v", "out", "dout", "a", "a_other", "b", "b_other", "da", "dv", "key_slab", "query_slab")
    types = {f"{name}_ptr": f"*{dtype}" for name in matrices} | dict.fromkeys((*STRIDES, "stride_gt"), "i32")
    sums = ("row_max", "row_sum", "records", "bias_slab", "dkey", "dquery", "dbias", "sums")
    types |= {f"{name}_ptr": "*fp32" for name in sums}
    types |= {f"{name}_ptr": "*i32" for name in ("ends", "tiles", "index", "positions", "offsets", "rows")}
    types |= dict.fromkeys(("softmax_scale", "scale_log2e", "keep_scale", "scale"), "fp32") | {"philox_ptr": "*i64"}
    counts = (
        "total_tokens",
        "num_places",
        "num_heads",
        "batch_size",
        "reach",
        "threshold",
        "window_left",
        "window_right",
    )
    return types | dict.fromkeys((*counts, "count", "num_rows", "num_diagonals", "num_groups"), "i32")


def _attention(dtype: str, head_dim: int, tile: int, kind: str, major: int) -> Iterator[dict[str, Any]]:
    from fastbert.kernels.blocks import relative_blocks_of

    terms, features = KINDS[kind]
    constants: dict[str, Any] = {
        f"HAS_{name}": name in features for name in ("DROPOUT", "HOLES", "WINDOW", "POSITIONS")
    }
    constants |= {f"HAS_{name.upper()}": name in terms for name in ("key", "query", "bias")}
    constants |= {"HEAD_DIM": head_dim, "BLOCK_D": max(16, 1 << (head_dim - 1).bit_length())}
    for name, feature in (("philox_ptr", "DROPOUT"), ("index_ptr", "HOLES"), ("positions_ptr", "POSITIONS")):
        constants |= {} if feature in features else {name: None}
    registers = "more" if "HOLES" in features else {"key query": "", "bias": "bias"}.get(terms, "more")
    slabs = sum(name in terms for name in ("key", "query"))
    for which, kernel, loads in (
        ("fwd", "attention_relative_fwd._attention_relative_fwd_kernel", 3),
        ("dq", "attention_relative_bwd._attention_relative_bwd_kernel", 4),
        ("dkdv", "attention_relative_bwd._attention_relative_bwd_kernel", 4),
        ("tables", "relative_tables._relative_sums_kernel", 4),
    ):
        blocks = relative_blocks_of(which, major, head_dim, 4 if dtype == "fp32" else 2, tile, registers)
        case = {
            "kernel": kernel,
            "dtype": dtype,
            "types": _types(dtype),
            "num_warps": blocks.num_warps,
            "wide_loads": loads + slabs,
            "num_stages": blocks.num_stages,
            "major": major,
            "has_products": blocks.tile == 64,
            "narrow_loads": 2 if which in ("dq", "dkdv") else 0,  # a row each, of which a thread has one element
        }
        own = {"BLOCK": blocks.tile, "BLOCK_TILE": tile}
        if which == "fwd":
            own["RETURN_STATS"] = True
        elif which != "tables":
            own["OF_KEYS"] = which == "dkdv"
        variant = f"{which}-{kind}-{head_dim}-tile{tile}-sm_{major}0"
        if which != "tables":
            yield {**case, "constants": constants | own, "variant": variant}
            continue
        del own["BLOCK_TILE"]
        for wanted in blocks.launches:
            needs = {f"NEEDS_{name.upper()}": name in wanted and name in terms for name in ("key", "query", "bias")}
            if any(needs.values()):
                yield {**case, "constants": constants | own | needs, "variant": f"{variant}-{'-'.join(wanted)}"}


def cases() -> Iterator[dict[str, Any]]:
    for dtype, head_dim, tile, kind, only in VARIANTS:
        for major in (8, 9, 10) if only == 0 else (only,):
            yield from _attention(dtype, head_dim, tile, kind, major)
    for dtype, bias in (("bf16", "fp32"), ("fp32", "bf16")):
        types = _types(dtype) | {"key_ptr": f"*{dtype}", "query_ptr": f"*{dtype}", "bias_ptr": f"*{bias}"}
        types |= dict.fromkeys([f"stride_{name}{axis}" for name in "kqb" for axis in "rh"], "i32")
        constants = {"HEAD_DIM": 64, "BLOCK_D": 64, "BLOCK": 32, "HAS_KEY": True, "HAS_QUERY": True, "HAS_BIAS": True}
        yield {
            "kernel": "relative_slabs._expand_kernel",
            "dtype": dtype,
            "types": types,
            "constants": constants,
            "num_warps": 4,
            "wide_loads": 2,
            "narrow_loads": 1,
        }
        sizes = {"HEAD_DIM": 64, "BLOCK_D": 64} if dtype == "bf16" else {"HEAD_DIM": 1, "BLOCK_D": 1}
        yield {
            "kernel": "relative_tables._relative_fold_kernel",
            "dtype": dtype,
            "types": types | {"table_ptr": f"*{dtype}"},
            "constants": {**sizes, "BLOCK": 64, "BLOCK_R": 16, "IS_BIAS": dtype == "fp32"},
            "num_warps": 4,
            "wide_loads": 1 if dtype == "bf16" else 0,
            "variant": "" if dtype == "bf16" else "bias",
        }
