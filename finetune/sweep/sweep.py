"""A sweep from its first run to its table: waves of runs that train together."""

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field
from rich.console import RenderableType

from finetune.errors import ApartError, CheckpointError, ConfigError, TrialDoesNotFitError
from finetune.files.atomic import JsonFile, write_atomically
from finetune.files.manifest import sealed_json
from finetune.recipe.capabilities import broken_with, require_shared
from finetune.recipe.load import load_recipe
from finetune.recipe.recipe import Recipe, differences, resolved_yaml
from finetune.recipe.sections import OffloadSection
from finetune.report.compare_pages import SweptRun, sweep_page
from finetune.report.explain import explain
from finetune.report.rows import Table, as_text
from finetune.report.screen import Screen
from finetune.run.run_dir import RunDir
from finetune.run.run_files import EVAL_LOSS
from finetune.run.run_lock import locked
from finetune.sweep.screen import Board, RunScreen
from finetune.sweep.together import train_together
from finetune.sweep.variants import StopRule, Variant, Variants, Verdicts, waves_of
from finetune.training.ranks import Ranks, require_same_settings
from finetune.training.run import Outcome, opened
from offload.errors import DoesNotFitError

# ---------------------------------------------------------------------------------------------
# A sweep's directory: which runs it has, how each ended, and the recipe of the best.
#
# sweep.json      the runs, their settings, their directories and losses
# recipes/NAME.yaml      the recipe of each, complete, from which a sweep is resumed
# sweep.html      the same with curves, a page to look at
# best.yaml       the recipe of the run with the lowest loss on held-out rows

SWEEP, PAGE, BEST, RECIPES = "sweep.json", "sweep.html", "best.yaml", "recipes"
WAITING, FINISHED, STOPPED, FAILED = "waiting", "finished", "stopped", "failed"


