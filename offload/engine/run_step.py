"""A run's share of a step, as it is given to the engine."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from offload.engine.batch import Batch
from offload.engine.model.router import alone
from offload.engine.objective import Objective
from offload.engine.seeding import NEWEST, Seeding
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


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RunStep:
    """What one run computes in a step that it may share with others.

    Attributes:
        micro_batches: As for `Engine.forward_backward`.
        adapter: Name of the adapter that it trains; None for those that are active, which only a
            run that shares its step with no other can have.
        objective: The loss of the run's step; None for the cross-entropy.
        scored: Micro-batches that the objective's loss reads and does not train on.
        dropout_seed: Seeds dropout; None draws one from torch's generator.
        seeding: How seed, layer and micro-batch become a generator's seed.
        num_label_tokens: Divisor of the sum of the losses; None counts the label tokens of the
            micro-batches. If several processes share a step, pass their total. An objective divides
            as it defines.
        micro_batch_ids: Number of each micro-batch in the run's whole step, so that its dropout
            does not depend on the process that computes it; None numbers them from 0.
        add_up: Adds up a vector over the processes that share the step, in each of them alike; a
            router loss calls it once per step.
        reducer: Adds up the gradients over the processes that share the step, while it runs; None
            leaves those of this process.
        loss_scale: Factor of all gradients, and not of the loss that is returned: a power of two
            keeps small ones in float16.
    """

    micro_batches: Sequence[Batch]
    adapter: str | None = None
    objective: Objective | None = None
    scored: Sequence[Batch] = ()
    dropout_seed: int | None = None
    seeding: Seeding = NEWEST
    num_label_tokens: int | None = None
    micro_batch_ids: Sequence[int] | None = None
    add_up: Callable[[torch.Tensor], torch.Tensor] = alone
    reducer: Reducer | None = None
    loss_scale: float = 1.0
