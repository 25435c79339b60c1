"""One of the runs that share an engine: begun or restored, trained step by step, and finished.

All ranks run it together; only the main rank writes files and samples from the model.
"""

import json
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from finetune.data.steps import StepLoader
from finetune.errors import CheckpointError
from finetune.files.atomic import write_atomically
from finetune.files.manifest import sealed_json
from finetune.recipe.recipe import is_longer
from finetune.report.explain import explanation_tables
from finetune.report.model_card import MODEL_CARD, model_card
from finetune.report.prediction import write_prediction
from finetune.report.summary import run_summary
from finetune.run.checkpoint import LossScale, Restored, Saved
from finetune.run.references import write_references
from finetune.run.run_files import EVAL_LOSS, EVALUATION_BEFORE, Evaluations, shown_evaluation
from finetune.training import report
from finetune.training.loop import Computed, Request, StepRecord
from finetune.training.measured import energy_row, memory_in_use, open_meter, write_measured
from finetune.training.metrics_writer import MetricsWriter, profiled
from finetune.training.optimizer import rates_since
from finetune.training.samples import answer, answerable
from finetune.training.shared.together import Answer, Ended, Evaluated
from finetune.training.world.from_main import FromMain
from offload.engine.engine import Engine
from offload.engine.seeding import Seeding
from offload.errors import SluiceError
from offload.plan.plan import Plan
from offload.probe.energy import Taken

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel

    from finetune.training.session import Session


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """How a run ended.

    Attributes:
        run_dir: Its directory.
        num_steps: Steps done.
        signal: That stopped it; None if none did.
        signalled: The ranks that got a signal.
        stopped: Why a rule stopped it; None if none did.
        error: That it failed with; None if it did not.
    """

    run_dir: Path
    num_steps: int
    signal: int | None
    signalled: tuple[int, ...] = ()
    stopped: str | None = None
    error: SluiceError | OSError | None = None

    @property
    def is_complete(self) -> bool:
        """Whether all its steps are done, or enough of them by its own recipe."""
        return self.signal is None and self.stopped is None and self.error is None


@dataclass(frozen=True, kw_only=True, slots=True)
class Begun:
    """A run on its engine, before its next step.

    Attributes:
        session: The run.
        first_step: Steps that were done before.
        seal: Of the file that the plan was written to.
    """

    session: "Session"
    first_step: int
    seal: str


def begin(
    session: "Session", plan: Plan, *, priced: Mapping[str, Any], choice: Mapping[str, Any]
) -> Begun:
    """Begin a run, or restore it from its newest checkpoint, and write what is predicted."""
    run, ranks, num_steps = session.run, session.run.ranks, session.steps.num
    first_step = ranks.from_main(lambda: _begin(session, plan))
    if first_step:
        _restore_all(session, first_step)
    session.loop.require_same(step=first_step)
    run.screen.note(report.promise(plan, num_steps=num_steps - first_step))
    seal = ranks.from_main(
        lambda: write_prediction(
            run.dir.path, plan, priced=priced, steps=(first_step, num_steps), choice=choice
        )
    )
    return Begun(session=session, first_step=first_step, seal=seal)


def _begin(session: "Session", plan: Plan) -> int:
    """Write the directory of a new run, or drop what came after the checkpoint of an old one.

    Returns:
        The first step to run: 0, or that after the newest checkpoint.
    """
    run = session.run
    if not run.is_resumed:
        run.dir.start(run.recipe, experts_implementation=plan.experts_implementation)
    run.ranks.note_begun()
    if session.references:
        write_references(run.dir.path, session.references, rows=session.rows_hash)
    if not run.is_resumed:
        return 0
    newest, begun = run.dir.clear_torn() or 0, run.dir.recipe()
    for note in run.dir.drop_metrics_after(newest):
        run.screen.note(note)
    if is_longer(begun, run.recipe):
        run.screen.note(rates_since(begun.train, run.recipe.train, first_step=newest))
        run.dir.lengthen(run.recipe)
    return newest


def _read_checkpoint(session: "Session", step: int) -> Restored:
    """Read the weights and optimizer states of a checkpoint."""
    return session.run.dir.checkpoints.read(
        step,
        session.loop.weights,
        session.loop.optimizer,
        form=session.loop.state_form,
        data_hash=session.rows.data_hash,
        is_scaled=session.loop.scaling is not None,
    )


