"""DoRA on a linear layer: each output feature has a magnitude that trains.

    y = c (W x + s B A x) + b,    c = m / n,    n = |W + s B A|, a norm per output feature

m is the magnitude. The norm is a constant: no gradient passes through it (arXiv:2402.09353, 4.3).

Problem. Written out, the norm takes a matrix as large as W in fp32, and peft multiplies an identity
by A and B to have it, for each micro-batch.

Idea. The norm holds for all micro-batches of a visit, and for the same layer's visit downwards, as
W, A and B do: it is computed once in a pass. Merged weights are made in chunks of rows, in fp32,
that are only read for their norms. With B = 0 these are those of W to the bit, which the magnitudes
start from.

Rejected: the square of the norm as |W|^2 + 2 s sum_r B (W A^T) + s^2 sum_r B (B A A^T), even with
|W|^2 kept and all but W A^T in fp64. On a CPU it is no faster. Where a branch cancels most of a row
what is left of it errs by the cancelled part's rounding: 2e-6 of a norm that is 0.3 of |W|, 2e-5 at
0.1, 1e-3 at 0.01, and merged rows 3e-7, 3e-7 and 5e-7. Merged in bf16, rows err by up to 5e-4.

The output is c (W x) added to (c s B)(A x) + b. It is rounded as often as without DoRA: after the
product with W, and at the end. The gradient of m is the sum of g (W x + s B A x) / n over all rows,
taken in fp32; the part of B is that of s B times g^T (A x), which the gradient of B needs as well.
c multiplies g before the product with W; before that with B it multiplies B.

Shapes: N rows (tokens), K features in, M features out, R rank.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from offload.plan.facts.facts import Device, norm_rows, sum_rows


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Scale:
    """What a layer's output is multiplied by, for as long as its weights are the same."""

    factor_M: torch.Tensor  # the magnitude over the norm, in fp32 at least
    norm_M: torch.Tensor  # the norm

    @classmethod
    def of(cls, magnitude_M: torch.Tensor, norm_M: torch.Tensor) -> "Scale":
        """Return the scale of rows with these norms to these magnitudes."""
        return cls(factor_M=magnitude_M.to(norm_M.dtype) / norm_M, norm_M=norm_M)

    def of_b(self, b_MR: torch.Tensor, scaling: float) -> torch.Tensor:
        """Return what A x is multiplied by: c s B."""
        return b_MR * (self.factor_M * scaling)[:, None]

    def add_scaled(self, out_NM: torch.Tensor, y_NM: torch.Tensor) -> None:
        """Add c y to what is in `out_NM`."""
        if not isinstance(y_NM.shape[0], int):  # addcmul knows no symbols
            out_NM.add_(y_NM * self.factor_M)
            return
        for rows in _casts(y_NM):
            out_NM[rows].addcmul_(y_NM[rows], self.factor_M)

    def scaled(self, y_NM: torch.Tensor) -> torch.Tensor:
        """Return c y, in the dtype of y."""
        out_NM = torch.empty_like(y_NM)
        for rows in _casts(y_NM):
            torch.mul(y_NM[rows], self.factor_M, out=out_NM[rows])
        return out_NM

    def of_magnitude(
        self, g_NM: torch.Tensor, y_NM: torch.Tensor, *, b_MR: torch.Tensor, of_b_MR: torch.Tensor
    ) -> torch.Tensor:
        """Return the gradient of the magnitude, (M,).

        Args:
            g_NM: That of the output.
            y_NM: W x.
            b_MR: B.
            of_b_MR: The gradient of B as if nothing were scaled, s g^T (A x).
        """
        num_features, device = g_NM.shape[1], g_NM.device
        size = sum_rows(num_features, _device(g_NM))
        shape = min(len(g_NM), size), num_features
        summed = torch.zeros(shape, dtype=self.norm_M.dtype, device=device)
        for rows in _chunks(g_NM, size):
            part_NM = g_NM[rows]
            summed[: len(part_NM)].addcmul_(part_NM, y_NM[rows])
        return summed.sum(dim=0).add_((of_b_MR * b_MR).sum(dim=1)).div_(self.norm_M)


def row_norms(
    weight_MK: torch.Tensor, *, a_RK: torch.Tensor, b_MR: torch.Tensor, scaling: float
) -> torch.Tensor:
    """Return the norm of each row of a frozen weight with its branch, (M,), in fp32 at least.

    Args:
        weight_MK: The weight.
        a_RK: A, in fp32.
        b_MR: B, in fp32.
        scaling: Factor of the branch.
    """
    wide = torch.promote_types(weight_MK.dtype, torch.float32)
    a_RK, b_MR = a_RK.to(wide), b_MR.to(wide)
    norm_M = weight_MK.new_empty(len(weight_MK), dtype=wide)
    for rows in _chunks(weight_MK, norm_rows(weight_MK.shape[1], _device(weight_MK))):
        merged_MK = weight_MK[rows].to(wide, copy=True)
        merged_MK.addmm_(b_MR[rows], a_RK, alpha=scaling)
        torch.linalg.vector_norm(merged_MK, dim=1, out=norm_M[rows])
    return norm_M


def _device(x: torch.Tensor) -> Device:
    return "cuda" if x.is_cuda else "cpu"


def _casts(x_NM: torch.Tensor) -> Iterable[slice]:
    """Cut rows into chunks whose fp32 copies, which a CPU makes, stay in its cache."""
    return (slice(None),) if x_NM.is_cuda else _chunks(x_NM, sum_rows(x_NM.shape[1], "cpu"))


def _chunks(x_NM: torch.Tensor, size: int) -> Iterable[slice]:
    return (slice(start, start + size) for start in range(0, len(x_NM), size))
