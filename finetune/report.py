"""What a run leaves behind: its prediction, its metrics, and the two compared."""

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

from finetune.figures import shown_mib, shown_time, table_of
from finetune.files import write_atomically
from finetune.plan_report import plan_json
from finetune.recipe import Recipe, recipe_hash
from offload.plan.memory import CONTEXT, DATA_WORKERS, FRAGMENTATION, OTHER_RANKS
from offload.plan.plan import Plan
from offload.plan.timeline import Timeline
from offload.plan.trace import perfetto_trace

if TYPE_CHECKING:
    from finetune.loop import StepRecord
    from finetune.sampling import Answers

NUM_SHOWN_SAMPLES = 5
PREDICTION = "predicted.json"
COMPUTE_PHASES = ("step", "forward", "decode", "head and loss", "backward", "optimizer")
LINK_PHASES = ("h2d", "d2h")
OPTIONAL_PHASES = ("decode", "d2h")
PHASES = (*COMPUTE_PHASES, *LINK_PHASES, "stall", "data wait")


def promise(plan: Plan, *, num_steps: int) -> str:
    """Return the prediction in one line."""
    step_s = plan.step_s
    return (
        f"Predicted ({plan.costs.grade}): {shown_time(step_s)} per step,"
        f" {plan.tokens_per_step / step_s:,.0f} tokens/s,"
        f" {shown_time(step_s * num_steps)} for {num_steps} steps"
    )


def write_prediction(run_dir: Path, *, first: Plan, calibrated: Plan) -> None:
    """Write what was predicted before step 1; a prediction that is there is left as it is."""
    file = run_dir / PREDICTION
    if file.exists():
        return
    both = {"before measuring": plan_json(first), "calibrated": plan_json(calibrated)}
    write_atomically(file, json.dumps(both, indent=1))
    write_atomically(run_dir / "predicted_timeline.json", calibrated.predict().to_json())


def metrics_row(record: "StepRecord", *, step: int, data_wait_s: float) -> dict[str, Any]:
    """Return a line of metrics.jsonl: what was learned, and where the time went."""
    phases = record.timeline.phases() | {
        "step": record.step_s,
        "optimizer": record.optimizer_s,
        "data wait": data_wait_s,
    }
    return {
        "step": step,
        "loss": record.loss,
        "lr": record.lr,
        "grad_norm": record.grad_norm,
        "num_tokens": record.num_tokens,
        "num_label_tokens": record.num_label_tokens,
        "num_loads": record.num_loads,
        "tokens_per_s": record.num_tokens / (record.step_s + data_wait_s),
        "phases_s": phases,
    }


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """One row of the report: predicted and measured, in seconds or bytes."""

    name: str
    predicted: float
    measured: float
    unit: str

    @property
    def error(self) -> float | None:
        """Relative error of the prediction; None where nothing was measured."""
        return (self.predicted - self.measured) / self.measured if self.measured else None


def compare(
    predicted_s: Mapping[str, float],
    plan: Plan,
    rows: Sequence[Mapping[str, Any]],
    *,
    peak_bytes: int,
) -> list[Comparison]:
    """Set what was predicted beside the medians of the steps that were run.

    Args:
        predicted_s: Seconds by phase, from before step 1.
        plan: For its memory.
        rows: Lines of metrics.jsonl.
        peak_bytes: Measured peak: allocated by torch on a GPU, the resident set on a CPU.
    """
    table = [
        Comparison(
            name=name,
            predicted=predicted_s[name],
            measured=statistics.median(row["phases_s"][name] for row in rows),
            unit="s",
        )
        for name in PHASES
        if name not in OPTIONAL_PHASES or predicted_s[name]
    ]
    if plan.machine.device == "cpu":  # device memory is host memory, others are other processes
        name, terms, others = (
            "peak memory",
            (*plan.device_memory, *plan.host_memory),
            {DATA_WORKERS, OTHER_RANKS},
        )
    else:
        terms, others = plan.device_memory, {CONTEXT, FRAGMENTATION}
        name = "peak allocated VRAM"
    expected = sum(term.num_bytes for term in terms if term.name not in others)
    table.append(Comparison(name=name, predicted=expected, measured=peak_bytes, unit="bytes"))
    return table


def write_report(
    run_dir: Path,
    recipe: Recipe,
    plan: Plan,
    rows: Sequence[Mapping[str, Any]],
    *,
    peak_bytes: int,
) -> Table:
    """Write report.json and trace.json, and return the table that a run ends with."""
    predicted = json.loads((run_dir / PREDICTION).read_text())["calibrated"]["predicted"]
    comparisons = compare(predicted["phases_s"], plan, rows, peak_bytes=peak_bytes)
    content = {
        "recipe_sha256": recipe_hash(recipe),
        "num_steps": len(rows),
        "first_loss": rows[0]["loss"],
        "last_loss": rows[-1]["loss"],
        "grade": plan.costs.grade,
        "machine": plan.machine.name,
        "exact_match": {
            when: json.loads(file.read_text())["exact_match"]
            for when in ("before", "after")
            if (file := run_dir / f"samples_{when}.json").exists()
        },
        "comparison": [
            {"name": r.name, "predicted": r.predicted, "measured": r.measured, "unit": r.unit}
            for r in comparisons
        ],
    }
    write_atomically(run_dir / "report.json", json.dumps(content, indent=1))
    tracks = {
        name: Timeline.from_json(file.read_text())
        for name in ("predicted", "measured")
        if (file := run_dir / f"{name}_timeline.json").exists()
    }
    write_atomically(run_dir / "trace.json", perfetto_trace(tracks))
    return _comparison_table(comparisons, grade=plan.costs.grade, num_steps=len(rows))


def _comparison_table(rows: Sequence[Comparison], *, grade: str, num_steps: int) -> Table:
    title = f"Predicted ({grade}) against measured (median of {num_steps} steps)"
    table = table_of(title, "", "predicted", "measured", "error")
    for row in rows:
        shown = shown_time if row.unit == "s" else shown_mib
        error = "" if row.error is None else f"{row.error:+.0%}"
        table.add_row(row.name, shown(row.predicted), shown(row.measured), error)
    return table


def samples_table(when: str, answers: "Answers") -> Table:
    """Return the exact match and some (prompt, wanted, got) rows as a table."""
    title = f"{when.capitalize()} training: {answers.exact_match:.1%} of {len(answers.rows)} right"
    table = table_of(title, "prompt", "wanted", "got")
    for prompt, wanted, got in answers.rows[:NUM_SHOWN_SAMPLES]:
        style = "green" if wanted.strip() == got.strip() else "red"
        table.add_row(Text(prompt), Text(wanted), Text(got, style=style))
    return table


def samples_json(answers: "Answers") -> dict[str, Any]:
    """Return all answers for samples_before.json and samples_after.json."""
    return {
        "exact_match": answers.exact_match,
        "rows": [{"prompt": p, "wanted": w, "got": g} for p, w, g in answers.rows],
    }
