"""The main path: recipe -> machine, facts -> rows -> plan -> model, engine -> steps -> report.

All ranks walk it together; what is written and asked of the model is the main rank's alone.
"""

import json
from collections.abc import Iterator
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

from finetune import adapters, choice_report, interrupts, plan_report, preflight, report
from finetune.batches import StepLoader
from finetune.best import EVAL_LOSS, Evaluations
from finetune.env import launch_notes
from finetune.errors import CheckpointError
from finetune.explain_tables import explanation_tables
from finetune.files import write_atomically
from finetune.loop import StepRecord, spared_collector
from finetune.measured import write_measured
from finetune.model_card import MODEL_CARD, model_card
from finetune.objective import rates_since
from finetune.prediction import Promised, require_unchanged, write_prediction
from finetune.prepare import Work, prepare
from finetune.ranks import Ranks
from finetune.recipe import Recipe, is_longer
from finetune.recorder import Recorder, profiled
from finetune.run_dir import RunDir
from finetune.run_lock import locked
from finetune.sampling import answer, answerable
from finetune.screen import Screen
from finetune.seal import sealed_json
from finetune.session import Session, build, rehearse
from finetune.stock_report import stock_table
from finetune.stops import Stops
from offload.plan.plan import Plan


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """How a run ended: in its directory, after some steps, by a signal if before its last."""

    run_dir: Path
    num_steps: int
    signal: int | None


def finetune(
    recipe: Recipe,
    *,
    ranks: Ranks,
    screen: Screen,
    machine_file: Path | None,
    is_resume: bool,
    may_overwrite: bool,
) -> Outcome:
    """Run a recipe from its rows to its adapter.

    Args:
        recipe: What to do.
        ranks: The processes that do it together.
        screen: Where to show it.
        machine_file: A machine that was measured before; None measures this one.
        is_resume: Continue the run in the recipe's directory.
        may_overwrite: Replace a run that is there.

    Raises:
        SluiceError: Anything a user or the machine can cause.
    """
    for note in launch_notes():
        screen.note(note)
    run_dir = RunDir(recipe.output.run_dir)
    with _held(run_dir, ranks, screen):
        recipe = run_dir.as_begun(recipe) if is_resume else recipe
        preflight.require_micro_batch_per_rank(recipe.train, num_ranks=ranks.num)
        preflight.require_loggers(recipe.report.log_to)
        if ranks.is_main and is_resume:
            _require_resumable(run_dir, recipe, screen)
        elif ranks.is_main:
            run_dir.require_startable(may_overwrite=may_overwrite)
        return _run(recipe, run_dir, ranks, screen, machine_file, is_resume=is_resume)


@contextmanager
def _held(run_dir: RunDir, ranks: Ranks, screen: Screen) -> Iterator[None]:
    """Keep other processes from the run's directory; it can be written once this has begun."""
    with locked(run_dir.path) if ranks.is_main else nullcontext(()) as notes:
        for note in notes:
            screen.note(note)
        ranks.exchange(None)
        yield


def _require_resumable(run_dir: RunDir, recipe: Recipe, screen: Screen) -> None:
    """Check all that a resume reads, before the machine is measured and the model loaded."""
    run_dir.require_same_recipe(recipe)
    require_unchanged(run_dir.path, run_dir.read_metrics())
    newest = run_dir.checkpoints.newest()
    if newest is None:
        screen.note("There is no checkpoint yet: the run begins with step 1 again")
        return
    note = run_dir.checkpoints.require_whole(newest)
    screen.note(note or f"Continuing from {run_dir.checkpoints.folder(newest)}")


def _run(
    recipe: Recipe,
    run_dir: RunDir,
    ranks: Ranks,
    screen: Screen,
    machine_file: Path | None,
    *,
    is_resume: bool,
) -> Outcome:
    """Run a recipe in a directory that is this process's."""
    work = prepare(recipe, ranks, screen, machine_file, resumed=run_dir if is_resume else None)
    recipe = work.recipe
    if ranks.is_main:
        preflight.require_room(run_dir.path, work.plan)
    screen.show(plan_report.plan_tables(work.plan))
    screen.show(choice_report.choice_tables(work.choice))
    session = build(recipe, work, ranks, screen)
    stops = Stops(trained=work.rows.train.answer_ends, base=adapters.base_eos(session.model))
    with closing(session.engine), spared_collector():
        _introduce(session, screen)
        screen.note(stops.shown(work.tokenizer))
        predicted = rehearse(work, session, screen)
        first_step = _start(recipe, run_dir, work, session, ranks, screen, is_resume=is_resume)
        promised = _promise(run_dir, work, session, predicted, ranks, screen, first_step=first_step)
        if ranks.is_main and first_step == 0:
            _sample(recipe, run_dir, work, session, stops, screen, when="before")
        last_step, signal = _train(
            recipe, run_dir, work, session, ranks, screen, promised, first_step=first_step
        )
        if ranks.is_main and signal is None:
            _finish(recipe, run_dir, work, session, stops, screen)
    return Outcome(run_dir=run_dir.path, num_steps=last_step, signal=signal)


