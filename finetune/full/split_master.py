"""An fp32 master weight as the weight that computes in 16 bits, and what makes it up.

A bf16 weight has the sign, the exponent and the first 7 bits of the mantissa of an fp32 number. So
a master need not be kept in addition to the bf16 weights that are streamed: 16 more bits make up
the rest.

The high half is the master rounded to the nearest bf16, ties away from zero; the low half is the
master's own last 16 bits. Read as a signed number they are what the rounding took away, so adding
the two undoes it: bit by bit, for each of the 2^32 patterns. Rounding ties to even, as torch does,
cannot be undone: of a tie two masters have the same halves. Truncation can be undone, but it makes
every weight that computes too small.

What is not finite. Masters beyond the largest bf16 number have an infinite high half, as with any
rounding. Of a NaN the high half can be infinite (its mantissa is only in the last 16 bits) or a
zero (all of its first mantissa bits are ones, and rounding carries into the sign). The master is
the same NaN all the same, but a layer may compute without it. So a step whose loss or gradients
are not finite must be refused before its update.

A float16 weight is no half of an fp32 number: it has an exponent of its own, and below 6e-5 fewer
bits. It is the master rounded to the nearest, ties to even, as torch rounds. With it are kept the
32 bits in which the master differs from that, zeros for a weight that was not updated yet.
"""

import torch

_HALF = 1 << 15


def low_type(dtype: torch.dtype) -> torch.dtype | None:
    """Return the type of what makes up the master of a weight; None if it is its own master."""
    return {torch.bfloat16: torch.int16, torch.float16: torch.int32}.get(dtype)


def split_into(master: torch.Tensor, high: torch.Tensor, low: torch.Tensor) -> None:
    """Write an fp32 master (any shape) into two parts of the same shape: a weight and its rest."""
    bits = master.view(torch.int32)
    if high.dtype is torch.float16:
        high.copy_(master)
        torch.bitwise_xor(bits, high.float().view(torch.int32), out=low)
        return
    low.copy_(bits)  # the last 16 bits: conversions of integers wrap
    high.view(torch.int16).copy_((bits + _HALF).bitwise_right_shift_(16))


def joined(high: torch.Tensor, low: torch.Tensor) -> torch.Tensor:
    """Return the fp32 master of a weight and its rest, of the same shape."""
    if high.dtype is torch.float16:
        return high.float().view(torch.int32).bitwise_xor_(low).view(torch.float32)
    bits = high.view(torch.int16).to(torch.int32)
    return bits.bitwise_left_shift_(16).add_(low).view(torch.float32)
