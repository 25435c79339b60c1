"""Weights in bitsandbytes' nf4 with double quantisation, byte for byte."""

from collections.abc import Sequence

import torch

from offload.engine.codecs.int8 import check_stream
from offload.engine.codecs.layout import (
    InParts,
    blocks_of,
    check_finite,
    pieces,
)
from offload.plan.facts.codec import NF4_BLOCK, NF4_NESTED_BLOCK, CodecName


class Nf4(InParts):
    """4 bits in blocks of 64; their scales, minus their mean, in 8 bits in blocks of 256.

    The bytes are those of `quantize_4bit(compress_statistics=True, quant_type="nf4")` of the whole
    tensor on the same device. Blocks are independent, so weights are quantised piece by piece;
    only the scales (half a bit per weight) are held until their overall mean is known.

    Error of a weight: at most 0.152 of its block's largest weight (half of the widest gap between
    the 16 values, -1 and -0.696), plus the error of the scale (1/125 of the largest difference
    between a scale and the mean among 256 scales: half of the dynamic map's widest step is 1/142,
    and the search on a CPU exceeds it), plus the rounding of the weights' dtype.
    Source: arXiv:2305.14314, section 3 and appendix E; bitsandbytes 0.50 functional.py.
    """

    name: CodecName = "nf4"

    def write(self, flat: torch.Tensor, parts: Sequence[torch.Tensor]) -> None:
        """Quantise weights, then their scales, on a device's default stream.

        Raises:
            CodecError: Some weights are not finite.
        """
        from bitsandbytes.functional import create_dynamic_map

        check_finite(self.name, flat)
        packed, quants, nested, table, offset = parts
        code = table.view(torch.float32)
        code.copy_(create_dynamic_map())
        absmax = flat.new_empty(quants.numel(), dtype=torch.float32)
        check_stream(flat)
        for piece in pieces(flat.numel(), flat.device):
            found = _quantize(flat[piece])
            packed[blocks_of(piece, 2)] = found[0]
            absmax[blocks_of(piece, NF4_BLOCK)] = found[1]
        mean = absmax.mean() if flat.numel() else absmax.new_zeros(())
        offset.view(torch.float32).copy_(mean)
        if flat.numel():
            found = torch.ops.bitsandbytes.quantize_blockwise.default(
                absmax.sub_(mean), code, NF4_NESTED_BLOCK
            )
            quants.copy_(found[0])
            nested.view(torch.float32).copy_(found[1])

    def read(self, parts: Sequence[torch.Tensor], flat: torch.Tensor) -> None:
        """Decode a piece's scales, then its weights."""
        import bitsandbytes  # noqa: F401  (registers its operators)

        packed, quants, nested, table, offset = parts
        code, mean = table.view(torch.float32), offset.view(torch.float32)
        for piece in pieces(flat.numel(), flat.device):
            scales = blocks_of(piece, NF4_BLOCK)
            absmax = torch.ops.bitsandbytes.dequantize_blockwise.default(
                quants[scales],
                nested.view(torch.float32)[blocks_of(scales, NF4_NESTED_BLOCK)],
                code,
                NF4_NESTED_BLOCK,
                torch.float32,
            )
            _decode_piece(packed[blocks_of(piece, 2)], absmax.add_(mean), flat[piece])
            del absmax  # so that two are never allocated at once


def _quantize(weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return bitsandbytes' result for weights (N,): pairs of codes, and the scales of blocks.

    On a CPU bitsandbytes searches the 16 values for each weight. Counting the midpoints below, for
    all weights at once, is three times faster. A partial block is left to bitsandbytes.
    """
    from bitsandbytes.functional import get_4bit_type

    if weights.device.type != "cpu" or weights.numel() % NF4_BLOCK:
        operator = torch.ops.bitsandbytes.quantize_4bit
        packed, absmax = operator.default(weights, NF4_BLOCK, "nf4", torch.uint8)
        return packed.view(-1), absmax
    in_blocks = weights.view(-1, NF4_BLOCK).float()
    absmax = in_blocks.abs().amax(1)
    scaled = (in_blocks * (1.0 / absmax.clamp(min=1e-38))[:, None]).clamp_(-1, 1).view(-1)
    values = get_4bit_type("nf4", device="cpu")
    codes = torch.zeros(scaled.shape, dtype=torch.uint8)
    is_above = torch.empty(scaled.shape, dtype=torch.bool)
    for midpoint in ((values[:-1] + values[1:]) / 2).tolist():
        codes += torch.gt(scaled, midpoint, out=is_above).view(torch.uint8)
    return codes[::2] << 4 | codes[1::2], absmax


def _decode_piece(packed: torch.Tensor, absmax: torch.Tensor, out: torch.Tensor) -> None:
    operator, given = torch.ops.bitsandbytes.dequantize_4bit, (packed, absmax, NF4_BLOCK, "nf4")
    if out.device.type == "cpu":  # no kernel there writes in place, or is fast for odd sizes
        even = (out.numel() + 1) // 2 * 2
        out.copy_(operator.default(*given, (even,), out.dtype).view(-1)[: out.numel()])
    else:
        operator.out(*given, out.shape, out.dtype, out=out)
