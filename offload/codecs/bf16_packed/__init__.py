"""bf16 weights in three quarters of their bytes, without loss.

Of a bf16 weight's 16 bits, sign and mantissa are noise. The 8 bits of the exponent are not: nearly
all exponents of trained weights are within a dozen of each other. So:

    low        uint8 (N,)         sign and 7 bits of mantissa
    codes      uint8 (N/2,)       4 bits for the exponent
    tops       uint8 (N/256,)     the top of the 14 exponents that a block of 256 can encode
    positions  int32 (K,)         the weights that no code represents, ...
    escaped    bf16 (K,)          ... and their values

A code is 0 for zeros and denormals (exponent 0: low has the rest), 1 to 14 for a block's top
exponent and the 13 below it, and 15 for an escape. The top is the largest finite exponent, or, if
that leaves out many weights, the one that leaves out fewest. A byte of codes holds weights j and
j + 128 of a block, so that each half of the block is written contiguously.

The size must follow from the shape, so there is room for K escapes: one in 256 weights, plus 64. A
tensor with more is refused. Unused entries repeat weight 0. Measured escape rates: normal weights,
one in 4800; Laplace, one in 1900; Student's t with 3 degrees of freedom, one in 1400; normal with
columns whose scales are log-normal with sigma 1, one in 400.

Rejected: one exponent range per tensor (blocks of zeros, rows of another scale), Huffman codes
(0.66 of the bytes, but sizes depend on values, and decoding is serial).
"""

from collections.abc import Iterator, Sequence

from offload.codecs._pieces import blocks, blocks_of, has_triton
from offload.errors import CodecError
from offload.plan.facts.codec import WORKSPACE_BYTES, Codec
from offload.tensors import Tensor

BLOCK = 256  # weights that share a range of exponents, of one byte
ESCAPE_EVERY, MIN_ESCAPES = 256, 64  # room for one in so many weights, and for a few in any tensor
FAR = 2**31  # number of weights from which a position takes 8 bytes instead of 4
_NUM_CODES = 14
_ESCAPE = 15
_FEW = 4  # escapes in a block for which no better top is searched
_HALF = BLOCK // 2
_SIGN_AND_MANTISSA = -0x7F81  # 0x807f as an int16
_PIECE = 2**20  # weights: half a dozen temporaries of a few MB


