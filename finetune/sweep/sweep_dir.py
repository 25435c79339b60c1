"""A sweep's directory: which runs it has, how each ended, and the recipe of the best.

sweep.json      the runs, their settings, their directories and losses
recipes/NAME.yaml      the recipe of each, complete, from which a sweep is resumed
sweep.html      the same with curves, a page to look at
best.yaml       the recipe of the run with the lowest loss on held-out rows
"""

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from finetune.errors import CheckpointError
from finetune.files.atomic import write_atomically
from finetune.files.json import JsonFile
from finetune.files.seal import sealed_json
from finetune.recipe.load import load_recipe
from finetune.recipe.recipe import Recipe, resolved_yaml
from finetune.report.pages.sweep_page import SweptRun, sweep_page
from finetune.run.evaluations import EVAL_LOSS
from finetune.run.run_dir import RunDir
from finetune.sweep.stop import StopRule
from finetune.sweep.variants import Variant, Variants

SWEEP, PAGE, BEST, RECIPES = "sweep.json", "sweep.html", "best.yaml", "recipes"
WAITING, FINISHED, STOPPED, FAILED = "waiting", "finished", "stopped", "failed"


@dataclass(frozen=True, kw_only=True, slots=True)
class RunState:
    """How far a run of a sweep is.

    Attributes:
        name: Of the run.
        dir: Its directory.
        settings: What it has that others have not.
        status: `waiting` until it has ended, then `finished`, `stopped` by a rule, or `failed`.
        why: Why it stopped or failed.
        steps: Done.
        loss: Of its last step.
        eval_loss: On held-out rows, of the step that its adapter is from.
        best_eval_loss: The lowest.
        best_step: That of the lowest.
    """

    name: str
    dir: str
    settings: Mapping[str, str]
    status: str = WAITING
    why: str | None = None
    steps: int = 0
    loss: float | None = None
    eval_loss: float | None = None
    best_eval_loss: float | None = None
    best_step: int | None = None


class _Run(BaseModel):
    model_config = ConfigDict(extra="ignore")

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
    dir: str
    settings: dict[str, str]
    status: str
    why: str | None = None


class _Stop(BaseModel):
    worse_than_best_by: float
    after_steps: int


class _Sweep(BaseModel):
    model_config = ConfigDict(extra="ignore")

    runs: Annotated[list[_Run], Field(min_length=1)]
    stop: _Stop | None


_FILE = JsonFile(
    holds=_Sweep,
    error=CheckpointError,
    limit="it is written when a sweep begins, and again when a run ends",
    hint="restore it from a copy, or begin the sweep again with another `output.name`",
)


