"""Weights in bitsandbytes' nf4 with double quantisation, byte for byte."""

from dataclasses import dataclass

import torch

from offload.engine.codecs.int8 import check_stream
from offload.engine.codecs.layout import (
    DEVICE_PIECE,
    HOST_PIECE,
    Layout,
    blocks_of,
    check_dtype,
    check_finite,
    pieces,
)
from offload.errors import CodecError
from offload.plan.codec import NF4_BLOCK, NF4_NESTED_BLOCK, CodecName

_MAP_BYTES = 4 * 256


@dataclass(frozen=True, kw_only=True, slots=True)
class Published:
    """A weight as a checkpoint of bitsandbytes has it, under that checkpoint's names.

    Attributes:
        packed: The weight itself, two to a byte, in whichever dtype it is stored.
        absmax: uint8, one for each block.
        quant_map: float32 (16,).
        nested_absmax: float32, one for each block of `absmax`.
        nested_quant_map: float32 (256,).
        nested_offset: What was taken from all scales.
        blocksize: Weights of a block.
        nested_blocksize: Scales of a block.
    """

    packed: torch.Tensor
    absmax: torch.Tensor
    quant_map: torch.Tensor
    nested_absmax: torch.Tensor
    nested_quant_map: torch.Tensor
    nested_offset: float
    blocksize: int
    nested_blocksize: int


