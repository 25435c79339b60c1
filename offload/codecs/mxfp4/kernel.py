"""Unpacking MXFP4 in one pass over its bytes (see the package for the format).

A program reads the exponents and the codes of one group in some columns, and writes both halves of
the group's rows: rows are contiguous, so all reads and writes are.
"""

import torch
import triton
import triton.language as tl

from offload.codecs.mxfp4 import HALF

_COLUMNS = 128  # of a program


def unpack(codes: torch.Tensor, exponents: torch.Tensor, out: torch.Tensor) -> None:
    """Write the weights, on the current stream; nothing is allocated.

    Args:
        codes: uint8 (groups, 16, N).
        exponents: uint8 (groups, N).
        out: int16 (..., N), groups * 32 rows: the bits of bf16.
    """
    num_groups, num_columns = exponents.shape
    if not out.numel():
        return
    grid = (num_groups, triton.cdiv(num_columns, _COLUMNS))
    unpack_groups[grid](codes, exponents, out, num_columns, HALF=HALF, COLUMNS=_COLUMNS)


@triton.jit
def unpack_groups(codes, exponents, out, num_columns, HALF: tl.constexpr, COLUMNS: tl.constexpr):
    """Write COLUMNS columns of a group of 2 * HALF rows."""
    group = tl.program_id(0).to(tl.int64)
    row = tl.arange(0, HALF)[:, None]
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    is_column = column < num_columns
    exponent = tl.load(exponents + group * num_columns + column, mask=is_column, other=0)
    start = exponent.to(tl.int32) << 7
    at = (group * HALF + row) * num_columns + column
    pair = tl.load(codes + at, mask=is_column, other=0).to(tl.int32)
    for half in tl.static_range(2):
        code = (pair >> (4 * half)) & 0xF
        size = code & 7
        bits = start + tl.where(size == 1, -128, (size << 6) - 128)
        bits = tl.where(size == 0, 0, bits) | ((code & 8) << 12)
        place = (group * (2 * HALF) + half * HALF + row) * num_columns + column
        tl.store(out + place, bits.to(tl.int16), mask=is_column)