@dataclass(frozen=True, kw_only=True, slots=True)
class RunState:
    """How far a run of a sweep is."""

    name: str  # the name of the run
    dir: str  # the directory of the run
    settings: Mapping[str, str]  # the settings that others do not have
    # `waiting` until it has ended, then `finished`, `stopped` by a rule, or `failed`.
    status: str = WAITING
    why: str | None = None  # why it stopped or failed
    steps: int = 0  # done
    loss: float | None = None  # the loss of its last step
    eval_loss: float | None = None  # the loss on held-out rows at the step that its adapter is from
    best_eval_loss: float | None = None  # the lowest
    best_step: int | None = None  # the step of the lowest loss


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
        rows = {one.dir: RunDir(Path(one.dir)).read_metrics() for one in states}
        runs = [
            SweptRun(
                name=one.name,
                settings=one.settings,
                state=one.status if one.why is None else f"{one.status}: {one.why}",
                rows=rows[one.dir],
                pace=explain(Path(one.dir)).sections[-1].pace if rows[one.dir] else None,
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


@dataclass(frozen=True, kw_only=True, slots=True)
class How:
    """How a sweep is run."""

    machine_file: Path | None  # a machine that was measured before; None measures this one
    is_resume: bool  # continue what is in its directory
    may_overwrite: bool  # replace runs that are there
    most: int | None  # runs at a time; None for all that can train together

    @classmethod
    def of(
        cls,
        machine_file: Path | None,
        is_resume: bool,  # noqa: FBT001 - as the command line gives them
        may_overwrite: bool,  # noqa: FBT001
        *,
        most: int | None,
    ) -> "How":
        """Return how a sweep is run, if it can be.

        Raises:
            ConfigError: It is to be resumed and to be overwritten.
        """
        if is_resume and may_overwrite:
            raise ConfigError(
                "both --resume and --overwrite",
                hint="`--resume` continues it, `--overwrite` begins it again",
            )
        return cls(
            machine_file=machine_file, is_resume=is_resume, may_overwrite=may_overwrite, most=most
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class SweepOutcome:
    """How a sweep ended."""

    states: Sequence[RunState]  # the states of its runs
    signal: int | None  # the signal that stopped it; None if none did
    best: Path | None  # the recipe of the best run, once all have ended

    @property
    def has_failures(self) -> bool:
        """Whether a run has failed."""
        return any(state.status == FAILED for state in self.states)


def sweep(variants: Variants, how: How, *, ranks: Ranks, screen: Screen) -> SweepOutcome:
    """Run a sweep, or what is left of one.

    Args:
        variants: The runs of the sweep; of one that is resumed, only the directory is read.
        how: The way it is run.
        ranks: The processes that do it together; the main one writes.
        screen: The screen that shows it.

    Raises:
        SluiceError: Anything that a user or the machine can cause, but for failures of one run.
    """
    folder = SweepDir(variants.folder)
    screen.note(f"Sweep directory {folder.path}")
    statuses: Mapping[str, str] = {}
    asked = {run.name: run.recipe for run in variants.runs}
    require_same_settings(ranks, asked, is_resume=how.is_resume)
    if how.is_resume:
        before = variants.runs
        variants, statuses = _read_by_main(folder, ranks)
        _require_as_begun(before, variants.runs, folder)
    require_shared([(run.name, run.recipe) for run in variants.runs])
    _require_comparable(variants)
    waves = waves_of(
        [run for run in variants.runs if statuses.get(run.name) != FINISHED], most=how.most
    )
    if ranks.is_main and not how.is_resume:
        folder.require_startable(may_overwrite=how.may_overwrite)
        for run in variants.runs:
            RunDir(run.recipe.output.run_dir).require_startable(may_overwrite=how.may_overwrite)
    with locked(folder.path) if ranks.is_main else nullcontext(()) as notes:
        for note in notes:
            screen.note(note)
        if ranks.is_main and not how.is_resume:
            folder.start(variants)
        ranks.exchange(None)
        outcome = _run(variants, waves, statuses, how, folder, ranks, screen)
    if outcome.signal is not None:
        screen.note(f"Stopped; continue with `sluice sweep {folder.path} --resume`.")
        return outcome
    screen.show(sweep_table(outcome))
    screen.note(f"Sweep: {folder.path / PAGE}")
    if outcome.best is not None:
        screen.note(f"Best recipe: {outcome.best}")
    return outcome


def _require_as_begun(asked: Sequence[Variant], begun: Sequence[Variant], folder: SweepDir) -> None:
    """Check that recipes that are named again are those that were begun."""
    changed = [f"{one.name} is new" for one in asked if one.name not in {b.name for b in begun}]
    for one in asked:
        for before in begun:
            if before.name == one.name:
                changed += [f"{one.name}: {d}" for d in differences(before.recipe, one.recipe)]
    if changed:
        raise CheckpointError(
            f"the recipes are not those that {folder.path} was begun with: {'; '.join(changed)}",
            limit="resumed runs continue to the bit, so their settings cannot change",
            hint=f"undo the change, or `sluice sweep {folder.path} --resume`",
        )


def _run(
    variants: Variants,
    waves: Sequence[Sequence[Variant]],
    statuses: Mapping[str, str],
    how: How,
    folder: SweepDir,
    ranks: Ranks,
    screen: Screen,
) -> SweepOutcome:
    """Run the waves, and write how far each run is after each wave."""
    states = {
        run.name: state_of(run, status=FINISHED, why=None)
        if statuses.get(run.name) == FINISHED
        else waiting(run)
        for run in variants.runs
    }
    signal, left = None, [list(wave) for wave in waves]
    while left:
        wave = left.pop(0)
        if left or len(wave) < len(variants.runs):
            names = ", ".join(run.name for run in wave)
            screen.note(f"Wave of {len(wave)} runs, {sum(map(len, left))} wait: {names}")
        try:
            outcomes = _together(wave, variants, how, ranks, screen)
        except ApartError as error:
            screen.note(f"By the plan, {len(wave)} runs train in waves of {error.sizes}")
            left[:0] = [[wave[number] for number in numbers] for numbers in error.waves]
            continue
        except DoesNotFitError as error:
            is_of_one_rank = ranks.num > 1 and isinstance(error, TrialDoesNotFitError)
            if len(wave) == 1 or is_of_one_rank:
                raise
            half = -(-len(wave) // 2)
            screen.note(f"{len(wave)} runs do not fit together ({error.what}): {half} at a time")
            left[:0] = [wave[:half], wave[half:]]
            continue
        for run, outcome in zip(wave, outcomes, strict=True):
            states[run.name] = _ended(run, outcome)
            if outcome.error is not None:
                screen.note(f"{run.name} has left: {outcome.error}")
        if ranks.is_main:
            folder.write([states[run.name] for run in variants.runs], variants.stop)
            folder.draw([states[run.name] for run in variants.runs])
        signal = next((one.signal for one in outcomes if one.signal is not None), None)
        if signal is not None:
            return SweepOutcome(states=list(states.values()), signal=signal, best=None)
    best = ranks.from_main(lambda: _best(variants, list(states.values()), folder))
    return SweepOutcome(states=list(states.values()), signal=None, best=best)


def _read_by_main(folder: SweepDir, ranks: Ranks) -> tuple[Variants, Mapping[str, str]]:
    """Return what `folder.read` does on the main rank; other machines do not have the directory."""

    def read() -> tuple[list[Any], dict[str, Any] | None, dict[str, str]]:
        found, statuses = folder.read()
        runs = [(run.name, run.settings, run.recipe) for run in found.runs]
        return runs, None if found.stop is None else asdict(found.stop), statuses

    runs, stop, statuses = ranks.from_main(read)
    variants = Variants(
        folder=folder.path,
        runs=[Variant(name=name, settings=own, recipe=recipe) for name, own, recipe in runs],
        stop=None if stop is None else StopRule(**stop),
    )
    return variants, statuses


def _together(
    wave: Sequence[Variant], variants: Variants, how: How, ranks: Ranks, screen: Screen
) -> list[Outcome]:
    """Run a wave."""
    board = Board(screen.console)
    verdicts = Verdicts(
        rule=variants.stop,
        names=[run.name for run in wave],
        before=lambda: {run.name: eval_losses(run) for run in variants.runs},
        note=screen.note,
    )
    begun = ranks.from_main(lambda: _begun(variants) if how.is_resume else {})
    with ExitStack() as held:
        runs = [
            held.enter_context(
                opened(
                    run.recipe,
                    ranks=ranks,
                    screen=_screen(run, screen, board),
                    is_resume=run.name in begun,
                    may_overwrite=how.may_overwrite,
                    adapter=f"run_{number}" if len(wave) > 1 else None,
                )
            )
            for number, run in enumerate(_with_begun(wave, begun), 1)
        ]
        return train_together(
            runs,
            screen=screen,
            machine_file=how.machine_file,
            judge=lambda step, losses: ranks.from_main(lambda: verdicts(step, losses)),
        )


def _begun(variants: Variants) -> dict[str, OffloadSection]:
    """Return what was settled for the runs that have begun, by name."""
    dirs = {run.name: RunDir(run.recipe.output.run_dir) for run in variants.runs}
    return {name: one.recipe().offload for name, one in dirs.items() if one.recipe_file.exists()}


def _with_begun(wave: Sequence[Variant], begun: Mapping[str, OffloadSection]) -> Sequence[Variant]:
    """Return the runs of a wave; those not begun take what was settled for the others.

    Else a head chunk that was chosen for runs that have begun could differ from the newly chosen.
    A run whose embedding or head has to be on the device, as a copy of it trains, has it there.
    """
    if not begun:
        return wave
    settled = next(iter(begun.values()))
    names = ("head_chunk", "mlp_chunk", "embeddings", "head")
    update = {name: getattr(settled, name) for name in names}
    return [
        run
        if run.name in begun
        else Variant(name=run.name, settings=run.settings, recipe=_settled(run.recipe, update))
        for run in wave
    ]


def _settled(recipe: Recipe, update: Mapping[str, object]) -> Recipe:
    """Return a recipe with settings of other runs, but for places that its own weights exclude."""

    def updated(update: Mapping[str, object]) -> Recipe:
        offload = recipe.offload.model_copy(update=dict(update))
        return recipe.model_copy(update={"offload": offload})

    made, own = updated(update), recipe.offload
    is_pair = made.offload.embeddings == made.offload.head == "host"  # which may be one weight
    if is_out := any(broken_with(made, "offload.embeddings")):
        update = {**update, "embeddings": own.embeddings}
    if any(broken_with(made, "offload.head")) or (is_out and is_pair):
        update = {**update, "head": own.head}
    return updated(update)


def _screen(run: Variant, screen: Screen, board: Board) -> RunScreen:
    return RunScreen(
        screen.console, board, name=run.name, is_verbose=screen.is_verbose, form=screen.form
    )


def _ended(run: Variant, outcome: Outcome) -> RunState:
    if outcome.error is not None:
        return state_of(run, status=FAILED, why=str(outcome.error))
    if outcome.stopped is not None:
        return state_of(run, status=STOPPED, why=outcome.stopped)
    status = WAITING if outcome.signal is not None else FINISHED
    return state_of(run, status=status, why=None)


def _require_comparable(variants: Variants) -> None:
    why = incomparable([run.recipe for run in variants.runs])
    if variants.stop is not None and why is not None:
        raise ConfigError(
            f"stop compares runs, and {why}",
            limit="losses on held-out rows are compared where the rows and the loss are the same",
            hint="leave `stop` out",
        )
    blind = next((run for run in variants.runs if run.recipe.output.eval_every is None), None)
    if variants.stop is not None and blind is not None:
        raise ConfigError(
            f"stop compares runs, and {blind.name} is never evaluated",
            limit="it reads losses on held-out rows",
            hint="`output.eval_every=20`",
        )


def _best(variants: Variants, states: Sequence[RunState], folder: SweepDir) -> Path | None:
    """Write the recipe of the best finished run, if their losses can be compared."""
    if incomparable([run.recipe for run in variants.runs]) is not None:
        return None
    found = [one for one in ranked(states) if one.status == FINISHED and one.eval_loss is not None]
    if not found:
        return None
    return folder.write_best(next(run for run in variants.runs if run.name == found[0].name))


def sweep_table(outcome: SweepOutcome) -> RenderableType:
    """Return a table of the runs, the lowest loss on held-out rows first."""
    lines = [
        (
            *(one.name, one.status, one.steps, one.loss, one.eval_loss, one.best_eval_loss),
            one.best_step,
        )
        for one in ranked(outcome.states)
    ]
    columns: list[str] = ["run", "status", "steps", "loss|loss"]
    more: list[str] = ["held-out|loss", "lowest|loss", "at step|whole"]
    table = Table("Runs by their loss on held-out rows", [*columns, *more], lines)
    return as_text([table], is_compact=True)
