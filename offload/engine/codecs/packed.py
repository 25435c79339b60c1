"""bf16 weights in three quarters of their bytes, none of their bits lost.

Of a bf16 weight's 16 bits, sign and mantissa are noise, and the 8 of the exponent are not: trained
weights have nearly all of their exponents within a dozen of each other. So:

    low        uint8 (N,)         sign and 7 bits of mantissa
    codes      uint8 (N/2,)       4 bits for the exponent
    tops       uint8 (N/256,)     the top of the 14 exponents that a block of 256 can tell
    positions  int32 (K,)         the weights that no code tells, ...
    escaped    bf16 (K,)          ... and what they are

A code is 0 for zeros and denormals (exponent 0: low has the rest), 1 to 14 for a block's top
exponent and the 13 below, and 15 for an escape. The top is the largest finite exponent, or, where
that leaves out many, the one that leaves out fewest. A byte of codes holds weight j of a block and
weight j + 128, so that either half of it is written as a run.

The number of bytes is known from the shape, so there is room for K escapes, one in 256 weights
and 64 more, and a tensor with more than that is refused. Unused room repeats weight 0. Found in
normal weights: one in 4800; Laplace: one in 1900; Student's t with 3 degrees: one in 1400; normal
with columns whose scales are log-normal with sigma 1: one in 400.

Rejected: one exponent range for the tensor (blocks of zeros, rows of another scale), Huffman codes
(0.66 of the bytes, but sizes depend on values, and decoding is serial).
"""

from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec

import torch
import torch.nn.functional as F

from offload.engine.codecs.layout import blocks, blocks_of, check_dtype, layout_of
from offload.errors import CodecError
from offload.plan.codec import PACKED_BLOCK, PACKED_FAR, CodecName

_NUM_CODES = 14
_ESCAPE = 15
_FEW = 4  # escapes of a block that is not looked at twice
_HALF = PACKED_BLOCK // 2
_SIGN_AND_MANTISSA = -0x7F81  # 0x807f as an int16
_PIECE = 2**20  # weights: half a dozen temporaries of a few MB