def _restore_all(session: "Session", step: int) -> None:
    """Load what a checkpoint holds on all ranks; the main one reads it, and sends each tensor."""
    ranks, read = session.run.ranks, list[Restored]()

    def sent() -> tuple[int, LossScale | None, dict[str, Any]]:
        read.append(_read_checkpoint(session, step))
        return int(read[0].seeding), read[0].scaling, read[0].optimizer

    seeding, scaling, optimizer = ranks.from_main(sent)
    stored = read[0].tensors if read else None
    restored = Restored(
        seeding=Seeding(seeding),
        scaling=scaling,
        tensors=FromMain(stored, ranks=ranks),
        optimizer=optimizer,
    )
    _restore(session, restored)


def _restore(session: "Session", restored: Restored) -> None:
    """Load what a checkpoint holds into the model on its engine."""
    session.loop.restore(restored)


# ---------------------------------------------------------------------------------------------
# Steps


@dataclass(frozen=True, kw_only=True, slots=True)
class Done:
    """Where a run's steps ended, and the signal or the rule that stopped it; see `Outcome`."""

    num_steps: int
    signal: int | None = None
    signalled: tuple[int, ...] = ()
    stopped: str | None = None


def train(
    begun: Begun, plan: Plan, received: Sequence[int]
) -> Generator[Request | Evaluated, Answer, Done]:
    """Run the remaining steps, each computed by whoever drives this generator.

    There is no signal if the run is complete: after its last step, or earlier if it stops early.

    Args:
        begun: The run.
        plan: What its steps are compared with.
        received: Signals so far; it grows.
    """
    session, seal, done = begun.session, begun.seal, begun.first_step
    run, num_steps = session.run, session.steps.num
    recipe, output, ranks = run.recipe, run.recipe.output, run.ranks
    evaluations = ranks.from_main(lambda: run.dir.evaluations(recipe.train))
    if done == num_steps or evaluations.are_enough:
        return Done(num_steps=done)
    newest = ranks.from_main(lambda: run.dir.read_metrics()[-1:] if done else [])
    stopped = yield from _verdict(newest[0] if newest else {})
    if stopped:
        return Done(num_steps=done, stopped=stopped)
    loader = StepLoader(session.steps, first_step=done, num_workers=recipe.data.num_workers)
    writer = MetricsWriter(run.dir, recipe, is_main=ranks.is_main, first_step=done)
    with (
        loader,
        writer,
        open_meter(run) as meter,
        run.screen.steps(
            done=done, total=num_steps, memory=partial(memory_in_use, run.device)
        ) as bar,
    ):
        for batch in loader:
            is_profiled = ranks.is_main and recipe.report.profile == batch.step + 1
            with profiled(run.dir.path / "profile" if is_profiled else None):
                request = session.loop.request(batch.step, batch.share)
                found = yield from _computed(session, request)
                record = session.loop.complete(request, found)
            done = batch.step + 1
            report.note_if_skipped(record, step=done, note=run.screen.note)
            report.note_unlearned(record, note=run.screen.note)
            row = report.metrics_row(record, step=done, data_wait_s=batch.wait_s, seal=seal)
            if _is_due(done, output.eval_every):
                row |= report.evaluation_row(session.evaluation())
                evaluations = evaluations.after(done, row[EVAL_LOSS])
            taken = ranks.exchange(meter.taken())
            with ranks.failing_together():
                if ranks.is_main:
                    writer.write(row | energy_row(taken, num_tokens=record.num_tokens))
            bar.advance(row)
            stopped = yield from _verdict(row)
            signals = ranks.exchange(received[0] if received else 0)
            signal = max(signals) or None
            is_last = done == num_steps or evaluations.are_enough
            best = evaluations.best_step if output.best_checkpoint else None
            is_left = is_last or bool(stopped or signal)
            if _is_due(done, output.checkpoint_every) or done == best or is_left:
                _save(begun, plan, record, step=done, best=best, taken=taken, is_left=is_left)
            if is_left:
                end = Done(num_steps=done)
                if is_last:
                    return end
                signalled = tuple(rank for rank, number in enumerate(signals) if number)
                return replace(end, signal=signal, signalled=signalled, stopped=stopped)
    return Done(num_steps=done)


