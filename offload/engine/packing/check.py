"""Finds the layers that may compute packed rows together, before the first packed step.

A layer may if, on a few rows,

1. its output is what it gives for each row alone, but for rounding;
2. a row that is NaN leaves all others finite, whichever row it is: NaN propagates along every path,
   however small the number that it is multiplied by;
3. other tokens in all other rows change a row by no more than rounding.

Any other layer is called once for each row, where each of these holds by construction.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import nn

from offload.engine.closeness import is_near
from offload.engine.packing.calls import PackedCall

if TYPE_CHECKING:
    from offload.engine.model.layers import LayeredModel

LENS = (5, 3, 7, 2)  # tokens of the rows that are tried
ROUNDINGS, ROUNDINGS_FP32 = 1, 8  # of a norm; 8 of float32 are 1e-6
Forward = Callable[[torch.Tensor, PackedCall], torch.Tensor]
_ERRORS = (TypeError, ValueError, LookupError, AttributeError, RuntimeError)


class PackedTrial:
    """A few packed rows on their way through the layers of a model."""

    def __init__(self, model: "LayeredModel", input_ids_BT: torch.Tensor) -> None:
        """Run the part before the layers.

        Args:
            model: The model.
            input_ids_BT: Tokens to take some of.
        """
        ids_N, num = input_ids_BT.flatten(), sum(LENS)
        some_N = ids_N[torch.arange(num, device=ids_N.device) % ids_N.numel()]
        front = model.front({"input_ids": some_N.unsqueeze(0), "row_lens": torch.tensor(LENS)})
        self._model, self._calls = model, front.packed
        self._hidden_BTD = front.hidden_BTD.detach()

    def visit(self, layer: int) -> bool:
        """Try a layer, whose weights are in place; return whether it may compute rows together."""
        model, call = self._model, self._calls[layer]
        alone, together = (partial(f, layer) for f in (model.rows_alone, model.rows_together))
        hidden_BTD = self._hidden_BTD
        with _without_dropout(model.layers[layer]):
            self._hidden_BTD = alone(hidden_BTD, call)
            try:
                return is_exact_together(hidden_BTD, call, alone=alone, together=together)
            except torch.OutOfMemoryError:
                raise
            except _ERRORS:  # of a layer that cannot take the tokens of several rows
                return False


@contextmanager
def _without_dropout(layer: nn.Module) -> Iterator[None]:
    kinds = (nn.Dropout, nn.AlphaDropout, nn.FeatureAlphaDropout)
    dropouts = [m for m in layer.modules() if m.training and isinstance(m, kinds)]
    try:
        for module in dropouts:
            module.training = False
        yield
    finally:
        for module in dropouts:
            module.training = True


def is_exact_together(
    hidden_BTD: torch.Tensor, call: PackedCall, *, alone: Forward, together: Forward
) -> bool:
    """Return whether a layer computes packed rows together as it does each alone.

    Args:
        hidden_BTD: The layer's input, of all rows.
        call: Its other arguments.
        alone: Computes the layer row by row.
        together: Computes it for all rows at once.
    """
    if call.together is None:
        return False
    expected_BTD = alone(hidden_BTD, call)
    if not _are_near(expected_BTD, together(hidden_BTD, call), call):
        return False
    for index, own_BTD in enumerate(call.split(expected_BTD)):
        others = [row.flip(-1) * 0.5 for row in call.split(hidden_BTD)]
        others[index] = call.split(hidden_BTD)[index]
        moved_BTD = call.split(together(torch.cat(others, dim=1), call))[index]
        if not _is_near(own_BTD, moved_BTD):
            return False
        poisoned = list(call.split(hidden_BTD))
        poisoned[index] = torch.full_like(poisoned[index], torch.nan)
        outputs = list(call.split(together(torch.cat(poisoned, dim=1), call)))
        del outputs[index]
        if not all(bool(row.isfinite().all()) for row in outputs):
            return False
    return True


def _are_near(one_BTD: torch.Tensor, other_BTD: torch.Tensor, call: PackedCall) -> bool:
    rows = zip(call.split(one_BTD), call.split(other_BTD), strict=True)
    return all(_is_near(*row) for row in rows)


def _is_near(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two results of a row differ by rounding."""
    num = ROUNDINGS_FP32 if one.dtype.itemsize >= torch.float32.itemsize else ROUNDINGS
    return is_near(other.float(), one.float(), num * torch.finfo(one.dtype).eps)
