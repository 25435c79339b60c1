"""The sums of gradients over ranks whose model's own weights train, of layers and around them."""

from collections.abc import Callable, Sequence

import torch
from torch import nn

from finetune.training.ranks import Ranks
from offload.engine.host_gradients import LateUpdates
from offload.plan.schedule.reduced import Reduced


class WeightSums:
    """Adds up gradients in ops of the network lane: of a layer in its buffer on the device."""

    def __init__(
        self,
        updates: LateUpdates,
        around: Callable[[], Sequence[torch.Tensor]],
        *,
        reduced: Reduced,
        dtype: torch.dtype,
        ranks: Ranks,
    ) -> None:
        """Take the parts.

        Args:
            updates: Of the layers.
            around: Returns the gradients of what is around them, on the device.
            reduced: What is sent.
            dtype: That gradients are sent in; sums are taken in fp32.
            ranks: The processes that share each step.
        """
        self._updates, self._around = updates, around
        self.reduced, self._dtype, self._ranks = reduced, dtype, ranks

    def reduce(self, layer: int | None) -> None:
        """Replace gradients by their sums in the order of the ranks; waits for the others."""
        summed = (
            [_holder(gradient) for gradient in self._around()]
            if layer is None
            else self._updates.gradients_of(layer)
        )
        self._ranks.sum_gradients(summed, dtype=self._dtype, is_ordered=True)


def _holder(gradient: torch.Tensor) -> nn.Parameter:
    """Return a parameter with this gradient, which is summed in place."""
    holder = nn.Parameter(gradient, requires_grad=False)
    holder.grad = gradient
    return holder
