"""How the micro-batches of a step are shared among ranks that are planned one by one.

All ranks cut the rows alike and keep layers in one form, so that they train on one order of rows
and those of a machine share its slab. Slots, kept graphs and the place of layer inputs are those of
each rank's own plan. The shares are those with which the slowest rank's simulated step is shortest.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Literal

from finetune.errors import ConfigError
from finetune.planning.candidates import choose, in_forms
from offload.errors import DoesNotFitError
from offload.plan.facts.facts import ModelFacts
from offload.plan.machine.machine import Machine
from offload.plan.request import PlanRequest
from offload.plan.search import Choice, fastest_step_s, fits
from offload.plan.shares import apportioned, fastest_shares

Wanted = Literal["auto", "equal"] | tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Shares:
    """What the ranks of a step agree on.

    Attributes:
        micro_batches: Of each rank, in a typical step.
        requests: Alike in form and cut; what they leave open each rank chooses for itself.
        step_s: The predicted step of the slowest rank; infinite if it does not fit.
    """

    micro_batches: tuple[int, ...]
    requests: tuple[PlanRequest, ...]
    step_s: float

    def of(self, rank: int) -> list[PlanRequest]:
        """Return what a rank may choose from."""
        own = self.micro_batches[rank]
        return [replace(request, own_micro_batches=own) for request in self.requests]


def share_out(
    facts: ModelFacts,
    machines: Sequence[Machine],
    requests: Sequence[PlanRequest],
    *,
    wanted: Wanted,
) -> Shares:
    """Return the fastest shares, of the first form of the step in which all ranks fit.

    Args:
        facts: The model.
        machines: Of each rank.
        requests: The candidates, the plainest first.
        wanted: `train.shares`.

    Raises:
        ConfigError: The shares that are wanted are of no whole micro-batches.
        DoesNotFitError: A rank does not fit.
    """
    found: list[Shares] = []
    for form in in_forms(requests, machines[0]):
        found = list(_of_form(facts, machines, form, wanted))
        best = min(found, key=lambda shares: shares.step_s, default=None)
        if best is not None and math.isfinite(best.step_s):
            return best
    if not found:
        assert not isinstance(wanted, str)
        num = requests[0].num_micro_batches
        nearest = list(apportioned(num, wanted))
        raise ConfigError(
            f"train.shares: {list(wanted)} for a step of {num} micro-batches",
            limit=f"they add up to {sum(wanted)}, which must divide the micro-batches of a step",
            hint=f"`train.shares: {nearest}`, or `train.shares: auto`",
        )
    last = found[-1]
    for rank in range(len(machines)):
        own_choice(facts, machines[rank], last, rank=rank)
    raise AssertionError("one of the ranks does not fit")


def own_choice(facts: ModelFacts, machine: Machine, shares: Shares, *, rank: int) -> Choice:
    """Return the plan of one rank's share, and the alternatives that were considered.

    Raises:
        DoesNotFitError: It does not fit.
    """
    try:
        return choose(facts, machine, shares.of(rank))
    except DoesNotFitError as error:
        raise DoesNotFitError(
            f"rank {rank} with {shares.micro_batches[rank]} of the step's micro-batches:"
            f" {error.what}",
            limit=error.limit,
            hint=error.hint,
        ) from error


def _of_form(
    facts: ModelFacts, machines: Sequence[Machine], form: Sequence[PlanRequest], wanted: Wanted
) -> Iterator[Shares]:
    """Yield the shares of each cut of a step; a cut into no whole shares is left out."""
    cuts: dict[tuple[int, int], list[PlanRequest]] = {}
    for request in form:
        key = (request.typical.micro_batch_size, request.num_micro_batches)
        cuts.setdefault(key, []).append(request)
    for (_, num), alike in cuts.items():
        is_whole = alike[0].most_tokens is not None  # packed steps differ in their micro-batches
        if not isinstance(wanted, str) and num % sum(wanted) and not is_whole:
            continue
        yield _of_cut(facts, machines, alike, wanted)


def _of_cut(
    facts: ModelFacts, machines: Sequence[Machine], alike: Sequence[PlanRequest], wanted: Wanted
) -> Shares:
    num = alike[0].num_micro_batches

    def own(count: int) -> list[PlanRequest]:
        return [replace(request, own_micro_batches=count) for request in alike]

    @cache
    def step_s(machine: Machine, count: int) -> float:
        return fastest_step_s(facts, machine, own(count))

    def has_room(machine: Machine, count: int) -> bool:
        return fits(facts, machine, own(count))

    counts = None
    if wanted == "auto":
        counts = fastest_shares(
            [partial(step_s, machine) for machine in machines],
            [partial(has_room, machine) for machine in machines],
            num=num,
        )
    if counts is None:
        weights = (1,) * len(machines) if isinstance(wanted, str) else wanted
        counts = apportioned(num, weights)
    taken = list(zip(machines, counts, strict=True))
    slowest_s = math.inf
    if all(has_room(*one) for one in taken):
        slowest_s = max(step_s(*one) for one in taken)
    return Shares(micro_batches=counts, requests=tuple(alike), step_s=slowest_s)
