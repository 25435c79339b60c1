"""Several runs as one page: their curves, and a table that begins with the best."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from finetune.report.pages import charts
from finetune.report.pages.page import Chart, page, table
from finetune.run.evaluations import EVAL_LOSS


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
            charts.curves(
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
            charts.curves(
                "loss",
                "Training loss",
                losses,
                y="loss",
                by="run",
                summary=f"Training loss of {len(runs)} runs by step.",
            )
        )
    return charts.same_colours(drawn, [run.name for run in runs])


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
