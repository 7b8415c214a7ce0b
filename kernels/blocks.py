"""Block sizes, one table an architecture: nothing is tuned on a user's first call."""

import torch

from .sizes import next_power_of_2


class Blocks:
    """What a program of attention takes: `tile` tokens, `step` of those that it walks over, `heads` in turn."""

    def __init__(self, tile: int, step: int, heads: int, num_warps: int, num_stages: int):
        self.tile, self.step, self.heads = tile, step, heads
        self.num_warps, self.num_stages = num_warps, num_stages


_majors: dict[torch.device, int] = {}


def major_of(device: torch.device) -> int:
    """The architecture, by its compute capability's first number; the interpreter is taken for Hopper."""
    if device not in _majors:
        _majors[device] = torch.cuda.get_device_capability(device)[0] if device.type == "cuda" else 9
    return _majors[device]


# 16-bit attention, {(head_dim padded, at least 64; tile): {pass: (step, with dropout, num_warps, num_stages)}}, "" for
# passes not named. Chosen so that nothing spills, which test_aot.py checks; Hopper's are the ones to be tuned.
# A tile is the same for all passes, since they share the list of tiles.
_HOPPER = {
    (64, 128): {"fwd": (128, 64, 8, 3), "dkdv": (64, 32, 8, 2), "dq": (64, 64, 8, 2)},
    (64, 64): {"": (32, 32, 4, 2)},
    (128, 64): {"dkdv": (32, 32, 8, 2), "": (64, 64, 8, 2)},
    (256, 32): {"fwd": (16, 16, 4, 1), "": (32, 16, 8, 1)},
}
_SHORT = {32: (32, 16, 4, 2), 16: (16, 16, 2, 2)}  # two or four heads of 64 in turn keep a program busy
# What other architectures have instead.
_OTHERS = {
    8: {
        (64, 128): {"fwd": (64, 32, 8, 3), "dkdv": (16, 16, 8, 2), "dq": (64, 32, 8, 2)},
        (64, 64): {"dkdv": (16, 16, 8, 2), "": (32, 32, 8, 2)},
    },
    10: {
        (64, 128): {"fwd": (128, 64, 8, 3), "dkdv": (64, 16, 8, 2), "dq": (64, 64, 8, 2)},
        (64, 64): {"": (32, 32, 8, 2)},
    },
}
# IEEE products of fp32 run on the plain cores, with a register for every operand.
_FP32 = {32: {"fwd": (16, 16, 4, 2), "": (32, 32, 8, 1)}, 16: {"dq": (16, 16, 8, 2), "": (16, 16, 8, 1)}}
# Variants of attention with more in registers than the others: the longest steps, where those above would spill.
# {(variant, pass, architecture, bytes of an element, head_dim padded, tile): step}
_LONGEST_STEP = {
    ("positions", "dq", 8, 2, 64, 128): 32,
    ("grouped", "dkdv", 9, 2, 128, 64): 16,
    ("grouped", "dkdv", 10, 2, 128, 64): 16,
}


