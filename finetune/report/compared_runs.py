"""Several runs next to each other: what their recipes differ in, and what came of it."""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from finetune.errors import CheckpointError, ConfigError
from finetune.recipe.recipe import Recipe, differences
from finetune.report.energy import RunEnergy, cost_of, run_energy
from finetune.report.explain import Explanation, explain
from finetune.report.pace import BASIS, FIGURES, Pace
from finetune.report.rows import Part, Table, shown
from finetune.report.verdict import answers_right
from finetune.run.run_dir import RunDir
from finetune.run.run_files import (
    EVAL_LOSS,
    EVAL_PREFIX,
    EVALUATION,
    EVALUATION_BEFORE,
    read_sealed,
)

ACCURACY = f"{EVAL_PREFIX}accuracy"
NAMES = ("output.name:", "output.dir:")  # in which all runs differ
COLUMNS: tuple[str, ...] = (
    *("run", "steps|whole", "held-out|loss", "loss|loss"),
    *(f"{name}|" for name in FIGURES),
    "disturbed",
    *("answers right|", "held-out accuracy|", "J/token", "energy|kWh", "cost", "reward"),
    *("images|whole", "encoded in|s"),
)
ALWAYS = 8  # columns that are shown where all are empty
FEWEST_STEPS = 5  # whose spread means something


@dataclass(frozen=True, kw_only=True, slots=True)
class ComparedRun:
    """A run, finished or not, from its files."""

    name: str  # the name of its directory; the whole path if another has the same name
    recipe: Recipe  # the recipe that it was begun with
    rows: Sequence[Mapping[str, Any]]  # the rows of its metrics
    explanation: Explanation | None  # None before its first step
    right: Mapping[str, float]  # shares of right held-out answers, before and after training
    accuracy: str | None  # that of held-out rows whose class was right

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
    def pace(self) -> Pace | None:
        """The time of a step and tokens/s, since the newest start."""
        return None if self.explanation is None else self.explanation.sections[-1].pace

    @property
    def is_disturbed(self) -> bool:
        """Whether something other than its plan affected the times of its steps."""
        return self.explanation is not None and self.explanation.sections[-1].is_disturbed

    @property
    def noise(self) -> float:
        """The interquartile range of the tokens/s of its steps; infinite of fewer than five."""
        first, last = (0, 0) if self.explanation is None else self.explanation.sections[-1].steps
        rates = [float(row["tokens_per_s"]) for row in self.rows if first <= row["step"] <= last]
        if len(rates) < FEWEST_STEPS:
            return math.inf
        low, _, high = statistics.quantiles(rates, n=4)
        return high - low

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
        right=answers_right(folder),
        accuracy=_accuracy(folder, rows),
    )


def _accuracy(folder: Path, rows: Sequence[Mapping[str, Any]]) -> str | None:
    """Return the accuracy on held-out rows, the first and the last; None without one."""
    before = folder / EVALUATION_BEFORE
    evaluated = [read_sealed(EVALUATION, before)] if before.exists() else []
    found = [one[ACCURACY] for one in (*evaluated, *rows) if ACCURACY in one]
    return _shares((found[0], found[-1])) if found else None


def _shares(values: Iterable[float]) -> str:
    return " -> ".join(shown(value, "share") for value in values)


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
    images = None if run.explanation is None else run.explanation.images
    cost, currency = cost_of(run.energy.kwh, run.recipe.report), run.recipe.report.currency
    pace = run.pace.shown if run.pace else {}
    return (
        *(run.name, run.rows[-1]["step"] if run.rows else 0, run.eval_loss, run.loss),
        *(pace.get(name) for name in FIGURES),
        "yes" if run.is_disturbed else None,
        *(_shares(run.right.values()) or None, run.accuracy),
        *(run.energy.j_per_token, run.energy.kwh),
        None if cost is None else f"{cost:,.3g} {currency or ''}".strip(),
        *(run.reward_span, images and images.num_images, images and images.encoded_s),
    )


