"""What follows each step of a run: its figures, its evaluation, its checkpoint, and its end."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any

from finetune.data.steps import StepBatch, StepLoader
from finetune.errors import FinetuneError
from finetune.report.screen import Steps
from finetune.run.run_files import EVAL_LOSS
from finetune.training import report
from finetune.training.checkpoints import save
from finetune.training.loop import StepRecord, is_due
from finetune.training.measured import energy_row, memory_in_use, open_meter
from finetune.training.metrics_writer import MetricsWriter, profiled
from finetune.training.ranks import Ranks
from finetune.training.run import Outcome
from finetune.training.session import Session
from offload.plan.plan import Plan
from offload.probe.energy import Meter, Taken


@contextmanager
def step_log(session: Session, plan: Plan) -> Iterator["StepLog"]:
    """Open what the steps of a run are read from and written to, in this context.

    Args:
        session: The run, begun.
        plan: The plan that its steps are compared with.
    """
    run, recipe = session.run, session.run.recipe
    with ExitStack() as held:
        log = StepLog(session, plan)
        if log.outcome is None:
            log.loader = held.enter_context(
                session.rounds
                or StepLoader(
                    session.steps,
                    first_step=session.first_step,
                    num_workers=recipe.data.num_workers,
                )
            )
            log.writer = held.enter_context(
                MetricsWriter(
                    run.dir, recipe, is_main=run.ranks.is_main, first_step=session.first_step
                )
            )
            log.meter = held.enter_context(open_meter(run))
            log.bar = held.enter_context(
                run.screen.steps(
                    done=session.first_step,
                    total=session.steps.num,
                    memory=partial(memory_in_use, run.device),
                )
            )
        yield log


class StepLog:
    """The steps of a run, from the first that is left to its end.

    Attributes:
        outcome: The end of the steps; None as long as there are more.
        num_steps: Steps that are done.
        loss: The loss on held-out rows after the newest step; None where it was not evaluated.
    """

    loader: Iterable[StepBatch]
    writer: MetricsWriter
    meter: Meter
    bar: Steps

    def __init__(self, session: Session, plan: Plan) -> None:
        """Look how far the run is; a complete one has no step left."""
        run, ranks = session.run, session.run.ranks
        self.session, self._plan = session, plan
        self.num_steps = session.first_step
        self.outcome: Outcome | None = None
        self._evaluations = ranks.from_main(lambda: run.dir.evaluations(run.recipe.train))
        if self._is_complete:
            self.outcome = Outcome(run_dir=run.dir.path, num_steps=self.num_steps)
        rows: list[dict[str, Any]] = []
        if self.num_steps and self.outcome is None:
            rows = ranks.from_main(lambda: run.dir.read_metrics()[-1:])
        self.loss: float | None = rows[0].get(EVAL_LOSS) if rows else None
        self._taken: Sequence[Taken] = ()
        self._unsaved: StepRecord | None = None  # of the newest step, without a checkpoint

    @property
    def _is_complete(self) -> bool:
        return self.num_steps == self.session.steps.num or self._evaluations.are_enough

    @property
    def ended(self) -> Outcome:
        """How the steps ended."""
        assert self.outcome is not None, "the last step of a run ends it"
        return self.outcome

    def batches(self) -> Iterator[StepBatch]:
        """Yield the rows of each step that is left; none after `close_step` has ended the run."""
        try:
            for batch in () if self.outcome is not None else self.loader:
                yield batch
                if self.outcome is not None:
                    return
        except FinetuneError:  # of what makes the rows; what was learned so far is kept
            if self._unsaved is not None:
                self._save(self._unsaved, best=None, is_left=True)
            raise

    def watching(self, batch: StepBatch) -> AbstractContextManager[object]:
        """Record a step with torch's profiler, if the recipe asks for it."""
        run = self.session.run
        is_profiled = run.ranks.is_main and run.recipe.report.profile == batch.step + 1
        return profiled(run.dir.path / "profile" if is_profiled else None)

    def write(self, batch: StepBatch, record: StepRecord) -> None:
        """Evaluate the run if that is due, and write the figures of a step."""
        session, run, ranks = self.session, self.session.run, self.session.run.ranks
        done = self.num_steps = batch.step + 1
        report.note_if_skipped(record, step=done, note=run.screen.note)
        report.note_unlearned(record, note=run.screen.note)
        row = report.metrics_row(record, step=done, data_wait_s=batch.wait_s, seal=session.seal)
        row |= batch.metrics
        self.loss = None
        if is_due(done, run.recipe.output.eval_every):
            row |= report.evaluation_row(session.evaluation())
            self.loss = row[EVAL_LOSS]
            self._evaluations = self._evaluations.after(done, row[EVAL_LOSS])
        self._taken = _of_all(self.meter.taken(), ranks)
        with ranks.failing_together(is_step=True):
            if ranks.is_main:
                self.writer.write(row | energy_row(self._taken, num_tokens=record.num_tokens))
        self.bar.advance(row)

    def close_step(
        self, record: StepRecord, received: Sequence[int], *, stopped: str | None = None
    ) -> None:
        """Save what is due after a step, and end the run if it is the last, or is to stop.

        There is no signal if the run is complete: after its last step, or earlier by its recipe.

        Args:
            record: The result of the step.
            received: Signals so far.
            stopped: Why the run is to stop; None lets it go on.
        """
        run, done = self.session.run, self.num_steps
        output, evaluations = run.recipe.output, self._evaluations
        signals = run.ranks.exchange(received[0] if received else 0, is_step=True)
        signal = max(signals) or None
        best = evaluations.best_step if output.best_checkpoint else None
        if self._is_complete:
            self.outcome = Outcome(run_dir=run.dir.path, num_steps=done)
        elif stopped or signal:
            self.stop(stopped, signal, tuple(rank for rank, number in enumerate(signals) if number))
        is_left = self.outcome is not None
        self._unsaved = record
        if is_due(done, output.checkpoint_every) or done == best or is_left:
            self._save(record, best=best, is_left=is_left)

    def _save(self, record: StepRecord, *, best: int | None, is_left: bool) -> None:
        """Write the checkpoint after the newest step."""
        save(
            self.session,
            self._plan,
            record,
            step=self.num_steps,
            best=best,
            taken=self._taken,
            is_left=is_left,
        )
        self._unsaved = None

    def stop(
        self, why: str | None, signal: int | None = None, signalled: tuple[int, ...] = ()
    ) -> None:
        """End the run after the newest step, by a rule or a signal."""
        self.outcome = Outcome(
            run_dir=self.session.run.dir.path,
            num_steps=self.num_steps,
            signal=signal,
            signalled=signalled,
            stopped=why,
        )


def _of_all(taken: Taken, ranks: Ranks) -> list[Taken]:
    """Return what all ranks have taken, in rank order."""
    own = (taken.window_s, dict(taken.joules), dict(taken.missing))
    every = ranks.exchange(own, is_step=True)
    return [Taken(window_s=window_s, joules=joules, missing=why) for window_s, joules, why in every]
