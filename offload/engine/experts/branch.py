"""A low-rank branch alongside the matrices of one projection, for all experts.

E experts, K features in, N out, R rank.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch.nn import functional as F

from offload.engine.visit_cache import VISIT_CACHE
from offload.plan.memory.experts import ROW_BYTES


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Branch:
    """The adapter of one projection of all experts: scaling * (x A) B.

    Attributes:
        a_ERK: A of each expert, laid out as in a linear layer.
        b_ERN: B of each expert, transposed.
        scaling: A factor.
        key: Names A and B in the cache of a visit; None casts them at each call.
    """

    a_ERK: torch.Tensor
    b_ERN: torch.Tensor
    scaling: float
    key: object = None

    @staticmethod
    def join(branches: Sequence["Branch"]) -> "Branch":
        """Return the sum of several adapters as one of a higher rank."""
        if len(branches) == 1:
            return branches[0]
        keys = tuple(branch.key for branch in branches)
        return Branch(
            a_ERK=torch.cat([branch.a_ERK for branch in branches], dim=1),
            b_ERN=torch.cat([branch.scaling * branch.b_ERN for branch in branches], dim=1),
            scaling=1.0,
            key=None if None in keys else keys,
        )

    def cast(self, dtype: torch.dtype) -> "Branch":
        """Return it in a dtype, with a layout for products and without its graph."""
        with torch.no_grad():
            if self.key is None:
                return self._laid_out(dtype)
            return VISIT_CACHE.once((self.key, dtype), lambda: self._laid_out(dtype))

    def fit(self, dtype: torch.dtype) -> "Branch":
        """Return it in a dtype, with a layout for products, its rank padded to a whole row."""
        cast = self._laid_out(dtype)
        missing = -cast.a_ERK.shape[1] % (ROW_BYTES // dtype.itemsize)
        if not missing:
            return cast
        return replace(
            cast,
            a_ERK=F.pad(cast.a_ERK, (0, 0, 0, missing)),
            b_ERN=F.pad(cast.b_ERN, (0, 0, 0, missing)),
        )

    def _laid_out(self, dtype: torch.dtype) -> "Branch":
        return replace(
            self,
            a_ERK=self.a_ERK.to(dtype, memory_format=torch.contiguous_format).contiguous(),
            b_ERN=self.b_ERN.to(dtype, memory_format=torch.contiguous_format).contiguous(),
        )
