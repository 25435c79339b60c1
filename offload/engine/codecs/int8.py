"""Weights as 8-bit integers, with a float32 for each block, by bitsandbytes."""

from collections.abc import Sequence

import torch

from offload.engine.codecs.layout import (
    InParts,
    blocks_of,
    check_finite,
    pieces,
)
from offload.plan.facts.codec import INT8_BLOCK, CodecName


class Int8(InParts):
    """bitsandbytes' blockwise 8 bits, in blocks of 256, with its linear map.

    Its default map, the dynamic one, is made for optimizer states, which span many decades.
    Weights do not: on normally distributed weights the linear map's error is 0.64 of the dynamic
    map's. The map is stored with the weights, so decoding needs no other copy from the host.

    Error: at most 1/250 of the block's largest weight, plus the rounding of the weights' dtype.
    Half of the map's step is 1/254; bitsandbytes' search on a CPU exceeds it by 0.4 %.
    Source: bitsandbytes 0.50 functional.py, create_linear_map, quantize_blockwise.
    """

    name: CodecName = "int8"

    def write(self, flat: torch.Tensor, parts: Sequence[torch.Tensor]) -> None:
        """Quantise, on a device's default stream.

        Raises:
            CodecError: Some weights are not finite.
        """
        from bitsandbytes.functional import create_linear_map

        check_finite(self.name, flat)
        quants, scales, table = parts
        code = table.view(torch.float32)
        code.copy_(create_linear_map())
        check_stream(flat)
        for piece in pieces(flat.numel(), flat.device):
            found = torch.ops.bitsandbytes.quantize_blockwise.default(flat[piece], code, INT8_BLOCK)
            quants[piece].copy_(found[0])
            scales.view(torch.float32)[blocks_of(piece, INT8_BLOCK)] = found[1]

    def read(self, parts: Sequence[torch.Tensor], flat: torch.Tensor) -> None:
        """Look up and scale."""
        import bitsandbytes  # noqa: F401  (registers its operators)

        quants, scales, table = parts
        code = table.view(torch.float32)
        operator = torch.ops.bitsandbytes.dequantize_blockwise
        for piece in pieces(flat.numel(), flat.device):
            absmax = scales.view(torch.float32)[blocks_of(piece, INT8_BLOCK)]
            given = (quants[piece], absmax, code, INT8_BLOCK, flat.dtype)
            if flat.device.type == "cpu":  # there it has no form that writes in place
                flat[piece] = operator.default(*given)
            else:
                operator.out(*given, out=flat[piece])


def check_stream(values: torch.Tensor) -> None:
    """Assert that the default stream is current: bitsandbytes quantises on that one."""
    if values.is_cuda:
        assert torch.cuda.current_stream(values.device) == torch.cuda.default_stream(values.device)
