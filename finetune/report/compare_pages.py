"""Several runs as one page: their curves, and a table that begins with the best."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from finetune.report.charts import metric_charts, page
from finetune.report.compared_runs import (
    ComparedRun,
    differences_of,
    runs_table,
    verdict_lines,
)
from finetune.report.pace import BASIS, FIGURES, Pace
from finetune.report.rows import Table, as_html
from finetune.run.run_files import EVAL_LOSS


@dataclass(frozen=True, kw_only=True, slots=True)
class SweptRun:
    """A run of a sweep."""

    name: str  # the name of the run
    settings: Mapping[str, Any]  # what sets it apart from the others, by field
    state: str  # its status, and why it ended if it did not finish
    rows: Sequence[Mapping[str, Any]]  # the rows of its metrics
    pace: Pace | None  # how fast its steps were; None before the first

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
    drawn = metric_charts({run.name: run.rows for run in runs}, ("eval", "loss"))
    fields = list(dict.fromkeys(field for run in runs for field in run.settings))
    ordered = best_first(runs)
    lines = [
        (
            *(run.name, _number(run.eval_loss), _number(run.last_loss)),
            *(str(run.settings.get(field, "")) for field in fields),
            run.rows[-1]["step"] if run.rows else 0,
            *(run.pace.shown[name] if run.pace else None for name in FIGURES),
            run.state,
        )
        for run in ordered
    ]
    losses = ("held-out loss|loss", "training loss|loss")
    of_pace = (f"{name}|" for name in FIGURES)
    columns = ["run", *losses, *fields, "steps|whole", *of_pace, "state"]
    best, name = ordered[0], "training"
    if not math.isnan(best.eval_loss):
        name = "held-out"
    loss = best.last_loss if math.isnan(best.eval_loss) else best.eval_loss
    is_known = not math.isnan(loss)
    settings = ", ".join(f"{field} {value}" for field, value in best.settings.items())
    said = f"Best: {best.name} ({settings}), with a {name} loss of {loss:.4f}."
    marked = 0 if is_known else None
    table = Table("Runs, the best first", columns, lines, BASIS, level="brief", best=marked)
    together = Table("All runs together", [""] * 2, facts, level="brief")
    body = [as_html([said, table] if is_known else [table]), *(chart.html for chart in drawn)]
    return page(title, "\n".join([*body, as_html([together])]), drawn)


def _number(value: float) -> float | None:
    return None if math.isnan(value) else value


def compare_page(runs: Sequence[ComparedRun]) -> str:
    """Return the page of two runs or more."""
    drawn = metric_charts({run.name: run.rows for run in runs})
    body = [
        as_html([*verdict_lines(runs), runs_table(runs)]),
        *(chart.html for chart in drawn),
        as_html(differences_of(runs)),
    ]
    return page(f"{len(runs)} runs", "\n".join(body), drawn)
