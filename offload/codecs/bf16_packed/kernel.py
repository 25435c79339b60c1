"""Unpacking bf16 in one pass over its bytes (see the package for the format).

With torch's operators it takes ten passes. A program here reads a few blocks' codes once and writes
both halves of each block; a second launch on the same stream writes the escaped weights.
"""

import torch
import triton
import triton.language as tl

from offload.codecs.bf16_packed import BLOCK

_ROWS = 8  # blocks of a program
_ESCAPES = 1024  # of a program


def unpack(
    low: torch.Tensor,
    codes: torch.Tensor,
    tops: torch.Tensor,
    positions: torch.Tensor,
    escaped: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """Write the weights, on the current stream; nothing is allocated.

    Args:
        low: uint8 (N,).
        codes: uint8 (ceil(N / 256) * 128,).
        tops: uint8 (ceil(N / 256),).
        positions: int32 or int64 (K,).
        escaped: int16 (K,).
        out: int16 (N,).
    """
    if not out.numel():
        return
    num_blocks = tops.numel()
    unpack_blocks[(triton.cdiv(num_blocks, _ROWS),)](
        low, codes, tops, out, out.numel(), num_blocks, ROWS=_ROWS, HALF=BLOCK // 2
    )
    room = positions.numel()
    write_escaped[(triton.cdiv(room, _ESCAPES),)](positions, escaped, out, room, SIZE=_ESCAPES)


@triton.jit
def unpack_blocks(
    low, codes, tops, out, num_weights, num_blocks, ROWS: tl.constexpr, HALF: tl.constexpr
):
    """Write ROWS blocks; the values written for escapes are undefined."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, HALF)[None, :]
    code_pair = tl.load(codes + row * HALF + column, mask=row < num_blocks, other=0).to(tl.int32)
    top = tl.load(tops + row, mask=row < num_blocks, other=0).to(tl.int32)
    for half in tl.static_range(2):
        code = (code_pair >> (4 * half)) & 0xF
        exponent = tl.where(code == 0, 0, top + 1 - code)
        position = row * (2 * HALF) + half * HALF + column
        is_weight = position < num_weights
        byte = tl.load(low + position, mask=is_weight, other=0).to(tl.int32)
        bits = ((byte & 0x80) << 8) | ((exponent & 0xFF) << 7) | (byte & 0x7F)
        tl.store(out + position, bits.to(tl.int16), mask=is_weight)


@triton.jit
def write_escaped(positions, escaped, out, room, SIZE: tl.constexpr):
    """Write the weights that no code represents; unused entries repeat weight 0."""
    index = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    position = tl.load(positions + index, mask=index < room, other=0).to(tl.int64)
    tl.store(
        out + position, tl.load(escaped + index, mask=index < room, other=0), mask=index < room
    )
