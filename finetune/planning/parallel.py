"""How several processes share a step: each streams all layers, or each holds a part of the model.

Both are planned for the same step, with all rows full, and the faster of those that fit is chosen.
"""

from dataclasses import dataclass
from typing import Any, Literal

from finetune.errors import ConfigError
from finetune.planning.candidates import choose, chooser, full_requests
from finetune.planning.ranks import LAUNCHED, require_ranks_for
from finetune.recipe.recipe import Recipe, with_parallel
from finetune.recipe.sharded_rules import broken_sharded_rules
from finetune.report.format import shown_gib, shown_time
from offload.errors import DoesNotFitError, SluiceError
from offload.plan.facts.facts import ModelFacts
from offload.plan.machine.machine import Machine
from offload.plan.plan import Plan
from offload.plan.schedule.op import OVER_NETWORK, Kind
from offload.plan.search import Choice

STREAM: Literal["stream"] = "stream"
FSDP2: Literal["fsdp2"] = "fsdp2"


@dataclass(frozen=True, kw_only=True, slots=True)
class Way:
    """One way to share a step.

    Attributes:
        name: As `train.parallel` names it.
        choice: Its plan; None where there is none.
        why_not: Why there is none, in words.
        error: The refusal, where the plan does not fit or is not possible.
    """

    name: Literal["stream", "fsdp2"]
    choice: Choice | None
    why_not: str = ""
    error: SluiceError | None = None

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
            with_parallel(recipe, STREAM), facts, machine, num_ranks=num_ranks, setting=setting
        ),
        sharded=_sharded(with_parallel(recipe, FSDP2), facts, machine, num_ranks=num_ranks),
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
    breach = next(broken_sharded_rules(recipe), None)
    if breach is not None:
        why = f"as {breach.what.partition(' and train.parallel')[0]}: {breach.limit}"
        broken = ConfigError(breach.what, limit=breach.limit, hint=breach.hint)
        return Way(name=FSDP2, choice=None, why_not=why, error=broken)
    try:
        choose_sharded = chooser(recipe)
    except ConfigError as error:
        why = "as a router loss counts the tokens of the whole step"
        return Way(name=FSDP2, choice=None, why_not=why, error=error)
    requests = full_requests(recipe, facts, num_ranks=num_ranks)
    try:
        return Way(name=FSDP2, choice=choose_sharded(facts, machine, requests))
    except DoesNotFitError as error:
        return Way(name=FSDP2, choice=None, why_not=_why(error), error=error)


def way_line(way: Way) -> str:
    """Return a way's time and memory in words, or why there is none."""
    plan = way.plan
    if plan is None:
        return f"{way.name}: not possible, {way.why_not}"
    return (
        f"{way.name}: {shown_time(plan.step_s)} per step,"
        f" {plan.tokens_per_step / plan.step_s:,.0f} tokens/s; {shown_gib(plan.peak_bytes)} of each"
        f" GPU, {shown_gib(plan.host_bytes)} of RAM; {_spent(plan)}"
    )


def ways_lines(ways: Ways) -> list[str]:
    """Return how a step could be shared, and which way is faster, in words."""
    return [
        f"train.parallel: {way_line(ways.stream)}",
        f"train.parallel: {way_line(ways.sharded)}",
        f"train.parallel: auto takes {ways.reason}",
    ]


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
