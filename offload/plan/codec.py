"""The forms in which layers wait, by name, and what a weight takes in each."""

from collections.abc import Mapping
from typing import Literal, get_args

CodecName = Literal["native", "bf16", "fp16", "fp8", "int8", "nf4", "bf16_packed"]
CODEC_NAMES: tuple[CodecName, ...] = get_args(CodecName)
EXACT_CODECS: tuple[CodecName, ...] = ("native", "bf16", "bf16_packed")  # of bfloat16 weights
# Root mean square error by that of the weights, normal ones; measured by bench_codecs.
ROUNDING: Mapping[CodecName, float] = {"int8": 7.3e-3, "fp8": 2.7e-2, "nf4": 9.2e-2}

FP8_BLOCK = 256  # weights that share a power of two, of one byte
INT8_BLOCK = 256  # weights that share a float32
NF4_BLOCK, NF4_NESTED_BLOCK = 64, 256  # weights that share a scale, scales that share two float32
PACKED_BLOCK = 256  # weights that share a range of exponents, of one byte
PACKED_ESCAPE_EVERY = 256  # room for one escape in so many weights ...
PACKED_MIN_ESCAPES = 64  # ... and for a few in the smallest tensor
PACKED_ESCAPE_BYTES = 6  # a position of 4 bytes (tensors under 2**31 weights), and the weight

_BYTES_PER_WEIGHT: dict[CodecName, float] = {
    "bf16": 2.0,
    "fp16": 2.0,
    "fp8": 1 + 1 / FP8_BLOCK,
    "int8": 1 + 4 / INT8_BLOCK,
    "nf4": 0.5 + 1 / NF4_BLOCK + 4 / (NF4_BLOCK * NF4_NESTED_BLOCK),
    "bf16_packed": 1.5 + 1 / PACKED_BLOCK + PACKED_ESCAPE_BYTES / PACKED_ESCAPE_EVERY,
}


def bytes_per_weight(codec: CodecName, dtype_bytes: int) -> float:
    """Return what a weight of a large tensor takes.

    A small tensor takes up to 4 KiB more: its parts begin at multiples of 256 bytes, and tables
    are written beside them.

    Args:
        codec: The form.
        dtype_bytes: Bytes of a weight as it computes, which `native` keeps.
    """
    return float(dtype_bytes) if codec == "native" else _BYTES_PER_WEIGHT[codec]


def is_encoded(codec: CodecName, dtype_bytes: int) -> bool:
    """Tell whether matrices have to be decoded: not what has the type that it computes in.

    Weights of two bytes are taken for bfloat16.
    """
    return codec != "native" and not (codec == "bf16" and dtype_bytes == _BYTES_PER_WEIGHT["bf16"])


def decode_workspace_bytes(codec: CodecName) -> int:
    """Return the most device memory that decoding a tensor takes, beside its two forms.

    Tensors are decoded in pieces, so this does not grow with them.
    """
    return 0 if codec in ("native", "bf16", "fp16") else 16 * 2**20