class SweepDir:
    """The paths of a sweep and what is in them."""

    def __init__(self, path: Path) -> None:
        """Name the directory; nothing is created."""
        self.path = path
        self.file = path / SWEEP

    def require_startable(self, *, may_overwrite: bool) -> None:
        """Check that a new sweep may be written here.

        Raises:
            CheckpointError: There is a sweep already, or something else.
        """
        is_there = self.path.is_dir() and any(self.path.iterdir())
        if self.file.exists() and not may_overwrite:
            raise CheckpointError(
                f"{self.path} holds a sweep already",
                limit="a sweep is not overwritten unasked",
                hint=f"`sluice sweep {self.path} --resume` continues it, `--overwrite` replaces it,"
                " `output.name=...` names another",
            )
        if is_there and not self.file.exists():
            raise CheckpointError(
                f"{self.path} is there and holds no sweep",
                limit="a sweep is written to a new or empty directory",
                hint="`output.name=...` with a name that is free",
            )

    def start(self, variants: Variants) -> None:
        """Write what is to be done."""
        (self.path / RECIPES).mkdir(parents=True, exist_ok=True)
        for run in variants.runs:
            write_atomically(self._recipe(run.name), resolved_yaml(run.recipe))
        self.write([waiting(run) for run in variants.runs], variants.stop)

    def _recipe(self, name: str) -> Path:
        return self.path / RECIPES / f"{name}.yaml"

    def write(self, states: Sequence[RunState], stop: StopRule | None) -> None:
        """Write how far the runs are."""
        content = {
            "stop": None if stop is None else asdict(stop),
            "runs": [asdict(state) for state in states],
        }
        write_atomically(self.file, sealed_json(json.dumps(content, indent=1)))

    def draw(self, states: Sequence[RunState]) -> None:
        """Write the curves of the runs as a page."""
        runs = [
            SweptRun(
                name=one.name,
                settings=one.settings,
                state=one.status if one.why is None else f"{one.status}: {one.why}",
                rows=RunDir(Path(one.dir)).read_metrics(),
            )
            for one in states
        ]
        counts = Counter(one.status for one in states)
        facts = [
            ("directory", str(self.path)),
            ("runs", ", ".join(f"{number} {status}" for status, number in counts.items())),
        ]
        write_atomically(self.path / PAGE, sweep_page(f"Sweep {self.path.name}", facts, runs))

    def read(self) -> tuple[Variants, dict[str, str]]:
        """Return the sweep as it was begun, and the status of each run.

        Raises:
            CheckpointError: There is none, it is damaged, or its runs are not here.
        """
        if not self.file.exists():
            raise CheckpointError(
                f"{self.path} holds no sweep",
                limit=f"a sweep that was begun has a {SWEEP}",
                hint="leave `--resume` away, or name the directory that `sluice sweep` printed",
            )
        content: dict[str, Any] = _FILE.read(self.file)
        runs = []
        for run in content["runs"]:
            recipe = load_recipe(str(self._recipe(run["name"])), [])
            runs.append(Variant(name=run["name"], settings=run["settings"], recipe=recipe))
            folder = recipe.output.run_dir
            if run["status"] != WAITING and not folder.exists():
                raise CheckpointError(
                    f"the run {run['name']} has {run['status']}, and {folder} is not there",
                    limit="directories of runs are found from where the sweep was begun",
                    hint="resume it from that directory, or restore the run's from a copy",
                )
        stop = content["stop"]
        variants = Variants(
            folder=self.path, runs=runs, stop=None if stop is None else StopRule(**stop)
        )
        return variants, {run["name"]: run["status"] for run in content["runs"]}

    def write_best(self, best: Variant) -> Path:
        """Write the recipe of the best run, to be run again under a name of its own."""
        recipe = RunDir(best.recipe.output.run_dir).recipe()
        output = recipe.output.model_copy(update={"name": f"{self.path.name}-best", "dir": None})
        file = self.path / BEST
        write_atomically(file, resolved_yaml(recipe.model_copy(update={"output": output})))
        return file


def waiting(run: Variant) -> RunState:
    """Return the state of a run that has not ended."""
    return RunState(name=run.name, dir=str(run.recipe.output.run_dir), settings=run.settings)


def eval_losses(run: Variant) -> dict[int, float]:
    """Return a run's losses on held-out rows so far, by step."""
    rows = RunDir(run.recipe.output.run_dir).read_metrics()
    return {row["step"]: row[EVAL_LOSS] for row in rows if EVAL_LOSS in row}


def state_of(run: Variant, *, status: str, why: str | None) -> RunState:
    """Return how far a run is, from the files that it has written."""
    rows = RunDir(run.recipe.output.run_dir).read_metrics()
    losses = eval_losses(run)
    best = min(losses, key=lambda step: (losses[step], step)) if losses else None
    takes_best = run.recipe.output.best_checkpoint == "use" and status == FINISHED
    last = best if takes_best else max(losses, default=None)
    return RunState(
        name=run.name,
        dir=str(run.recipe.output.run_dir),
        settings=run.settings,
        status=status,
        why=why,
        steps=rows[-1]["step"] if rows else 0,
        loss=rows[-1]["loss"] if rows else None,
        eval_loss=None if last is None else losses[last],
        best_eval_loss=None if best is None else losses[best],
        best_step=best,
    )


def ranked(states: Sequence[RunState]) -> list[RunState]:
    """Return runs by their loss on held-out rows, those without one last, in their order."""
    return sorted(states, key=lambda one: math.inf if one.eval_loss is None else one.eval_loss)


def incomparable(recipes: Sequence[Recipe]) -> str | None:
    """Return why losses of runs on held-out rows cannot be compared; None if they can."""
    first = recipes[0]
    if any(one.objective.method != first.objective.method for one in recipes):
        return "their losses differ in kind (objective.method)"
    if any(one.data != first.data for one in recipes):
        return "their rows differ (data)"
    if any(one.train.seq_len != first.train.seq_len for one in recipes):
        return "their rows are cut at different lengths (train.seq_len)"
    if first.data.eval_path is None and any(one.train.seed != first.train.seed for one in recipes):
        return "other rows are held out by another train.seed (data.eval_path would be the same)"
    return None
