"""The outputs of a run: its metrics, its answers, and its report."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.text import Text

from finetune.data.chat_template import Stops
from finetune.errors import CheckpointError
from finetune.files.atomic import write_atomically
from finetune.recipe.recipe import Recipe, recipe_hash
from finetune.report.energy import cost_of
from finetune.report.explain import METRICS, REPORT, Explanation, draw, explain
from finetune.report.format import shown_time
from finetune.report.pages import REPORT_PAGE, write_run_page
from finetune.report.plan import SOURCES
from finetune.report.prediction import SEAL
from finetune.report.rows import Table, shown
from finetune.run.run_files import (
    EVAL_LOSS,
    EVAL_PREFIX,
    EVALUATION,
    EVALUATION_BEFORE,
    SAMPLES,
    read_sealed,
)
from offload.plan.plan import Plan
from offload.plan.schedule.timeline import DATA_WAIT, OPTIMIZER, OUTSIDE, parts_json, parts_of

if TYPE_CHECKING:
    from finetune.run.run_files import Evaluation
    from finetune.training.loop import StepRecord
    from finetune.training.samples import Answers

NUM_SHOWN_SAMPLES = 3
PAGE_EVERY_S = 60.0  # drawing takes 0.1 s of a CPU, of 10,000 steps 0.9 s


def promise(plan: Plan, *, num_steps: int) -> str:
    """Return the prediction in one line."""
    step_s = plan.step_s
    return (
        f"Predicted from {SOURCES[plan.costs.grade]}: {shown_time(step_s)} per step,"
        f" {plan.tokens_per_step / step_s:,.0f} tokens/s,"
        f" {shown_time(step_s * num_steps)} for {num_steps} steps"
    )


def metrics_row(
    record: "StepRecord", *, step: int, data_wait_s: float, seal: str
) -> dict[str, Any]:
    """Return a line of metrics.jsonl: what was learned, and where the time went.

    `phases_s` overlap; `parts_s` add up to the step and its wait for data.

    Args:
        record: The result of the step.
        step: The number of the step, counted from 1.
        data_wait_s: Seconds for which it waited for its rows.
        seal: The seal of the prediction that existed before it.
    """
    timeline = record.timeline
    phases = timeline.phases() | {
        "step": record.step_s,
        "optimizer": record.optimizer_s,
        "data wait": data_wait_s,
    }
    parts = parts_of(timeline) | {
        (OPTIMIZER, None): record.optimizer_s,
        (OUTSIDE, None): record.step_s - record.optimizer_s - timeline.step_s,
        (DATA_WAIT, None): data_wait_s,
    }
    return {
        "step": step,
        "loss": record.loss,
        "lr": record.lr,
        "grad_norm": None if record.is_skipped else record.grad_norm,
        "num_tokens": record.num_tokens,
        "num_label_tokens": record.num_label_tokens,
        "num_loads": record.num_loads,
        "tokens_per_s": record.num_tokens / (record.step_s + data_wait_s),
        **record.metrics,
        **_scaled(record),
        "phases_s": phases,
        "parts_s": parts_json(parts),
        SEAL: seal,
    }


def _scaled(record: "StepRecord") -> dict[str, float]:
    """Return the factor of a step's loss, and how many steps were skipped so far."""
    if record.scaling is None:
        return {}
    return {
        "loss_scale": record.loss_scale,
        "num_skipped_steps": record.scaling.num_skipped,
    }


def note_if_skipped(record: "StepRecord", *, step: int, note: Callable[[str], None]) -> None:
    """Note that a step was skipped, and with which factor the next one goes on."""
    if record.is_skipped and record.scaling is not None:
        note(
            f"step {step} is skipped: a gradient overflows in float16 with the loss times"
            f" {record.loss_scale:g}; from here on times {record.scaling.factor:g}"
        )


def note_unlearned(record: "StepRecord", *, note: Callable[[str], None]) -> None:
    """Name the adapter's tensors that no gradient reached."""
    if record.unlearned:
        names = [name.removeprefix("base_model.model.") for name in record.unlearned]
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        note(
            f"warning: {names[0]}{more} got no gradient in the first step and will not learn: the"
            " model reads that layer's weight past the adapter, or uses its output only to choose;"
            " leave the layer out of `adapter.targets`"
        )


