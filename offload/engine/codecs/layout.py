"""What the codecs share: where parts lie, which pieces are worked on at once, what is refused."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate

import torch

from offload.errors import CodecError
from offload.plan.codec import CodecName, aligned, part_bytes

WEIGHT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
HOST_PIECE = 2**20  # weights: temporaries of a few MB, and enough work for the cores
DEVICE_PIECE = 2**26  # weights: launches cost nothing beside the work


@dataclass(frozen=True, slots=True)
class Layout:
    """The parts of an encoded tensor, one after the other.

    Args:
        sizes: Bytes of each part.
    """

    sizes: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """The size of all parts and of what lies between them."""
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
        """Return the parts, and write zeros between them: equal weights, equal bytes."""
        start = 0
        for size in self.sizes:
            encoded[start + size : start + aligned(size)].zero_()
            start += aligned(size)
        return self.split(encoded)


def layout_of(codec: CodecName, num_weights: int) -> Layout:
    """Return the parts of a tensor that a codec writes in parts."""
    return Layout(part_bytes(codec, num_weights, dtype_bytes=0))


def pieces(num_weights: int, device: torch.device) -> Iterator[slice]:
    """Yield the ranges of weights that are worked on at once; all but the last are even and full.

    A piece holds whole blocks of every codec, those of nf4's scales included.
    """
    size = HOST_PIECE if device.type == "cpu" else DEVICE_PIECE
    for start in range(0, num_weights, size):
        yield slice(start, min(start + size, num_weights))


def blocks(piece: slice, block: int) -> Iterator[tuple[slice, tuple[int, int]]]:
    """Yield a piece's full blocks and then its last, shorter one: the range and its 2-D shape."""
    full = (piece.stop - piece.start) // block
    middle = piece.start + full * block
    if full:
        yield slice(piece.start, middle), (full, block)
    if middle < piece.stop:
        yield slice(middle, piece.stop), (1, piece.stop - middle)


def blocks_of(weights: slice, block: int) -> slice:
    """Return the range of blocks that hold a range of weights, which begins with a block."""
    return slice(weights.start // block, -(-weights.stop // block))


def check_dtype(
    codec: CodecName, dtype: torch.dtype, allowed: tuple[torch.dtype, ...] = WEIGHT_DTYPES
) -> None:
    """Refuse weights that a codec does not write.

    Raises:
        CodecError: The dtype is none of `allowed`.
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
    """Refuse weights with which a block, or all of a tensor, would be lost; the host waits.

    Args:
        codec: Who asks.
        values: (N,).

    Raises:
        CodecError: There are values that are not finite.
    """
    if is_finite(values):
        return
    count = sum(
        int((~values[piece].isfinite()).sum()) for piece in pieces(len(values), values.device)
    )
    raise CodecError(
        f"{count} of {len(values)} weights are not finite",
        limit=f"{codec} scales a block by its largest weight, so all have to be finite",
        hint='mend the checkpoint, or keep its bits with `codec="native"`',
    )
