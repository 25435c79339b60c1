"""What runs on cards have measured against what was predicted, from the rows that people share.

A file `docs/measured/NAME.json` is one line of `sluice share`; `make generate` writes
docs/measured.md from all of them, and from what our own benchmarks on cards have kept.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from pydantic import ValidationError

from finetune.report.share import SharedRow

ROOT = Path(__file__).parents[2]
SHARED = ROOT / "docs" / "measured"
FEWEST = 3  # rows that have a median
BENCHMARKS = ROOT / "tests" / "bench" / "results"
CARDS = (
    *("card", "steps timed", "median error of step time", "largest error of step time"),
    *("median error of peak memory", "largest error of peak memory"),
)
ROWS = (
    *("card", "model", "what ran", "tokens per step", "predicted step time", "measured step time"),
    *("error of step time", "error of peak memory"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """A step of a run or a benchmark: predicted before it ran, then measured."""

    card: str
    model: str
    what: str
    tokens: int
    predicted_s: float
    measured_s: float
    predicted_bytes: int | None
    measured_bytes: int | None

    @property
    def error(self) -> float:
        """How much longer the step was predicted to be, as a share of what was measured."""
        return self.predicted_s / self.measured_s - 1

    @property
    def memory_error(self) -> float | None:
        """The same of the peak of memory; None if one of the two is not known."""
        if self.predicted_bytes is None or not self.measured_bytes:
            return None
        return self.predicted_bytes / self.measured_bytes - 1


def read_shared(folder: Path = SHARED) -> list[Measured]:
    """Return the rows that people shared.

    Raises:
        ValueError: A file is not one row of `sluice share`, with all of its fields and no other.
    """
    return [_of_a_run(_read(file)) for file in sorted(folder.glob("*.json"))]


def _read(file: Path) -> SharedRow:
    try:
        return SharedRow.model_validate_json(file.read_bytes())
    except ValidationError as error:
        raise ValueError(f"{file}: is no row of `sluice share RUN_DIR`: {error}") from error


def _of_a_run(row: SharedRow) -> Measured:
    settings, step = row.settings, row.step
    peak = row.peaks[0] if row.peaks else None
    what = f"{settings['train.what']}, {settings['model.dtype']}, {settings['offload.codec']}"
    return Measured(
        card=row.hardware.name,
        model=row.model.id or f"{row.model.type}, {row.model.num_parameters / 1e6:,.0f} million",
        what=what + (", disturbed" if step.is_disturbed else ""),
        tokens=step.num_tokens,
        predicted_s=step.predicted_s,
        measured_s=step.measured_s,
        predicted_bytes=None if peak is None else peak.predicted_bytes,
        measured_bytes=None if peak is None else peak.measured_bytes,
    )


def read_benchmarks(folder: Path = BENCHMARKS) -> list[Measured]:
    """Return the steps that our benchmarks on cards have timed: some layers of a model."""
    lines = [
        line for file in sorted(folder.glob("*.jsonl")) for line in file.read_text().splitlines()
    ]
    return list(_of_benchmarks([json.loads(line) for line in lines]))


def _of_benchmarks(rows: list[Mapping[str, Any]]) -> Iterator[Measured]:
    for row in rows:
        if row["gpu"] and not row["rehearsal"] and "calibrated_error" in row:
            yield Measured(
                card=row["gpu"],
                model=row["shape"],
                what=f"benchmark: {row['num_layers']} of {row['of_layers']} layers, {row['codec']}",
                tokens=row["tokens_per_step"],
                predicted_s=row["predicted_s"],
                measured_s=row["step_s"]["p50"],
                predicted_bytes=row["predicted_peak_bytes"],
                measured_bytes=row["peak_bytes"],
            )


def cards() -> list[list[str]]:
    """Return the error of the prediction by card."""
    by_card: dict[str, list[Measured]] = {}
    for row in _all():
        by_card.setdefault(row.card, []).append(row)
    lines = []
    for card, rows in sorted(by_card.items()):
        memory = [row.memory_error for row in rows if row.memory_error is not None]
        lines.append(
            [card, str(len(rows)), *_errors([row.error for row in rows]), *_errors(memory)]
        )
    return lines


def rows() -> list[list[str]]:
    """Return a line for each step, by card."""
    return [
        [
            *(row.card, row.model, row.what, f"{row.tokens:,}"),
            *(f"{row.predicted_s:.3f} s", f"{row.measured_s:.3f} s", f"{row.error:+.1%}"),
            "-" if row.memory_error is None else f"{row.memory_error:+.1%}",
        ]
        for row in _all()
    ]


def _all() -> list[Measured]:
    found = [*read_shared(), *read_benchmarks()]
    return sorted(found, key=lambda row: (row.card, row.model, row.what, row.tokens))


def _errors(values: list[float]) -> tuple[str, str]:
    if not values:
        return "-", "-"
    middle = f"{median(map(abs, values)):.1%}" if len(values) >= FEWEST else "-"
    return middle, f"{max(values, key=abs):+.1%}"
