"""Unpacking integers of 4 bits in one pass over their bytes (see the package for the format).

A program reads some bytes of codes, each with the scale and the note of its group, and writes the
two weights of each as one word: reads and writes are contiguous.
"""

import torch
import triton
import triton.language as tl

from offload.codecs.int4 import GROUP, IS_HALF

_BYTES = 1024  # of codes, of a program


def unpack(
    codes: torch.Tensor, scales: torch.Tensor, notes: torch.Tensor, out: torch.Tensor
) -> None:
    """Write the weights, on the current stream; nothing is allocated.

    Args:
        codes: uint8 (N / 2,).
        scales: int16 (N / 32,).
        notes: uint8 (N / 32,).
        out: int32 of any shape, N / 2 in all: the bits of two weights in bf16 each.
    """
    if not out.numel():
        return
    grid = (triton.cdiv(out.numel(), _BYTES),)
    unpack_pairs[grid](
        codes,
        scales,
        notes,
        out,
        out.numel(),
        BYTES=_BYTES,
        GROUP_BYTES=GROUP // 2,
        IS_HALF=IS_HALF,
    )


@triton.jit
def unpack_pairs(
    codes,
    scales,
    notes,
    out,
    num_bytes,
    BYTES: tl.constexpr,
    GROUP_BYTES: tl.constexpr,
    IS_HALF: tl.constexpr,
):
    """Write the words of BYTES bytes."""
    at = tl.program_id(0).to(tl.int64) * BYTES + tl.arange(0, BYTES)
    is_in = at < num_bytes
    pair = tl.load(codes + at, mask=is_in, other=0).to(tl.int32)
    bits = tl.load(scales + at // GROUP_BYTES, mask=is_in, other=0)
    note = tl.load(notes + at // GROUP_BYTES, mask=is_in, other=0).to(tl.int32)
    of_half = bits.to(tl.float16, bitcast=True).to(tl.float32)
    of_bf16 = (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    scale = tl.where(note >= IS_HALF, of_half, of_bf16)
    word = tl.zeros_like(pair)
    for half in tl.static_range(2):
        integer = ((pair >> (4 * half)) & 0xF) - (note & (IS_HALF - 1))
        product = integer.to(tl.float32) * scale
        product = tl.where(note >= IS_HALF, product.to(tl.float16).to(tl.float32), product)
        exact = product.to(tl.int32, bitcast=True)
        rounded = (exact + 0x7FFF + ((exact >> 16) & 1)) >> 16  # to bf16, to nearest, ties to even
        word |= (rounded & 0xFFFF) << (16 * half)
    tl.store(out + at, word, mask=is_in)
