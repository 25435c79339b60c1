"""The main path: run directory, data and plan, model on its engine, steps, adapter and report.

All ranks run it together; only the main rank writes files and samples from the model.
"""

import json
from collections.abc import Iterator
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, cast

from finetune import interrupts
from finetune.data.loader import StepLoader
from finetune.env import launch_notes
from finetune.errors import CheckpointError
from finetune.files.atomic import write_atomically
from finetune.files.seal import sealed_json
from finetune.planning.request import facts_of
from finetune.recipe.recipe import Recipe, is_longer, with_layer_kernels, with_packing
from finetune.report.choice import choice_json, choice_tables
from finetune.report.explain_tables import explanation_tables
from finetune.report.model_card import MODEL_CARD, model_card
from finetune.report.plan import plan_json, plan_tables
from finetune.report.prediction import require_unchanged, write_prediction
from finetune.report.screen import Screen
from finetune.report.summary import plan_summary, run_summary
from finetune.report.weights import inventory_table
from finetune.run.evaluations import EVAL_LOSS, Evaluations, shown_evaluation
from finetune.run.references import write_references
from finetune.run.run_dir import RunDir
from finetune.run.run_files import EVALUATION_BEFORE
from finetune.run.run_lock import locked
from finetune.training import preflight, report
from finetune.training.layer_kernels import settled_layer_kernels, shown_fused
from finetune.training.loop import gc_frozen
from finetune.training.measured import write_measured
from finetune.training.metrics_writer import MetricsWriter, profiled
from finetune.training.optimizer import rates_since
from finetune.training.packing import settled_packing
from finetune.training.prepare import load_data, measure, plan_steps
from finetune.training.ranks import Ranks
from finetune.training.run import Run
from finetune.training.samples import answer, answerable
from offload.plan.plan import Plan

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel

    from finetune.training.session import Session


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """How a run ended: its directory, the number of steps done, and the signal that stopped it."""

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
    # ------------------------------------------------------------------------------ run directory
    for note in launch_notes():
        screen.note(note)
    run_dir = RunDir(recipe.output.run_dir)
    with _held(run_dir, ranks, screen):
        run = _opened(
            recipe, run_dir, ranks, screen, is_resume=is_resume, may_overwrite=may_overwrite
        )

        # -------------------------------------------------------------------------- data and plan
        facts = facts_of(run.recipe.model)
        machine, is_settled = ranks.from_main(lambda: measure(run, facts, machine_file))
        run = _settled(run)
        preflight.require_ready(run.recipe, facts, machine, num_ranks=ranks.num)
        data = load_data(run)
        planned = plan_steps(run, facts, data, machine, is_backend_settled=is_settled)
        run, steps, plan = replace(run, recipe=planned.recipe), planned.steps, planned.choice.plan
        if ranks.is_main:
            preflight.require_room(run_dir.path, plan)
        screen.show(plan_summary(planned.choice))
        screen.detail(plan_tables(plan))
        screen.detail(choice_tables(planned.choice))

        # ------------------------------------------------------------------- model on its engine
        # peft, transformers' model code and torch's compiler take seconds to import: they come last
        from finetune.training.session import attached, load_adapted
        from finetune.training.trace_memory import trace_memory

        adapted = load_adapted(run, plan)
        plan, note = trace_memory(
            adapted.model,
            plan,
            open_requests=planned.open_requests,
            device=run.device,
            ranks=ranks,
        )
        session = attached(run, plan, adapted, data, steps)
        with closing(session.engine), gc_frozen():
            fused = shown_fused(session.engine.fused)
            for one in (*adapted.notes, note, *session.engine.notes, *fused):
                screen.note(one)
            screen.detail(inventory_table(session.engine.weights))
            screen.note(session.stops.shown(session.tokenizer))
            priced, plan = plan_json(plan), session.calibrated(plan)
            first_step = ranks.from_main(lambda: _begin(session, plan))
            if first_step:
                _restore(session, step=first_step)
            ranks.require_same_weights(session.loop.weights, step=first_step)
            screen.note(report.promise(plan, num_steps=steps.num - first_step))
            weighed = choice_json(planned.choice)
            seal = ranks.from_main(
                lambda: write_prediction(
                    run_dir.path, plan, priced=priced, steps=(first_step, steps.num), choice=weighed
                )
            )

            # -------------------------------------------------------------------------------- steps
            if first_step == 0:
                _look_before(session)
            last_step, signal = _train(session, plan, seal, first_step=first_step)

            # ------------------------------------------------------------------ adapter and report
            if ranks.is_main and signal is None:
                _finish(session)
    return Outcome(run_dir=run_dir.path, num_steps=last_step, signal=signal)


