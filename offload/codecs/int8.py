"""Weights as 8-bit integers in blocks of 256, by bitsandbytes with its linear map.

Its default map, the dynamic one, is made for optimizer states, which span many decades.
Weights do not: on normally distributed weights the linear map's error is 0.64 of the dynamic
map's. The map is stored with the weights, so decoding needs no other copy from the host.

Error: at most 1/250 of the block's largest weight, plus the rounding of the weights' dtype.
Half of the map's step is 1/254; bitsandbytes' search on a CPU exceeds it by 0.4 %.
Source: bitsandbytes 0.50 functional.py, create_linear_map, quantize_blockwise.
"""

from collections.abc import Sequence

from offload.codecs._pieces import blocks_of, check_stream, finite, pieces
from offload.plan.facts.codec import WORKSPACE_BYTES, Codec
from offload.tensors import Tensor

BLOCK = 256  # weights that share a float32


def _write(values: Tensor, parts: Sequence[Tensor]) -> None:
    """Quantise, on a device's default stream."""
    import torch
    from bitsandbytes.functional import create_linear_map

    flat = finite("int8", values)
    quants, scales, table = parts
    code = table.view(torch.float32)
    code.copy_(create_linear_map())
    check_stream(flat)
    for piece in pieces(flat.numel(), flat.device):
        found = torch.ops.bitsandbytes.quantize_blockwise.default(flat[piece], code, BLOCK)
        quants[piece].copy_(found[0])
        scales.view(torch.float32)[blocks_of(piece, BLOCK)] = found[1]


def _read(parts: Sequence[Tensor], values: Tensor) -> None:
    """Look up and scale."""
    import bitsandbytes  # noqa: F401  (registers its operators)
    import torch

    quants, scales, table = parts
    flat = values.view(-1)
    code = table.view(torch.float32)
    operator = torch.ops.bitsandbytes.dequantize_blockwise
    for piece in pieces(flat.numel(), flat.device):
        absmax = scales.view(torch.float32)[blocks_of(piece, BLOCK)]
        given = (quants[piece], absmax, code, BLOCK, flat.dtype)
        if flat.device.type == "cpu":  # there it has no form that writes in place
            flat[piece] = operator.default(*given)
        else:
            operator.out(*given, out=flat[piece])


EXTENSION = Codec(
    doc="takes about 8 bits (bitsandbytes)",
    # the last is the map: what 8 bits encode, in float32
    sizes=lambda num_weights, _: (num_weights, 4 * -(-num_weights // BLOCK), 4 * 256),
    write=_write,
    read=_read,
    rounding=7.3e-3,
    workspace_bytes=WORKSPACE_BYTES,
    is_suggested=True,
    aliases=("load_in_8bit",),
)
