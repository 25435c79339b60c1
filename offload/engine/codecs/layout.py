"""What the codecs share: offsets of parts, the pieces processed at once, and input checks."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from offload.errors import CodecError
from offload.plan.facts.codec import CodecName, aligned, part_bytes

WEIGHT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
HOST_PIECE = 2**20  # weights: temporaries of a few MB, and enough work for the cores
DEVICE_PIECE = 2**26  # weights: launch overhead is negligible at this size


@dataclass(frozen=True, slots=True)
class Layout:
    """The parts of an encoded tensor, one after the other.

    Args:
        sizes: Bytes of each part.
    """

    sizes: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """The size of all parts, padding between them included."""
        return sum(map(aligned, self.sizes))

    def split(self, encoded: torch.Tensor) -> list[torch.Tensor]:
        """Return the parts, as views."""
        assert encoded.dtype is torch.uint8, encoded.dtype
        assert encoded.shape == (self.num_bytes,), (encoded.shape, self.num_bytes)
        ends = accumulate(map(aligned, self.sizes), initial=0)
        return [
            encoded[start : start + size] for start, size in zip(ends, self.sizes, strict=False)
        ]

    def split_to_write(self, encoded: torch.Tensor) -> list[torch.Tensor]:
        """Return the parts and zero the padding, so that equal weights give equal bytes."""
        start = 0
        for size in self.sizes:
            encoded[start + size : start + aligned(size)].zero_()
            start += aligned(size)
        return self.split(encoded)


def layout_of(codec: CodecName, num_weights: int) -> Layout:
    """Return the parts of a tensor that a codec writes in parts."""
    return Layout(part_bytes(codec, num_weights, dtype_bytes=0))


def pieces(num_weights: int, device: torch.device) -> Iterator[slice]:
    """Yield the ranges of weights processed at once; all but the last are even and full.

    A piece holds whole blocks of every codec, including the blocks of nf4's scales.
    """
    size = HOST_PIECE if device.type == "cpu" else DEVICE_PIECE
    for start in range(0, num_weights, size):
        yield slice(start, min(start + size, num_weights))


def blocks(piece: slice, block: int) -> Iterator[tuple[slice, tuple[int, int]]]:
    """Yield a piece's full blocks, then its shorter last block: the range and its 2-D shape."""
    full = (piece.stop - piece.start) // block
    middle = piece.start + full * block
    if full:
        yield slice(piece.start, middle), (full, block)
    if middle < piece.stop:
        yield slice(middle, piece.stop), (1, piece.stop - middle)


def blocks_of(weights: slice, block: int) -> slice:
    """Return the range of blocks that hold a range of weights that starts on a block."""
    return slice(weights.start // block, -(-weights.stop // block))


def check_dtype(
    codec: CodecName, dtype: torch.dtype, allowed: tuple[torch.dtype, ...] = WEIGHT_DTYPES
) -> None:
    """Refuse weights whose dtype a codec does not support.

    Raises:
        CodecError: The dtype is not in `allowed`.
    """
    if dtype not in allowed:
        raise CodecError(
            f"weights of {dtype} cannot be written as {codec}",
            limit=f"{codec} takes {', '.join(map(str, allowed))}",
            hint='`codec="native"` keeps any dtype',
        )


def is_finite(values: torch.Tensor) -> bool:
    """Return whether all values are finite, in one pass; the host waits."""
    return not values.numel() or bool(torch.stack(values.aminmax()).isfinite().all())


def check_finite(codec: CodecName, values: torch.Tensor) -> None:
    """Refuse non-finite weights, which would spoil a block or the whole tensor; the host waits.

    Args:
        codec: The codec in use, for the message.
        values: (N,).

    Raises:
        CodecError: Some values are not finite.
    """
    if is_finite(values):
        return
    count = sum(
        int((~values[piece].isfinite()).sum()) for piece in pieces(len(values), values.device)
    )
    raise CodecError(
        f"{count} of {len(values)} weights are not finite",
        limit=f"{codec} scales a block by its largest weight, so all have to be finite",
        hint='fix the checkpoint, or keep its bits with `codec="native"`',
    )


class InParts(ABC):
    """A codec that writes a tensor in parts, one after the other.

    Attributes:
        name: Its name.
        dtypes: Types of weights that it takes.
    """

    name: CodecName
    dtypes: tuple[torch.dtype, ...] = WEIGHT_DTYPES

    def num_bytes(self, shape: torch.Size, dtype: torch.dtype) -> int:
        """Return the size of an encoded tensor in bytes."""
        check_dtype(self.name, dtype, self.dtypes)
        return layout_of(self.name, shape.numel()).num_bytes

    def encode(self, values: torch.Tensor, encoded: torch.Tensor) -> None:
        """Encode a tensor.

        Raises:
            CodecError: These values cannot be written in this form.
        """
        check_dtype(self.name, values.dtype, self.dtypes)
        flat = values.detach().reshape(-1)
        self.write(flat, layout_of(self.name, flat.numel()).split_to_write(encoded))

    def decode(self, encoded: torch.Tensor, values: torch.Tensor) -> None:
        """Decode a tensor in place."""
        flat = values.view(-1)
        self.read(layout_of(self.name, flat.numel()).split(encoded), flat)

    @abstractmethod
    def write(self, flat: torch.Tensor, parts: Sequence[torch.Tensor]) -> None:
        """Encode weights (N,) into the parts."""

    @abstractmethod
    def read(self, parts: Sequence[torch.Tensor], flat: torch.Tensor) -> None:
        """Decode the parts into weights (N,)."""


class Cast:
    """Each weight rounded to nearest, ties to even.

    Error: none if the weights already have that dtype. Otherwise the relative error is at most
    2**-8 in bf16 and 2**-11 in fp16: half a unit of 8 and 11 significant bits (IEEE 754-2019,
    4.3.1). Below fp16's normal numbers (2**-14) the absolute error is at most 2**-25; bf16 weights
    are exact in fp16 from 2**-17 on.

    Args:
        name: The codec's name.
        dtype: What is written.
    """

    def __init__(self, name: CodecName, dtype: torch.dtype) -> None:
        self.name: CodecName = name
        self._dtype = dtype

    def num_bytes(self, shape: torch.Size, dtype: torch.dtype) -> int:
        """Return two bytes for each weight."""
        check_dtype(self.name, dtype)
        return shape.numel() * self._dtype.itemsize

    def encode(self, values: torch.Tensor, encoded: torch.Tensor) -> None:
        """Round.

        Raises:
            CodecError: Finite weights are too large for the dtype.
        """
        assert encoded.numel() == self.num_bytes(values.shape, values.dtype)
        flat, rounded = values.detach().reshape(-1), encoded.view(self._dtype)
        rounded.copy_(flat)
        if values.dtype is self._dtype or is_finite(rounded):
            return
        num_lost = sum(
            int((rounded[piece].isinf() & flat[piece].isfinite()).sum())
            for piece in pieces(flat.numel(), flat.device)
        )
        if num_lost:
            raise CodecError(
                f"{num_lost} of {flat.numel()} weights are too large for {self.name}",
                limit=f"{self.name} ends at {torch.finfo(self._dtype).max:g}",
                hint='`codec="native"`',
            )

    def decode(self, encoded: torch.Tensor, values: torch.Tensor) -> None:
        """Copy, converting."""
        values.copy_(encoded.view(self._dtype).view(values.shape), non_blocking=True)
