"""Weights in bitsandbytes' nf4 with double quantisation, byte for byte.

4 bits in blocks of 64; their scales, minus their mean, in 8 bits in blocks of 256. The bytes are
those of `quantize_4bit(compress_statistics=True, quant_type="nf4")` of the whole tensor on the same
device. Blocks are independent, so weights are quantised piece by piece; only the scales (half a bit
per weight) are held until their overall mean is known.

Error of a weight: at most 0.152 of its block's largest weight (half of the widest gap between
the 16 values, -1 and -0.696), plus the error of the scale (1/125 of the largest difference
between a scale and the mean among 256 scales: half of the dynamic map's widest step is 1/142,
and the search on a CPU exceeds it), plus the rounding of the weights' dtype.
Source: arXiv:2305.14314, section 3 and appendix E; bitsandbytes 0.50 functional.py.
"""

from collections.abc import Sequence

from offload.codecs._pieces import blocks_of, check_stream, finite, pieces
from offload.plan.facts.codec import WORKSPACE_BYTES, Codec
from offload.tensors import Tensor

BLOCK, NESTED_BLOCK = 64, 256  # weights that share a scale, scales that share two float32
MAP_BYTES = 4 * 256  # the values that 8 bits encode, in float32


def _sizes(num_weights: int, _: int) -> tuple[int, ...]:
    num_scales = -(-num_weights // BLOCK)
    num_nested = -(-num_scales // NESTED_BLOCK)
    return -(-num_weights // 2), num_scales, 4 * num_nested, MAP_BYTES, 4


def _write(values: Tensor, parts: Sequence[Tensor]) -> None:
    """Quantise weights, then their scales, on a device's default stream."""
    import torch
    from bitsandbytes.functional import create_dynamic_map

    flat = finite("nf4", values)
    packed, quants, nested, table, offset = parts
    code = table.view(torch.float32)
    code.copy_(create_dynamic_map())
    absmax = flat.new_empty(quants.numel(), dtype=torch.float32)
    check_stream(flat)
    for piece in pieces(flat.numel(), flat.device):
        found = _quantize(flat[piece])
        packed[blocks_of(piece, 2)] = found[0]
        absmax[blocks_of(piece, BLOCK)] = found[1]
    mean = absmax.mean() if flat.numel() else absmax.new_zeros(())
    offset.view(torch.float32).copy_(mean)
    if flat.numel():
        found = torch.ops.bitsandbytes.quantize_blockwise.default(
            absmax.sub_(mean), code, NESTED_BLOCK
        )
        quants.copy_(found[0])
        nested.view(torch.float32).copy_(found[1])


def _read(parts: Sequence[Tensor], values: Tensor) -> None:
    """Decode a piece's scales, then its weights."""
    import bitsandbytes  # noqa: F401  (registers its operators)
    import torch

    packed, quants, nested, table, offset = parts
    flat = values.view(-1)
    code, mean = table.view(torch.float32), offset.view(torch.float32)
    for piece in pieces(flat.numel(), flat.device):
        scales = blocks_of(piece, BLOCK)
        absmax = torch.ops.bitsandbytes.dequantize_blockwise.default(
            quants[scales],
            nested.view(torch.float32)[blocks_of(scales, NESTED_BLOCK)],
            code,
            NESTED_BLOCK,
            torch.float32,
        )
        _decode_piece(packed[blocks_of(piece, 2)], absmax.add_(mean), flat[piece])
        del absmax  # so that two are never allocated at once


def _quantize(weights: Tensor) -> tuple[Tensor, Tensor]:
    """Return bitsandbytes' result for weights (N,): pairs of codes, and the scales of blocks.

    On a CPU bitsandbytes searches the 16 values for each weight. Counting the midpoints below, for
    all weights at once, is three times faster. A partial block is left to bitsandbytes.
    """
    import torch
    from bitsandbytes.functional import get_4bit_type

    if weights.device.type != "cpu" or weights.numel() % BLOCK:
        operator = torch.ops.bitsandbytes.quantize_4bit
        packed, absmax = operator.default(weights, BLOCK, "nf4", torch.uint8)
        return packed.view(-1), absmax
    in_blocks = weights.view(-1, BLOCK).float()
    absmax = in_blocks.abs().amax(1)
    scaled = (in_blocks * (1.0 / absmax.clamp(min=1e-38))[:, None]).clamp_(-1, 1).view(-1)
    values = get_4bit_type("nf4", device="cpu")
    codes = torch.zeros(scaled.shape, dtype=torch.uint8)
    is_above = torch.empty(scaled.shape, dtype=torch.bool)
    for midpoint in ((values[:-1] + values[1:]) / 2).tolist():
        codes += torch.gt(scaled, midpoint, out=is_above).view(torch.uint8)
    return codes[::2] << 4 | codes[1::2], absmax


def _decode_piece(packed: Tensor, absmax: Tensor, out: Tensor) -> None:
    import torch

    operator, given = torch.ops.bitsandbytes.dequantize_4bit, (packed, absmax, BLOCK, "nf4")
    if out.device.type == "cpu":  # no kernel there writes in place, or is fast for odd sizes
        even = (out.numel() + 1) // 2 * 2
        out.copy_(operator.default(*given, (even,), out.dtype).view(-1)[: out.numel()])
    else:
        operator.out(*given, out.shape, out.dtype, out=out)


EXTENSION = Codec(
    doc="takes about 4 bits (bitsandbytes)",
    sizes=_sizes,
    write=_write,
    read=_read,
    rounding=9.2e-2,
    workspace_bytes=WORKSPACE_BYTES,
    is_suggested=True,
    option=("4-bit weights", "arXiv:2305.14314"),
    aliases=(
        "load_in_4bit",
        "quantize_base",
        "qlora",
        "quantization_bit",
        "quantization_config",
        "bnb_4bit_quant_type",
        "bnb_4bit_use_double_quant",
    ),
)
