"""What adds up the gradients of a run whose step several processes share."""

from typing import Protocol

from offload.plan.schedule.reduced import Reduced


class Reducer(Protocol):
    """Adds up a run's gradients over its processes, in ops of the step's network lane.

    All processes do the same ops in the same order, whatever micro-batches each has.
    """

    @property
    def reduced(self) -> Reduced:
        """What is sent of each layer, and of all else; equal on all processes."""

    def reduce(self, layer: int | None) -> None:
        """Replace gradients by their sums, on the running lane; waits for the other processes.

        Args:
            layer: Whose; None for those that no layer has alone.
        """
