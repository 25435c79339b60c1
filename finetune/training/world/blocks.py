"""How gradients are cut to be sent: into parts that fit a bucket, and over gloo into blocks.

gloo moves a large message in one direction at a time, and small ones in both. So a rank's share is
cut into many blocks, of which some move at a time: with few of them, much of the time a direction
would have none. Larger blocks take less of the processor, which counts on a fast network.
"""

from collections.abc import Iterator, Sequence

import torch

LEAST_BLOCK_BYTES, MOST_BLOCK_BYTES, MOST_RUNNING = 64 * 1024, 512 * 1024, 4
ENOUGH_BLOCKS = 16


def block_elements(num_elements: int, dtype: torch.dtype) -> int:
    """Return how many elements a block of a rank's share has."""
    num_bytes = num_elements * dtype.itemsize // ENOUGH_BLOCKS
    return min(MOST_BLOCK_BYTES, max(LEAST_BLOCK_BYTES, num_bytes)) // dtype.itemsize


def parts_of(
    gradients: Sequence[torch.Tensor], *, max_elements: int
) -> Iterator[list[torch.Tensor]]:
    """Cut tensors, as flat views, into parts that fit the bucket."""
    part: list[torch.Tensor] = []
    num_elements = 0
    for piece in (piece for g in gradients for piece in g.view(-1).split(max_elements)):
        if num_elements + piece.numel() > max_elements:
            yield part
            part, num_elements = [], 0
        part.append(piece)
        num_elements += piece.numel()
    yield part