class Nf4:
    """4 bits in blocks of 64; their scales, less their mean, in 8 bits in blocks of 256.

    The bytes are those of `quantize_4bit(compress_statistics=True, quant_type="nf4")` of the whole
    tensor on the same device: blocks are apart, so weights are quantised piece by piece, and only
    the scales, a sixteenth of a float32 for each weight, are held for the mean of them all.

    Error of a weight: at most 0.152 of its block's largest, half of the widest gap between
    the 16 values (-1 and -0.696), and the error of the scale: 1/125 of the largest difference
    between a scale and their mean among 256 of them (half of the dynamic map's widest step is
    1/142, and a CPU's search goes past it), and the rounding of the weights' dtype.
    Source: arXiv:2305.14314, section 3 and appendix E; bitsandbytes 0.50 functional.py.
    """

    name: CodecName = "nf4"

    def num_bytes(self, shape: torch.Size, dtype: torch.dtype) -> int:
        """Return half a byte for each weight, one for each block, and what scales those."""
        check_dtype(self.name, dtype)
        return _layout(shape.numel()).num_bytes

    def workspace_bytes(self, shape: torch.Size, dtype: torch.dtype) -> int:
        """Return a piece's scales in float32, and on a host the piece."""
        num_weights = shape.numel()
        host = min(num_weights, HOST_PIECE)
        on_host = (host + 1) * dtype.itemsize + 4 * -(-host // NF4_BLOCK)
        return max(4 * -(-min(num_weights, DEVICE_PIECE) // NF4_BLOCK), on_host)

    def encode(self, values: torch.Tensor, encoded: torch.Tensor) -> None:
        """Quantise weights, then their scales, on a device's default stream.

        Raises:
            CodecError: There are weights that are not finite.
        """
        from bitsandbytes.functional import create_dynamic_map

        check_dtype(self.name, values.dtype)
        flat = values.detach().reshape(-1)
        check_finite(self.name, flat)
        packed, quants, nested, table, offset = _layout(flat.numel()).split_to_write(encoded)
        code = table.view(torch.float32)
        code.copy_(create_dynamic_map())
        absmax = flat.new_empty(quants.numel(), dtype=torch.float32)
        check_stream(flat)
        for piece in pieces(flat.numel(), flat.device):
            found = _quantize(flat[piece])
            packed[blocks_of(piece, 2)] = found[0]
            absmax[blocks_of(piece, NF4_BLOCK)] = found[1]
        mean = absmax.mean() if flat.numel() else absmax.new_zeros(())
        offset.view(torch.float32)[0] = mean
        if flat.numel():
            found = torch.ops.bitsandbytes.quantize_blockwise.default(
                absmax.sub_(mean), code, NF4_NESTED_BLOCK
            )
            quants.copy_(found[0])
            nested.view(torch.float32).copy_(found[1])

    def decode(self, encoded: torch.Tensor, values: torch.Tensor) -> None:
        """Decode a piece's scales, then its weights."""
        import bitsandbytes  # noqa: F401  (registers its operators)

        flat = values.view(-1)
        packed, quants, nested, table, offset = _layout(flat.numel()).split(encoded)
        code, mean = table.view(torch.float32), offset.view(torch.float32)[0]
        for piece in pieces(flat.numel(), flat.device):
            scales = blocks_of(piece, NF4_BLOCK)
            absmax = torch.ops.bitsandbytes.dequantize_blockwise.default(
                quants[scales],
                nested.view(torch.float32)[blocks_of(scales, NF4_NESTED_BLOCK)],
                code,
                NF4_NESTED_BLOCK,
                torch.float32,
            ).add_(mean)
            _decode_piece(packed[blocks_of(piece, 2)], absmax, flat[piece])
            del absmax  # or it would stand beside the next one

    def assemble(self, published: Published, shape: torch.Size, encoded: torch.Tensor) -> None:
        """Write the encoded form of a weight that bitsandbytes encoded; nothing is rounded.

        Args:
            published: The parts, on the device of `encoded`.
            shape: Of the weight.
            encoded: As for `encode`.

        Raises:
            CodecError: The parts are of another form, or do not belong to this shape.
        """
        _check_form(published)
        layout = _layout(shape.numel())
        parts = (
            published.packed.reshape(-1).view(torch.uint8),
            published.absmax,
            published.nested_absmax,
            published.nested_quant_map,
            published.nested_absmax.new_tensor([published.nested_offset]),
        )
        sizes = tuple(part.nbytes for part in parts)
        if sizes != layout.sizes:
            raise CodecError(
                f"the parts of an nf4 weight of shape {tuple(shape)} take {sizes} bytes",
                limit=f"this shape has {layout.sizes}",
                hint="compare the checkpoint's config.json with its weights",
            )
        for target, part in zip(layout.split_to_write(encoded), parts, strict=True):
            target.copy_(part.reshape(-1).view(torch.uint8))


def _layout(num_weights: int) -> Layout:
    num_scales = -(-num_weights // NF4_BLOCK)
    num_nested = -(-num_scales // NF4_NESTED_BLOCK)
    return Layout((-(-num_weights // 2), num_scales, 4 * num_nested, _MAP_BYTES, 4))


def _quantize(weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what bitsandbytes makes of weights (N,): pairs of codes, and the scales of blocks.

    On a host bitsandbytes searches the values for each weight, which is three times slower than to
    count, for all weights at a time, the midpoints below; a block that is not full is left to it.
    """
    from bitsandbytes.functional import get_4bit_type

    if weights.device.type != "cpu" or weights.numel() % NF4_BLOCK:
        operator = torch.ops.bitsandbytes.quantize_4bit
        packed, absmax = operator.default(weights, NF4_BLOCK, "nf4", torch.uint8)
        return packed.view(-1), absmax
    blocks = weights.view(-1, NF4_BLOCK).float()
    absmax = blocks.abs().amax(1)
    scaled = (blocks * (1.0 / absmax.clamp(min=1e-38))[:, None]).clamp_(-1, 1).view(-1)
    values = get_4bit_type("nf4", device="cpu")
    codes = torch.zeros(scaled.shape, dtype=torch.uint8)
    is_above = torch.empty(scaled.shape, dtype=torch.bool)
    for midpoint in ((values[:-1] + values[1:]) / 2).tolist():
        codes += torch.gt(scaled, midpoint, out=is_above).view(torch.uint8)
    return codes[::2] << 4 | codes[1::2], absmax


def _decode_piece(packed: torch.Tensor, absmax: torch.Tensor, out: torch.Tensor) -> None:
    operator, given = torch.ops.bitsandbytes.dequantize_4bit, (packed, absmax, NF4_BLOCK, "nf4")
    if out.device.type == "cpu":  # nothing there writes in place, or an odd number fast
        even = (out.numel() + 1) // 2 * 2
        out.copy_(operator.default(*given, (even,), out.dtype).view(-1)[: out.numel()])
    else:
        operator.out(*given, out.shape, out.dtype, out=out)


def _check_form(published: Published) -> None:
    """Refuse what is not nf4 in blocks of 64 and 256."""
    from bitsandbytes.functional import get_4bit_type

    found = (published.blocksize, published.nested_blocksize)
    if found != (NF4_BLOCK, NF4_NESTED_BLOCK):
        raise CodecError(
            f"an nf4 weight has blocks of {found[0]} and {found[1]}",
            limit=f"those of {NF4_BLOCK} and {NF4_NESTED_BLOCK} can be read",
            hint="load the checkpoint that it was made from",
        )
    dtypes = (published.absmax.dtype, published.nested_absmax.dtype)
    if dtypes != (torch.uint8, torch.float32):
        raise CodecError(
            f"an nf4 weight has scales of {dtypes[0]}, scaled by {dtypes[1]}",
            limit="scales of torch.uint8, scaled by torch.float32, can be read",
            hint="load the checkpoint that it was made from",
        )
    table = get_4bit_type("nf4", device=published.quant_map.device)
    if not torch.equal(published.quant_map, table):
        raise CodecError(
            f"a 4-bit weight has the values {published.quant_map.tolist()}",
            limit=f"nf4 has {table.tolist()}",
            hint="load the checkpoint that it was made from",
        )