def _computed(session: "Session", request: Request) -> Generator[Request, Answer, Computed]:
    """Ask for a step; a head that trains alone computes its own."""
    if session.head_alone is not None:
        return session.head_alone.computed(request)
    found = yield request
    assert isinstance(found, Computed)
    return found


def _verdict(row: Mapping[str, Any]) -> Generator[Evaluated, Answer, str | None]:
    """Return why the run is to stop after a step, if it was evaluated and others are better."""
    if EVAL_LOSS not in row:
        return None
    verdict = yield Evaluated(step=row["step"], loss=row[EVAL_LOSS])
    assert not isinstance(verdict, Computed)
    return verdict


def outcome_of(begun: Begun, end: Ended[Done]) -> Outcome:
    """Return how a run's steps ended."""
    run_dir = begun.session.run.dir
    if end.result is None:
        num_steps = run_dir.checkpoints.newest() or 0
        return Outcome(run_dir=run_dir.path, num_steps=num_steps, signal=None, error=end.error)
    done = end.result
    return Outcome(
        run_dir=run_dir.path,
        num_steps=done.num_steps,
        signal=done.signal,
        signalled=done.signalled,
        stopped=done.stopped,
    )


def _is_due(step: int, every: int | None) -> bool:
    return every is not None and step % every == 0


def look_before(begun: Begun) -> None:
    """Answer held-out rows before the first step; where answers are compared, evaluate them."""
    if begun.first_step == 0:
        with begun.session.loop.using():
            _look_before(begun.session)


def _look_before(session: "Session") -> None:
    recipe = session.run.recipe
    if session.run.ranks.is_main:
        _sample(session, when="before")
    if recipe.objective.is_sft or recipe.output.eval_every is None:
        return
    row = report.evaluation_row(session.evaluation())
    if session.run.ranks.is_main:
        file = session.run.dir.path / EVALUATION_BEFORE
        write_atomically(file, sealed_json(json.dumps(row, indent=1)))
    if recipe.objective.computes_reference:  # the model is the reference: rewards are rounding
        row = {name: value for name, value in row.items() if "rewards/" not in name}
    session.run.screen.note(f"Before training: {shown_evaluation(row)}")


def _save(
    begun: Begun,
    plan: Plan,
    record: StepRecord,
    *,
    step: int,
    best: int | None,
    taken: Sequence[Taken],
    is_left: bool,
) -> None:
    """Write the checkpoint after a step; all ranks have a part in it."""
    begun.session.loop.require_same(step=step)
    saved, ranks = begun.session.loop.saved(), begun.session.run.ranks
    with ranks.failing_together():
        if ranks.is_main:
            _write(begun, plan, record, saved, step, best=best, taken=taken, is_left=is_left)


def _write(
    begun: Begun,
    plan: Plan,
    record: StepRecord,
    saved: Saved,
    step: int,
    *,
    best: int | None,
    taken: Sequence[Taken],
    is_left: bool,
) -> None:
    """Write a checkpoint, but first the metrics, which determine the best one."""
    session, run, loop = begun.session, begun.session.run, begun.session.loop
    write_measured(session, plan, record, step=step, seal=begun.seal, taken=taken)
    run.dir.flush_metrics()
    run.dir.checkpoints.save(
        step,
        saved.weights,
        saved.optimizer,
        data_hash=session.rows.data_hash,
        seeding=loop.seeding,
        scaling=loop.scaling,
        num_kept=run.recipe.output.keep_checkpoints,
        best=best,
    )
    report.page_at_checkpoint(run.dir.path, is_left=is_left, note=run.screen.note)


# ---------------------------------------------------------------------------------------------
# Adapter and report


def finished(begun: Begun, outcome: Outcome) -> Outcome:
    """Finish a run whose steps are done; return its outcome, with the error if that fails."""
    session, ranks = begun.session, begun.session.run.ranks
    try:
        saved = _result(session)
        with ranks.failing_together(), session.loop.using():
            if ranks.is_main:
                _finish(session, saved)
    except ranks.run_errors as error:
        return replace(outcome, error=error)
    return outcome


def _result(session: "Session") -> Saved:
    """Return what was trained, and of a model that is in parts what is saved with it."""
    from finetune.training.sharded.engine import ShardedEngine

    saved = session.loop.saved()
    if not (session.run.recipe.train.is_full and isinstance(session.engine, ShardedEngine)):
        return saved
    return replace(saved, weights={**session.engine.frozen_weights(), **saved.weights})


