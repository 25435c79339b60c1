"""A run begun or restored, and its checkpoints: all ranks take part, and the main one writes."""

from collections.abc import Mapping, Sequence
from typing import Any

from finetune.errors import CheckpointError
from finetune.recipe.recipe import is_longer
from finetune.report.prediction import write_prediction
from finetune.run.checkpoint import LossScale, Restored
from finetune.run.references import write_references
from finetune.run.run_files import Evaluations
from finetune.training import report
from finetune.training.loop import StepRecord
from finetune.training.measured import write_measured
from finetune.training.optimizer import rates_since
from finetune.training.ranks import FromMain
from finetune.training.session import Session
from offload.plan.plan import Plan
from offload.probe.energy import Taken


def begin(
    session: Session, plan: Plan, *, priced: Mapping[str, Any], choice: Mapping[str, Any]
) -> None:
    """Begin a run, or restore it from its newest checkpoint, and write what is predicted.

    Args:
        session: The run, just attached.
        plan: The plan of its steps, at measured prices.
        priced: The plan as it was before steps were timed.
        choice: The alternatives that were considered.
    """
    run, ranks, num_steps = session.run, session.run.ranks, session.steps.num
    first_step = session.first_step = ranks.from_main(lambda: _begin(session, plan))
    if first_step:
        _restore(session, first_step)
    session.loop.require_same(step=first_step)
    run.screen.note(report.promise(plan, num_steps=num_steps - first_step))
    session.seal = ranks.from_main(
        lambda: write_prediction(
            run.dir.path, plan, priced=priced, steps=(first_step, num_steps), choice=choice
        )
    )


def _begin(session: Session, plan: Plan) -> int:
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


def _restore(session: Session, step: int) -> None:
    """Load what a checkpoint holds on all ranks; the main one reads it, and sends each tensor."""
    ranks, read = session.run.ranks, list[Restored]()

    def sent() -> tuple[LossScale | None, dict[str, Any]]:
        read.append(_read(session, step))
        return read[0].scaling, read[0].optimizer

    scaling, optimizer = ranks.from_main(sent)
    stored = read[0].tensors if read else None
    session.loop.restore(
        Restored(
            scaling=scaling,
            tensors=FromMain(stored, ranks=ranks),
            optimizer=optimizer,
        )
    )


def _read(session: Session, step: int) -> Restored:
    """Read the weights and optimizer states of a checkpoint."""
    return session.run.dir.checkpoints.read(
        step,
        session.loop.weights,
        data_hash=session.rows.data_hash,
        form=session.loop.state_form,
        is_scaled=session.loop.scaling is not None,
    )


def save(
    session: Session,
    plan: Plan,
    record: StepRecord,
    *,
    step: int,
    best: int | None,
    taken: Sequence[Taken],
    is_left: bool,
) -> None:
    """Write the checkpoint after a step; all ranks have a part in it.

    The metrics, which determine the best one, are written first.

    Args:
        session: The run.
        plan: The plan that it is compared with.
        record: The result of the step.
        step: The number of the step, counted from 1.
        best: The step of the best checkpoint, which is kept.
        taken: Energy of the step, by each rank.
        is_left: Whether it is the last that this process writes.
    """
    run, loop = session.run, session.loop
    loop.require_same(step=step)
    saved = loop.saved()
    with run.ranks.failing_together():
        if not run.ranks.is_main:
            return
        write_measured(session, plan, record, step=step, seal=session.seal, taken=taken)
        run.dir.flush_metrics()
        run.dir.checkpoints.save(
            step,
            saved.weights,
            saved.optimizer,
            data_hash=session.rows.data_hash,
            scaling=loop.scaling,
            num_kept=run.recipe.output.keep_checkpoints,
            best=best,
        )
        report.page_at_checkpoint(run.dir.path, is_left=is_left, note=run.screen.note)


def take_best(session: Session, evaluations: Evaluations) -> None:
    """Load the weights of the best checkpoint into the model, on the main rank.

    Raises:
        CheckpointError: There is none.
    """
    step = evaluations.best_step
    if not step:
        raise CheckpointError(
            f"{session.run.dir.checkpoints.path} holds no checkpoint with a loss on held-out rows",
            limit="output.best_checkpoint is use, so the result is that of such a checkpoint",
            hint="restore the checkpoint from a copy, or start a new run with `output.name=...`",
        )
    session.loop.restore(_read(session, step))
    session.run.screen.note(
        f"What was trained is that of step {step}: its loss on held-out rows,"
        f" {evaluations.best_loss:.4f}, is the lowest"
    )
