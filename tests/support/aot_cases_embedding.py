"""What compiled_kernels.py compiles of the kernels around the encoder: embedding, dropout, pooling, packing."""

from __future__ import annotations

DTYPES = ("bf16", "fp16", "fp32")
MODES = ("mean", "cls", "max")


def case(kernel, dtype, types, constants, num_warps, wide_loads, variant=""):
    return {
        "kernel": kernel,
        "dtype": dtype,
        "types": types,
        "constants": constants,
        "num_warps": num_warps,
        "wide_loads": wide_loads,
        "variant": variant,
    }


def embedding_cases(hidden_size: int):
    from fastbert.kernels.layer_norm import row_tile

    from fastbert.kernels import embedding

    for dtype in DTYPES:
        pointer = f"*{dtype}"
        block_n, num_warps = row_tile(hidden_size)
        ids = dict.fromkeys(("input_ids_ptr", "position_ids_ptr", "token_type_ids_ptr"), "*i64")
        tables = ("word_ptr", "position_ptr", "token_type_ptr", "weight_ptr", "bias_ptr", "out_ptr")
        rows = dict.fromkeys(("word_rows", "position_rows", "token_type_rows"), "i32")
        types = {**ids, **dict.fromkeys(tables, pointer), **rows, "hidden_size": "i32", "eps": "fp32"}
        flags = ("HAS_INPUT_IDS", "HAS_TYPE", "HAS_TYPE_IDS", "HAS_POSITION", "HAS_NORM", "HAS_BIAS")
        constants = {**dict.fromkeys(flags, True), "BLOCK_N": block_n}
        yield case("embedding._embed_fwd_kernel", dtype, types, constants, num_warps, wide_loads=5)

        sizes = {"num_rows": "i32", "hidden_size": "i32", "padding_idx": "i32"}
        types = {
            "dout_ptr": pointer,
            "dtable_ptr": pointer,
            "ids_ptr": "*i32",
            "order_ptr": "*i64",
            "parts_ptr": "*fp32",
            "total_tokens": "i32",
            **sizes,
        }
        block_n = embedding.sum_block(hidden_size)
        constants = {"CHUNK": embedding.CHUNK, "GROUP": embedding.GROUP, "BLOCK_N": block_n}
        yield case("embedding._sum_runs_kernel", dtype, types, constants, 1, wide_loads=embedding.GROUP)

        types = {"ids_ptr": "*i32", "ends_ptr": "*i64", "parts_ptr": "*fp32", "dtable_ptr": pointer, **sizes}
        constants = {"CHUNK": embedding.CHUNK, "BLOCK_M": 32, "BLOCK_N": 64}
        yield case("embedding._join_runs_kernel", dtype, types, constants, 4, wide_loads=1)


def dropout_cases(hidden_size: int):
    from fastbert.kernels import dropout

    block_m, block_n = dropout.tile(hidden_size)
    for dtype in DTYPES:
        types = {
            "x_ptr": f"*{dtype}",
            "philox_ptr": "*i64",
            "out_ptr": f"*{dtype}",
            "num_rows": "i32",
            "hidden_size": "i32",
            "threshold": "i64",
            "scale": "fp32",
        }
        yield case("dropout._dropout_kernel", dtype, types, {"BLOCK_M": block_m, "BLOCK_N": block_n}, 4, wide_loads=1)


def pooling_cases():
    for dtype in DTYPES:
        for mode in MODES:
            is_max = mode == "max"
            types = {
                "x_ptr": f"*{dtype}",
                "cu_seqlens_ptr": "*i32",
                "out_ptr": f"*{dtype}",
                "ties_ptr": "*i32",
                "parts_ptr": "*fp32",
                "part_ties_ptr": "*i32",
                "total_tokens": "i32",
                "hidden_size": "i32",
            }
            for splits in (1, 16)[: 1 if mode == "cls" else 2]:
                constants = {"MODE": mode, "RETURN_TIES": is_max, "SPLITS": splits, "BLOCK_N": 64}
                options = {"variant": f"{mode}-{splits}"}
                walk = {**constants, "BLOCK_M": 32}
                yield case("pooling._pooling_fwd_kernel", dtype, types, walk, 4, wide_loads=1, **options)
                if splits > 1:
                    yield case("pooling._pooling_join_kernel", dtype, types, constants, 4, wide_loads=1, **options)
            types = {
                **dict.fromkeys(("dout_ptr", "x_ptr", "out_ptr", "dx_ptr"), f"*{dtype}"),
                "ties_ptr": "*i32",
                "cu_seqlens_ptr": "*i32",
                "total_tokens": "i32",
                "batch_size": "i32",
                "hidden_size": "i32",
                "search_steps": "i32",
            }
            constants = {"MODE": mode, "BLOCK_M": 8, "BLOCK_N": 256}
            if not is_max:
                constants |= dict.fromkeys(("x_ptr", "out_ptr", "ties_ptr"))
            wide = 4 if is_max else 1
            yield case("pooling._pooling_bwd_kernel", dtype, types, constants, 4, wide_loads=wide, variant=mode)


def packing_cases(hidden_size: int):
    """By the words that rows are copied as: of 4 bytes, or of 2 where 16-bit rows are odd."""
    from fastbert.kernels import packing

    for word in ("i32", "i16"):
        block_m, block_n = packing.tile(hidden_size)
        types = {
            "padded_ptr": f"*{word}",
            "packed_ptr": f"*{word}",
            "indices_ptr": "*i64",
            "num_rows": "i32",
            "total_tokens": "i32",
            "hidden_size": "i32",
            "search_steps": "i32",
        }
        constants = {"BLOCK_M": block_m, "BLOCK_N": block_n}
        for way in ("pack", "unpack"):
            yield case(f"packing._{way}_kernel", word, types, constants, 4, wide_loads=1)


def cases(hidden_size: int):
    yield from embedding_cases(hidden_size)
    yield from dropout_cases(hidden_size)
    yield from pooling_cases()
    yield from packing_cases(hidden_size)
