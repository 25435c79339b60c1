"""Tile sizes of a grouped product, by GPU and by the number of rows per expert.

We have timed no tile yet. These are the sizes that tuning found for a similar kernel (vLLM's
fused_moe/configs, E=128) on an A100, an RTX 4090 and an RTX 5090 up to 256 rows per expert; an RTX
3090 takes that of the RTX 4090, whose multiprocessors have as many registers and as much shared
memory. On an H100 and an H200 that tuning found 128 x 256 for 64 rows and more, which leaves room
for one program with our gate; 128 x 128 leaves room for two, of which one computes while the other
reads and writes. tests/compiled.py reads what each tile takes from the machine code.
"""

from dataclasses import dataclass, replace

import torch

from offload.plan.time.expert_passes import LARGE_TILE_ROWS, TILE_ROWS, tile_rows

REGISTERS, MAX_REGISTERS = 65536, 255  # of a multiprocessor, and of a thread, from sm_80 to sm_120
MAX_SHARED_BYTES = {80: 163 * 1024, 86: 99 * 1024, 89: 99 * 1024, 90: 227 * 1024, 120: 99 * 1024}


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
    def max_registers(self) -> int:
        """Return how many a thread may have if two programs are to share a multiprocessor."""
        return min(MAX_REGISTERS, REGISTERS // (2 * 32 * self.num_warps))

    @property
    def outer(self) -> "Blocks":
        """Return the tile of a sum over rows, whose height is only a branch's rank."""
        return replace(self, m=max(16, min(64, self.m)))

    def within(self, num_columns: int) -> "Blocks":
        """Return the tile for a matrix that may have few columns, like a branch's first factor."""
        return replace(self, n=max(16, min(self.n, 1 << (num_columns - 1).bit_length())))


INTERPRETED = Blocks(m=16, n=64, k=64, num_warps=1, num_stages=1)
FP32 = Blocks(m=32, n=32, k=16, num_warps=4, num_stages=2)  # larger ones spill on some GPUs
LOW = Blocks(m=TILE_ROWS, n=128, k=64, num_warps=4, num_stages=3)
TILES = {
    (8, 6): replace(LOW, num_warps=8),
    (8, 9): replace(LOW, num_warps=8),
    (9, 0): replace(LOW, m=LARGE_TILE_ROWS, num_warps=8),
}


def blocks_for(
    capability: tuple[int, int] | None, dtype: torch.dtype, *, rows_per_expert: int
) -> Blocks:
    """Return the tile for a GPU; None is Triton's interpreter, where small tiles are fast.

    An expert whose rows leave more than a quarter of that tile empty has a lower one.
    """
    if capability is None:
        return INTERPRETED
    if dtype is torch.float32:  # without tensor cores
        return FP32
    tile = TILES.get(capability, LOW)
    rows = tile_rows(rows_per_expert, is_large=tile.m == LARGE_TILE_ROWS)
    return tile if rows == tile.m else replace(LOW, m=rows)