# ---------------------------------------------------------------------------------------------
# Run directory


def _opened(
    recipe: Recipe,
    run_dir: RunDir,
    ranks: Ranks,
    screen: Screen,
    *,
    is_resume: bool,
    may_overwrite: bool,
) -> Run:
    """Return the run, after all checks that need nothing measured or loaded."""
    recipe = run_dir.as_begun(recipe) if is_resume else recipe
    preflight.require_micro_batch_per_rank(recipe.train, num_ranks=ranks.num)
    preflight.require_one_rank(recipe.train, num_ranks=ranks.num)
    preflight.require_loggers(recipe.report.log_to)
    if recipe.adapter.init_from is not None:
        _, notes = preflight.adapter_to_go_on_from(
            Path(recipe.adapter.init_from), model=recipe.model.path
        )
        for note in notes:
            screen.note(note)
    if ranks.is_main and is_resume:
        _require_resumable(run_dir, recipe, screen)
    elif ranks.is_main:
        run_dir.require_startable(may_overwrite=may_overwrite)
    device = preflight.torch_device(recipe.offload, ranks)
    return Run(
        recipe=recipe,
        dir=run_dir,
        ranks=ranks,
        device=device,
        screen=screen,
        is_resumed=is_resume,
    )


def _settled(run: Run) -> Run:
    """Return the run with what its recipe left open: the layers' kernels, and packing."""
    kernels = run.ranks.from_main(lambda: settled_layer_kernels(run.recipe, run.device, run.screen))
    recipe = with_layer_kernels(run.recipe, kernels)
    return replace(run, recipe=with_packing(recipe, settled_packing(recipe, run.screen)))


@contextmanager
def _held(run_dir: RunDir, ranks: Ranks, screen: Screen) -> Iterator[None]:
    """Lock the run's directory against other processes; inside this context it is writable."""
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


def _begin(session: "Session", plan: Plan) -> int:
    """Write the directory of a new run, or drop what came after the checkpoint of an old one.

    Returns:
        The first step to run: 0, or that after the newest checkpoint.
    """
    run = session.run
    if not run.is_resumed:
        run.dir.start(run.recipe, experts_implementation=plan.experts_implementation)
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


def _restore(session: "Session", *, step: int) -> None:
    """Load a checkpoint's weights and optimizer states into the model on its engine."""
    loop = session.loop
    loop.seeding = session.run.dir.checkpoints.load(
        step,
        loop.weights,
        loop.optimizer,
        form=loop.state_form,
        data_hash=session.rows.data_hash,
    )
    loop.publish()


# ---------------------------------------------------------------------------------------------
# Steps


def _train(session: "Session", plan: Plan, seal: str, *, first_step: int) -> tuple[int, int | None]:
    """Run the remaining steps; return how many are done, and the signal that has stopped them.

    There is no signal if the run is complete: after its last step, or earlier if it stops early.

    Args:
        session: The run.
        plan: What its steps are compared with.
        seal: Of the file that the plan was written to.
        first_step: Steps that were done before.
    """
    run, num_steps, done, stopped_by = session.run, session.steps.num, first_step, None
    recipe, output, ranks = run.recipe, run.recipe.output, run.ranks
    evaluations = ranks.from_main(lambda: run.dir.evaluations(recipe.train))
    is_last = done == num_steps or evaluations.are_enough
    if is_last:
        return done, None
    loader = StepLoader(session.steps, first_step=first_step, num_workers=recipe.data.num_workers)
    writer = MetricsWriter(run.dir, recipe, is_main=ranks.is_main, first_step=first_step)
    with (
        loader,
        writer,
        run.screen.steps(done=first_step, total=num_steps) as bar,
        interrupts.collected() as received,
    ):
        for batch in loader:
            is_profiled = ranks.is_main and recipe.report.profile == batch.step + 1
            with profiled(run.dir.path / "profile" if is_profiled else None):
                record = session.loop.step(batch.step, batch.share)
            done = batch.step + 1
            row = report.metrics_row(record, step=done, data_wait_s=batch.wait_s, seal=seal)
            if _is_due(done, output.eval_every):
                row |= report.evaluation_row(session.evaluation())
                evaluations = evaluations.after(done, row[EVAL_LOSS])
            if ranks.is_main:
                writer.write(row)
            bar.advance(row)
            stopped_by = max(ranks.exchange(received[0] if received else 0)) or None
            is_last = done == num_steps or evaluations.are_enough
            best = evaluations.best_step if output.best_checkpoint else None
            if _is_due(done, output.checkpoint_every) or done == best or stopped_by or is_last:
                ranks.require_same_weights(session.loop.weights, step=done)
                if ranks.is_main:
                    write_measured(session, plan, record, step=done, seal=seal)
                    _save(session, step=done, best=best)
            if stopped_by or is_last:
                break
    return done, None if is_last else stopped_by


