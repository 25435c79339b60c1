"""Several runs over one stream of the base: each asks for its steps, and all are computed at once.

Between two steps each run updates its weights, evaluates itself and writes its files, as if it were
alone. All runs that are equally far share one pass over the layers and back. A run that is further
than others, as after a kill, waits for them: so what a loss on held-out rows is compared with is
the same whether or not the runs were interrupted.

A run that ends, or fails between two steps, leaves; the others go on. A failure of the engine is
everybody's, and so is one that only some ranks of the run know of.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

from finetune import interrupts
from finetune.data.steps import StepBatch
from finetune.env import launch_notes
from finetune.errors import ApartError
from finetune.planning.request import facts_of
from finetune.report.screen import Screen
from finetune.sweep.plan_wave import plan_wave, plan_waves
from finetune.train import show_plan
from finetune.training.attach import on_engine
from finetune.training.finish import finish, look_before
from finetune.training.loop import Computed, Request, StepRecord, computed
from finetune.training.notify import failures_notified, notify_failure
from finetune.training.prepare import (
    Prepared,
    agreed,
    measured_everywhere,
    prepare_alone,
    settled,
    with_plan,
)
from finetune.training.run import Outcome, Run, shortage_named
from finetune.training.session import Session
from finetune.training.step_log import StepLog, step_log
from offload.plan.plan import Plan

Judge = Callable[[int, Mapping[int, float]], Mapping[int, str]]
"""Takes a step and losses after it, by number of the run; returns why which runs are to stop."""


def train_together(
    runs: Sequence[Run], *, screen: Screen, machine_file: Path | None, judge: Judge
) -> list[Outcome]:
    """Run recipes over one stream of their base, each as if it were alone.

    Args:
        runs: The runs, with their directories locked; their recipes agree in what they share.
        screen: The screen for what they share.
        machine_file: A machine that was measured before; None measures this one.
        judge: Says which runs are to stop after an evaluation.

    Returns:
        How each ended. One that fails between two steps leaves alone.

    Raises:
        ApartError: By the plan they train in waves.
        SluiceError: Anything else that a user or the machine can cause, but for such failures.
    """
    for note in launch_notes():
        screen.note(note)
    ranks, facts = runs[0].ranks, facts_of(runs[0].recipe.model)
    cards = measured_everywhere(runs[0], facts, machine_file)
    alone: list[Prepared] = []
    for run in settled(runs, facts, cards):
        alone.append(prepare_alone(run, facts, cards))
        cards = alone[-1].planned.cards  # expert kernels are timed once
    waves = ranks.from_main(lambda: plan_waves([one.planned for one in alone]))
    if len(waves) > 1:
        raise ApartError(waves)
    shared = agreed(plan_wave([one.planned for one in alone]), ranks)
    plan = shared.choice.plan
    prepared = [replace(one, run=with_plan(one.run, one.planned, plan)) for one in alone]
    show_plan(shared, runs[0].recipe, screen)
    with on_engine(prepared, shared) as (sessions, plan):
        for session, request in zip(sessions, plan.request.runs, strict=True):
            look_before(session)
            session.kind.begin(session, plan, request)
        with ExitStack() as held, shortage_named(ranks):
            for session in sessions:
                held.enter_context(failures_notified(session.run))
            return _trained(sessions, plan, judge)


class _Member:
    """A run that trains with others.

    Attributes:
        session: The run.
        log: The log of its steps.
        is_waiting: Whether its loss on held-out rows is yet to be compared.
        failed: The outcome of a run that failed; None otherwise.
    """

    log: StepLog
    _batch: StepBatch
    _batches: Iterator[StepBatch]

    def __init__(self, session: Session) -> None:
        """Take the run, begun."""
        self.session = session
        self.is_waiting = False
        self.failed: Outcome | None = None
        self._held = ExitStack()
        self._record: StepRecord | None = None
        self._is_finished = False

    @property
    def outcome(self) -> Outcome | None:
        """How it ended; None as long as it trains."""
        return self.failed or self.log.outcome

    @contextmanager
    def leaving_alone(self) -> Iterator[None]:
        """Let the run leave, and the others go on, if it fails in this context."""
        run = self.session.run
        try:
            yield
        except run.ranks.run_errors as error:
            num_steps = run.dir.checkpoints.newest() or 0
            self.failed = Outcome(run_dir=run.dir.path, num_steps=num_steps, error=error)
            notify_failure(run, error)
            self.close()

    def open(self, plan: Plan) -> None:
        """Open what its steps are read from and written to."""
        self.log = self._held.enter_context(step_log(self.session, plan))
        self.is_waiting = self.log.loss is not None
        self._batches = self.log.batches()

    def close(self) -> None:
        """Close it."""
        self._held.close()

    def request(self, watched: ExitStack) -> Request:
        """Return its next step, recorded in a context where the recipe asks for it."""
        self._batch = next(self._batches)
        watched.enter_context(self.log.watching(self._batch))
        return self.session.loop.request(self._batch.step, self._batch.share)

    def complete(self, request: Request, found: Computed, received: Sequence[int]) -> None:
        """Update what trains with what the engine found; a loss on held-out rows waits."""
        self._record = self.session.loop.complete(request, found)
        self.log.write(self._batch, self._record)
        self.is_waiting = self.log.loss is not None
        if not self.is_waiting:
            self.log.close_step(self._record, received)

    def settle(self, why: str | None, received: Sequence[int]) -> None:
        """Go on after its loss was compared, or stop; a run that is resumed has no step yet."""
        self.is_waiting = False
        if self._record is not None:
            self.log.close_step(self._record, received, stopped=why)
        elif why is not None:
            self.log.stop(why)

    def finish(self) -> None:
        """Write the result of a run that is complete, once."""
        self.close()
        if self._is_finished or self.outcome is None or not self.outcome.is_complete:
            return
        self._is_finished = True
        outcome = self.outcome
        with self.leaving_alone():
            finish(self.session)
        if self.failed is not None:
            self.failed = replace(outcome, error=self.failed.error)


def _trained(sessions: Sequence[Session], plan: Plan, judge: Judge) -> list[Outcome]:
    """Run all steps, and finish each run when it leaves; the last ones after their steps.

    While steps run, a signal waits for their checkpoints; afterwards it ends the program at once.
    """
    members = [_Member(session) for session in sessions]
    with interrupts.collected() as received, ExitStack() as held:
        for member in members:
            held.callback(member.close)
            with member.leaving_alone():
                member.open(plan)
        while live := [member for member in members if member.outcome is None]:
            first = min(member.log.num_steps for member in live)
            due = [member for member in live if member.log.num_steps == first]
            waiting = {members.index(member): member for member in due if member.is_waiting}
            if waiting:
                losses = {n: one.log.loss for n, one in waiting.items() if one.log.loss is not None}
                verdicts = judge(first, losses)
                for number, member in waiting.items():
                    with member.leaving_alone():
                        member.settle(verdicts.get(number), received)
            else:
                _step(due, received)
            if any(member.outcome is None for member in members):
                for member in due:
                    if member.outcome is not None:
                        member.finish()
    for member in members:
        member.finish()
    return [outcome for member in members if (outcome := member.outcome) is not None]


def _step(due: Sequence[_Member], received: Sequence[int]) -> None:
    """Compute the next step of runs that are equally far, in one pass over the layers."""
    requests: dict[_Member, Request] = {}
    with ExitStack() as watched:
        for member in due:
            with member.leaving_alone():
                requests[member] = member.request(watched)
        if not requests:
            return
        found = computed(due[0].session.engine, list(requests.values()))
    for (member, request), result in zip(requests.items(), found, strict=True):
        with member.leaving_alone():
            member.complete(request, result, received)
