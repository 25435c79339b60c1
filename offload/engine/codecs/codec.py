"""The interface of a codec."""

from typing import Protocol

import torch

from offload.engine.codecs.fp8 import Fp8
from offload.engine.codecs.int8 import Int8
from offload.engine.codecs.layout import Cast
from offload.engine.codecs.nf4 import Nf4
from offload.engine.codecs.packed import Bf16Packed
from offload.errors import CodecError
from offload.plan.facts.codec import CodecName


class Codec(Protocol):
    """Encodes a tensor in fewer bytes; the size follows from its shape alone.

    Sizes do not depend on values because layers are laid out before any weight is read.
    """

    name: CodecName

    def num_bytes(self, shape: torch.Size, dtype: torch.dtype) -> int:
        """Return the size of an encoded tensor in bytes."""

    def encode(self, values: torch.Tensor, encoded: torch.Tensor) -> None:
        """Encode a tensor.

        Args:
            values: Floating point, any shape.
            encoded: uint8 (num_bytes,), 256-byte aligned, on the same device; all of it is written.

        Raises:
            CodecError: These values cannot be written in this form.
        """

    def decode(self, encoded: torch.Tensor, values: torch.Tensor) -> None:
        """Decode a tensor in place, on the current stream; the host does not wait.

        Args:
            encoded: As `encode` left it, on the device of `values`.
            values: Contiguous, of the shape and dtype that were encoded.
        """


class Native:
    """The bytes, unchanged."""

    name: CodecName = "native"

    def num_bytes(self, shape: torch.Size, dtype: torch.dtype) -> int:
        """Return the size of the tensor itself."""
        return shape.numel() * dtype.itemsize

    def encode(self, values: torch.Tensor, encoded: torch.Tensor) -> None:
        """Copy."""
        encoded.view(values.dtype).view(values.shape).copy_(values)

    def decode(self, encoded: torch.Tensor, values: torch.Tensor) -> None:
        """Copy."""
        values.copy_(encoded.view(values.dtype).view(values.shape), non_blocking=True)


NATIVE = Native()
NF4 = Nf4()
_CODECS: dict[CodecName, Codec] = {
    "native": NATIVE,
    "bf16": Cast("bf16", torch.bfloat16),
    "fp16": Cast("fp16", torch.float16),
    "fp8": Fp8(),
    "int8": Int8(),
    "nf4": NF4,
    "bf16_packed": Bf16Packed(),
}


def codec_named(name: CodecName) -> Codec:
    """Return the codec with this name.

    Raises:
        CodecError: There is none.
    """
    if name not in _CODECS:
        raise CodecError(
            f"there is no codec {name!r}",
            limit=f"codecs are {', '.join(_CODECS)}",
            hint='`codec="native"` keeps the weights as they are',
        )
    return _CODECS[name]