def evaluation_row(evaluation: "Evaluation") -> dict[str, float]:
    """Return what held-out rows said, by the names in metrics.jsonl."""
    more = {EVAL_PREFIX + name: value for name, value in evaluation.metrics.items()}
    return {EVAL_LOSS: evaluation.loss, **more}


def write_report(
    run_dir: Path,
    recipe: Recipe,
    rows: Sequence[Mapping[str, Any]],
    *,
    adapter_step: int,
    stops: Stops,
) -> Explanation:
    """Write report.json, a page and the drawings, and return the explanation shown at the end.

    Args:
        run_dir: The run's directory.
        recipe: The run's recipe.
        rows: The rows of its metrics.
        adapter_step: The step after which the adapter's weights were taken.
        stops: The tokens that ended the trained answers.
    """
    explanation = explain(run_dir)
    content = {
        "recipe_sha256": recipe_hash(recipe),
        "first_loss": rows[0]["loss"],
        "last_loss": rows[-1]["loss"],
        "answer_end_token_ids": stops.trained,
        "stop_token_ids": stops.ids,
        "adapter_step": adapter_step,
        "exact_match": {
            when: read_sealed(SAMPLES, file)["exact_match"]
            for when in ("before", "after")
            if (file := run_dir / f"samples_{when}.json").exists()
        },
        "held_out": _held_out(run_dir, rows, adapter_step=adapter_step),
        **explanation.to_json(),
        "cost": cost_of(explanation.energy.kwh, recipe.report),
        "currency": recipe.report.currency,
    }
    write_atomically(run_dir / REPORT, json.dumps(content, indent=1))
    draw(run_dir, explanation)
    write_run_page(run_dir)
    return explanation


def page_at_checkpoint(run_dir: Path, *, is_left: bool, note: Callable[[str], None]) -> None:
    """Write report.html after a checkpoint, at most once a minute while the run goes on.

    A page that cannot be written does not stop a run.

    Args:
        run_dir: The run's directory; its metrics were written just now.
        is_left: Whether no step follows.
        note: Says what went wrong.
    """
    page, metrics = run_dir / REPORT_PAGE, run_dir / METRICS
    try:
        if page.exists() and not is_left:
            age_s = metrics.stat().st_mtime - page.stat().st_mtime
            if 0 <= age_s < PAGE_EVERY_S:
                return
        write_run_page(run_dir, goes_on=not is_left)
    except (CheckpointError, OSError) as error:
        note(f"{page} was not written: {error}")


def _held_out(
    run_dir: Path, rows: Sequence[Mapping[str, Any]], *, adapter_step: int
) -> dict[str, dict[str, float]]:
    """Return what held-out rows said before training, and after the step of the result."""
    before = run_dir / EVALUATION_BEFORE
    found = {"before": read_sealed(EVALUATION, before)} if before.exists() else {}
    for row in rows:
        if row["step"] == adapter_step and EVAL_LOSS in row:
            found["after"] = row
    return {
        when: {name: value for name, value in row.items() if name.startswith(EVAL_PREFIX)}
        for when, row in found.items()
    }


def samples_title(when: str, answers: "Answers") -> str:
    """Return the exact match in one line, and the prompts that are not the template's default."""
    right = shown(answers.exact_match, "share")
    line = f"{when.capitalize()} training: {right} of {len(answers.rows)} right"
    given = [name for name in answers.prompts if name]
    return line + (f", after the prompt with {' or '.join(given)}" if given else "")


def samples_table(when: str, answers: "Answers") -> Table:
    """Return the exact match and some (prompt, wanted, got) rows as a table."""
    lines = [
        (prompt, wanted, Text(got, style="green" if wanted.strip() == got.strip() else "red"))
        for prompt, wanted, got in answers.rows[:NUM_SHOWN_SAMPLES]
    ]
    columns = ("prompt", "wanted", "got")
    return Table(samples_title(when, answers), columns, lines)


def samples_json(answers: "Answers") -> dict[str, Any]:
    """Return all answers for samples_before.json and samples_after.json."""
    return {
        "exact_match": answers.exact_match,
        "prompts": dict(answers.prompts),
        "rows": [{"prompt": p, "wanted": w, "got": g} for p, w, g in answers.rows],
    }
