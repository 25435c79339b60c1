"""What came of a run in a few figures: what it learned, how long it took, predicted or not."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from finetune.report.explain import Explanation
from finetune.report.format import shown_mib, shown_time
from finetune.report.memory import PEAKS
from finetune.report.rows import Row
from finetune.run.run_files import (
    EVAL_LOSS,
    EVALUATION,
    EVALUATION_BEFORE,
    SAMPLES,
    read_sealed,
)
from offload.plan.schedule.timeline import DATA_WAIT

ANSWERS = {when: f"samples_{when}.json" for when in ("before", "after")}


def verdict(
    run_dir: Path, rows: Sequence[Mapping[str, Any]], explanation: Explanation
) -> list[Row]:
    """Return what came of a run that has done a step.

    Args:
        run_dir: Directory of the run.
        rows: Rows of its metrics.
        explanation: Prediction and measurement, as its files have them.

    Raises:
        CheckpointError: A file is damaged.
    """
    rounds, section = explanation.rounds, explanation.sections[-1]
    learned = _losses(run_dir, rows) if rounds is None else rounds.verdict(section)
    took_s = sum(row["phases_s"]["step"] + row["phases_s"][DATA_WAIT] for row in rows)
    num_tokens = sum(row["num_tokens"] for row in rows)
    done = f"{explanation.num_done:,} of {explanation.num_steps:,} steps, {num_tokens:,} tokens"
    step = section.comparison[0]
    found = [
        *_exact_match(run_dir),
        *learned,
        Row("", "training took", took_s, "s", done),
        against("a step took", step.predicted, step.measured, shown_time),
    ]
    for row in explanation.memory:
        if row.name in PEAKS and row.predicted is not None and row.measured is not None:
            found.append(against(row.name, row.predicted, row.measured, shown_mib))
    return found


def against(label: str, predicted: float, measured: float, shown: Callable[[float], str]) -> Row:
    """Return a measured figure with what was predicted."""
    error = f", {(predicted - measured) / measured:+.0%}" if measured else ""
    return Row("", label, shown(measured), "", f"predicted {shown(predicted)}{error}")


def exact_match(run_dir: Path, when: str) -> float | None:
    """Return the share of held-out answers that are right to the letter; None if none was drawn.

    Args:
        run_dir: Directory of the run.
        when: Before or after training.

    Raises:
        CheckpointError: The file is damaged.
    """
    file = run_dir / ANSWERS[when]
    return float(read_sealed(SAMPLES, file)["exact_match"]) if file.exists() else None


def _exact_match(run_dir: Path) -> list[Row]:
    shares = [exact_match(run_dir, when) for when in ANSWERS]
    known = [f"{share:.0%}" for share in shares if share is not None]
    if not known:
        return []
    note = "before -> after training" if known[1:] else "before training"
    if shares[0] is None:
        note = "after training"
    return [Row("", "held-out answers right", " -> ".join(known), "", note)]


def _losses(run_dir: Path, rows: Sequence[Mapping[str, Any]]) -> list[Row]:
    first, last = rows[0], rows[-1]
    evaluated = [(f"step {row['step']:,}", row[EVAL_LOSS]) for row in rows if EVAL_LOSS in row]
    if (file := run_dir / EVALUATION_BEFORE).exists():
        evaluated.insert(0, ("before training", read_sealed(EVALUATION, file)[EVAL_LOSS]))
    best = min(evaluated, key=lambda one: float(one[1]), default=None)
    trained = [(f"step {row['step']:,}", row["loss"]) for row in (first, last)]
    lowest = f"; lowest {best[1]:.4f}, {best[0]}" if best and best != evaluated[-1] else ""
    return [
        *([change("held-out loss", evaluated, lowest)] if evaluated else []),
        change("training loss", trained),
    ]


def change(label: str, values: Sequence[tuple[str, float]], note: str = "") -> Row:
    """Return the first and the last of some values, which may be one.

    Args:
        label: What they are.
        values: When each was measured, and the value.
        note: What is said after both times.
    """
    ends = dict.fromkeys((values[0], values[-1]))
    figures, times = " -> ".join(f"{of:.4f}" for _, of in ends), " -> ".join(at for at, _ in ends)
    return Row("", label, figures, "", f"{times}{note}")