def _sizes(num_weights: int, _: int) -> tuple[int, ...]:
    num_blocks = -(-num_weights // BLOCK)
    room = num_weights and MIN_ESCAPES + num_weights // ESCAPE_EVERY
    position_bytes = 4 if num_weights < FAR else 8
    return num_weights, BLOCK // 2 * num_blocks, num_blocks, position_bytes * room, 2 * room


def _write(values: Tensor, parts: Sequence[Tensor]) -> None:
    """Pack.

    Raises:
        CodecError: More weights are outside of their block's range than there is room for.
    """
    import torch

    flat = values.reshape(-1).view(torch.int16)
    low, codes, tops, positions, escaped = typed(parts, flat.numel())
    num_found, room = 0, escaped.numel()
    for part, (rows, columns) in _parts(flat.numel()):
        bits = torch.nn.functional.pad(flat[part].view(rows, columns), (0, BLOCK - columns))
        sign = (flat[part] >> 8) & 0x80
        low[part] = sign.bitwise_or_(flat[part] & 0x7F).to(torch.uint8)
        block = blocks_of(part, BLOCK)
        code, tops[block] = _codes(bits)
        codes.view(-1, _HALF)[block] = code[:, :_HALF] | (code[:, _HALF:] << 4)
        at = (code == _ESCAPE).view(-1).nonzero().view(-1) + part.start
        kept = at[: max(room - num_found, 0)]
        positions[num_found : num_found + kept.numel()] = kept
        num_found += at.numel()
    if num_found > room:
        raise CodecError(
            f"{num_found} of {flat.numel()} weights are too small or too large next to others",
            limit=f"bf16_packed has room for {room} in a tensor of this shape",
            hint='`codec="native"` keeps them in 16 bits',
        )
    if room:
        positions[num_found:] = 0
        escaped.copy_(flat[positions])


def _read(parts: Sequence[Tensor], values: Tensor) -> None:
    """Unpack, then overwrite the escaped weights."""
    import torch

    flat = values.view(-1).view(torch.int16)
    low, codes, tops, at, bits = typed(parts, flat.numel())
    if flat.is_cuda and has_triton():
        from offload.codecs.bf16_packed.kernel import unpack

        with torch.cuda.device(flat.device):
            unpack(low, codes, tops, at, bits, flat)
        return
    for part, (rows, columns) in _parts(flat.numel()):
        block = blocks_of(part, BLOCK)
        exponents = _exponents(codes.view(-1, _HALF)[block], tops[block])
        out = flat[part].view(rows, columns)
        out.copy_(low[part].view(torch.int8).view(rows, columns))  # the sign fills bits 8 to 15
        out.bitwise_and_(_SIGN_AND_MANTISSA)
        out.add_(exponents[:, :columns], alpha=128)
    for start in range(0, at.numel(), _PIECE // 4):
        some = slice(start, start + _PIECE // 4)
        flat.scatter_(0, at[some].long(), bits[some])


def typed(parts: Sequence[Tensor], num_weights: int) -> tuple[Tensor, ...]:
    """Return the parts of an encoded tensor, each in its dtype."""
    import torch

    low, codes, tops, positions, escaped = parts
    at = positions.view(torch.int32 if num_weights < FAR else torch.int64)
    return low, codes, tops, at, escaped.view(torch.int16)


def _parts(num_weights: int) -> Iterator[tuple[slice, tuple[int, int]]]:
    for start in range(0, num_weights, _PIECE):
        yield from blocks(slice(start, min(start + _PIECE, num_weights)), BLOCK)


def _codes(bits: Tensor) -> tuple[Tensor, Tensor]:
    """Return the codes and the top exponent of each block."""
    exponents = ((bits >> 7) & 0xFF).byte()  # (blocks, BLOCK)
    tops = (exponents * (exponents != 0xFF)).amax(1).clamp_(min=_NUM_CODES)
    crowded = ((tops[:, None] - exponents >= _NUM_CODES) & (exponents != 0)).sum(1) > _FEW
    tops[crowded] = _best_tops(exponents[crowded])
    # from 14 up, an exponent above the top wraps around to 15 or more: also an escape
    codes = (tops[:, None] - exponents).clamp_(max=_NUM_CODES).add_(1)
    return codes.mul_(exponents != 0), tops


def _best_tops(exponents: Tensor) -> Tensor:
    """Return the top of the 14 exponents that cover most of each block."""
    import torch

    ordered = exponents.int().sort(1).values
    first = torch.searchsorted(ordered, (ordered - _NUM_CODES + 1).clamp_(min=1))
    in_reach = torch.arange(1, BLOCK + 1, device=first.device) - first
    best = in_reach.masked_fill_(ordered == 0xFF, 0).argmax(1, keepdim=True)
    return ordered.gather(1, best)[:, 0].clamp_(min=_NUM_CODES).to(torch.uint8)


def _exponents(codes: Tensor, tops: Tensor) -> Tensor:
    """Return the exponents that codes represent: 0 for code 0, undefined for an escape."""
    import torch

    both = codes.new_empty((len(codes), 2, _HALF))
    torch.bitwise_and(codes, 0xF, out=both[:, 0])
    torch.bitwise_right_shift(codes, 4, out=both[:, 1])
    both = both.view(-1, BLOCK)
    return ((tops + 1)[:, None] - both).mul_(both != 0)


EXTENSION = Codec(
    doc="packs bfloat16 into 3/4 of its bytes, without loss",
    sizes=_sizes,
    write=_write,
    read=_read,
    dtypes=("bfloat16",),
    is_exact=True,
    workspace_bytes=WORKSPACE_BYTES,
    is_automatic=True,
)
