"""The sums of gradients over ranks whose model's own weights train, of layers and around them."""

from collections.abc import Callable, Collection, Sequence

import torch
from torch import nn

from finetune.training.ranks import Ranks
from offload.engine.host_gradients import LateUpdates
from offload.plan.facts.embedding import summed_row_bytes
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
        self._ranks.sum_gradients(summed, dtype=self._dtype)


class RowGradients:
    """The ranks that train an embedding in RAM; see `OtherRows`."""

    def __init__(
        self, width: int, *, to: Collection[int], dtype: torch.dtype, ranks: Ranks
    ) -> None:
        """Take the parts.

        Args:
            width: Of a row.
            to: The ranks that update the embedding.
            dtype: That gradients are sent in; sums are taken in fp32.
            ranks: The processes that share each step.
        """
        self._width, self._to, self._dtype, self._ranks = width, to, dtype, ranks

    def num_bytes(self, num_rows: int) -> int:
        """See `OtherRows`."""
        row_bytes = self._width * self._dtype.itemsize
        return summed_row_bytes(num_rows, row_bytes, num_ranks=self._ranks.num)

    def gather(
        self,
        tokens_N: torch.Tensor,
        rows_ND: torch.Tensor,
        add: Callable[[torch.Tensor, torch.Tensor], None],
    ) -> None:
        """See `OtherRows`."""
        self._ranks.gather_rows(tokens_N, rows_ND, to=self._to, dtype=self._dtype, add=add)


def _holder(gradient: torch.Tensor) -> nn.Parameter:
    """Return a parameter with this gradient, which is summed in place."""
    holder = nn.Parameter(gradient, requires_grad=False)
    holder.grad = gradient
    return holder
