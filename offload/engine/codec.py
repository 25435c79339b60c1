"""Tensors in the form of a codec, whose parts are one after the other."""

from functools import cache
from itertools import accumulate

import torch

from offload.errors import CodecError
from offload.plan.facts.codec import CODECS, aligned


class Form:
    """Encodes and decodes tensors by a codec."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._codec = CODECS[name]

    def num_bytes(self, shape: torch.Size, dtype: torch.dtype) -> int:
        """Return the size of an encoded tensor in bytes, which follows from its shape alone.

        Raises:
            CodecError: The codec takes no weights of this dtype.
        """
        allowed = tuple(f"torch.{name}" for name in self._codec.dtypes)
        if allowed and str(dtype) not in allowed:
            raise CodecError(
                f"weights of {dtype} cannot be written as {self.name}",
                limit=f"{self.name} takes {', '.join(allowed)}",
                hint='`codec="native"` keeps any dtype',
            )
        return _size(self._codec.sizes(shape.numel(), dtype.itemsize))

    def encode(self, values: torch.Tensor, encoded: torch.Tensor) -> None:
        """Encode a tensor.

        Args:
            values: Floating point, any shape.
            encoded: uint8 (num_bytes,), 256-byte aligned, on the same device; all of it is written.

        Raises:
            CodecError: These values cannot be written in this form.
        """
        assert encoded.numel() == self.num_bytes(values.shape, values.dtype)
        parts = self.parts(encoded, values.numel(), values.dtype)
        if len(parts) > 1:  # zeros between them, so that equal weights give equal bytes
            encoded.zero_()
        self._codec.write(values.detach(), parts)

    def decode(self, encoded: torch.Tensor, values: torch.Tensor) -> None:
        """Decode a tensor in place, on the current stream; the host does not wait.

        Args:
            encoded: Bytes that `encode` left, on the device of `values`.
            values: Contiguous, of the shape and dtype that were encoded.
        """
        self._codec.read(self.parts(encoded, values.numel(), values.dtype), values)

    def parts(
        self, encoded: torch.Tensor, num_weights: int, dtype: torch.dtype
    ) -> list[torch.Tensor]:
        """Return the parts of an encoded tensor, as views."""
        sizes = self._codec.sizes(num_weights, dtype.itemsize)
        assert encoded.shape == (_size(sizes),), (encoded.shape, sizes)
        starts = accumulate(map(aligned, sizes), initial=0)
        return [encoded[start : start + size] for start, size in zip(starts, sizes, strict=False)]


def _size(sizes: tuple[int, ...]) -> int:
    return sizes[0] if len(sizes) == 1 else sum(map(aligned, sizes))


@cache
def form_named(name: str) -> Form:
    """Return the form of a codec with this name.

    Raises:
        CodecError: There is none.
    """
    if name not in CODECS:
        raise CodecError(
            f"there is no codec {name!r}",
            limit=f"codecs are {', '.join(CODECS)}",
            hint='`codec="native"` keeps the weights as they are',
        )
    return Form(name)


NATIVE = form_named("native")
