"""What came of a run in a few figures: what it learned, how long it took, predicted or not."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from finetune.report.explain import Explanation
from finetune.report.format import shown_mib, shown_time
from finetune.report.memory import PEAKS
from finetune.report.rows import Row, shown
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
    pace, right, images = section.pace, answers_right(run_dir), explanation.images
    shares, when = " -> ".join(shown(of, "share") for of in right.values()), " -> ".join(right)
    basis = f"{pace.basis}; the run was disturbed" if section.is_disturbed else pace.basis
    found = [
        *([Row("", "held-out answers right", shares, "", f"{when} training")] if right else []),
        *learned,
        Row("", "training took", took_s, "s", done),
        against("a step took", pace.predicted_s, pace.measured_s, shown_time, basis),
        Row("", "speed", pace.tokens_per_s, "tokens/s", "in the same steps, all waits included"),
        *([] if images is None else [images.row]),
        *(
            [against(f"encoding {images.num_encoded:,} of them took", *images.times, shown_time)]
            if images is not None and images.num_encoded
            else []
        ),
    ]
    for row in explanation.memory:
        if row.name in PEAKS and row.predicted is not None and row.measured is not None:
            found.append(against(row.name, row.predicted, row.measured, shown_mib))
    return found


def against(
    label: str, predicted: float, measured: float, written: Callable[[float], str], basis: str = ""
) -> Row:
    """Return a measured figure with what was predicted.

    Args:
        label: What it is.
        predicted: The figure as predicted.
        measured: The figure as measured.
        written: Writes both.
        basis: What the measured one is a mean of.
    """
    error = f", error {shown((predicted - measured) / measured, 'error')}" if measured else ""
    note = f"predicted {written(predicted)}{error}{'; ' if basis else ''}{basis}"
    return Row("", label, written(measured), "", note)


def answers_right(run_dir: Path) -> dict[str, float]:
    """Return the share of held-out answers that are right to the letter.

    Returns:
        That before and that after training, as far as answers were drawn.

    Raises:
        CheckpointError: A file is damaged.
    """
    files = {when: run_dir / name for when, name in ANSWERS.items()}
    return {
        when: read_sealed(SAMPLES, file)["exact_match"]
        for when, file in files.items()
        if file.exists()
    }


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
