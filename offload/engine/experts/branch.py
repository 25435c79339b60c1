"""A low-rank branch alongside the matrices of one projection, for all experts.

E experts, K features in, N out, R rank.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional as F

from offload.plan.memory.experts import ROW_BYTES


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Branch:
    """The adapter of one projection of all experts: scaling * (x A) B.

    Attributes:
        a_ERK: A of each expert, laid out as in a linear layer.
        b_ERN: B of each expert, transposed.
        scaling: One number, or one per rank (R,).
    """

    a_ERK: torch.Tensor
    b_ERN: torch.Tensor
    scaling: float | torch.Tensor

    @staticmethod
    def join(branches: Sequence["Branch"]) -> "Branch":
        """Return the sum of several adapters as one of a higher rank."""
        if len(branches) == 1:
            return branches[0]
        per_rank = [b.a_ERK.new_full((b.a_ERK.shape[1],), float(b.scaling)) for b in branches]
        return Branch(
            a_ERK=torch.cat([branch.a_ERK for branch in branches], dim=1),
            b_ERN=torch.cat([branch.b_ERN for branch in branches], dim=1),
            scaling=torch.cat(per_rank),
        )

    def cast(self, dtype: torch.dtype) -> "Branch":
        """Return it in a dtype, with a layout for products."""
        scaling = self.scaling
        return Branch(
            a_ERK=self.a_ERK.to(dtype, memory_format=torch.contiguous_format).contiguous(),
            b_ERN=self.b_ERN.to(dtype, memory_format=torch.contiguous_format).contiguous(),
            scaling=scaling.to(dtype) if isinstance(scaling, torch.Tensor) else scaling,
        )

    def fit(self, dtype: torch.dtype) -> "Branch":
        """Return it in a dtype, with a layout for products, its rank padded to a whole row."""
        cast = self.cast(dtype)
        missing = -cast.a_ERK.shape[1] % (ROW_BYTES // dtype.itemsize)
        if not missing:
            return cast
        scaling = cast.scaling
        return Branch(
            a_ERK=F.pad(cast.a_ERK, (0, 0, 0, missing)),
            b_ERN=F.pad(cast.b_ERN, (0, 0, 0, missing)),
            scaling=F.pad(scaling, (0, missing)) if isinstance(scaling, torch.Tensor) else scaling,
        )
