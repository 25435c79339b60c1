"""Tile sizes of a grouped product, by GPU and by the number of rows per expert.

We have timed no tile yet. Before and after Hopper, sizes are those that tuning found for a similar
kernel on an A100, an A10, an RTX 4090 and an RTX 5090 at 64 to 256 rows per expert (vLLM's
fused_moe/configs, E=128). More rows, and Hopper, use the next larger tile that fits into registers:
tests/compiled.py reads each tile's register use from the machine code.
"""

from dataclasses import dataclass, replace

import torch

MAX_SHARED_BYTES = {80: 163 * 1024, 86: 99 * 1024, 89: 99 * 1024, 90: 227 * 1024, 120: 99 * 1024}
HOPPER = 9
MANY_ROWS = 256  # of an expert, on average


@dataclass(frozen=True, kw_only=True, slots=True)
class Blocks:
    """A tile's size and launch settings.

    Attributes:
        m: Rows.
        n: Columns.
        k: Elements of the sum at a time.
        num_warps: Groups of 32 threads that share the tile.
        num_stages: Steps of the sum in flight, loaded before they are used.
    """

    m: int
    n: int
    k: int
    num_warps: int
    num_stages: int

    @property
    def backward(self) -> "Blocks":
        """Return the tile for a gate's backward, which needs three values per element."""
        return replace(self, n=self.n // 2)

    @property
    def outer(self) -> "Blocks":
        """Return the tile of a sum over rows, whose height is only a branch's rank."""
        return replace(self, m=max(16, min(64, self.m)))

    def within(self, num_columns: int) -> "Blocks":
        """Return the tile for a matrix that may have few columns, like a branch's first factor."""
        return replace(self, n=max(16, min(self.n, 1 << (num_columns - 1).bit_length())))


INTERPRETED = Blocks(m=16, n=64, k=64, num_warps=1, num_stages=1)


def blocks_for(
    capability: tuple[int, int] | None, dtype: torch.dtype, *, rows_per_expert: int
) -> Blocks:
    """Return the tile for a GPU; None is Triton's interpreter, where small tiles are fast.

    An expert with few rows has one tile, which is then no higher than those rows need.
    """
    if capability is None:
        return INTERPRETED
    if dtype is torch.float32:  # without tensor cores; larger ones spill on some GPUs
        return Blocks(m=32, n=32, k=16, num_warps=4, num_stages=2)
    m = max(16, min(64, 1 << (rows_per_expert - 1).bit_length()))
    if rows_per_expert > MANY_ROWS:
        num_stages = 4 if capability[0] == HOPPER else 3
        return Blocks(m=128, n=128, k=64, num_warps=8, num_stages=num_stages)
    return Blocks(m=m, n=128, k=64, num_warps=4, num_stages=3)
