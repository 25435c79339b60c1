"""Several runs next to each other: what their recipes differ in, and what came of it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from finetune.errors import CheckpointError, ConfigError
from finetune.recipe.recipe import Recipe, differences
from finetune.report.energy import RunEnergy, cost_of, run_energy, shown_kwh
from finetune.report.explain import Explanation, explain
from finetune.report.format import shown_time, table_of
from finetune.run.run_dir import RunDir
from finetune.run.run_files import EVAL_LOSS

NAMES = ("output.name:", "output.dir:")  # in which all runs differ
COLUMNS = (
    *("run", "steps", "loss", "held-out", "tokens/s", "predicted", "measured"),
    *("J/token", "energy", "cost"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class ComparedRun:
    """A run, finished or not, from its files.

    Attributes:
        name: Of its directory; the whole path if another has the same name.
        recipe: As it was begun.
        rows: Of its metrics.
        explanation: None before its first step.
    """

    name: str
    recipe: Recipe
    rows: Sequence[Mapping[str, Any]]
    explanation: Explanation | None

    @property
    def loss(self) -> float | None:
        """Training loss of the last step."""
        return float(self.rows[-1]["loss"]) if self.rows else None

    @property
    def eval_loss(self) -> float | None:
        """Held-out loss of the last evaluation."""
        found = [float(row[EVAL_LOSS]) for row in self.rows if EVAL_LOSS in row]
        return found[-1] if found else None

    @property
    def tokens_per_s(self) -> float | None:
        """Over all steps and their waits for data."""
        times = (row["phases_s"]["step"] + row["phases_s"]["data wait"] for row in self.rows)
        return sum(row["num_tokens"] for row in self.rows) / sum(times) if self.rows else None

    @property
    def step_s(self) -> tuple[float, float] | None:
        """A step as predicted and as measured, of the newest start."""
        if self.explanation is None:
            return None
        section = self.explanation.sections[-1]
        return section.predicted_s, section.comparison[0].measured

    @property
    def energy(self) -> RunEnergy:
        """What its steps took."""
        return run_energy([], {}) if self.explanation is None else self.explanation.energy


def read_runs(folders: Sequence[Path]) -> list[ComparedRun]:
    """Read the files of runs.

    Raises:
        ConfigError: There are fewer than two, or one is named twice.
        CheckpointError: A folder holds no run, or a file is damaged.
    """
    if len(folders) < 2:
        raise ConfigError(
            f"one run: {folders[0]}" if folders else "no run",
            limit="a comparison is of two runs or more",
            hint="`sluice compare runs/a runs/b`",
        )
    by_place: dict[Path, Path] = {}
    for folder in folders:
        place = folder.resolve()
        if place in by_place:
            raise ConfigError(
                f"{folder} is the run of {by_place[place]} again",
                limit="a run is compared with others",
                hint="name each run once",
            )
        by_place[place] = folder
    names = [folder.resolve().name for folder in folders]
    return [
        _read(folder, str(folder) if names.count(name) > 1 else name)
        for folder, name in zip(folders, names, strict=True)
    ]


def _read(folder: Path, name: str) -> ComparedRun:
    run = RunDir(folder)
    if not run.recipe_file.exists():
        raise CheckpointError(
            f"{folder} holds no run",
            limit="a run's directory has its recipe.yaml",
            hint="give the directory that `sluice finetune` wrote",
        )
    rows = run.read_metrics()
    return ComparedRun(
        name=name,
        recipe=run.recipe(),
        rows=rows,
        explanation=explain(folder) if rows else None,
    )


def recipe_changes(runs: Sequence[ComparedRun]) -> dict[str, list[str]]:
    """Return in which settings each run but the first differs from the first, by its name."""
    first, *others = runs
    return {
        run.name: [
            line for line in differences(first.recipe, run.recipe) if not line.startswith(NAMES)
        ]
        for run in others
    }


def figures_of(run: ComparedRun) -> tuple[str, ...]:
    """Return a run's figures as they are shown, in the order of COLUMNS; "-" for none."""
    step_s, kwh = run.step_s, run.energy.kwh
    cost, currency = cost_of(kwh, run.recipe.report), run.recipe.report.currency
    return (
        run.name,
        f"{run.rows[-1]['step']:,}" if run.rows else "0",
        "-" if run.loss is None else f"{run.loss:.4f}",
        "-" if run.eval_loss is None else f"{run.eval_loss:.4f}",
        "-" if run.tokens_per_s is None else f"{run.tokens_per_s:,.0f}",
        "-" if step_s is None else shown_time(step_s[0]),
        "-" if step_s is None else shown_time(step_s[1]),
        "-" if run.energy.j_per_token is None else f"{run.energy.j_per_token:.3g}",
        "-" if kwh is None else shown_kwh(kwh),
        "-" if cost is None else f"{cost:,.3g}{f' {currency}' if currency else ''}",
    )


def runs_table(runs: Sequence[ComparedRun]) -> RenderableType:
    """Return a row for each run, and the differences of their recipes; empty columns are left out.

    Args:
        runs: Two or more.
    """
    cells = [figures_of(run) for run in runs]
    shown = [i for i in range(len(COLUMNS)) if i < 7 or any(row[i] != "-" for row in cells)]
    table = table_of("Runs", *(COLUMNS[i] for i in shown))
    for row in cells:
        table.add_row(*(Text(row[i]) for i in shown))
    lines = [f"Settings that differ from those of {runs[0].name}:"]
    for name, changes in recipe_changes(runs).items():
        lines += [f"  {name}: {', '.join(changes) or 'none'}"]
    lines += [
        f"{run.name}: energy: {line}"
        for run in runs
        if run.energy.joules is None and run.energy.missing
        for line in run.energy.lines()
    ]
    return Group(table, *map(Text, lines))