def _introduce(session: Session, screen: Screen) -> None:
    """Say how host memory is held, and what form each weight has."""
    for note in session.notes:
        screen.note(note)
    screen.show(stock_table(session.engine.stock))


def _start(
    recipe: Recipe,
    run_dir: RunDir,
    work: Work,
    session: Session,
    ranks: Ranks,
    screen: Screen,
    *,
    is_resume: bool,
) -> int:
    """Return the first step to run: 0, or that after the newest checkpoint, which is loaded."""

    def make_ready() -> int:
        if not is_resume:
            run_dir.start(recipe, experts_implementation=work.experts_implementation)
            return 0
        newest, begun = run_dir.clear_torn() or 0, run_dir.recipe()
        for note in run_dir.drop_metrics_after(newest):
            screen.note(note)
        if is_longer(begun, recipe):
            screen.note(rates_since(begun.train, recipe.train, first_step=newest))
            run_dir.lengthen(recipe)
        return newest

    step = ranks.from_main(make_ready)
    if step:
        _restore(run_dir, work, session, step=step)
    ranks.require_same_weights(session.loop.weights, step=step)
    return step


def _restore(run_dir: RunDir, work: Work, session: Session, *, step: int) -> None:
    """Put a checkpoint's weights and optimizer states into the model on its engine."""
    loop = session.loop
    run_dir.checkpoints.load(
        step,
        loop.weights,
        loop.optimizer,
        form=loop.state_form,
        data_hash=work.rows.data_hash,
    )
    loop.publish()


def _promise(
    run_dir: RunDir,
    work: Work,
    session: Session,
    predicted: Plan,
    ranks: Ranks,
    screen: Screen,
    *,
    first_step: int,
) -> Promised:
    """Say what the steps to come will take, and write it down."""
    num_steps, choice = work.order.num_steps, choice_report.choice_json(work.choice)
    screen.note(report.promise(predicted, num_steps=num_steps - first_step))
    steps, path = (first_step, num_steps), run_dir.path
    return ranks.from_main(
        lambda: write_prediction(path, session.plan, predicted, steps=steps, choice=choice)
    )


def _train(
    recipe: Recipe,
    run_dir: RunDir,
    work: Work,
    session: Session,
    ranks: Ranks,
    screen: Screen,
    promised: Promised,
    *,
    first_step: int,
) -> tuple[int, int | None]:
    """Run the steps that are left; return how many are done, and the signal that has ended them.

    There is none where the run is done: after its last step, or before where it stops early.
    """
    output, num_steps, done, stopped_by = recipe.output, work.order.num_steps, first_step, None
    evaluations = ranks.from_main(lambda: run_dir.evaluations(recipe.train))
    is_last = done == num_steps or evaluations.are_enough
    if is_last:
        return done, None
    loader = _loader(recipe, work, first_step=first_step)
    recorder = Recorder(run_dir, recipe, is_main=ranks.is_main, first_step=first_step)
    with (
        loader,
        recorder,
        screen.steps(done=first_step, total=num_steps) as bar,
        interrupts.collected() as received,
    ):
        for batch in loader:
            is_profiled = ranks.is_main and recipe.report.profile == batch.step + 1
            with profiled(run_dir.path / "profile" if is_profiled else None):
                record = session.loop.step(batch.step, batch.share)
            done = batch.step + 1
            row = report.metrics_row(
                record, step=done, data_wait_s=batch.wait_s, seal=promised.seal
            )
            if _is_due(done, output.eval_every):
                row[EVAL_LOSS] = _validate(work, session)
                evaluations = evaluations.after(done, row[EVAL_LOSS])
            if ranks.is_main:
                recorder.write(row)
            bar.advance(row)
            stopped_by = max(ranks.exchange(received[0] if received else 0)) or None
            is_last = done == num_steps or evaluations.are_enough
            best = evaluations.best_step if output.best_checkpoint else None
            if _is_due(done, output.checkpoint_every) or done == best or stopped_by or is_last:
                ranks.require_same_weights(session.loop.weights, step=done)
                if ranks.is_main:
                    _save(recipe, run_dir, work, session, record, promised, step=done, best=best)
            if stopped_by or is_last:
                break
    return done, None if is_last else stopped_by