def heads_in_turn(tile: int) -> int:
    """How many heads a program of attention takes."""
    return max(1, 64 // tile)


def blocks_of(
    which: str,
    major: int,
    head_dim: int,
    element_size: int,
    tile: int,
    has_dropout: bool,
    variants: tuple[str, ...] = (),
) -> Blocks:
    """variants: "positions" where a window goes by them, "grouped" where several query heads read one key head."""
    major = max(8, min(major, 10))
    padded = max(64, next_power_of_2(head_dim))
    heads = heads_in_turn(tile)
    if element_size == 4:
        step, with_dropout, num_warps, num_stages = _FP32[tile].get(which) or _FP32[tile][""]
    elif tile in _SHORT and padded < 256:
        step, with_dropout, num_warps, num_stages = _SHORT[tile]
    elif padded == 256:  # a tile of 16 as one of 32
        passes = _HOPPER[256, 32]
        step, with_dropout, num_warps, num_stages = passes.get(which) or passes[""]
    else:
        passes = _OTHERS.get(major, {}).get((padded, tile)) or _HOPPER[padded, tile]
        step, with_dropout, num_warps, num_stages = passes.get(which) or passes[""]
    step = min(tile, with_dropout if has_dropout else step)
    for variant in variants:
        step = min(step, _LONGEST_STEP.get((variant, which, major, element_size, padded, tile), step))
    if element_size == 2 and head_dim <= 32 and step < 8 * num_warps:
        num_warps //= 2  # a thread that loads 16 bytes: more of them would load less each
    return Blocks(tile, step, heads, num_warps, num_stages)


def attention_blocks(
    which: str, q: torch.Tensor, tile: int, has_dropout: bool, group: int, has_positions: bool
) -> Blocks:
    """Of the pass `which` ("fwd", "dkdv", "dq") over q (total_tokens, num_heads, head_dim), where `group` heads of it
    read one of k."""
    variants = (*(("grouped",) if group > 1 else ()), *(("positions",) if has_positions else ()))
    return blocks_of(which, major_of(q.device), q.shape[2], q.element_size(), tile, has_dropout, variants)


class RelativeBlocks(Blocks):
    """Of attention with terms by distance, whose tiles are square. launches: the tables whose gradients are made in one
    launch, which are sums in registers."""

    def __init__(self, tile: int, num_warps: int, num_stages: int, launches: tuple[tuple[str, ...], ...]):
        super().__init__(tile, tile, 1, num_warps, num_stages)
        self.launches = launches


# {(architecture, variant): {pass: (block, num_warps, num_stages)}}, 16 bits, head sizes up to 64, tiles of the list of
# 64. Variants: "bias" where that is the only term, "more" with what takes registers (holes, a window, all three terms),
# else "". wgmma wants 64 rows, which Ampere's products have no registers for; on Blackwell the tables' gradients have
# none. Chosen as above. Hopper's dq copies nothing ahead, so that shared memory has room for two programs; nor do most
# of Blackwell's kernels, whose products read later than they are issued what the next copy would overwrite; nor does
# "more", since what is loaded by an index goes in four bytes each.
_RELATIVE = {
    (8, ""): {"dkdv": (32, 8, 2), "": (32, 4, 2)},
    (8, "more"): {"dkdv": (32, 8, 1), "": (32, 4, 1)},
    (9, ""): {"dq": (64, 4, 1), "": (64, 4, 2)},
    (9, "bias"): {"": (64, 4, 2)},
    (9, "more"): {"": (32, 4, 1)},
    (10, ""): {"dq": (64, 8, 2), "tables": (32, 4, 1), "": (64, 8, 1)},
    (10, "bias"): {"dq": (64, 8, 2), "tables": (32, 4, 2), "": (64, 8, 1)},
    (10, "more"): {"tables": (32, 4, 1), "": (32, 8, 1)},
}


def relative_blocks_of(
    which: str, major: int, head_dim: int, element_size: int, tile: int, variant: str
) -> RelativeBlocks:
    major = max(8, min(major, 10))
    apart: tuple[tuple[str, ...], ...] = (("key",), ("query",), ("bias",))
    together = (("key", "query", "bias"),)
    if element_size == 4:
        return RelativeBlocks(16, 4 if which == "dq" or (which == "fwd" and variant != "more") else 8, 1, together)
    if head_dim > 64:
        block = 32 if which == "fwd" and variant != "more" else 16
        return RelativeBlocks(block, 8, 2 if variant != "more" and major < 10 else 1, apart)
    passes = _RELATIVE.get((major, variant)) or _RELATIVE[major, ""]
    block, num_warps, num_stages = passes.get(which) or passes[""]
    if tile == 16:
        block, num_warps, num_stages = (16, 4, 1) if variant == "more" else (16, 2, 2)
    elif tile < block:
        block, num_stages = tile, 1 if major == 10 else num_stages
    launches = apart if block == 64 or (block == 32 and (major == 8 or variant == "more")) else together
    return RelativeBlocks(block, num_warps, num_stages, launches)


def relative_blocks(which: str, q: torch.Tensor, tile: int, variant: str) -> RelativeBlocks:
    """Of the pass `which` ("fwd", "dkdv", "dq", "tables")."""
    blocks = relative_blocks_of(which, major_of(q.device), q.shape[2], q.element_size(), tile, variant)
    blocks.tile = min(tile, blocks.tile)
    return blocks
