"""What a new head reads at each label token of rows: computed once, kept in RAM, read in any order.

Shapes: R rows, F label tokens of all of them, N label tokens of some rows, D model dim.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import nn


class Features:
    """A table of features, in the type that the model computes in."""

    def __init__(self, *, num_rows: int, max_features: int, dtype: torch.dtype) -> None:
        """Make an empty table.

        Args:
            num_rows: R.
            max_features: F, or more; memory that is not filled is not used.
            dtype: Of the features.
        """
        self._max_features, self._dtype = max_features, dtype
        self._values_FD = torch.empty(0, 0, dtype=dtype)
        self._starts_R = np.zeros(num_rows, np.int64)
        self._lens_R = np.zeros(num_rows, np.int64)
        self.num = 0

    @property
    def num_bytes(self) -> int:
        """Of the features that it holds."""
        return self._values_FD[: self.num].nbytes

    def add(self, rows: Sequence[int], lens: Sequence[int], values_ND: torch.Tensor) -> None:
        """Add the features of some rows, which follow each other, `lens` of each."""
        if not self.num:
            shape = self._max_features, values_ND.shape[1]
            self._values_FD = torch.empty(shape, dtype=self._dtype)
        first, self.num = self.num, self.num + len(values_ND)
        self._values_FD[first : self.num] = values_ND
        ends = first + np.cumsum(lens)
        self._starts_R[list(rows)] = ends - lens
        self._lens_R[list(rows)] = lens

    def of(self, rows: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the features (N, D) of some rows in their order, and the place of each's row."""
        lens = self._lens_R[list(rows)]
        numbers = [
            np.arange(self._starts_R[row], self._starts_R[row] + num)
            for row, num in zip(rows, lens, strict=True)
        ]
        places_N = np.repeat(np.arange(len(rows)), lens)
        return self._values_FD[np.concatenate(numbers)], torch.from_numpy(places_N)


class PassThrough:
    """A hook by which a head returns what it reads, in a context; outside it changes nothing.

    It stays on the head: an engine would inspect a model again whose hooks come and go.
    """

    def __init__(self, head: nn.Module) -> None:
        """Put it on a head."""
        self._is_on = False
        head.register_forward_hook(self)

    def __call__(
        self, _head: nn.Module, inputs: tuple[torch.Tensor, ...], _output: object
    ) -> torch.Tensor | None:
        """Return what replaces the head's output; None keeps it."""
        return inputs[0] if self._is_on else None

    @contextmanager
    def on(self) -> Iterator[None]:
        """Let the head return what it reads."""
        self._is_on = True
        try:
            yield
        finally:
            self._is_on = False
