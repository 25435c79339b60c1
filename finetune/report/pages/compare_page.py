"""Several runs as one page: their curves, their figures, and what their recipes differ in."""

from collections.abc import Sequence
from html import escape

from finetune.report.compared_runs import COLUMNS, ComparedRun, figures_of, recipe_changes
from finetune.report.pages import charts
from finetune.report.pages.page import Chart, page, table
from finetune.report.pages.sweep_page import SweptRun, loss_charts


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
            drawn.append(charts.curves(name, title, points, y=field, by="run", summary=summary))
    return charts.same_colours(drawn, [run.name for run in runs])
