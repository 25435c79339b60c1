"""Several runs next to each other: what their recipes differ in, and what came of it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from finetune.errors import CheckpointError, ConfigError
from finetune.recipe.recipe import Recipe, differences
from finetune.report.energy import RunEnergy, cost_of, run_energy
from finetune.report.explain import Explanation, explain
from finetune.report.rows import Part, Table
from finetune.report.verdict import exact_match
from finetune.run.run_dir import RunDir
from finetune.run.run_files import EVAL_LOSS

NAMES = ("output.name:", "output.dir:")  # in which all runs differ
COLUMNS: tuple[str, ...] = (
    *("run", "steps|whole", "held-out|loss", "loss|loss"),
    *("tokens/s|whole", "step predicted|s", "step measured|s"),
    *("right|%", "J/token", "energy|kWh", "cost", "reward"),
)
ALWAYS = 7  # columns that are shown where all are empty


@dataclass(frozen=True, kw_only=True, slots=True)
class ComparedRun:
    """A run, finished or not, from its files."""

    name: str  # the name of its directory; the whole path if another has the same name
    recipe: Recipe  # the recipe that it was begun with
    rows: Sequence[Mapping[str, Any]]  # the rows of its metrics
    explanation: Explanation | None  # None before its first step
    right: float | None  # the share of held-out answers that are right after training

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
    def reward_span(self) -> str | None:
        """How the mean reward of answers that it sampled has changed; None where it did not."""
        found = self.explanation and self.explanation.rounds
        return found.reward_span if found else None

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
        right=exact_match(folder, "after"),
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


def figures_of(run: ComparedRun) -> tuple[Any, ...]:
    """Return a run's figures, in the order of COLUMNS; None for what there is not."""
    cost, currency = cost_of(run.energy.kwh, run.recipe.report), run.recipe.report.currency
    return (
        *(run.name, run.rows[-1]["step"] if run.rows else 0, run.eval_loss, run.loss),
        *(run.tokens_per_s, *(run.step_s or (None, None)), run.right),
        *(run.energy.j_per_token, run.energy.kwh),
        None if cost is None else f"{cost:,.3g} {currency or ''}".strip(),
        run.reward_span,
    )


def best_of(runs: Sequence[ComparedRun]) -> int | None:
    """Return the number of the run of the lowest held-out loss.

    None where fewer than two were evaluated, or their losses are not of one kind.
    """
    losses = {n: run.eval_loss for n, run in enumerate(runs) if run.eval_loss is not None}
    kinds = {runs[n].recipe.objective.method for n in losses}
    is_comparable = len(losses) > 1 and len(kinds) == 1
    return min(losses, key=lambda n: losses[n]) if is_comparable else None


def verdict_lines(runs: Sequence[ComparedRun]) -> list[Part]:
    """Return which run learned best and which was fastest, in words."""
    best, found = best_of(runs), list[Part]()
    if best is not None:
        found.append(f"Best: {runs[best].name}, held-out loss {runs[best].eval_loss:.4f}")
    rates = {run.name: run.tokens_per_s for run in runs if run.tokens_per_s is not None}
    if len(rates) > 1:
        name = max(rates, key=lambda name: rates[name])
        found.append(f"Fastest: {name}, {rates[name]:,.0f} tokens/s")
    return found


def runs_table(runs: Sequence[ComparedRun]) -> Table:
    """Return a line for each run, the best marked; no column is empty."""
    cells = [figures_of(run) for run in runs]
    shown = [i for i, column in enumerate(zip(*cells, strict=True)) if i < ALWAYS or any(column)]
    columns, lines = [COLUMNS[i] for i in shown], [[row[i] for i in shown] for row in cells]
    return Table("Runs", columns, lines, level="brief", best=best_of(runs))


def differences_of(runs: Sequence[ComparedRun]) -> list[Part]:
    """Return the settings that differ, paths last, and what is missing of a run."""
    changes = [
        (name, line)
        for name, lines in recipe_changes(runs).items()
        for line in sorted(lines, key=lambda line: "path" in line.split(":")[0]) or ["none"]
    ]
    uncounted: dict[str, list[str]] = {}
    for run in runs:
        if run.energy.joules is None and run.energy.missing:
            for line in run.energy.lines():
                uncounted.setdefault(line, []).append(run.name)
    title = f"Settings that differ from those of {runs[0].name}"
    return [
        Table(title, ["run", "setting"], changes, level="brief"),
        *(f"{run.name} has done no step yet." for run in runs if not run.rows),
        *(f"{', '.join(names)}: energy: {line}" for line, names in uncounted.items()),
    ]


def runs_tables(runs: Sequence[ComparedRun]) -> list[Part]:
    """Return the verdict, a line for each run, and the differences of their recipes.

    Args:
        runs: Two or more.
    """
    return [*verdict_lines(runs), runs_table(runs), *differences_of(runs)]