def best_of(runs: Sequence[ComparedRun]) -> int | None:
    """Return the number of the run of the lowest held-out loss.

    Where no run was evaluated, it is the one with the most held-out answers right after training.
    None where fewer than two have a figure, losses are not of one kind, or two runs share the best.
    """
    losses = {n: round(run.eval_loss, 4) for n, run in enumerate(runs) if run.eval_loss is not None}
    wrong = {n: 1 - run.right["after"] for n, run in enumerate(runs) if "after" in run.right}
    ranked = losses or wrong
    kinds = {runs[n].recipe.objective.method for n in losses}
    first, *others = sorted(ranked, key=lambda n: ranked[n]) or [0]
    is_best = others and len(kinds) <= 1 and ranked[first] < ranked[others[0]]
    return first if is_best else None


def verdict_lines(runs: Sequence[ComparedRun]) -> list[Part]:
    """Return in words whether runs are alike, which learned best and which was fastest."""
    best, found = best_of(runs), list[Part](_unlike(runs))
    if best is not None:
        run = runs[best]
        figure = (
            f"{shown(run.right['after'], 'share')} of held-out answers right"
            if run.eval_loss is None
            else f"held-out loss {run.eval_loss:.4f}"
        )
        found.append(f"Best: {run.name}, {figure}")
    return [*found, *_fastest(runs)]


def _unlike(runs: Sequence[ComparedRun]) -> list[str]:
    """Return in words that runs train other models, or on other rows, if they do."""
    models = [f"{run.recipe.model.path} {run.recipe.model.config}" for run in runs]
    keys = list(zip(models, (str(run.recipe.data.sources) for run in runs), strict=True))
    groups: dict[tuple[str, str], list[str]] = {}
    for key, run in zip(keys, runs, strict=True):
        groups.setdefault(key, []).append(run.name)
    if len(groups) == 1:
        return []
    parts = zip(("models", "rows"), zip(*keys, strict=True), strict=True)
    what = " and ".join(name for name, of in parts if len(set(of)) > 1).capitalize()
    names = " against ".join(", ".join(group) for group in groups.values())
    return [f"{what} differ ({names}): their figures say nothing of each other's settings"]


def _fastest(runs: Sequence[ComparedRun]) -> list[str]:
    """Return which run is the fastest, if its lead is larger than the noise of the steps.

    A lead is noise up to the larger interquartile range of the two runs' tokens/s by step.
    """
    timed = [(run.pace.tokens_per_s, run.noise, run.name) for run in runs if run.pace is not None]
    if len(timed) < 2:
        return []
    if disturbed := [run.name for run in runs if run.is_disturbed]:
        return [
            f"Fastest: none is named, as the steps of {', '.join(disturbed)} were disturbed, by"
            " other programs or by changing clock rates"
        ]
    (rate, noise, name), *others = sorted(timed, key=lambda one: -one[0])
    if close := [one for other, own, one in others if rate - other <= max(noise, own)]:
        names = ", ".join([name, *close])
        return [f"Fastest: {names}, with no difference larger than the noise of the steps"]
    return [f"Fastest: {name}, {shown(rate, 'whole')} tokens/s"]


def runs_table(runs: Sequence[ComparedRun]) -> Table:
    """Return a line for each run, the best marked; no column is empty."""
    cells = [figures_of(run) for run in runs]
    shown = [
        i
        for i, column in enumerate(zip(*cells, strict=True))
        if i < ALWAYS or any(one is not None for one in column)
    ]
    columns, lines = [COLUMNS[i] for i in shown], [[row[i] for i in shown] for row in cells]
    return Table("Runs", columns, lines, BASIS, level="brief", best=best_of(runs))


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
        *(
            f"{run.name} has no held-out loss: no evaluation by step {run.rows[-1]['step']:,}."
            for run in runs
            if run.rows and run.eval_loss is None
        ),
        *(f"{', '.join(names)}: energy: {line}" for line, names in uncounted.items()),
    ]


def runs_tables(runs: Sequence[ComparedRun]) -> list[Part]:
    """Return the verdict, a line for each run, and the differences of their recipes.

    Args:
        runs: Two or more.
    """
    return [*verdict_lines(runs), runs_table(runs), *differences_of(runs)]
