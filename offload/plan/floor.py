"""A floor under the time of a step: what its layers could save at best, without a search.

A step takes at least the time of its visits, less what is not computed again because it was kept or
sent. Each number of kept graphs leaves room for so many outputs of attention next to the fewest
slots, and what is sent is copied first. Whether the link keeps up is left out, so it takes no bound
to compute. Where visits limit the step, it is a few thousandths below the best residency.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from offload.plan.schedule.residency import NOTHING_SAVED, Residency
from offload.plan.schedule.schedule import warm_ring
from offload.plan.time.bounds import StepBound
from offload.plan.time.costs import Costs


@dataclass(frozen=True, kw_only=True, slots=True)
class Floor:
    """Times that a step does not get below, by how many of its layers save something.

    Attributes:
        visits_s: The step if copies took no time and every layer were computed again.
        num_micro_batches: Of the step.
        graphs_s: What a kept graph saves a micro-batch, by layer, the largest first.
        outputs_s: The same of a kept output of attention.
        sent_graphs_s: The same of a graph that is sent.
        sent_outputs_s: The same of an output that is sent.
    """

    visits_s: float
    num_micro_batches: int
    graphs_s: Sequence[float]
    outputs_s: Sequence[float]
    sent_graphs_s: Sequence[float]
    sent_outputs_s: Sequence[float]

    @classmethod
    def of(cls, costs: Costs, *, num_micro_batches: int) -> "Floor":
        """Add up the visits of a step, and what its layers can save."""
        layers, num_layers = costs.layers, len(costs.layers)
        step = StepBound.of(
            costs, num_micro_batches=num_micro_batches, stashed_bytes=0, is_staged=False
        )
        visits_s = step.bound_s(
            num_layers, num_kept_graphs=0, saved=NOTHING_SAVED, ring=warm_ring(num_layers)
        )
        again_s = [one.back_s(has_graph=False) for one in layers]
        graphs_s = [s - one.back_s(has_graph=True) for s, one in zip(again_s, layers, strict=True)]
        outputs_s = [
            s - one.back_s(has_graph=False, has_output=True)
            for s, one in zip(again_s, layers, strict=True)
        ]
        return cls(
            visits_s=visits_s + costs.optimizer_s,
            num_micro_batches=num_micro_batches,
            graphs_s=sorted(graphs_s, reverse=True),
            outputs_s=sorted(outputs_s, reverse=True),
            sent_graphs_s=_without_copies(graphs_s, [one.graph_pack_s for one in layers]),
            sent_outputs_s=_without_copies(outputs_s, [one.pack_s for one in layers]),
        )

    def least_s(self, saved: Iterable[Residency]) -> float:
        """Return the least time of a step with one of these residencies, or with less."""
        saved_s = max(map(self._saved_s, saved), default=0.0)
        return self.visits_s - self.num_micro_batches * saved_s

    def _saved_s(self, saved: Residency) -> float:
        """Return what a micro-batch saves at most; a layer saves in one way."""
        each_s = [
            *self.graphs_s[: saved.num_kept_graphs],
            *self.outputs_s[: saved.num_kept_outputs],
            *self.sent_graphs_s[: saved.num_sent_graphs],
            *self.sent_outputs_s[: saved.num_sent_outputs],
        ]
        return sum(s for s in sorted(each_s, reverse=True)[: len(self.graphs_s)] if s > 0)


def _without_copies(saved_s: Sequence[float], copies_s: Sequence[float]) -> Sequence[float]:
    return sorted((s - copy_s for s, copy_s in zip(saved_s, copies_s, strict=True)), reverse=True)
