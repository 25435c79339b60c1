"""Weights as e4m3 in flat blocks of 256, each scaled by a power of two, which takes one byte.

A floating point type has the same relative error over its whole range. So a scale only has to
bring the block's largest weight below e4m3's maximum, 448: 18 binades of the block then fit,
and neither a finer scale nor a smaller block would be more accurate. Scaling by a power of two
is exact both ways, and every decoded weight is a bf16 number, so there is only one rounding.

Error: at most 2**-4 of the weight (half a unit of 4 significant bits), or 2**-17 of the
block's largest weight if that is more: below 2**-6 of the scale e4m3 has a fixed step of
2**-9, and the block's largest weight is over 224 scales. In fp16, values below its normal
numbers are rounded once more, by 2**-25. No scale is below 2**-126, which leaves 2**-136.
Source: OCP 8-bit Floating Point Specification 1.0, table 1.
"""

from collections.abc import Sequence

from offload.codecs._pieces import blocks, blocks_of, finite, pieces
from offload.plan.facts.codec import WORKSPACE_BYTES, Codec
from offload.tensors import Tensor

BLOCK = 256
_E4M3_MAX = 448.0
_BIAS = 127  # of the scale's exponent, as float32 has it


def _write(values: Tensor, parts: Sequence[Tensor]) -> None:
    """Scale and round."""
    import torch

    flat = finite("fp8", values)
    quants, exponents = parts
    # what e4m3 rounds up to would be infinite: the largest number of 4 bits in the dtype
    largest = 1.875 * 2.0 ** (15 if flat.dtype is torch.float16 else 127)
    for piece in pieces(flat.numel(), flat.device):
        for part, shape in blocks(piece, BLOCK):
            weights = flat[part].view(shape).float()
            mantissa, exponent = torch.frexp(weights.abs().amax(1))
            exponent += (mantissa > _E4M3_MAX / 512).int() - 9  # the largest is <= 448 scales
            exponent.clamp_(1 - _BIAS, _BIAS)
            exponents[blocks_of(part, BLOCK)] = (exponent + _BIAS).to(torch.uint8)
            scaled = weights.clamp(-largest, largest).mul_(_power(_BIAS - exponent)[:, None])
            quants[part].view(torch.float8_e4m3fn).copy_(scaled.view(-1))


def _read(parts: Sequence[Tensor], values: Tensor) -> None:
    """Widen, then scale in place."""
    quants, exponents = parts
    flat = values.view(-1)
    for piece in pieces(flat.numel(), flat.device):
        for part, shape in blocks(piece, BLOCK):
            _widen(quants[part], flat[part])
            scales = _power(exponents[blocks_of(part, BLOCK)])
            flat[part].view(shape).mul_(scales[:, None])


def _widen(quants: Tensor, out: Tensor) -> None:
    """Write e4m3 in a wider dtype."""
    import torch

    if out.device.type == "cpu":  # elementwise conversion takes six times as long there
        table = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).to(out.dtype)
        torch.index_select(table, 0, quants.int(), out=out)
    else:
        out.copy_(quants.view(torch.float8_e4m3fn))


def _power(biased: Tensor) -> Tensor:
    """Return 2 ** (biased - 127) in float32, by its bits."""
    import torch

    return biased.to(torch.int32).bitwise_left_shift_(23).view(torch.float32)


EXTENSION = Codec(
    doc="is e4m3 with a scale per block, about 8 bits",
    sizes=lambda num_weights, _: (num_weights, -(-num_weights // BLOCK)),
    write=_write,
    read=_read,
    rounding=2.7e-2,
    workspace_bytes=WORKSPACE_BYTES,
    option=("fp8 weights", "arXiv:2209.05433"),
    aliases=("load_in_fp8",),
)
