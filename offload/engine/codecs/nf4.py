"""Weights in bitsandbytes' nf4 with double quantisation, byte for byte."""

from dataclasses import dataclass

import torch

from offload.engine.codecs.int8 import check_stream
from offload.engine.codecs.layout import (
    DEVICE_PIECE,
    HOST_PIECE,
    Layout,
    blocks,
    blocks_of,
    check_dtype,
    check_finite,
    pieces,
)
from offload.errors import CodecError
from offload.plan.codec import NF4_BLOCK, NF4_NESTED_BLOCK, CodecName

_MAP_BYTES = 4 * 256
_HINT = "load the checkpoint that it was quantised from"


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
    the scales, a sixteenth of a float32 for each weight, are held for the mean of them all. The
    mean is written for each block of scales: a layer's experts, each encoded by itself in a
    checkpoint, can so be parts of one tensor.

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
        packed, quants, nested, table, means = _layout(flat.numel()).split_to_write(encoded)
        code = table.view(torch.float32)
        code.copy_(create_dynamic_map())
        absmax = flat.new_empty(quants.numel(), dtype=torch.float32)
        check_stream(flat)
        for piece in pieces(flat.numel(), flat.device):
            found = _quantize(flat[piece])
            packed[blocks_of(piece, 2)] = found[0]
            absmax[blocks_of(piece, NF4_BLOCK)] = found[1]
        if flat.numel():
            mean = absmax.mean()
            means.view(torch.float32).copy_(mean)
            found = torch.ops.bitsandbytes.quantize_blockwise.default(
                absmax.sub_(mean), code, NF4_NESTED_BLOCK
            )
            quants.copy_(found[0])
            nested.view(torch.float32).copy_(found[1])

    def decode(self, encoded: torch.Tensor, values: torch.Tensor) -> None:
        """Decode a piece's scales, then its weights."""
        import bitsandbytes  # noqa: F401  (registers its operators)

        flat = values.view(-1)
        packed, quants, nested, table, means = _layout(flat.numel()).split(encoded)
        code = table.view(torch.float32)
        for piece in pieces(flat.numel(), flat.device):
            scales = blocks_of(piece, NF4_BLOCK)
            nests = blocks_of(scales, NF4_NESTED_BLOCK)
            absmax = torch.ops.bitsandbytes.dequantize_blockwise.default(
                quants[scales],
                nested.view(torch.float32)[nests],
                code,
                NF4_NESTED_BLOCK,
                torch.float32,
            )
            _add_means(absmax, means.view(torch.float32)[nests])
            _decode_piece(packed[blocks_of(piece, 2)], absmax, flat[piece])
            del absmax  # or it would stand beside the next one

    def assemble(
        self, published: Published, part: slice, shape: torch.Size, encoded: torch.Tensor
    ) -> None:
        """Write, into the encoded form, a weight that bitsandbytes encoded; nothing is rounded.

        Args:
            published: The weight, on the device of `encoded`.
            part: The weights of the tensor that it holds, all of them or an expert's; the first
                part of a tensor has to be the first that is written.
            shape: Of the tensor.
            encoded: As for `encode`; all of it is written when all parts are.

        Raises:
            CodecError: The weight is of another form, or not of this part's size.
        """
        _check_form(published)
        _check_part(published, part, shape)
        packed, quants, nested, table, means = _layout(shape.numel()).split_to_write(encoded)
        scales = blocks_of(part, NF4_BLOCK)
        nests = blocks_of(scales, NF4_NESTED_BLOCK)
        code = table.view(torch.float32)
        if part.start == 0:
            code.copy_(published.nested_quant_map)
        elif not torch.equal(code, published.nested_quant_map):
            raise CodecError(
                f"the scales of weights {part.start} to {part.stop} have other values",
                limit="all parts of a tensor share those of the first",
                hint=_HINT,
            )
        packed[blocks_of(part, 2)] = published.packed.reshape(-1).view(torch.uint8)
        quants[scales] = published.absmax.view(-1)
        nested.view(torch.float32)[nests] = published.nested_absmax.view(-1)
        means.view(torch.float32)[nests] = published.nested_offset


def _layout(num_weights: int) -> Layout:
    num_scales = -(-num_weights // NF4_BLOCK)
    num_nested = -(-num_scales // NF4_NESTED_BLOCK)
    return Layout((-(-num_weights // 2), num_scales, 4 * num_nested, _MAP_BYTES, 4 * num_nested))


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
    in_blocks = weights.view(-1, NF4_BLOCK).float()
    absmax = in_blocks.abs().amax(1)
    scaled = (in_blocks * (1.0 / absmax.clamp(min=1e-38))[:, None]).clamp_(-1, 1).view(-1)
    values = get_4bit_type("nf4", device="cpu")
    codes = torch.zeros(scaled.shape, dtype=torch.uint8)
    is_above = torch.empty(scaled.shape, dtype=torch.bool)
    for midpoint in ((values[:-1] + values[1:]) / 2).tolist():
        codes += torch.gt(scaled, midpoint, out=is_above).view(torch.uint8)
    return codes[::2] << 4 | codes[1::2], absmax


def _add_means(absmax: torch.Tensor, means: torch.Tensor) -> None:
    for part, shape in blocks(slice(0, absmax.numel()), NF4_NESTED_BLOCK):
        absmax[part].view(shape).add_(means[blocks_of(part, NF4_NESTED_BLOCK)][:, None])


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
            hint=_HINT,
        )
    dtypes = (published.absmax.dtype, published.nested_absmax.dtype)
    if dtypes != (torch.uint8, torch.float32):
        raise CodecError(
            f"an nf4 weight has scales of {dtypes[0]}, scaled by {dtypes[1]}",
            limit="scales of torch.uint8, scaled by torch.float32, can be read",
            hint=_HINT,
        )
    table = get_4bit_type("nf4", device=published.quant_map.device)
    if not torch.equal(published.quant_map, table):
        raise CodecError(
            f"a 4-bit weight has the values {published.quant_map.tolist()}",
            limit=f"nf4 has {table.tolist()}",
            hint=_HINT,
        )


def _check_part(published: Published, part: slice, shape: torch.Size) -> None:
    """Refuse a part that is not whole blocks of scales, or has another number of weights."""
    every = NF4_BLOCK * NF4_NESTED_BLOCK
    if part.start % every or (part.stop % every and part.stop != shape.numel()):
        raise CodecError(
            f"a quantised weight is weights {part.start} to {part.stop} of a tensor",
            limit=f"a part begins and ends with a block of {every}",
            hint=_HINT,
        )
    found = (published.packed.nbytes, published.absmax.nbytes, published.nested_absmax.nbytes)
    expected = _layout(part.stop - part.start).sizes[:3]
    if found != expected:
        raise CodecError(
            f"the parts of {part.stop - part.start} weights in nf4 take {found} bytes",
            limit=f"so many weights take {expected}",
            hint="compare the checkpoint's config.json with its weights",
        )
