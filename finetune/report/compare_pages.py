"""Several runs as one page: their curves, and a table that begins with the best."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from finetune.report.compared_runs import COLUMNS, ComparedRun, figures_of, recipe_changes
from finetune.report.pages import Chart, curves, page, same_colours, table
from finetune.run.run_files import EVAL_LOSS


@dataclass(frozen=True, kw_only=True, slots=True)
class SweptRun:
    """A run of a sweep.

    Attributes:
        name: Of the run.
        settings: What sets it apart from the others, by field.
        state: Its status, and why it ended if it did not finish.
        rows: Of its metrics.
    """

    name: str
    settings: Mapping[str, Any]
    state: str
    rows: Sequence[Mapping[str, Any]]

    @property
    def eval_loss(self) -> float:
        """The lowest held-out loss; not a number where nothing was evaluated."""
        return min((row[EVAL_LOSS] for row in self.rows if EVAL_LOSS in row), default=math.nan)

    @property
    def last_loss(self) -> float:
        """The training loss of the last step; not a number before the first."""
        return float(self.rows[-1]["loss"]) if self.rows else math.nan


def best_first(runs: Sequence[SweptRun]) -> list[SweptRun]:
    """Return runs by held-out loss, then those without one by training loss."""

    def rank(run: SweptRun) -> tuple[bool, float]:
        of = run.last_loss if math.isnan(run.eval_loss) else run.eval_loss
        return math.isnan(run.eval_loss), math.inf if math.isnan(of) else of

    return sorted(runs, key=rank)


def sweep_page(title: str, facts: Sequence[tuple[str, str]], runs: Sequence[SweptRun]) -> str:
    """Return the page of a sweep.

    Args:
        title: Its heading.
        facts: About all runs together, each with its name.
        runs: In the order of the sweep.
    """
    drawn = loss_charts(runs)
    title_of_runs = "Runs, the best first"
    body = [
        table("All runs together", ("", ""), facts),
        f"<h2>{title_of_runs}</h2>",
        _table(title_of_runs, best_first(runs)),
    ]
    return page(title, "\n".join([*body, *(chart.html for chart in drawn)]), drawn)


def loss_charts(runs: Sequence[SweptRun]) -> list[Chart]:
    """Return the curves of held-out and training losses, where there are any."""
    losses = [
        {"run": run.name, "step": row["step"], "loss": row["loss"]}
        for run in runs
        for row in run.rows
    ]
    evaluated = [
        {"run": run.name, "step": row["step"], "loss": row[EVAL_LOSS]}
        for run in runs
        for row in run.rows
        if EVAL_LOSS in row
    ]
    drawn = []
    if evaluated:
        drawn.append(
            curves(
                "eval",
                "Held-out loss",
                evaluated,
                y="loss",
                by="run",
                summary=f"Held-out loss of {len(runs)} runs; {best_first(runs)[0].name} is lowest.",
                has_points=True,
            )
        )
    if losses:
        drawn.append(
            curves(
                "loss",
                "Training loss",
                losses,
                y="loss",
                by="run",
                summary=f"Training loss of {len(runs)} runs by step.",
            )
        )
    return same_colours(drawn, [run.name for run in runs])


def _table(name: str, runs: Sequence[SweptRun]) -> str:
    fields = list(dict.fromkeys(field for run in runs for field in run.settings))
    heads = ("run", *fields, "held-out loss", "training loss", "steps", "tokens/s", "state")
    return table(
        name,
        heads,
        [
            (
                run.name,
                *(str(run.settings.get(field, "")) for field in fields),
                _number(run.eval_loss),
                _number(run.last_loss),
                run.rows[-1]["step"] if run.rows else 0,
                _number(run.rows[-1]["tokens_per_s"] if run.rows else math.nan),
                run.state,
            )
            for run in runs
        ],
    )


def _number(value: float) -> float | None:
    return None if math.isnan(value) else value


def compare_page(runs: Sequence[ComparedRun]) -> str:
    """Return the page of two runs or more."""
    drawn = _charts(runs)
    changes = [
        (name, line) for name, lines in recipe_changes(runs).items() for line in lines or ["none"]
    ]
    heads = ("run", f"settings that differ from those of {runs[0].name}")
    names, *figures = zip(*map(figures_of, runs), strict=True)
    rows = [
        (column, *cells)
        for column, cells in zip(COLUMNS[1:], figures, strict=True)
        if any(cell != "-" for cell in cells)
    ]
    body = [
        table("Figures", ("", *names), rows),
        table("Settings that differ", heads, changes),
        *(f"<p>{escape(run.name)} has done no step yet.</p>" for run in runs if not run.rows),
        *(chart.html for chart in drawn),
    ]
    return page(f"{len(runs)} runs", "\n".join(body), drawn)


def _charts(runs: Sequence[ComparedRun]) -> list[Chart]:
    drawn = loss_charts(
        [SweptRun(name=run.name, settings={}, state="", rows=run.rows) for run in runs]
    )
    for name, title, key, field in (
        ("rate", "Tokens per second", "tokens_per_s", "tokens/s"),
        ("lr", "Learning rate", "lr", "rate"),
        ("energy", "Joules per token", "energy_per_token_j", "J"),
    ):
        points = [
            {"run": run.name, "step": row["step"], field: row[key]}
            for run in runs
            for row in run.rows
            if key in row
        ]
        summary = f"{title} of {len(runs)} runs by step."
        if points:
            drawn.append(curves(name, title, points, y=field, by="run", summary=summary))
    return same_colours(drawn, [run.name for run in runs])
