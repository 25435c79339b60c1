"""The main path: run directory, rows and plan, model on its engine, steps, result and report.

All ranks run it together; only the main rank writes files and samples from the model. Several runs
over one stream of their base: see `finetune.sweep.together`.
"""

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from finetune import interrupts
from finetune.env import launch_notes
from finetune.recipe.recipe import Recipe
from finetune.report.choice import plan_parts
from finetune.report.rows import as_text
from finetune.report.screen import Screen
from finetune.training.prepare import Planned, prepare
from finetune.training.ranks import Ranks
from finetune.training.run import Outcome, Run, opened, shortage_named


def finetune(
    recipe: Recipe,
    *,
    ranks: Ranks,
    screen: Screen,
    machine_file: Path | None,
    is_resume: bool,
    may_overwrite: bool,
) -> Outcome:
    """Run a recipe from its rows to its adapter, or to the weights that it trains.

    Args:
        recipe: The recipe to run.
        ranks: The processes that do it together.
        screen: The screen that shows it.
        machine_file: A machine that was measured before; None measures this one.
        is_resume: Continue the run in the recipe's directory.
        may_overwrite: Replace a run that is there.

    Returns:
        How its steps ended. While they run, a signal waits for their checkpoint.

    Raises:
        SluiceError: Anything a user or the machine can cause.
    """
    if ranks.is_restart:
        screen.note("The launcher has started the processes again: the run goes on")
    for note in launch_notes():
        screen.note(note)
    with (
        opened(
            recipe,
            ranks=ranks,
            screen=screen,
            is_resume=is_resume or ranks.is_restart,
            may_overwrite=may_overwrite,
        ) as run,
        _notified(run),
    ):
        prepared = prepare(run, machine_file)
        show_plan(prepared.planned, recipe, screen)
        # peft, transformers' model code and torch's compiler take seconds to import: they come last
        from finetune.training.attach import on_engine
        from finetune.training.finish import finish, look_before
        from finetune.training.step_log import step_log

        with on_engine([prepared], prepared.planned) as ((session,), plan):
            look_before(session)
            session.kind.begin(session, plan, plan.request)
            with shortage_named(ranks):
                with interrupts.collected() as signals, step_log(session, plan) as log:
                    for batch in log.batches():
                        with log.watching(batch):
                            record = session.step(batch)
                        log.write(batch, record)
                        log.close_step(record, signals)
                if log.ended.is_complete:
                    finish(session)
            return log.ended


def _notified(run: Run) -> AbstractContextManager[None]:
    """Return what calls the recipe's command if the run fails; nothing without one."""
    if run.recipe.report.notify is None:
        return nullcontext()
    from finetune.training.notify import failures_notified

    return failures_notified(run)


def show_plan(planned: Planned, recipe: Recipe, screen: Screen) -> None:
    """Show the plan of a step, and in detail what else was considered."""
    num_steps, is_verbose = planned.steps.num, screen.is_verbose
    parts = plan_parts(planned.choice, recipe, is_verbose=is_verbose, num_steps=num_steps)
    screen.show(as_text(parts))
