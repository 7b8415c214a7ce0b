"""Arithmetic of sizes on the host, seven times a layer: Triton's own functions, made for kernels too, take 3 us."""


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()