def _validate(work: Work, session: Session) -> float:
    """Return the mean loss on the held-out rows."""
    assert work.rows.held_out is not None, "a rule of recipes"
    return session.loop.validation_loss(work.rows.held_out, pad_token_id=work.pad_token_id)


def _loader(recipe: Recipe, work: Work, *, first_step: int) -> StepLoader:
    """Return the batches of the steps that are left."""
    return StepLoader(
        work.rows.train,
        work.order,
        micro_batch_ids=work.micro_batch_ids,
        start_step=first_step,
        pad_token_id=work.pad_token_id,
        num_workers=recipe.data.num_workers,
    )


def _save(
    recipe: Recipe,
    run_dir: RunDir,
    work: Work,
    session: Session,
    record: StepRecord,
    promised: Promised,
    *,
    step: int,
    best: int | None,
) -> None:
    """Write the checkpoint after a step, where its time went, and what is in memory.

    The metrics are flushed first: from them follows which checkpoint is the best.
    """
    write_measured(run_dir.path, record, session, promised, step=step, device=work.device)
    run_dir.flush_metrics()
    run_dir.checkpoints.save(
        step,
        session.loop.weights,
        session.loop.optimizer,
        data_hash=work.rows.data_hash,
        num_kept=recipe.output.keep_checkpoints,
        best=best,
    )


def _is_due(step: int, every: int | None) -> bool:
    return every is not None and step % every == 0


def _finish(
    recipe: Recipe,
    run_dir: RunDir,
    work: Work,
    session: Session,
    stops: Stops,
    screen: Screen,
) -> None:
    """Write the adapter, its answers and the report."""
    evaluations = run_dir.evaluations(recipe.train)
    if evaluations.are_enough:
        screen.note(
            f"Stopped early: {evaluations.num_without} losses on held-out rows in a row were no"
            f" lower than {evaluations.lowest:.4f}"
        )
    step = run_dir.clear_torn() or 0
    if recipe.output.best_checkpoint == "use":
        step = evaluations.best_step
        _take_best(run_dir, work, session, screen, evaluations)
    adapters.save_adapter(session.model, run_dir.adapter, stops=stops)
    _sample(recipe, run_dir, work, session, stops, screen, when="after")
    explanation = report.write_report(
        run_dir.path, recipe, run_dir.read_metrics(), adapter_step=step, stops=stops
    )
    card = model_card(recipe, run_dir.path, session.model.config, data_hash=work.rows.data_hash)
    write_atomically(run_dir.adapter / MODEL_CARD, card)
    screen.show(explanation_tables(explanation))


def _take_best(
    run_dir: RunDir, work: Work, session: Session, screen: Screen, evaluations: Evaluations
) -> None:
    """Put the weights of the best checkpoint into the model."""
    step = evaluations.best_step
    if not step:
        raise CheckpointError(
            f"{run_dir.checkpoints.path} holds no checkpoint with a loss on held-out rows",
            limit="output.best_checkpoint is use, so the adapter is that of such a checkpoint",
            hint="restore the checkpoint from a copy, or start a new run with `output.name=...`",
        )
    _restore(run_dir, work, session, step=step)
    screen.note(
        f"The adapter is that of step {step}: its loss on held-out rows,"
        f" {evaluations.best_loss:.4f}, is the lowest"
    )


def _sample(
    recipe: Recipe,
    run_dir: RunDir,
    work: Work,
    session: Session,
    stops: Stops,
    screen: Screen,
    *,
    when: str,
) -> None:
    """Answer held-out rows, show some, and write all of them down."""
    rows = work.rows.held_out_rows[: recipe.report.samples]
    asked = answerable(rows, work.tokenizer, seq_len=recipe.train.seq_len)
    if len(asked) < len(rows):
        screen.note(f"{len(rows) - len(asked)} held-out rows are too long to be asked")
    if not asked:
        return
    answers = answer(
        asked,
        model=session.model,
        engine=session.engine,
        tokenizer=work.tokenizer,
        stop_ids=stops.ids,
        # without gradients a pass takes less than half of what the rehearsed visits take
        max_pass_tokens=2 * work.plan.request.largest.num_tokens,
    )
    screen.show(report.samples_table(when, answers))
    file = run_dir.path / f"samples_{when}.json"
    write_atomically(file, sealed_json(json.dumps(report.samples_json(answers), indent=1)))