def _finish(session: "Session", saved: Saved) -> None:
    """Write the adapter or the model, its answers and the report.

    Args:
        session: The run.
        saved: What it has trained.
    """
    run, recipe, stops = session.run, session.run.recipe, session.stops
    evaluations = run.dir.evaluations(recipe.train)
    if evaluations.are_enough:
        run.screen.note(
            f"Stopped early: {evaluations.num_without} losses on held-out rows in a row were no"
            f" lower than {evaluations.lowest:.4f}"
        )
    step = run.dir.clear_torn() or 0
    if recipe.output.best_checkpoint == "use":
        step = evaluations.best_step
        _take_best(session, evaluations)
        saved = session.loop.saved()
    folder = _save_trained(session, saved)
    _sample(session, when="after")
    explanation = report.write_report(
        run.dir.path, recipe, run.dir.read_metrics(), adapter_step=step, stops=stops
    )
    data_hash = session.rows.data_hash
    card = model_card(
        recipe,
        run.dir.path,
        session.model.config,
        data_hash=data_hash,
        prompt=session.rows.prompted.section(),
    )
    write_atomically(folder / MODEL_CARD, card)
    is_verbose = run.screen.is_verbose
    run.screen.show(explanation_tables(explanation) if is_verbose else run_summary(explanation))


def _save_trained(session: "Session", saved: Saved) -> Path:
    """Write the adapter, or the model if its own weights have trained; return the folder."""
    from finetune.adapter.lora import ALONE, save_adapter
    from finetune.full.weights import save_model

    directory, stops = session.run.dir, session.stops
    if not session.run.recipe.train.is_full:
        model, adapter = cast("PeftModel", session.model), session.run.adapter or ALONE
        tensors = saved.weights if session.run.recipe.train.is_sharded else None
        save_adapter(model, directory.adapter, adapter=adapter, tensors=tensors, stops=stops)
        return directory.adapter
    whole = cast("PreTrainedModel", session.model)
    save_model(
        whole,
        saved.weights,
        session.tokenizer,
        directory.model,
        section=session.run.recipe.model,
        stops=stops,
    )
    return directory.model


def _take_best(session: "Session", evaluations: Evaluations) -> None:
    """Load the weights of the best checkpoint into the model."""
    step = evaluations.best_step
    if not step:
        raise CheckpointError(
            f"{session.run.dir.checkpoints.path} holds no checkpoint with a loss on held-out rows",
            limit="output.best_checkpoint is use, so the result is that of such a checkpoint",
            hint="restore the checkpoint from a copy, or start a new run with `output.name=...`",
        )
    _restore(session, _read_checkpoint(session, step))
    session.run.screen.note(
        f"What was trained is that of step {step}: its loss on held-out rows,"
        f" {evaluations.best_loss:.4f}, is the lowest"
    )


def _sample(session: "Session", *, when: str) -> None:
    """Answer held-out rows, show some answers, and write all of them to a file."""
    run, tokenizer = session.run, session.tokenizer
    rows = session.rows.held_out_rows[: run.recipe.report.samples]
    asked = answerable(
        rows,
        tokenizer,
        seq_len=run.recipe.train.seq_len,
        empty_think=run.recipe.data.empty_think,
    )
    if len(asked) < len(rows):
        run.screen.note(f"{len(rows) - len(asked)} held-out rows are too long to be asked")
    if not asked:
        return
    assert isinstance(session.engine, Engine), "a rule of recipes"
    answers = answer(
        asked,
        model=session.model,
        engine=session.engine,
        tokenizer=tokenizer,
        empty_think=run.recipe.data.empty_think,
        stop_ids=session.stops.ids,
        # without gradients a pass takes less than half of what the largest visits take
        max_pass_tokens=2 * session.steps.largest_tokens,
        seq_len=run.recipe.train.seq_len,
        num_past=run.recipe.adapter.num_in_front,
        note=run.screen.note,
    )
    if when == "after" or run.screen.is_verbose:
        run.screen.show(report.samples_table(when, answers))
    else:
        run.screen.note(report.samples_title(when, answers))
    file = run.dir.path / f"samples_{when}.json"
    write_atomically(file, sealed_json(json.dumps(report.samples_json(answers), indent=1)))
