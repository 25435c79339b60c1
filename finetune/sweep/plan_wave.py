"""The plan of a step that several runs share, and which runs share their steps."""

from collections.abc import Sequence
from dataclasses import fields, replace

from finetune.planning.candidates import choose
from finetune.training.loop import TIMED_S
from finetune.training.prepare import Planned
from offload.errors import DoesNotFitError
from offload.plan.facts.facts import ModelFacts
from offload.plan.facts.workload import why_head_on_device, why_on_device
from offload.plan.plan import Plan
from offload.plan.request import OF_A_RUN, PlanRequest, sharing, with_workload
from offload.plan.runs import plan_runs
from offload.plan.schedule.schedule import Order


def plan_wave(runs: Sequence[Planned]) -> Planned:
    """Return how the steps of runs are run that share an engine; of one run, as it was planned.

    Layers, embedding and head wait, and logits and MLPs are cut, as in the run that needs most
    memory by itself; embedding and head are on the device if any run needs them there. All
    micro-batches of all runs pass a layer before the next is used.

    Args:
        runs: The plan of each run alone.

    Returns:
        The plan; its recipe and steps are those of the run that needs most memory.

    Raises:
        DoesNotFitError: The shared step does not fit.
    """
    if len(runs) == 1:
        return runs[0]
    largest = max(runs, key=lambda run: run.choice.plan.peak_bytes)
    plan = largest.choice.plan
    each = [request for run in runs for request in run.open_requests]
    chosen = with_common_places(plan.request, each, plan.facts)
    ways = [
        [_as_in(chosen, one) for one in run.open_requests if one.order is Order.LAYER_MAJOR]
        for run in runs
    ]
    requests = tuple(
        sharing(found)
        for first in ways[0]
        if len(found := [one for way in ways for one in way if _way(one) == _way(first)])
        == len(runs)
    )
    return replace(
        largest, choice=choose(plan.facts, plan.machine, requests), open_requests=requests
    )


def plan_waves(runs: Sequence[Planned]) -> list[tuple[int, ...]]:
    """Return which runs share their steps, by their numbers: all, or else in waves.

    Waves are chosen for the shortest time of all. Each costs the timing of its first steps too, so
    runs that neither save nor lose by sharing share.

    Args:
        runs: The plan of each run alone.
    """

    def planned(numbers: tuple[int, ...]) -> Plan | None:
        try:
            return plan_wave([runs[number] for number in numbers]).choice.plan
        except DoesNotFitError:
            return None

    found = plan_runs(
        planned,
        num_steps=[run.steps.num for run in runs],
        kinds=[run.open_requests for run in runs],
        start_s=TIMED_S,
    )
    assert found is not None  # each has been planned alone
    return [wave.runs for wave in found.waves]


def with_common_places(
    chosen: PlanRequest, requests: Sequence[PlanRequest], facts: ModelFacts
) -> PlanRequest:
    """Return a request with its embedding and head where all others may have them.

    Args:
        chosen: The request of one run.
        requests: The requests of all runs that are to share a step with it.
        facts: The facts of their model.
    """
    adapters = [one.typical.adapter for one in requests]
    if any(why_on_device(facts, adapter) for adapter in adapters):
        chosen = with_workload(chosen, embeddings="device")
    if any(why_head_on_device(facts, adapter) for adapter in adapters):
        chosen = with_workload(chosen, head="device")
    return chosen


def _as_in(chosen: PlanRequest, request: PlanRequest) -> PlanRequest:
    """Return a request with the form of layers and the cuts of another."""
    typical = chosen.typical
    return with_workload(
        request,
        codec=typical.codec,
        head_chunk_tokens=typical.head_chunk_tokens,
        embeddings=typical.embeddings,
        head=typical.head,
        mlp_chunk_tokens=typical.mlp_chunk_tokens,
    )


def _way(request: PlanRequest) -> tuple[object, ...]:
    """Return what a request says of the machine, which runs that share a step have in common."""
    names = [one.name for one in fields(request) if one.name not in OF_A_RUN]
    return tuple(getattr(request, name) for name in names)