def _is_due(step: int, every: int | None) -> bool:
    return every is not None and step % every == 0


def _look_before(session: "Session") -> None:
    """Answer held-out rows before the first step; where answers are compared, evaluate them."""
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


def _save(session: "Session", *, step: int, best: int | None) -> None:
    """Write the checkpoint after a step, but first the metrics, which determine the best one."""
    run, loop = session.run, session.loop
    run.dir.flush_metrics()
    run.dir.checkpoints.save(
        step,
        loop.weights,
        loop.optimizer,
        data_hash=session.rows.data_hash,
        seeding=loop.seeding,
        num_kept=run.recipe.output.keep_checkpoints,
        best=best,
    )


# ---------------------------------------------------------------------------------------------
# Adapter and report


def _finish(session: "Session") -> None:
    """Write the adapter or the model, its answers and the report."""
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
    folder = _save_trained(session)
    _sample(session, when="after")
    explanation = report.write_report(
        run.dir.path, recipe, run.dir.read_metrics(), adapter_step=step, stops=stops
    )
    data_hash = session.rows.data_hash
    card = model_card(recipe, run.dir.path, session.model.config, data_hash=data_hash)
    write_atomically(folder / MODEL_CARD, card)
    is_verbose = run.screen.is_verbose
    run.screen.show(explanation_tables(explanation) if is_verbose else run_summary(explanation))


def _save_trained(session: "Session") -> Path:
    """Write the adapter, or the model if its own weights have trained; return the folder."""
    from finetune.adapter.lora import save_adapter
    from finetune.full.save import save_model

    directory, stops = session.run.dir, session.stops
    if not session.run.recipe.train.is_full:
        save_adapter(cast("PeftModel", session.model), directory.adapter, stops=stops)
        return directory.adapter
    model, weights = cast("PreTrainedModel", session.model), session.loop.weights
    save_model(model, weights, session.tokenizer, directory.model, stops=stops)
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
    _restore(session, step=step)
    session.run.screen.note(
        f"What was trained is that of step {step}: its loss on held-out rows,"
        f" {evaluations.best_loss:.4f}, is the lowest"
    )


def _sample(session: "Session", *, when: str) -> None:
    """Answer held-out rows, show some answers, and write all of them to a file."""
    run, tokenizer = session.run, session.tokenizer
    rows = session.rows.held_out_rows[: run.recipe.report.samples]
    asked = answerable(rows, tokenizer, seq_len=run.recipe.train.seq_len)
    if len(asked) < len(rows):
        run.screen.note(f"{len(rows) - len(asked)} held-out rows are too long to be asked")
    if not asked:
        return
    answers = answer(
        asked,
        model=session.model,
        engine=session.engine,
        tokenizer=tokenizer,
        stop_ids=session.stops.ids,
        # without gradients a pass takes less than half of what the largest visits take
        max_pass_tokens=2 * session.steps.largest_tokens,
    )
    if when == "after" or run.screen.is_verbose:
        run.screen.show(report.samples_table(when, answers))
    else:
        run.screen.note(report.samples_title(when, answers))
    file = run.dir.path / f"samples_{when}.json"
    write_atomically(file, sealed_json(json.dumps(report.samples_json(answers), indent=1)))
