"""Holds the choice of experts and the sides of a ReLU, so that errors of rounding can be compared.

A token whose two next experts are close takes another one after the slightest rounding, and a value
near zero passes a ReLU or does not. Gradients then differ by far more than any rounding, in
whichever computation it was.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_TOPK = (torch.topk, torch.Tensor.topk)
_RELU = (torch.nn.functional.relu, torch.relu, torch.Tensor.relu)
_NEAR = 0.1  # scores of one call in two precisions differ by less, those of two calls by more


class HeldChoices(TorchFunctionMode):
    """Notes what the highest of some scores are, and which pass a ReLU, or gives it again.

    The scores of a call find their note: those of the same shape that are nearest. The values are
    those of the scores themselves, with their gradient. Scores without a note are chosen from anew.
    """

    def __init__(self, noted: "HeldChoices | None" = None) -> None:
        """Note choices, or give those that another has noted."""
        super().__init__()
        self._given = noted
        self.notes: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.sides: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.num_moved = 0

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        if func in _RELU:
            return self._passed(args[0], found)
        if func not in _TOPK:
            return found
        scores, dim = args[0], self._dim(args, kwargs or {})
        if self._given is None:
            self.notes.append((scores.detach().double(), found.indices))
            return found
        chosen = self._noted(scores.detach().double(), self._given.notes)
        if chosen is None or chosen.shape != found.indices.shape:
            return found
        self.num_moved += int((chosen.sort(dim)[0] != found.indices.sort(dim)[0]).sum())
        return torch.return_types.topk((scores.gather(dim, chosen), chosen))

    def _passed(self, values: torch.Tensor, found: torch.Tensor) -> torch.Tensor:
        """Return the values on the sides that were noted."""
        seen, passes = values.detach().double(), values.detach() > 0
        if self._given is None:
            self.sides.append((seen, passes))
            return found
        noted = self._noted(seen, self._given.sides)
        if noted is None:
            return found
        self.num_moved += int((noted != passes).sum())
        return values * noted

    @staticmethod
    def _dim(args: Sequence[Any], kwargs: Any) -> int:
        return int(args[2] if len(args) > 2 else kwargs.get("dim", -1))

    @staticmethod
    def _noted(
        scores: torch.Tensor, notes: Sequence[tuple[torch.Tensor, torch.Tensor]]
    ) -> torch.Tensor | None:
        away = [
            (float((scores - known).nan_to_num(0, 0, 0).norm()), i)
            for i, (known, _) in enumerate(notes)
            if known.shape == scores.shape
        ]
        if not away:
            return None
        distance, i = min(away)
        return notes[i][1] if distance <= _NEAR * float(scores.nan_to_num(0, 0, 0).norm()) else None
