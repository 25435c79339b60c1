"""What a run answers before its first step, and its result and report after the last."""

import json
from itertools import islice
from typing import Any

from finetune.files.atomic import write_atomically
from finetune.files.manifest import sealed_json
from finetune.model.config import published_form
from finetune.model.empty import auto_class
from finetune.report.explain import compared, details_of
from finetune.report.model_card import MODEL_CARD, model_card
from finetune.report.rows import as_text
from finetune.run.checkpoint import Saved
from finetune.run.run_files import EVALUATION_BEFORE, shown_evaluation
from finetune.training import report
from finetune.training.checkpoints import take_best
from finetune.training.samples import answer, answerable
from finetune.training.session import Session
from offload.engine.engine import Engine


def look_before(session: Session) -> None:
    """Answer held-out rows before the first step; where answers are compared, evaluate them."""
    if session.first_step:
        return
    with session.loop.using():
        _look_before(session)


def _look_before(session: Session) -> None:
    recipe = session.run.recipe
    if session.run.ranks.is_main:
        sample(session, when="before")
    if recipe.objective.is_cross_entropy or recipe.output.eval_every is None:
        return
    row = report.evaluation_row(session.evaluation())
    if session.run.ranks.is_main:
        file = session.run.dir.path / EVALUATION_BEFORE
        write_atomically(file, sealed_json(json.dumps(row, indent=1)))
    if recipe.objective.computes_reference:  # the model is the reference: rewards are rounding
        row = {name: value for name, value in row.items() if "rewards/" not in name}
    session.run.screen.note(f"Before training: {shown_evaluation(row)}")


def finish(session: Session) -> None:
    """Write the result of a run whose steps are done, its answers and the report.

    Raises:
        SluiceError: They cannot be written.
    """
    saved = session.kind.result(session)
    with session.run.ranks.failing_together(), session.loop.using():
        if session.run.ranks.is_main:
            _finish(session, saved)


def _finish(session: Session, saved: Saved) -> None:
    """Write the adapter or the model, its answers and the report.

    Args:
        session: The run.
        saved: The tensors that it has trained.
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
        take_best(session, evaluations)
        saved = session.loop.saved()
    folder = session.kind.save(session, saved)
    sample(session, when="after")
    explanation = report.write_report(
        run.dir.path, recipe, run.dir.read_metrics(), adapter_step=step, stops=stops
    )
    data_hash = session.rows.data_hash
    model: Any = session.model
    base = model if recipe.train.is_full else model.get_base_model()
    card = model_card(
        recipe,
        run.dir.path,
        session.model.config,
        loader=auto_class(base),
        data_hash=data_hash,
        prompt=session.rows.prompted.section(),
        images="" if session.images is None else session.images.section(recipe),
        form=published_form(recipe.model),
    )
    write_atomically(folder / MODEL_CARD, card)
    run.screen.show(as_text(compared(explanation), is_compact=True))
    run.screen.detail(as_text(details_of(explanation)))
    if recipe.report.notify is not None:
        from finetune.training.notify import notify

        notify(run, "end", message=f"{folder} is written")


def sample(session: Session, *, when: str) -> None:
    """Answer held-out rows, show some answers, and write all of them to a file."""
    run, tokenizer = session.run, session.tokenizer
    rows = tuple(islice(session.rows.held_out_rows, run.recipe.report.samples))
    asked = answerable(
        rows,
        tokenizer,
        seq_len=run.recipe.train.seq_len,
        empty_think=run.recipe.data.empty_think,
        images=session.images,
    )
    if len(asked) < len(rows):
        others = "" if session.images is None else ", or their images have changed"
        run.screen.note(f"{len(rows) - len(asked)} held-out rows are too long to be asked{others}")
    if not asked:
        return
    assert isinstance(session.engine, Engine), "a rule of recipes"
    small = [] if session.images is None else session.images.thumbnails(asked)
    with run.screen.working("Answering held-out rows", "rows") as progress:
        answers = answer(
            asked,
            model=session.model,
            engine=session.engine,
            tokenizer=tokenizer,
            empty_think=run.recipe.data.empty_think,
            images=session.images,
            stop_ids=session.stops.ids,
            # without gradients a pass takes less than half of what the largest visits take
            max_pass_tokens=2 * session.steps.largest_tokens,
            seq_len=run.recipe.train.seq_len,
            num_past=run.recipe.adapter.num_in_front,
            note=run.screen.note,
            progress=progress,
        )
    if when == "after" or run.screen.is_verbose:
        run.screen.show(as_text([report.samples_table(when, answers)], is_compact=True))
    else:
        run.screen.note(report.samples_title(when, answers))
    content, file = report.samples_json(answers), run.dir.path / f"samples_{when}.json"
    for line, images in zip(content["rows"], small, strict=False):
        line["images"] = images
    write_atomically(file, sealed_json(json.dumps(content, indent=1)))
