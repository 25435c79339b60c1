"""DoRA's magnitudes: how many rows of a matrix are computed on at once.

A product of two matrices is summed over its rows in fp32, in memory for one chunk of them: on a CPU
it fits into the cache, on a GPU into that of the chip. A CPU casts what it computes on in a chunk
of its own too; a GPU's kernels cast as they read.
"""

import math
from typing import Literal

CHUNK_ELEMENTS = {"cpu": 2**18, "cuda": 2**21}


def sum_rows(num_features: int, device: Literal["cpu", "cuda"]) -> int:
    """Return the rows of so many features that are summed at once; at least one."""
    return max(1, CHUNK_ELEMENTS[device] // num_features)


def num_sums(num_rows: int, num_features: int, device: Literal["cpu", "cuda"]) -> int:
    """Return the chunks that a matrix is summed in."""
    return math.ceil(num_rows / sum_rows(num_features, device))


def num_casts(num_rows: int, num_features: int, device: Literal["cpu", "cuda"]) -> int:
    """Return the chunks that a matrix is read in where its elements are cast."""
    return 1 if device == "cuda" else num_sums(num_rows, num_features, device)
