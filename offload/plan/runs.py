"""Several runs over one stream of the layers: what fits together, what it saves, and which waves.

Problem. Below break-even a step waits for weights, and a further run of few tokens would take no
longer: its visits compute while the next layer arrives. But each run adds an adapter, gradients,
optimizer states and layer inputs to the device, where they take the place of slots and graphs, and
in the end they do not fit.

Idea. A *wave* is a set of runs that share their steps. When a run has made its last step it leaves
its wave, and the others go on with the same slots. The waves are trained one after the other, so
their time is the sum, and the plan of each says how long its steps take.

Rule. A wave begins with the first run that is left; then, one at a time, it takes the run with
which it saves most over training that run alone, as long as it saves anything, fits, and is not to
be kept apart. Afterwards runs move from one wave to another while that makes the sum shorter: the
last wave would often have few runs left. Runs that ask the same of the planner are planned once.
"""

import math
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache

from offload.plan.fit import MemoryNeeds
from offload.plan.memory.memory import own_bytes
from offload.plan.plan import Plan, costs_of
from offload.plan.request import sharing
from offload.plan.step import Drafts

SAVED_FRAC = 1e-6  # of the time: less is no gain

Planner = Callable[[tuple[int, ...]], Plan | None]
"""Returns the plan of a step that these runs share, in this order; None if they do not fit."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sharing:
    """So many of the runs, the first ones, in shared steps."""

    plan: Plan  # the plan of a step of all of them
    alone_s: float  # the time of a step of each, one after the other

    @property
    def num_runs(self) -> int:
        """How many there are."""
        return len(self.plan.request.runs)

    @property
    def tokens_per_s(self) -> float:
        """Of all of them."""
        return self.plan.tokens_per_step / self.plan.step_s

    @property
    def run_tokens_per_s(self) -> tuple[float, ...]:
        """Of each."""
        step_s = self.plan.step_s
        return tuple(run.tokens_per_step / step_s for run in self.plan.request.runs)

    @property
    def run_bytes(self) -> tuple[int, ...]:
        """What each has on the device for itself, without kept graphs and outputs."""
        facts, machine = self.plan.facts, self.plan.machine
        needs = (MemoryNeeds.of(facts, machine, run) for run in self.plan.request.runs)
        return tuple(own_bytes(one.on_device) for one in needs)


@dataclass(frozen=True, kw_only=True, slots=True)
class Wave:
    """Runs that train together."""

    runs: tuple[int, ...]  # the numbers of the runs, counted from 0, in the order of the plan's
    plan: Plan  # the plan of a step of all of them
    time_s: float  # seconds from its start until the last run has made its last step


@dataclass(frozen=True, kw_only=True, slots=True)
class RunsPlan:
    """How several runs train."""

    # The plans for 1, 2, 4, ... runs, as many as fit, and for all if they do.
    sharings: tuple[Sharing, ...]
    waves: tuple[Wave, ...]  # the sets that train together, one after the other
    alone_s: float  # the time of all runs one after the other
    num_runs: int  # how many there are

    @property
    def together_s(self) -> float:
        """The time of all waves."""
        return sum(wave.time_s for wave in self.waves)


def plan_runs(
    planner: Planner,
    *,
    num_steps: Sequence[int],
    kinds: Sequence[Hashable],
    apart: Collection[frozenset[int]] = (),
    start_s: float = 0.0,
) -> RunsPlan | None:
    """Choose the runs that train together; see above for the rule.

    Args:
        planner: Plans a step that some of the runs share.
        num_steps: Steps of each run.
        kinds: What each run asks of the planner: those of runs of one kind are the same.
        apart: Sets of runs that cannot all be in one wave.
        start_s: What a wave takes before its first step, whatever its runs.

    Returns:
        The waves, and what fits; None if a run does not fit alone.
    """
    times = _Times(planner=planner, num_steps=num_steps, kinds=kinds, apart=apart, start_s=start_s)
    numbers = range(len(num_steps))
    alone = [times.wave((run,)) for run in numbers]
    steps_s = [wave.plan.step_s for wave in alone if wave is not None]
    if len(steps_s) < len(alone):
        return None
    waves = _moved(list(_greedy(times, numbers)), times)
    return RunsPlan(
        sharings=tuple(_sharings(times, steps_s)),
        waves=tuple(wave for runs in waves if (wave := times.wave(runs)) is not None),
        alone_s=sum(wave.time_s for wave in alone if wave is not None),
        num_runs=len(alone),
    )


def wave_s(plan: Plan, num_steps: Sequence[int]) -> float:
    """Return the time of runs that share their steps, each for as many as it has.

    Args:
        plan: Of a step of all of them.
        num_steps: Of each run of the plan.
    """
    total_s, done = 0.0, 0
    for last in sorted(set(num_steps)):
        left = [run for run, number in enumerate(num_steps) if number >= last]
        total_s += (last - done) * _rest_step_s(plan, left)
        done = last
    return total_s


def _rest_step_s(plan: Plan, left: Sequence[int]) -> float:
    """Return the time of a step of the runs that are left, with what stayed on the device."""
    runs = plan.request.runs
    if len(left) == len(runs):
        return plan.step_s
    request = sharing([runs[run] for run in left])
    costs = costs_of(plan.facts, plan.machine, request)
    drafts = Drafts(
        facts=plan.facts, request=request, costs=costs, is_staged=plan.schedule.is_staged
    )
    return drafts.step_s(plan.residency)


class _Times:
    """The plans and times of sets of runs, each computed once for runs of equal kinds."""

    def __init__(
        self,
        *,
        planner: Planner,
        num_steps: Sequence[int],
        kinds: Sequence[Hashable],
        apart: Collection[frozenset[int]],
        start_s: float,
    ) -> None:
        first = {kind: number for number, kind in reversed(list(enumerate(kinds)))}
        self._kinds = [first[kind] for kind in kinds]
        self._num_steps, self._apart, self._start_s = num_steps, apart, start_s
        # a kind is the number of the first run that has it
        self._plan = cache(planner)
        self._time_s = cache(self._timed)

    def like(self, run: int) -> tuple[int, int]:
        """Return what runs have in common that take the same time."""
        return self._kinds[run], self._num_steps[run]

    def time_s(self, runs: Collection[int]) -> float:
        """Return how long these train together; infinite if they cannot."""
        if any(one <= set(runs) for one in self._apart):
            return math.inf
        return self._time_s(tuple(sorted(map(self.like, runs)))) if runs else 0.0

    def wave(self, runs: Collection[int]) -> Wave | None:
        """Return these as a wave, or None."""
        time_s = self.time_s(runs)
        order = tuple(sorted(runs, key=lambda run: (*self.like(run), run)))
        plan = self._plan(tuple(self._kinds[run] for run in order))
        return (
            None
            if plan is None or math.isinf(time_s)
            else Wave(runs=order, plan=plan, time_s=time_s)
        )

    def _timed(self, likes: tuple[tuple[int, int], ...]) -> float:
        plan = self._plan(tuple(kind for kind, _ in likes))
        if plan is None:
            return math.inf
        return self._start_s + wave_s(plan, [number for _, number in likes])


def _sharings(times: _Times, steps_s: Sequence[float]) -> Iterator[Sharing]:
    """Yield what the first 1, 2, 4, ... runs give together, as many as can be."""
    number = 1
    while True:
        wave = times.wave(range(number))
        if wave is None:
            return
        yield Sharing(plan=wave.plan, alone_s=sum(steps_s[:number]))
        if number == len(steps_s):
            return
        number = min(2 * number, len(steps_s))


def _greedy(times: _Times, runs: Sequence[int]) -> Iterator[set[int]]:
    """Yield waves, each with the runs that save most in it."""
    left = list(runs)
    while left:
        wave = {left.pop(0)}
        while True:
            before_s = times.time_s(wave)
            saved_s = {
                run: before_s + times.time_s({run}) - times.time_s({*wave, run}) for run in left
            }
            best = max(saved_s, key=lambda run: (saved_s[run], -run), default=None)
            if best is None or saved_s[best] <= SAVED_FRAC * before_s:
                break
            wave.add(best)
            left.remove(best)
        yield wave


def _moved(waves: list[set[int]], times: _Times) -> list[set[int]]:
    """Move runs from wave to wave while that makes the sum of their times shorter."""
    while True:
        best_s, best = -SAVED_FRAC * sum(map(times.time_s, waves)), None
        for source in waves:
            for target in waves:
                for run in sorted(source, reverse=True) if source is not target else ():
                    before_s = times.time_s(source) + times.time_s(target)
                    after_s = times.time_s(source - {run}) + times.time_s(target | {run})
                    if after_s - before_s < best_s:
                        best_s, best = after_s - before_s, (source, target, run)
        if best is None:
            return [wave for wave in waves if wave]
        source, target, run = best
        source.remove(run)
        target.add(run)
