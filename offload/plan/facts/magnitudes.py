"""DoRA's magnitudes: how many rows of a matrix are computed on at once, in fp32.

On a CPU a chunk fits into the cache. On a GPU it is larger, so that launches are few: weights are
cast for their norms; products of outputs and gradients are added up. What is only scaled is cast by
a GPU's kernel as it reads, in one; on a CPU by the chunk.
"""

import math
from typing import Literal

Device = Literal["cpu", "cuda"]
NORM_ELEMENTS = {"cpu": 2**18, "cuda": 2**23}
SUM_ELEMENTS = {"cpu": 2**18, "cuda": 2**21}


def norm_rows(num_features: int, device: Device) -> int:
    """Return the rows of a weight with so many columns whose norms are computed at once."""
    return max(1, NORM_ELEMENTS[device] // num_features)


def sum_rows(num_features: int, device: Device) -> int:
    """Return the rows of so many features that are added up at once."""
    return max(1, SUM_ELEMENTS[device] // num_features)


def num_norms(num_rows: int, num_features: int, device: Device) -> int:
    """Return the chunks of a weight."""
    return math.ceil(num_rows / norm_rows(num_features, device))


def num_sums(num_rows: int, num_features: int, device: Device) -> int:
    """Return the chunks of an output that are added up."""
    return math.ceil(num_rows / sum_rows(num_features, device))


def num_scaled(num_rows: int, num_features: int, device: Device) -> int:
    """Return the chunks of an output that are scaled."""
    return 1 if device == "cuda" else num_sums(num_rows, num_features, device)
