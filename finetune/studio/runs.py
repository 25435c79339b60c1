"""The Runs room: what the runs of a folder are doing, from their files alone.

A run may be written to meanwhile, may have died before its first step, or may be damaged: each is
shown with what there is, and never keeps the others from being shown.
"""

from array import array
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from threading import Lock
from typing import Any

from finetune.errors import CheckpointError
from finetune.report.pages import charts
from finetune.report.pages.page import Chart
from finetune.report.pages.run_page import answers, run_page
from finetune.report.prediction import FIRST, read_predictions
from finetune.run.evaluations import EVAL_LOSS
from finetune.run.metrics import NewRows
from finetune.run.run_dir import RunDir
from finetune.run.run_lock import holder
from finetune.studio.guard import inside
from offload.errors import SluiceError

DEPTH = 2  # the runs of a sweep are in a folder of their own
MOST_RUNS = 200
NUM_LAST = 20  # steps whose time tells when the run will end
Json = dict[str, Any]


def run_names(folder: Path) -> list[str]:
    """Return the runs of a folder, the one written last first; no link leads out of it."""
    root = folder.resolve()
    found = (
        recipe.parent
        for depth in range(DEPTH)
        for recipe in root.glob("/".join(["*"] * (depth + 1)) + "/recipe.yaml")
    )
    named = [(run.relative_to(root).as_posix(), _written_s(run)) for run in found]
    inner = [pair for pair in named if inside(folder, f"{pair[0]}/recipe.yaml") is not None]
    return [name for name, _ in sorted(inner, key=lambda pair: (-pair[1], pair[0]))][:MOST_RUNS]


class Runs:
    """The runs of a folder. Whoever looks again and again reads only what is new of each."""

    def __init__(self, folder: Path) -> None:
        """Name the folder; nothing is read yet."""
        self.folder = folder
        self._progress: dict[str, _Progress] = {}
        self._lock = Lock()

    def all(self) -> Json:
        """Return each run in a line: its state, its steps, its last loss, when it will end."""
        with self._lock:
            names = run_names(self.folder)
            known = {name: self._progress.get(name) for name in names}
            self._progress = {n: p or _Progress(self.folder / n) for n, p in known.items()}
            runs = [{"name": name, **one.line()} for name, one in self._progress.items()]
        return {"folder": str(self.folder), "runs": runs}

    def one(self, name: str) -> Json:
        """Return one run: its line, its curves, its samples.

        Raises:
            CheckpointError: No run of the folder is called so.
        """
        run = self.folder / require_run(self.folder, name)
        with self._lock:
            progress = self._progress.setdefault(name, _Progress(run))
            found = {"name": name, **progress.line(), "charts": {}, "samples": [], "settings": []}
            charts = {chart.name: chart.complete_spec for chart in progress.charts()}
        if "problem" in found:
            return found
        try:
            recipe = RunDir(run).recipe()
            found["settings"] = [
                ["model", str(recipe.model.path or recipe.model.config)],
                ["learns by", recipe.objective.method],
                ["tokens per step", f"{recipe.train.global_batch_size * recipe.train.seq_len:,}"]
                if recipe.train.micro_batch_size != "auto"
                else ["tokens per step", f"{recipe.train.tokens_per_step:,}"],
            ]
            found["charts"] = charts
            found["samples"] = [asdict(answer) for answer in answers(run)]
        except (SluiceError, OSError) as error:
            found["problem"] = str(error)
        return found


def report_of(folder: Path, name: str) -> str:
    """Return a run's report page as its files are now, finished or not.

    Raises:
        CheckpointError: No run of the folder is called so, or a file of it is damaged.
    """
    return run_page(folder / require_run(folder, name))


def require_run(folder: Path, name: str) -> str:
    """Return the name of a run that is in the folder.

    Raises:
        CheckpointError: None is called so.
    """
    if name not in run_names(folder):
        raise CheckpointError(
            f"{name!r} is no run of {folder}",
            limit="only runs of this folder are shown",
            hint="choose one of the list, or `sluice studio DIR` with another folder",
        )
    return name


class _Progress:
    """How far a run is, and its curves."""

    def __init__(self, run: Path) -> None:
        self._run = RunDir(run)
        self._new_rows = NewRows(self._run.metrics_file)
        self._clear()

    def _clear(self) -> None:
        self._steps = array("q")
        self._curves = {"loss": array("d"), "tokens_per_s": array("d")}
        self._evaluated: list[tuple[int, float]] = []
        self._last_s: deque[float] = deque(maxlen=NUM_LAST)  # times of steps

    def _read(self) -> None:
        """Read the rows that are new.

        Raises:
            CheckpointError: One is damaged.
        """
        is_another, rows = self._new_rows.read()
        if is_another:
            self._clear()
        for row in rows:
            self._steps.append(row["step"])
            for key, curve in self._curves.items():
                curve.append(row[key])
            if EVAL_LOSS in row:
                self._evaluated.append((row["step"], row[EVAL_LOSS]))
            self._last_s.append(row["phases_s"]["step"] + row["phases_s"]["data wait"])

    def line(self) -> Json:
        """Return how far the run is; what is damaged is said and not raised."""
        found: Json = {"state": "stopped", "steps": 0, "of": None, "loss": None, "eta_s": None}
        try:
            self._read()
            if (self._run.path / FIRST).exists():
                found["of"] = read_predictions(self._run.path)[-1].num_steps
        except (SluiceError, OSError) as error:
            return {**found, "state": "damaged", "problem": str(error)}
        is_written = holder(self._run.path) is not None
        if self._steps:
            found["steps"] = self._steps[-1]
            found |= {key: curve[-1] for key, curve in self._curves.items()}
            found["eval_loss"] = self._evaluated[-1][1] if self._evaluated else None
        if is_written:
            found["state"] = "training" if self._steps else "starting"
            found["eta_s"] = self._eta_s(found["of"])
        elif self._run.adapter.is_dir() or self._run.model.is_dir():
            found["state"] = "finished"
        elif not self._steps:
            found["state"] = "died before step 1"
        return found

    def _eta_s(self, num_steps: int | None) -> float | None:
        """Return the seconds of the steps to come, at the pace of the last ones."""
        if not self._steps or num_steps is None:
            return None
        each_s = sum(self._last_s) / len(self._last_s)
        return each_s * max(0, num_steps - self._steps[-1])

    def charts(self) -> Iterator[Chart]:
        """Return the curves."""
        for name, title, key, y in (
            ("run-loss", "Training loss", "loss", "loss"),
            ("run-rate", "Tokens per second", "tokens_per_s", "tokens/s"),
        ):
            if self._steps:
                pairs = zip(self._steps, self._curves[key], strict=True)
                yield _curve(name, title, list(pairs), y=y)
        if self._evaluated:
            yield _curve("run-eval", "Held-out loss", self._evaluated, y="loss", is_held_out=True)


def _curve(
    name: str, title: str, points: Sequence[tuple[int, float]], *, y: str, is_held_out: bool = False
) -> Chart:
    step, value = points[-1]
    return charts.curves(
        name,
        title,
        [{"step": step, y: value} for step, value in points],
        y=y,
        summary=f"{title}: {value:.5g} {'at last' if is_held_out else f'in step {step}'}.",
        has_points=is_held_out,
    )


def _written_s(run: Path) -> float:
    """Return when a run was last written, for the order of the list."""
    times = [0.0]
    for name in ("metrics.jsonl", "recipe.yaml"):
        with suppress(OSError):  # it may be removed meanwhile
            times.append((run / name).stat().st_mtime)
    return max(times)
