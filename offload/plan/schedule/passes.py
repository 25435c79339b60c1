"""The passes of each run of a step through the layers' visits, and how they are numbered."""

from collections.abc import Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True, kw_only=True, slots=True)
class Passes:
    """The passes of one run through each layer's visits in a step.

    They are numbered within the step: the micro-batches that are trained on, run after run; then,
    run after run, those that are only scored and all of the run's as its reference computes them.

    Attributes:
        num_trained: Micro-batches that are trained on; 0 for an evaluation.
        num_scored: Micro-batches that are only scored.
        has_reference: Whether a reference scores all of them too.
        has_objective: Whether the loss is taken over all of the run's rows at once.
        first_trained: Number of the first that is trained on.
        first_further: Number of the first that is not; None if they follow at once.
    """

    num_trained: int
    num_scored: int = 0
    has_reference: bool = False
    has_objective: bool = True
    first_trained: int = 0
    first_further: int | None = None

    @property
    def num_policy(self) -> int:
        """How many are computed as the model is."""
        return self.num_trained + self.num_scored

    @property
    def num_further(self) -> int:
        """How many are not trained on."""
        return self.num_scored + self.num_policy * self.has_reference

    @property
    def trained(self) -> range:
        """Those with a gradient."""
        return range(self.first_trained, self.first_trained + self.num_trained)

    @property
    def scored(self) -> range:
        """Those of the model without one."""
        return range(self._further, self._further + self.num_scored)

    @property
    def reference(self) -> range:
        """Those of the reference."""
        return range(self._further + self.num_scored, self._further + self.num_further)

    @property
    def all(self) -> tuple[int, ...]:
        """All of them."""
        return (*self.trained, *self.scored, *self.reference)

    def micro_batch(self, number: int) -> int:
        """Return whose rows a pass computes: an index into those trained on, then those scored."""
        if number in self.trained:
            return number - self.first_trained
        return (number - self._further + self.num_trained) % self.num_policy

    @property
    def _further(self) -> int:
        following = self.first_trained + self.num_trained
        return following if self.first_further is None else self.first_further


def numbered(runs: Sequence[Passes]) -> tuple[Passes, ...]:
    """Return the passes of a step's runs with their numbers in the step."""
    first, further = 0, sum(run.num_trained for run in runs)
    found = []
    for run in runs:
        found.append(replace(run, first_trained=first, first_further=further))
        first, further = first + run.num_trained, further + run.num_further
    return tuple(found)
