"""What codecs share: the pieces processed at once, blocks, and a check of weights."""

from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec

from offload.errors import CodecError
from offload.tensors import Tensor, device

HOST_PIECE = 2**20  # weights: temporaries of a few MB, and enough work for the cores
DEVICE_PIECE = 2**26  # weights: launch overhead is negligible at this size


def pieces(num_weights: int, device: device, *, most: int = DEVICE_PIECE) -> Iterator[slice]:
    """Yield the ranges of weights processed at once; all but the last are even and full.

    A piece holds whole blocks of every codec, including the blocks of nf4's scales. On a device it
    has `most` weights: fewer where temporaries are several times as large as these.
    """
    size = HOST_PIECE if device.type == "cpu" else most
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


def is_finite(values: Tensor) -> bool:
    """Return whether all values are finite, in one pass; the host waits."""
    import torch

    return not values.numel() or bool(torch.stack(values.aminmax()).isfinite().all())


def finite(name: str, values: Tensor) -> Tensor:
    """Return weights of any shape as (N,); others would spoil a block or the whole tensor.

    Args:
        name: The codec in use, for the message.
        values: The weights; the host waits for them.

    Raises:
        CodecError: Some values are not finite.
    """
    flat = values.reshape(-1)
    if is_finite(flat):
        return flat
    count = sum(int((~flat[piece].isfinite()).sum()) for piece in pieces(len(flat), flat.device))
    raise CodecError(
        f"{count} of {len(flat)} weights are not finite",
        limit=f"{name} scales a block by its largest weight, so all have to be finite",
        hint='fix the checkpoint, or keep its bits with `codec="native"`',
    )


@cache
def has_triton() -> bool:
    """Return whether a GPU decodes by kernels of Triton."""
    return find_spec("triton") is not None


def check_stream(values: Tensor) -> None:
    """Assert that the default stream is current: bitsandbytes quantises on that one."""
    import torch

    if values.is_cuda:
        assert torch.cuda.current_stream(values.device) == torch.cuda.default_stream(values.device)
