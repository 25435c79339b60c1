"""Whether two results are equal, or equal but for rounding."""

import math

import torch


def rounding_of(dtype: torch.dtype) -> float:
    """Return the relative rounding of results of a dtype, at least that of float32.

    Models of float64 compute norms, rotations and routers in float32 as well.
    """
    return max(torch.finfo(dtype).eps, torch.finfo(torch.float32).eps)


def are_equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether all values are the same; a NaN equals a NaN."""
    return torch.allclose(one, other, rtol=0, atol=0, equal_nan=True)


def are_close(
    one: torch.Tensor, other: torch.Tensor, *, steps: int = 8, num_terms: int = 1
) -> bool:
    """Return whether two results differ by at most some roundings of their largest value.

    Kernels add up in float32, each in an order of its own. The rounding errors of a sum of n terms
    grow with the square root of n: against float64, those of a head's products over a vocabulary of
    151,936 are 4 to 130 roundings in float32, depending on the processor, where the root is 390.

    Args:
        one: A result.
        other: The same by another order of operations.
        steps: Roundings of their dtype.
        num_terms: Terms of the longest sum in them.
    """
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    one, other = one.detach(), other.detach()
    finite = one[one.isfinite()]
    largest = float(finite.abs().max()) if finite.numel() else 0.0
    of_sums = math.sqrt(num_terms) * torch.finfo(torch.float32).eps
    slack = (steps * rounding_of(one.dtype) + of_sums) * largest
    return torch.allclose(one, other, rtol=0, atol=slack, equal_nan=True)


def is_near(one: torch.Tensor, other: torch.Tensor, slack: float) -> bool:
    """Return whether a difference is at most a share of the other's norm."""
    return float((one - other).norm()) <= slack * float(other.norm())
