"""Unpacking NVFP4 in one pass over its bytes (see the package for the format).

A program reads some bytes of codes, each with the scale of its group, and writes the two weights of
each as one word: reads and writes are contiguous.
"""

import torch
import triton
import triton.language as tl

from offload.codecs.nvfp4 import FRACTION_BITS, GROUP, LOWEST

_BYTES = 1024  # of codes, of a program


def unpack(codes: torch.Tensor, scales: torch.Tensor, out: torch.Tensor) -> None:
    """Write the weights, on the current stream; nothing is allocated.

    Args:
        codes: uint8 (N / 2,).
        scales: int16 (N / 16,).
        out: int32 of any shape, N / 2 in all: the bits of two weights in bf16 each.
    """
    if not out.numel():
        return
    grid = (triton.cdiv(out.numel(), _BYTES),)
    unpack_pairs[grid](
        codes,
        scales,
        out,
        out.numel(),
        BYTES=_BYTES,
        GROUP_BYTES=GROUP // 2,
        FRACTION_BITS=FRACTION_BITS,
        LOWEST=LOWEST,
    )


@triton.jit
def unpack_pairs(
    codes,
    scales,
    out,
    num_bytes,
    BYTES: tl.constexpr,
    GROUP_BYTES: tl.constexpr,
    FRACTION_BITS: tl.constexpr,
    LOWEST: tl.constexpr,
):
    """Write the words of BYTES bytes."""
    at = tl.program_id(0).to(tl.int64) * BYTES + tl.arange(0, BYTES)
    is_in = at < num_bytes
    pair = tl.load(codes + at, mask=is_in, other=0).to(tl.int32)
    scale = tl.load(scales + at // GROUP_BYTES, mask=is_in, other=0).to(tl.int32) & 0xFFFF
    x = ((scale << (23 - FRACTION_BITS)) + (LOWEST << 23)).to(tl.float32, bitcast=True)
    word = tl.zeros_like(pair)
    for half in tl.static_range(2):
        code = (pair >> (4 * half)) & 0xF
        size = code & 7
        twice = tl.where(size < 2, size, ((4 + 2 * (size & 1)) << (size >> 1)) >> 2)
        exact = (twice.to(tl.float32) * (0.5 * x)).to(tl.int32, bitcast=True)
        bits = (exact + 0x7FFF + ((exact >> 16) & 1)) >> 16  # to bf16, to nearest, ties to even
        word |= (bits | ((code & 8) << 12)) << (16 * half)
    tl.store(out + at, word, mask=is_in)
