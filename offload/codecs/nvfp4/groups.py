"""Encoding and decoding groups of NVFP4 (see the package for the format)."""

from collections.abc import Sequence
from functools import cache

from offload.codecs._pieces import HOST_PIECE, blocks_of, has_triton, pieces
from offload.codecs.mxfp4.groups import E2M1
from offload.codecs.nvfp4 import FRACTION_BITS, GROUP, LOWEST
from offload.errors import CodecError
from offload.tensors import Tensor, device

_MAGNITUDE = 0x7FFF  # of the bits of a bf16 number
_FRACTION, _BINADE = 0x7F, 7  # of these bits; what they are shifted by for an exponent


def encode(values: Tensor, parts: Sequence[Tensor]) -> None:
    """Write the weights (..., K) as codes and scales of rows.

    Raises:
        CodecError: A weight would not come back to the bit, or rows are not of whole groups.
    """
    import torch

    if not values.ndim or values.shape[-1] % GROUP:
        raise _unfit(f"weights of {tuple(values.shape)} are not in groups of {GROUP} of a row")
    flat, codes, scales = values.reshape(-1), parts[0], parts[1].view(torch.int16)
    num_unfit = 0
    for piece in pieces(flat.numel(), flat.device, most=HOST_PIECE):
        bits = flat[piece].view(torch.int16).view(-1, GROUP)
        own = codes[blocks_of(piece, 2)], scales[blocks_of(piece, GROUP)]
        _encode_groups(bits, *own)
        num_unfit += int((_decoded(*own).view(torch.int16) != bits).sum())
    if num_unfit:
        raise _unfit(f"{num_unfit} of {values.numel()} weights are no numbers of NVFP4")


def _unfit(what: str) -> CodecError:
    return CodecError(
        what,
        limit="nvfp4 keeps weights that were published in it, to the bit",
        hint='`codec="native"` keeps any weights as they are',
    )


def _encode_groups(bits: Tensor, codes: Tensor, scales: Tensor) -> None:
    """Write codes and scales of groups (G, 16), which are right if there are any."""
    import torch

    magnitude = bits & _MAGNITUDE
    is_zero = magnitude == 0
    top = magnitude.amax(1)
    below = top[:, None] - magnitude
    rest = (below & _FRACTION).masked_fill_(is_zero, 0)
    place = ((top & _FRACTION).int() << _BINADE) + rest.amax(1)
    found = _table(bits.device).index_select(0, place)
    scale = ((top.int() >> _BINADE) << FRACTION_BITS) + (found >> 1)
    scales.copy_(scale.clamp_(0, 2**16 - 1))
    code = (6 + (found & 1).to(torch.int16))[:, None] - 2 * (below >> _BINADE)
    code.sub_(rest.clamp_(max=1)).clamp_(1, 7).masked_fill_(is_zero, 0)
    code |= (bits >> 12) & 8
    codes.copy_((code[:, ::2] | (code[:, 1::2] << 4)).view(-1))


@cache
def _table(device: device) -> Tensor:
    """Return what the largest weight of a group and the other fraction say, int32 (128 * 128,).

    By the fraction of the largest, and the distance of the other below it (0 if there is none), in
    bf16's bits: twice the scale, less the largest's exponent, plus 1 if the largest is 6, not 4.
    Distances from 6 to 4 are 64 to 86, those from 4 to 3 are 42 to 64, and no fraction has both.
    """
    import torch

    fractions = torch.arange(2**FRACTION_BITS, dtype=torch.int32)
    x = 1 + fractions / 2**FRACTION_BITS
    scale = ((127 - LOWEST) << FRACTION_BITS) + fractions
    table = torch.full((128 * 128,), -(2**30), dtype=torch.int32)
    for is_six, (largest, other) in enumerate(((4, 3), (6, 4))):
        top, below = ((c * x).bfloat16().view(torch.int16).int() for c in (largest, other))
        found = 2 * (scale - ((top >> _BINADE) << FRACTION_BITS)) + is_six
        place = (top & _FRACTION) << _BINADE
        if not is_six:  # alone, any weight is 4, with a scale of its own fraction
            table[place[::8].long()] = found[::8]
        table[(place + top - below).long()] = found
    return table.to(device)


def decode(parts: Sequence[Tensor], values: Tensor) -> None:
    """Look codes up, then scale and round once; on a GPU in one kernel."""
    import torch

    codes, scales = parts[0], parts[1].view(torch.int16)
    if values.is_cuda and has_triton():
        from offload.codecs.nvfp4.kernel import unpack

        with torch.cuda.device(values.device):
            unpack(codes, scales, values.view(torch.int32))
        return
    flat = values.view(-1)
    for piece in pieces(flat.numel(), flat.device, most=HOST_PIECE):
        own = codes[blocks_of(piece, 2)], scales[blocks_of(piece, GROUP)]
        flat[piece].view(-1, GROUP).copy_(_decoded(*own))


def _decoded(codes: Tensor, scales: Tensor) -> Tensor:
    """Return the weights of groups, bf16 (G, 16)."""
    import torch

    numbers = torch.tensor(E2M1, device=codes.device)
    pairs = torch.stack((numbers.repeat(16), numbers.repeat_interleave(16)), dim=1)
    found = pairs.index_select(0, codes.int()).view(-1, GROUP)
    bits = ((scales.int() & 0xFFFF) << (23 - FRACTION_BITS)) + (LOWEST << 23)
    return found.mul_(bits.view(torch.float32)[:, None]).bfloat16()