class Bf16Packed:
    """bf16, bit for bit, in 12 bits and a little (see above)."""

    name: CodecName = "bf16_packed"

    def num_bytes(self, shape: torch.Size, dtype: torch.dtype) -> int:
        """Return about 1.53 bytes for each weight."""
        check_dtype(self.name, dtype, (torch.bfloat16,))
        return layout_of(self.name, shape.numel()).num_bytes

    def workspace_bytes(self, shape: torch.Size, dtype: torch.dtype) -> int:
        """Return the temporaries of a piece."""
        return 6 * max(PACKED_BLOCK, min(shape.numel(), _PIECE))

    def encode(self, values: torch.Tensor, encoded: torch.Tensor) -> None:
        """Pack.

        Raises:
            CodecError: More weights than there is room for lie outside of their block's range.
        """
        check_dtype(self.name, values.dtype, (torch.bfloat16,))
        flat = values.detach().reshape(-1).view(torch.int16)
        layout_of(self.name, flat.numel()).split_to_write(encoded)
        low, codes, tops, positions, escaped = split(encoded, flat.numel())
        num_found, room = 0, escaped.numel()
        for part, (rows, columns) in _parts(flat.numel()):
            bits = F.pad(flat[part].view(rows, columns), (0, PACKED_BLOCK - columns))
            low[part] = _low(flat[part])
            block = blocks_of(part, PACKED_BLOCK)
            code, tops[block] = _codes(bits)
            codes.view(-1, _HALF)[block] = code[:, :_HALF] | (code[:, _HALF:] << 4)
            at = (code == _ESCAPE).view(-1).nonzero().view(-1) + part.start
            kept = at[: max(room - num_found, 0)]
            positions[num_found : num_found + kept.numel()] = kept
            num_found += at.numel()
        if num_found > room:
            raise CodecError(
                f"{num_found} of {flat.numel()} weights are too small or too large beside others",
                limit=f"bf16_packed has room for {room} in a tensor of this shape",
                hint='`codec="native"` keeps them in 16 bits',
            )
        if room:
            positions[num_found:] = 0
            escaped.copy_(flat[positions])

    def decode(self, encoded: torch.Tensor, values: torch.Tensor) -> None:
        """Unpack, then write the escaped weights over what their codes gave."""
        flat = values.view(-1).view(torch.int16)
        low, codes, tops, at, bits = split(encoded, flat.numel())
        if flat.is_cuda and _has_triton():
            from offload.engine.codecs.packed_kernel import unpack

            with torch.cuda.device(flat.device):
                unpack(low, codes, tops, at, bits, flat)
            return
        for part, (rows, columns) in _parts(flat.numel()):
            block = blocks_of(part, PACKED_BLOCK)
            exponents = _exponents(codes.view(-1, _HALF)[block], tops[block])
            out = flat[part].view(rows, columns)
            out.copy_(low[part].view(torch.int8).view(rows, columns))  # the sign fills bits 8 to 15
            out.bitwise_and_(_SIGN_AND_MANTISSA)
            out.add_(exponents[:, :columns], alpha=128)
        for start in range(0, at.numel(), _PIECE // 4):
            some = slice(start, start + _PIECE // 4)
            flat.scatter_(0, at[some].long(), bits[some])


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None


def split(encoded: torch.Tensor, num_weights: int) -> tuple[torch.Tensor, ...]:
    """Return the parts of an encoded tensor, each in its dtype."""
    low, codes, tops, positions, escaped = layout_of("bf16_packed", num_weights).split(encoded)
    at = positions.view(torch.int32 if num_weights < PACKED_FAR else torch.int64)
    return low, codes, tops, at, escaped.view(torch.int16)


def _parts(num_weights: int) -> Iterator[tuple[slice, tuple[int, int]]]:
    for start in range(0, num_weights, _PIECE):
        yield from blocks(slice(start, min(start + _PIECE, num_weights)), PACKED_BLOCK)


def _low(bits: torch.Tensor) -> torch.Tensor:
    """Return sign and mantissa in a byte."""
    return ((bits >> 8) & 0x80).bitwise_or_(bits & 0x7F).to(torch.uint8)


def _codes(bits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the codes and the top exponent of each block."""
    exponents = ((bits >> 7) & 0xFF).to(torch.uint8)  # (blocks, PACKED_BLOCK)
    tops = (exponents * (exponents != 0xFF)).amax(1).clamp_(min=_NUM_CODES)
    crowded = ((tops[:, None] - exponents >= _NUM_CODES) & (exponents != 0)).sum(1) > _FEW
    tops[crowded] = _best_tops(exponents[crowded])
    # from 14 up, what is over a top wraps around to 15 or more, and so is an escape as well
    codes = (tops[:, None] - exponents).clamp_(max=_NUM_CODES).add_(1)
    return codes.mul_(exponents != 0), tops


def _best_tops(exponents: torch.Tensor) -> torch.Tensor:
    """Return the top of the 14 exponents that hold most of each block."""
    ordered = exponents.int().sort(1).values
    first = torch.searchsorted(ordered, (ordered - _NUM_CODES + 1).clamp_(min=1))
    in_reach = torch.arange(1, PACKED_BLOCK + 1, device=first.device) - first
    best = in_reach.masked_fill_(ordered == 0xFF, 0).argmax(1, keepdim=True)
    return ordered.gather(1, best)[:, 0].clamp_(min=_NUM_CODES).to(torch.uint8)


def _exponents(codes: torch.Tensor, tops: torch.Tensor) -> torch.Tensor:
    """Return the exponents that codes tell: 0 for code 0, and of no meaning for an escape."""
    both = codes.new_empty((len(codes), 2, _HALF))
    torch.bitwise_and(codes, 0xF, out=both[:, 0])
    torch.bitwise_right_shift(codes, 4, out=both[:, 1])
    both = both.view(-1, PACKED_BLOCK)
    return ((tops + 1)[:, None] - both).mul_(both != 0)
