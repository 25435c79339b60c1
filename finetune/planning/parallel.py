"""How several processes share a step: each streams all layers, or each holds a part of the model.

Both are planned for the same step, with all rows full, and the faster of those that fit is chosen.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, Literal

from finetune.errors import ConfigError
from finetune.planning.candidates import choose, chooser, fits, full_requests, in_forms
from finetune.planning.ranks import LAUNCHED, require_ranks_for
from finetune.recipe.capabilities import broken_with
from finetune.recipe.recipe import Recipe, with_settings
from finetune.report.format import shown_gib, shown_time
from finetune.report.rows import Table
from offload.errors import DoesNotFitError, SluiceError
from offload.plan.facts.facts import ModelFacts
from offload.plan.machine.machine import Machine
from offload.plan.plan import Plan
from offload.plan.request import PlanRequest
from offload.plan.schedule.op import OVER_NETWORK, Kind
from offload.plan.search import Choice, fastest_step_s
from offload.plan.shares import apportioned, fastest_shares

# ---------------------------------------------------------------------------------------------
# How the micro-batches of a step are shared among ranks that are planned one by one.
#
# All ranks cut the rows alike and keep layers in one form, so that they train on one order of rows
# and those of a machine share its slab. Slots, kept graphs and the place of layer inputs are those
# of each rank's own plan. The shares are those with which the slowest rank's simulated step is
# shortest.

Wanted = Literal["auto", "equal"] | tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Shares:
    """What the ranks of a step agree on."""

    micro_batches: tuple[int, ...]  # each rank's micro-batches in a typical step
    # Alike in form and cut; what they leave open each rank chooses for itself.
    requests: tuple[PlanRequest, ...]
    step_s: float  # the predicted step of the slowest rank; infinite if it does not fit

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
    """Yield the shares of each cut of a step; a cut into no whole shares is left out.

    All ranks have layers in the same codec: those of a machine map one slab.
    """
    cuts: dict[tuple[int, int, str], list[PlanRequest]] = {}
    for request in form:
        typical = request.typical
        key = (typical.micro_batch_size, request.num_micro_batches, typical.codec)
        cuts.setdefault(key, []).append(request)
    for (_, num, _), alike in cuts.items():
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


STREAM: Literal["stream"] = "stream"
FSDP2: Literal["fsdp2"] = "fsdp2"


@dataclass(frozen=True, kw_only=True, slots=True)
class Way:
    """One way to share a step."""

    name: Literal["stream", "fsdp2"]  # the value of `train.parallel`
    choice: Choice | None  # its plan; None where there is none
    why_not: str = ""  # why there is none, in words
    error: SluiceError | None = None  # the refusal, where the plan does not fit or is not possible

    @property
    def plan(self) -> Plan | None:
        """Its plan."""
        return None if self.choice is None else self.choice.plan


@dataclass(frozen=True, kw_only=True, slots=True)
class Ways:
    """Both ways, and which is faster."""

    stream: Way
    sharded: Way

    @property
    def faster(self) -> Way:
        """The way that is faster, of those that fit; of equals the stream.

        Raises:
            SluiceError: Neither fits; the error is that of the stream, if it is possible.
        """
        stream, sharded = self.stream.plan, self.sharded.plan
        if stream is not None and (sharded is None or stream.step_s <= sharded.step_s):
            return self.stream
        if sharded is not None:
            return self.sharded
        assert self.stream.error is not None
        is_possible = isinstance(self.stream.error, DoesNotFitError)
        raise self.stream.error if is_possible else self.sharded.error or self.stream.error

    @property
    def reason(self) -> str:
        """Return which is taken and why, in words."""
        taken = self.faster
        other = self.sharded if taken is self.stream else self.stream
        if other.plan is None:
            return f"{taken.name}: {other.name} is not possible, {other.why_not}"
        assert taken.plan is not None
        return (
            f"{taken.name}: {shown_time(taken.plan.step_s)} per step, and {other.name}"
            f" {shown_time(other.plan.step_s)}; {_spent(taken.plan)}, {other.name}:"
            f" {_spent(other.plan)}"
        )


def compare_ways(
    recipe: Recipe,
    facts: ModelFacts,
    machine: Machine,
    *,
    num_ranks: int,
    setting: str = LAUNCHED,
) -> Ways:
    """Plan a recipe's step in both ways.

    Args:
        recipe: What is asked for; its `train.parallel` is not read.
        facts: The model.
        machine: Of each rank.
        num_ranks: Processes that share the step, two at least.
        setting: The option or command that sets their number.
    """
    return Ways(
        stream=_streamed(
            with_settings(recipe, {"train.parallel": STREAM}),
            facts,
            machine,
            num_ranks=num_ranks,
            setting=setting,
        ),
        sharded=_sharded(
            with_settings(recipe, {"train.parallel": FSDP2}), facts, machine, num_ranks=num_ranks
        ),
    )


def _streamed(
    recipe: Recipe, facts: ModelFacts, machine: Machine, *, num_ranks: int, setting: str
) -> Way:
    try:
        require_ranks_for(recipe.train, num_ranks=num_ranks, setting=setting)
    except ConfigError as error:
        return Way(name=STREAM, choice=None, why_not=_why(error), error=error)
    requests = full_requests(recipe, facts, num_ranks=num_ranks)
    try:
        return Way(name=STREAM, choice=choose(facts, machine, requests))
    except SluiceError as error:
        return Way(name=STREAM, choice=None, why_not=_why(error), error=error)


def _sharded(recipe: Recipe, facts: ModelFacts, machine: Machine, *, num_ranks: int) -> Way:
    breach = next(broken_with(recipe, "train.parallel"), None)
    if breach is not None:
        why = f"as {breach.what.partition(' and train.parallel')[0]}: {breach.limit}"
        return Way(name=FSDP2, choice=None, why_not=why, error=breach.error)
    try:
        choose_sharded = chooser(recipe)
    except ConfigError as error:
        why = "as a router loss counts the tokens of the whole step"
        return Way(name=FSDP2, choice=None, why_not=why, error=error)
    requests = full_requests(recipe, facts, num_ranks=num_ranks)
    try:
        return Way(name=FSDP2, choice=choose_sharded(facts, machine, requests))
    except SluiceError as error:
        return Way(name=FSDP2, choice=None, why_not=_why(error), error=error)


def ways_table(ways: Ways) -> Table:
    """Return how a step could be shared, and which way is faster."""
    lines = [
        (way.name, *([None] * 4), f"not possible, {way.why_not}")
        if (plan := way.plan) is None
        else (
            *(way.name, plan.step_s, plan.tokens_per_step / plan.step_s),
            *(plan.peak_bytes, plan.host_bytes, _spent(plan)),
        )
        for way in (ways.stream, ways.sharded)
    ]
    columns = ("", "step|s", "tokens/s|whole", "VRAM of each|bytes", "RAM|bytes", "moves")
    note = f"train.parallel: auto takes {ways.reason}"
    return Table("Ways to share a step: `train.parallel`", columns, lines, note, level="brief")


def ways_json(ways: Ways) -> dict[str, Any]:
    """Return the same for programs."""
    return {
        "auto": ways.faster.name,
        "reason": ways.reason,
        **{way.name: _way_json(way) for way in (ways.stream, ways.sharded)},
    }


def _way_json(way: Way) -> dict[str, Any]:
    plan = way.plan
    if plan is None:
        return {"why_not": way.why_not}
    return {
        "step_s": plan.step_s,
        "peak_vram_bytes": plan.peak_bytes,
        "host_bytes": plan.host_bytes,
        "network_bytes": plan.schedule.network_bytes,
        "h2d_bytes": plan.schedule.h2d_bytes,
        "device_memory": {term.name: term.num_bytes for term in plan.device_memory},
        "phases_s": plan.predict().phases(),
    }


def _spent(plan: Plan) -> str:
    """Return what a step waits for besides computing, in words."""
    timeline = plan.predict()
    waits_s, network_s = timeline.stall_s, timeline.exposed_s(*OVER_NETWORK)
    loads_s = timeline.busy_s(Kind.LOAD)
    moved = shown_gib(plan.schedule.network_bytes)
    if plan.request.is_sharded:
        return (
            f"{moved} sent by each, {shown_time(timeline.busy_s(*OVER_NETWORK))}, of which it waits"
            f" {shown_time(network_s)}"
        )
    return (
        f"{plan.schedule.num_loads} loads, {shown_time(loads_s)}, of which it waits"
        f" {shown_time(max(0.0, waits_s - network_s))}"
    )


def _why(error: SluiceError) -> str:
    return f"{error.what}; {error.limit}".splitlines()[0]
