"""Whether two results are equal, or equal but for rounding."""

import torch


def rounding_of(dtype: torch.dtype) -> float:
    """Return the relative rounding of results of a dtype, at least that of float32.

    Models of float64 compute norms, rotations and routers in float32 as well.
    """
    return max(torch.finfo(dtype).eps, torch.finfo(torch.float32).eps)


def are_equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether all values are the same; a NaN equals a NaN."""
    return torch.allclose(one, other, rtol=0, atol=0, equal_nan=True)


def are_close(one: torch.Tensor, other: torch.Tensor, *, steps: int = 8) -> bool:
    """Return whether two results differ by at most some roundings of their largest value."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    one, other = one.detach(), other.detach()
    finite = one[one.isfinite()]
    largest = float(finite.abs().max()) if finite.numel() else 0.0
    slack = steps * rounding_of(one.dtype) * largest
    return torch.allclose(one, other, rtol=0, atol=slack, equal_nan=True)


def is_near(one: torch.Tensor, other: torch.Tensor, slack: float) -> bool:
    """Return whether a difference is at most a share of the other's norm."""
    return float((one - other).norm()) <= slack * float(other.norm())
