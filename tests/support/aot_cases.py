"""What compiled_kernels.py compiles: every Triton kernel, with the blocks that it ships."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from aot_cases_embedding import cases as embedding_cases
from aot_cases_maxsim import cases as maxsim_cases
from aot_cases_relative import cases as relative_cases

HIDDEN_SIZE = 768  # BERT-base; divisible by 16, as launchers' arguments are when loads may be 16 bytes wide

# Shared memory that one block may have, in bytes (CUDA C++ Programming Guide,
# table "Technical Specifications"); 64 k registers and 64 warps (sm_80, sm_90, sm_100 alike).
SHARED_LIMIT = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}


@dataclasses.dataclass(frozen=True)
class Case:
    """One compilation: `types` by argument name, `constants` for the constexpr arguments and the pointers not given."""

    kernel: str
    dtype: str
    types: dict
    constants: dict
    num_warps: int
    wide_loads: int  # matrices and vectors in `dtype` that are read, each in loads of 16 bytes
    num_stages: int = 3
    variant: str = ""
    major: int = 0  # the only architecture that these blocks are for; 0: all
    has_products: bool = False  # of 16-bit operands: wgmma on sm_90
    narrow_loads: int = 0  # of a single element, where one is all that is wanted

    @property
    def id(self) -> str:
        return "-".join(part for part in (self.kernel, self.dtype, self.variant) if part)


def layer_norm_cases() -> Iterator[Case]:
    from fastbert.kernels import layer_norm

    for dtype, dropout, vectors, rms in (
        ("bf16", False, "bf16", False),
        ("bf16", True, "bf16", False),
        ("fp16", True, "fp16", False),
        ("fp32", True, "fp32", False),
        ("bf16", True, "fp32", False),
        ("bf16", True, "bf16", True),
    ):
        pointer, variant = f"*{dtype}", "dropout" if dropout else ""
        variant += ("" if vectors == dtype else f"-vectors-{vectors}") + ("-rms" if rms else "")
        kind = {"HAS_DROPOUT": dropout, "IS_RMS": rms, **({} if dropout else {"philox_ptr": None})}
        block_n, num_warps = layer_norm.row_tile(HIDDEN_SIZE)
        types = {
            **dict.fromkeys(("x_bias_ptr", "weight_ptr", "bias_ptr"), f"*{vectors}"),
            **dict.fromkeys(("x_ptr", "residual_ptr", "out_ptr", "summed_ptr"), pointer),
            "mean_ptr": "*fp32",
            "rstd_ptr": "*fp32",
            "philox_ptr": "*i64",
            "hidden_size": "i32",
            "threshold": "i64",
            "scale": "fp32",
            "eps": "fp32",
        }
        constants = dict.fromkeys(("HAS_X_BIAS", "HAS_RESIDUAL", "RETURN_SUM", "RETURN_STATS"), True)
        constants |= {"HAS_BIAS": not rms, "BLOCK_N": block_n, **({"bias_ptr": None} if rms else {}), **kind}
        loads = 4 if rms else 5
        yield Case("layer_norm._add_layer_norm_fwd_kernel", dtype, types, constants, num_warps, loads, variant=variant)

        block_m, block_n, num_warps = layer_norm._bwd_tile(HIDDEN_SIZE)
        types = {
            **dict.fromkeys(("dout_ptr", "dsum_ptr", "summed_ptr", "dx_ptr", "dsummed_ptr"), pointer),
            "weight_ptr": f"*{vectors}",
            "shares_ptr": "*fp32",
            "mean_ptr": "*fp32",
            "rstd_ptr": "*fp32",
            "philox_ptr": "*i64",
            "total_tokens": "i32",
            "hidden_size": "i32",
            "threshold": "i64",
            "scale": "fp32",
        }
        constants = {"HAS_DSUM": True, "HAS_X_BIAS": True, "BLOCK_M": block_m, "BLOCK_N": block_n, **kind}
        yield Case("layer_norm._add_layer_norm_bwd_kernel", dtype, types, constants, num_warps, 4, variant=variant)

    for dtype, rms in (("bf16", False), ("fp16", False), ("fp32", False), ("bf16", True)):
        types = dict.fromkeys(("dweight_ptr", "dbias_ptr", "dx_bias_ptr"), f"*{dtype}")
        types |= {"shares_ptr": "*fp32", "num_shares": "i32", "hidden_size": "i32"}
        constants, variant = {"IS_RMS": rms, "BLOCK_M": 32, "BLOCK_N": 32}, "rms" if rms else ""
        yield Case("layer_norm._add_shares_kernel", dtype, types, constants, 4, wide_loads=1, variant=variant)


def head_norm_cases() -> Iterator[Case]:
    """Norms of heads, each a row: of 128 columns (Qwen3), and of 256 by 1 + weight, a sum in fp32 (Gemma 3)."""
    from fastbert.kernels import layer_norm

    for width, vectors in ((128, "bf16"), (256, "fp32")):
        stats = {"mean_ptr": "*fp32", "rstd_ptr": "*fp32", "hidden_size": "i32", "threshold": "i64", "scale": "fp32"}
        block_n, num_warps = layer_norm.row_tile(width)
        types = dict.fromkeys(("x_ptr", "out_ptr", "summed_ptr"), "*bf16")
        types |= {"weight_ptr": f"*{vectors}", "eps": "fp32"}
        absent = dict.fromkeys(("x_bias_ptr", "residual_ptr", "bias_ptr", "philox_ptr"))
        constants = dict.fromkeys(("HAS_X_BIAS", "HAS_RESIDUAL", "HAS_BIAS", "HAS_DROPOUT", "RETURN_SUM"), False)
        constants |= {"RETURN_STATS": True, "IS_RMS": True, "BLOCK_N": block_n, **absent}
        kernel, variant = "layer_norm._add_layer_norm_fwd_kernel", f"head-rms-{width}-vectors-{vectors}"
        wide = 2 if width == 256 else 0  # a warp has four numbers a thread of 128
        yield Case(kernel, "bf16", types | stats, constants, num_warps, wide, variant=variant)
        block_m, block_n, num_warps = layer_norm._bwd_tile(width)
        types = dict.fromkeys(("dout_ptr", "summed_ptr", "dx_ptr", "dsummed_ptr"), "*bf16")
        types |= {"weight_ptr": f"*{vectors}", "shares_ptr": "*fp32", "total_tokens": "i32"}
        constants = dict.fromkeys(("HAS_DSUM", "HAS_X_BIAS", "HAS_DROPOUT"), False) | {"IS_RMS": True}
        constants |= {"BLOCK_M": block_m, "BLOCK_N": block_n, "dsum_ptr": None, "philox_ptr": None}
        kernel = "layer_norm._add_layer_norm_bwd_kernel"
        yield Case(kernel, "bf16", types | stats, constants, num_warps, 2, variant=variant)


_STRIDES = [f"stride_{name}{axis}" for name in "qkvd" for axis in "th"] + ["stride_gt"]


def attention_cases() -> Iterator[Case]:
    """Long sequences in every dtype, with dropout and with a window, and short ones, several heads a program."""
    from fastbert.kernels.blocks import blocks_of

    variants = [
        ("bf16", 64, 128, "plain"), ("bf16", 64, 128, "dropout"), ("bf16", 64, 128, "window"),
        ("bf16", 64, 64, "dropout"), ("bf16", 64, 32, "dropout"), ("bf16", 64, 16, "dropout"),
        ("bf16", 32, 128, "dropout"), ("bf16", 32, 64, "plain"), ("bf16", 80, 64, "plain"),
        ("bf16", 96, 64, "plain"), ("bf16", 128, 64, "dropout"), ("bf16", 256, 32, "dropout"),
        ("fp16", 64, 128, "plain"), ("fp32", 64, 32, "dropout"), ("fp32", 128, 16, "plain"),
        ("bf16", 64, 128, "grouped"), ("bf16", 64, 16, "grouped"), ("bf16", 128, 64, "grouped"),
        ("bf16", 256, 32, "grouped"), ("bf16", 256, 32, "window"),
        ("bf16", 64, 128, "positions"), ("fp32", 64, 32, "positions"),
    ]  # fmt: skip
    matrices = ("q_ptr", "k_ptr", "v_ptr", "dout_ptr", "out_ptr", "dq_ptr", "dk_ptr", "dv_ptr")
    for dtype, head_dim, tile, kind in variants:
        types = dict.fromkeys(matrices, f"*{dtype}") | dict.fromkeys(_STRIDES, "i32")
        types |= dict.fromkeys(("row_max_ptr", "row_sum_ptr", "records_ptr"), "*fp32")
        types |= dict.fromkeys(("softmax_scale", "scale_log2e", "keep_scale"), "fp32")
        types |= dict.fromkeys(("total_tokens", "num_heads", "window_left", "window_right"), "i32")
        types |= {"tiles_ptr": "*i32", "positions_ptr": "*i32", "philox_ptr": "*i64", "threshold": "i32"}
        for major in (8, 9, 10):
            for which, loads in (("fwd", 3), ("dkdv", 4), ("dq", 4)):
                size = 4 if dtype == "fp32" else 2
                blocks = blocks_of(which, major, head_dim, size, tile, kind == "dropout", (kind,))
                constants = {
                    "HEAD_DIM": head_dim,
                    "BLOCK_D": max(16, 1 << (head_dim - 1).bit_length()),
                    "SIGN": 1,
                    "HAS_WINDOW": kind in ("window", "positions"),
                    "HAS_POSITIONS": kind == "positions",
                    "HAS_DROPOUT": kind == "dropout",
                    "BLOCK_TILE": blocks.tile,
                    "BLOCK_STEP": blocks.step,
                    "HEADS": blocks.heads,
                    "GROUP": 4 if kind == "grouped" else 1,
                    **({} if kind == "positions" else {"positions_ptr": None}),
                    **({} if kind == "dropout" else {"philox_ptr": None}),
                    **({"RETURN_STATS": True} if which == "fwd" else {}),
                }
                module = "attention_fwd" if which == "fwd" else "attention_bwd"
                variant = f"{kind}-{head_dim}-tile{tile}-sm_{major}0"
                yield Case(
                    f"{module}._attention_{which}_kernel",
                    dtype,
                    types,
                    constants,
                    blocks.num_warps,
                    loads,
                    blocks.num_stages,
                    variant,
                    major,
                    has_products=dtype != "fp32" and tile >= 64,
                )
    for dtype in ("bf16", "fp16", "fp32"):
        types = {"dout_ptr": f"*{dtype}", "out_ptr": f"*{dtype}", "total_tokens": "i32", "scale_log2e": "fp32"}
        types |= dict.fromkeys(("row_max_ptr", "row_sum_ptr", "records_ptr"), "*fp32")
        types |= dict.fromkeys(("stride_dt", "stride_dh", "stride_ot", "stride_oh"), "i32")
        constants = {"HEAD_DIM": 64, "BLOCK_D": 64, "BLOCK_TILE": 32}
        yield Case("attention_bwd._attention_records_kernel", dtype, types, constants, num_warps=4, wide_loads=2)


def tiles_cases() -> Iterator[Case]:
    types = {"cu_seqlens_ptr": "*i32", "tiles_ptr": "*i32"}
    types |= dict.fromkeys(("batch_size", "total_tokens", "num_tiles"), "i32")
    for has_num_keys in (False, True):
        constants = {"BLOCK_TILE": 128, "BLOCK_B": 16, "BLOCK_R": 128, "HAS_NUM_KEYS": has_num_keys}
        pointers = types | {"num_keys_ptr": "*i32"} if has_num_keys else types
        constants |= {} if has_num_keys else {"num_keys_ptr": None}
        variant = "num-keys" if has_num_keys else ""
        yield Case("attention._attention_tiles_kernel", "i32", pointers, constants, 4, wide_loads=0, variant=variant)


def rotary_cases() -> Iterator[Case]:
    """Long and short sequences, and a head whose half is no power of two; backward, which only negates sin."""
    from fastbert.kernels import rotary

    for dtype in ("bf16", "fp16", "fp32"):
        for head_dim, tile, kind in (
            (64, 128, ""), (64, 128, "inverse"), (64, 16, ""), (80, 16, ""), (64, 128, "interleaved"),
            (64, 128, "grouped"),
        ):  # fmt: skip
            types = dict.fromkeys(("q_ptr", "k_ptr", "q_out_ptr", "k_out_ptr"), f"*{dtype}")
            types |= {"cos_ptr": "*fp32", "sin_ptr": "*fp32", "tiles_ptr": "*i32"}
            types |= dict.fromkeys(
                [f"stride_{name}" for name in ("qt", "qh", "kt", "kh", "qo", "ko", "ct", "st")], "i32"
            )
            types |= dict.fromkeys(("num_heads", "num_kv_heads", "max_positions"), "i32")
            block_m, block_half, num_warps = rotary.blocks(head_dim // 2, tile)
            constants = {
                "HALF": head_dim // 2,
                "BLOCK_HALF": block_half,
                "BLOCK_TILE": tile,
                "BLOCK_M": block_m,
                "HEADS": rotary.HEADS,
                "IS_GROUPED": kind == "grouped",
                "INTERLEAVED": kind == "interleaved",
                "BY_TOKEN": kind == "interleaved",
                "INVERSE": kind == "inverse",
            }
            variant = f"{kind}-{head_dim}-tile{tile}".removeprefix("-")
            loads = 12 if dtype == "fp32" else 8  # two of the rows of cos and sin, which are fp32
            yield Case("rotary._rotary_kernel", dtype, types, constants, num_warps, loads, variant=variant)


def feed_forward_cases() -> Iterator[Case]:
    from fastbert.kernels.blocks import EPILOGUES

    sizes = dict.fromkeys(("M", "N", "K", "stride_xm", "stride_wn", "stride_dm", "stride_wk"), "i32")
    names = ("x", "weight", "bias", "inner", "pre", "dout", "dpre", "dinner")
    for dtype in ("bf16", "fp16", "fp32"):
        types = {f"{name}_ptr": f"*{dtype}" for name in names} | sizes | {"shares_ptr": "*fp32"}
        for gated in (False, True):
            constants = {"ACTIVATION": "gelu", "GATED": gated}
            variant, elementwise = "gated" if gated else "", constants | {"BLOCK_M": 16, "BLOCK_N": 256}
            loads = 2 if gated else 1
            yield Case("feed_forward._activation_fwd_kernel", dtype, types, elementwise, 4, loads, variant=variant)
            elementwise = {**elementwise, "NEEDS_DBIAS": True}
            yield Case("feed_forward._activation_bwd_kernel", dtype, types, elementwise, 4, loads + 1, variant=variant)
            for major in (8, 9, 10) if dtype != "fp32" else ():
                plan = EPILOGUES[9 if major >= 9 else 8, gated]
                for kernel, blocks, flags in (
                    ("_up_kernel", plan.up, {"HAS_BIAS": True, "RETURN_PRE": True}),
                    ("_down_bwd_kernel", plan.down, {"NEEDS_DBIAS": True}),
                ):
                    options = {name: blocks[name] for name in ("num_warps", "num_stages")}
                    tile = {name: value for name, value in blocks.items() if name not in options}
                    rest = {"major": major, "has_products": True, "wide_loads": 0, **options}
                    rest["variant"] = f"{variant}-sm_{major}0".removeprefix("-")
                    yield Case(f"feed_forward.{kernel}", dtype, types, {**constants, **flags, **tile}, **rest)


def cross_entropy_cases() -> Iterator[Case]:
    types = {"labels_ptr": "*i64", "share_ptr": "*fp32", "rows": "i32", "ignore_index": "i32"}
    yield Case("cross_entropy._share_of_a_label_kernel", "i64", types, {"BLOCK": 4096}, num_warps=4, wide_loads=0)
    for dtype in ("bf16", "fp16", "fp32"):
        types = {"logits_ptr": f"*{dtype}", "labels_ptr": "*i64", "losses_ptr": "*fp32", "num_classes": "i32"}
        types |= {"share_ptr": "*fp32", "stride": "i32", "ignore_index": "i32"}
        types |= dict.fromkeys(("label_smoothing", "z_loss"), "fp32")
        constants = {"NEEDS_GRAD": True, "BLOCK_V": 4096}
        yield Case(
            "cross_entropy._cross_entropy_kernel", dtype, types, constants, num_warps=8, wide_loads=2, narrow_loads=1
        )


def adamw_cases() -> Iterator[Case]:
    from fastbert.kernels.adamw import PARTS

    from fastbert.ops.optim.adamw_flat import BLOCK

    sizes = {"PARTS": PARTS, "BLOCK": BLOCK}
    types = {"gradients_ptr": "*fp32", "parts_ptr": "*fp32", "num_blocks": "i32"}
    yield Case("adamw._square_sums_kernel", "fp32", types, sizes, num_warps=4, wide_loads=1)
    types = {"parts_ptr": "*fp32", "norm_ptr": "*fp32", "max_norm": "fp32"}
    yield Case("adamw._norm_kernel", "fp32", types, {"PARTS": PARTS}, num_warps=4, wide_loads=1)
    types = {"addresses_ptr": "*i64", "counts_ptr": "*i32", "groups_ptr": "*i32", "num_groups": "i32"}
    types |= dict.fromkeys(("gradients_ptr", "means_ptr", "squares_ptr", "numbers_ptr", "norm_ptr"), "*fp32")
    types |= dict.fromkeys(("beta1", "beta2", "eps"), "fp32")
    constants = {"CLIPS": True, "BLOCK": BLOCK}
    yield Case("adamw._adamw_kernel", "fp32", types, constants, num_warps=4, wide_loads=4)


def merging_cases() -> Iterator[Case]:
    from fastbert.kernels.merging import BLOCK

    for given, made, is_aligned in (("fp32", "bf16", True), ("bf16", "bf16", True), ("fp32", "fp32", False)):
        types = {"addresses_ptr": "*i64", "counts_ptr": "*i32", "offsets_ptr": "*i64"}
        types |= {"like_ptr": f"*{given}", "merged_ptr": f"*{made}"}
        constants = {"IS_ALIGNED": is_aligned, "BLOCK": BLOCK}
        variant = f"to-{made}" + ("" if is_aligned else "-anywhere")
        loads, narrow = (1 if is_aligned else 0), (16 if given == "bf16" else 0)  # a matrix's last block
        yield Case("merging._merge_kernel", given, types, constants, 4, loads, variant=variant, narrow_loads=narrow)


def all_cases() -> list[Case]:
    mine = [*layer_norm_cases(), *head_norm_cases(), *attention_cases(), *tiles_cases(), *rotary_cases()]
    others = (*embedding_cases(HIDDEN_SIZE), *relative_cases(), *maxsim_cases())
    mine += [*feed_forward_cases(), *cross_entropy_cases(), *adamw_cases(), *merging_cases()]
    return [*mine, *(Case(**case) for case in others)]
