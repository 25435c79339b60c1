"""The device memory of a step that several runs share.

What trains is there once for each run: its adapter, gradients, optimizer states and master copies.
So are the inputs of all micro-batches, and what kept graphs and outputs of attention hold. The
model is there once, and only one visit, head chunk or update works at a time: the largest counts.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

from offload.plan.memory.memory import (
    ADAPTERS,
    GRADIENTS,
    HIDDEN,
    KEPT_INPUTS,
    RECORDED,
    ROUTER_LOGITS,
    ROUTER_LOSS,
    SCORED_ROWS,
    SCORES_OF_LABELS,
    STATES,
    TRAINED_MODULES,
    DeviceNeeds,
    MemoryTerm,
    total_bytes,
)

SUMMED = frozenset(
    {
        ADAPTERS,
        TRAINED_MODULES,
        GRADIENTS,
        STATES,
        KEPT_INPUTS,
        HIDDEN,
        RECORDED,
        ROUTER_LOGITS,
        ROUTER_LOSS,
        SCORED_ROWS,
        SCORES_OF_LABELS,
    }
)
"""Terms of which each run has its own; of the others the largest counts."""

_Terms = tuple[MemoryTerm, ...]


def shared_needs(runs: Sequence[DeviceNeeds]) -> DeviceNeeds:
    """Return the needs of a step of several runs, on the same device and with the same layers.

    Sizes by micro-batch become those of the whole step.
    """
    if len(runs) == 1:
        return runs[0]

    def added_up(sizes_of: Callable[[DeviceNeeds], tuple[int, ...]]) -> tuple[int, ...]:
        layers = zip(*map(sizes_of, runs), strict=True)
        return tuple(
            int(sum(run.num_micro_batches * size for run, size in zip(runs, sizes, strict=True)))
            for sizes in layers
        )

    return replace(
        runs[0],
        always=_together([run.always for run in runs]),
        kept=_together([run.kept for run in runs]),
        graph_bytes=tuple(map(sum, zip(*(run.graph_bytes for run in runs), strict=True))),
        visit=_largest([run.visit for run in runs]),
        instants=tuple(map(_largest, zip(*(run.instants for run in runs), strict=True))),
        forward=_largest([run.forward for run in runs]),
        scored=_together([run.scored for run in runs]),
        update=max((run.update for run in runs), key=lambda term: term.num_bytes),
        output_bytes=tuple(
            size if all(run.output_bytes[layer] for run in runs) else 0
            for layer, size in enumerate(added_up(lambda run: run.output_bytes))
        ),
        sent_graph_bytes=added_up(lambda run: run.sent_graph_bytes),
        router_bytes=added_up(lambda run: run.router_bytes),
        num_micro_batches=1.0,
    )


def own_bytes(run: DeviceNeeds) -> int:
    """Return what a run has on the device for itself: what trains, and its layer inputs."""
    return total_bytes(
        term for term in (*run.always, *run.kept, *run.scored) if term.name in SUMMED
    )


def _together(runs: Sequence[_Terms]) -> _Terms:
    """Return all terms of a part, each as the sum over the runs or as the largest of them."""
    sizes: dict[str, list[int]] = {}
    for terms in runs:
        for term in terms:
            sizes.setdefault(term.name, []).append(term.num_bytes)
    return tuple(
        MemoryTerm(name=name, num_bytes=sum(some) if name in SUMMED else max(some))
        for name, some in sizes.items()
    )


def _largest(runs: Sequence[_Terms]) -> _Terms:
    return max(runs, key=total_bytes)
