"""DoRA's factors: how many elements of an output are computed on at once.

Outputs are scaled and summed in fp32. What is fp32 lives for one chunk of rows: on a CPU in its
cache, on a GPU in as much memory as keeps launches few.
"""

import math
from typing import Literal

CHUNK_ELEMENTS = {"cpu": 2**18, "cuda": 2**23}


def chunk_rows(num_features: int, device: Literal["cpu", "cuda"]) -> int:
    """Return the rows of so many features that make one chunk; at least one."""
    return max(1, CHUNK_ELEMENTS[device] // num_features)


def num_chunks(num_rows: int, num_features: int, device: Literal["cpu", "cuda"]) -> int:
    """Return the chunks of a matrix."""
    return math.ceil(num_rows / chunk_rows(num_features, device))
