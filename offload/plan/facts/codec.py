"""The codecs in which layers are stored, by name, and the size of a weight in each."""

from collections.abc import Mapping
from typing import Literal, get_args

CodecName = Literal["native", "bf16", "fp16", "fp8", "int8", "nf4", "bf16_packed"]
CODEC_NAMES: tuple[CodecName, ...] = get_args(CodecName)
EXACT_CODECS: tuple[CodecName, ...] = ("native", "bf16", "bf16_packed")  # of bfloat16 weights
# RMS error relative to the RMS of normally distributed weights; measured by bench_codecs.
ROUNDING: Mapping[CodecName, float] = {"int8": 7.3e-3, "fp8": 2.7e-2, "nf4": 9.2e-2}

FP8_BLOCK = 256  # weights that share a power of two, of one byte
INT8_BLOCK = 256  # weights that share a float32
NF4_BLOCK, NF4_NESTED_BLOCK = 64, 256  # weights that share a scale, scales that share two float32
MAP_BYTES = 4 * 256  # the values that 8 bits encode, in float32
PACKED_BLOCK = 256  # weights that share a range of exponents, of one byte
PACKED_ESCAPE_EVERY = 256  # room for one escape in so many weights ...
PACKED_MIN_ESCAPES = 64  # ... and for a few in the smallest tensor
PACKED_FAR = 2**31  # number of weights from which a position takes 8 bytes instead of 4
CAST_BYTES = 2  # of bf16 and fp16

ALIGN_BYTES = 256  # of each part: enough for the widest load and for a view as any dtype


def aligned(num_bytes: int) -> int:
    """Round a size up to the alignment of parts."""
    return -(-num_bytes // ALIGN_BYTES) * ALIGN_BYTES


def part_bytes(codec: CodecName, num_weights: int, dtype_bytes: int) -> tuple[int, ...]:
    """Return the sizes of the parts that a tensor is stored as.

    Args:
        codec: The codec.
        num_weights: Of the tensor.
        dtype_bytes: Bytes of a weight in the compute dtype, which `native` keeps.
    """
    if codec == "native":
        return (dtype_bytes * num_weights,)
    if codec == "fp8":
        return num_weights, -(-num_weights // FP8_BLOCK)
    if codec == "int8":
        return num_weights, 4 * -(-num_weights // INT8_BLOCK), MAP_BYTES
    if codec == "nf4":
        num_scales = -(-num_weights // NF4_BLOCK)
        num_nested = -(-num_scales // NF4_NESTED_BLOCK)
        return -(-num_weights // 2), num_scales, 4 * num_nested, MAP_BYTES, 4
    if codec == "bf16_packed":
        num_blocks, room = -(-num_weights // PACKED_BLOCK), num_escapes(num_weights)
        position_bytes = 4 if num_weights < PACKED_FAR else 8
        codes_bytes = PACKED_BLOCK // 2 * num_blocks
        return num_weights, codes_bytes, num_blocks, position_bytes * room, 2 * room
    return (CAST_BYTES * num_weights,)


def num_escapes(num_weights: int) -> int:
    """Return how many weights of a packed tensor may be outside their block's range."""
    return num_weights and PACKED_MIN_ESCAPES + num_weights // PACKED_ESCAPE_EVERY


def is_encoded(codec: CodecName, dtype_bytes: int) -> bool:
    """Return whether matrices have to be decoded: false if stored in the compute dtype.

    Weights of two bytes are assumed to be bfloat16.
    """
    return codec != "native" and not (codec == "bf16" and dtype_bytes == CAST_BYTES)


def decode_workspace_bytes(codec: CodecName) -> int:
    """Return the peak device memory of decoding a tensor, in addition to its two forms.

    Tensors are decoded in pieces, so this does not grow with them.
    """
    return 0 if codec in ("native", "bf16", "fp16") else 16 * 2**20
