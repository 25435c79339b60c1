"""The runs of a sweep: a grid over a recipe's settings, lists taken in step, or named variants.

    sluice sweep RECIPE train.lr=1e-4,2e-4 adapter.rank=8,32      four runs
    sluice sweep RECIPE train.lr=1e-4,2e-4 adapter.rank=8,32 --zip      two
    sluice sweep FILE      as a YAML file names them

`finetune.recipe.grid` says what is in a file.
"""

import itertools
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from finetune.errors import ConfigError
from finetune.planning.request import facts_of
from finetune.recipe.draft import CoreLoader
from finetune.recipe.grid import STOP, named_variants, values_of
from finetune.recipe.load import is_of_run, load_recipe
from finetune.recipe.recipe import Recipe, resolved_yaml

_FIELDS = ("worse_than_best_by", "after_steps")


@dataclass(frozen=True, kw_only=True, slots=True)
class StopRule:
    """Compares a run with the lowest loss that any run had on held-out rows by the same step."""

    worse_than_best_by: float  # a run whose loss is higher than that by more stops
    after_steps: int  # no run stops before so many steps


def stop_rule(content: object, words: Sequence[str]) -> StopRule | None:
    """Return the rule of a file, and of `stop.field=value` words over it; None if there is none.

    Raises:
        ConfigError: It is incomplete, or a value is out of range.
    """
    values: dict[str, Any] = dict(content) if isinstance(content, dict) else {STOP: content}
    for word in words:
        path, _, text = word.partition("=")
        values[path.partition(".")[2]] = yaml.load(text, Loader=CoreLoader)
    if not values:
        return None
    worse_by, after = (values.get(name) for name in _FIELDS)
    if (
        set(values) == set(_FIELDS)
        and isinstance(worse_by, int | float)
        and isinstance(after, int)
        and not isinstance(worse_by, bool)
        and not isinstance(after, bool)
        and 0 <= worse_by < math.inf
        and after >= 1
    ):
        return StopRule(worse_than_best_by=float(worse_by), after_steps=after)
    raise ConfigError(
        f"stop is {values}",
        limit="it has worse_than_best_by, a loss of at least 0, and after_steps, at least 1",
        hint="`stop.worse_than_best_by=0.2 stop.after_steps=40`",
    )


@dataclass(kw_only=True, slots=True, eq=False)
class Verdicts:
    """Judges runs that train together, by their losses and those of runs before them."""

    rule: StopRule | None  # when a run stops; None for never
    names: Sequence[str]  # the names of the runs, in the order of their numbers
    # Reads the losses so far of all runs of the sweep: name -> step -> loss.
    before: Callable[[], Mapping[str, Mapping[int, float]]]
    note: Callable[[str], None]  # says which run stops, and why
    # The losses that were read before the first was judged, and those judged since.
    losses: dict[str, dict[int, float]] | None = None

    def __call__(self, step: int, losses: Mapping[int, float]) -> Mapping[int, str]:
        """Return why runs are to stop after a step, by number."""
        rule = self.rule
        if rule is None:
            return {}
        if self.losses is None:
            self.losses = {name: dict(steps) for name, steps in self.before().items()}
        found = self.losses
        for number, loss in losses.items():
            found.setdefault(self.names[number], {})[step] = loss
        verdicts = {}
        for number, loss in losses.items():
            best, name = min(
                (other, name)
                for name, steps in found.items()
                for at, other in steps.items()
                if at <= step
            )
            if step >= rule.after_steps and loss > best + rule.worse_than_best_by:
                verdicts[number] = (
                    f"stopped after step {step}: loss on held-out rows {loss:.4f}, more"
                    f" than {rule.worse_than_best_by:g} above {best:.4f} of {name}"
                )
                self.note(f"{self.names[number]}: {verdicts[number]}")
        return verdicts


MAX_RUNS = 64
_PLACES = ("output.name", "output.dir")


@dataclass(frozen=True, kw_only=True, slots=True)
class Variant:
    """A run of a sweep."""

    name: str  # the name of the run within the sweep
    # The settings that others do not have, as it was written: path -> value.
    settings: Mapping[str, str]
    recipe: Recipe  # all of it


@dataclass(frozen=True, kw_only=True, slots=True)
class Variants:
    """What a sweep is."""

    folder: Path  # the directory of the sweep
    runs: Sequence[Variant]  # the runs, each with a directory of its own
    stop: StopRule | None  # when a run that is worse than others stops; None for never


def variants_of(source: str, words: Sequence[str], *, is_zipped: bool, max_runs: int) -> Variants:
    """Return the runs of a sweep.

    Args:
        source: A recipe, or a file of named variants.
        words: `section.field=value`, or several values with commas between them.
        is_zipped: Whether the first values of all settings make a run, the second another, and so
            on; each with each if not.
        max_runs: The most that there may be.

    Raises:
        ConfigError: Something is wrong with them.
    """
    stops = [word for word in words if word.startswith(f"{STOP}.")]
    words = [word for word in words if word not in stops]
    named, (fixed, lists) = named_variants(source), _split(words)
    stop: Mapping[str, Any] = {}
    if named is None:
        if not lists:
            load_recipe(source, [], check_files=False)  # refuses what is no recipe
            raise ConfigError(
                f"no setting of {' '.join(words) or source} has several values",
                limit="a sweep is a grid over a recipe, or a file of variants",
                hint="`train.lr=1e-4,2e-4`",
            )
        settings = list(_zipped(lists) if is_zipped else _grid(lists, max_runs=max_runs))
        names = _names(settings)
        recipe = source
    else:
        if lists or is_zipped:
            raise ConfigError(
                f"{source} names its variants, and {', '.join(lists) or '--zip'} makes others",
                limit="a sweep is a grid over a recipe, or a file of variants",
                hint="write the values into the file",
            )
        recipe, names, settings = named.recipe, list(named.settings), list(named.settings.values())
        stop = named.stop
    _require_few(len(settings), max_runs=max_runs)
    base = load_recipe(recipe, fixed)
    folder = base.output.run_dir
    is_named = any(word.startswith("output.dir=") for word in fixed)
    if base.output.dir is None or (is_of_run(recipe) and not is_named):
        folder = folder.with_name(f"{folder.name}-sweep")
    runs = []
    for name, own in zip(names, settings, strict=True):
        _require_no_place(own)
        output = [f"output.name={base.output.name}-{name}", f"output.dir={folder / name}"]
        others = [word for word in fixed if word.partition("=")[0] not in _PLACES]
        one = load_recipe(recipe, [*others, *(f"{k}={v}" for k, v in own.items()), *output])
        runs.append(Variant(name=name, settings=own, recipe=one))
    _require_different(runs)
    return Variants(folder=folder, runs=runs, stop=stop_rule(stop, stops))


def variants_to_resume(source: str, words: Sequence[str], *, is_zipped: bool) -> Variants:
    """Return a sweep of which only the directory is known, to be read.

    Raises:
        ConfigError: Settings are given too.
    """
    if words or is_zipped:
        raise ConfigError(
            f"--resume with {' '.join(words) or '--zip'}",
            limit="a sweep is continued as it was begun",
            hint=f"`sluice sweep {source} --resume`",
        )
    return Variants(folder=Path(source), runs=(), stop=None)


def recipes_together(sources: Sequence[str], words: Sequence[str]) -> Variants:
    """Return the runs of several recipes, each in the directory that it names.

    Args:
        sources: The recipes.
        words: Settings of all; recipes among them are passed over.

    Raises:
        ConfigError: Two are equal, or have the same directory.
    """
    overrides = [word for word in words if word not in sources]
    _require_few(len(sources), max_runs=MAX_RUNS)
    recipes = [load_recipe(source, overrides) for source in sources]
    taken: dict[Path, str] = {}
    for source, recipe in zip(sources, recipes, strict=True):
        place = recipe.output.run_dir.absolute()
        if place in taken:
            raise ConfigError(
                f"{taken[place]} and {source} are both to be written to {recipe.output.run_dir}",
                limit="each run has a directory of its own",
                hint="`output.name: ...` in one of them",
            )
        taken[place] = source
    runs = [Variant(name=one.output.name, settings={}, recipe=one) for one in recipes]
    names = [run.name for run in runs]
    double = next((name for name in names if names.count(name) > 1), None)
    if double is not None:
        raise ConfigError(
            f"two recipes are named {double}",
            limit="runs that train together have different names, `output.name`",
            hint="`output.name: ...` in one of them",
        )
    _require_different(runs)
    folder = Path("runs") / f"{names[0]}-and-{len(names) - 1}-more"
    return Variants(folder=folder, runs=runs, stop=None)


# ---------------------------------------------------------------------------------------------
# Values


def _split(words: Sequence[str]) -> tuple[list[str], dict[str, list[str]]]:
    """Return settings of all runs, and those with several values."""
    fixed: list[str] = []
    lists: dict[str, list[str]] = {}
    for word in words:
        path, _, text = word.partition("=")
        values = values_of(text)
        if len(values) == 1:
            fixed.append(word)
            continue
        if path in lists:
            raise ConfigError(
                f"{path} is given a second time: {word}",
                limit="a setting is given once, with all its values",
                hint=f"`{path}={','.join(lists[path])},...`",
            )
        if "" in values:
            raise ConfigError(
                f"{word} has an empty value",
                limit="values are separated by single commas",
                hint=f"`{path}={','.join(value for value in values if value)}`",
            )
        lists[path] = values
    return fixed, lists


def _grid(lists: Mapping[str, list[str]], *, max_runs: int) -> Iterator[dict[str, str]]:
    num = 1
    for values in lists.values():
        num *= len(values)
    _require_few(num, max_runs=max_runs)
    for chosen in itertools.product(*lists.values()):
        yield dict(zip(lists, chosen, strict=True))


def _zipped(lists: Mapping[str, list[str]]) -> Iterator[dict[str, str]]:
    lengths = {path: len(values) for path, values in lists.items()}
    if len(set(lengths.values())) > 1:
        raise ConfigError(
            "--zip with " + ", ".join(f"{num} values of {path}" for path, num in lengths.items()),
            limit="with --zip all settings have as many values",
            hint="leave `--zip` away for a grid",
        )
    for values in zip(*lists.values(), strict=True):
        yield dict(zip(lists, values, strict=True))


def _names(settings: Sequence[Mapping[str, str]]) -> list[str]:
    """Return a name of each run, made of its settings; the last words of paths, if they differ."""
    paths = list(settings[0]) if settings else []
    last = [path.rpartition(".")[2] for path in paths]
    keys = last if len(set(last)) == len(last) else paths
    names: list[str] = []
    for own in settings:
        values = (re.sub(r"[^A-Za-z0-9.]+", "-", value).strip("-.") for value in own.values())
        name = "_".join(f"{key}-{value}" for key, value in zip(keys, values, strict=True))
        again = re.compile(re.escape(name) + r"(_[0-9]+)?")
        double = sum(again.fullmatch(other) is not None for other in names)
        names.append(f"{name}_{double + 1}" if double else name)
    return names


# ---------------------------------------------------------------------------------------------
# Checks


def _require_few(num: int, *, max_runs: int) -> None:
    if not 1 <= num <= max_runs:
        raise ConfigError(
            f"the sweep has {num:,} runs",
            limit=f"it may have 1 to {max_runs}",
            hint=f"fewer values, or `--max-runs {num}`",
        )


def _require_no_place(own: Mapping[str, str]) -> None:
    place = next((path for path in own if path in _PLACES), None)
    if place is not None:
        raise ConfigError(
            f"{place} differs between the runs of a sweep",
            limit="each run has a directory in that of the sweep, named by its settings",
            hint=f"one value for all: `{place}=...` names the sweep",
        )


def _require_different(runs: Sequence[Variant]) -> None:
    """Check that no two runs are the same but for their names."""
    seen: dict[str, str] = {}
    for run in runs:
        output = run.recipe.output.model_copy(update={"name": "same", "dir": None})
        text = resolved_yaml(run.recipe.model_copy(update={"output": output}))
        if text in seen:
            raise ConfigError(
                f"the runs {seen[text]} and {run.name} are equal",
                limit="each run of a sweep has a setting that no other has",
                hint=f"leave {run.name} out",
            )
        seen[text] = run.name


@dataclass(frozen=True, kw_only=True, slots=True)
class _Held:
    """What peft cannot hold twice: other adapted parameters, a head that is tied to a copy."""

    parameters: frozenset[str]
    is_tied: bool

    def agrees(self, other: "_Held") -> bool:
        both = self.parameters and other.parameters and self.parameters != other.parameters
        return not both and not self.is_tied and not other.is_tied


def waves_of(runs: Sequence[Variant], *, most: int | None) -> list[list[Variant]]:
    """Return which runs train together, in their order; each is in the first wave that takes it.

    Args:
        runs: They agree in what they must share.
        most: Runs at a time; None for any number.
    """
    waves: list[list[Variant]] = []
    held: list[list[_Held]] = []
    found = _held_by(runs)
    for run, own in zip(runs, found, strict=True):
        for wave, others in zip(waves, held, strict=True):
            if (most is None or len(wave) < most) and all(own.agrees(one) for one in others):
                wave.append(run)
                others.append(own)
                break
        else:
            waves.append([run])
            held.append([own])
    return waves


def _held_by(runs: Sequence[Variant]) -> list[_Held]:
    """Find out what peft would adapt, on a model without weights; only where it can matter."""
    model = runs[0].recipe.model
    if not facts_of(model).has_experts and not any(
        one.recipe.adapter.as_lora.modules_to_save for one in runs
    ):
        return [_Held(parameters=frozenset(), is_tied=False) for _ in runs]
    from finetune.adapter.lora import held_by
    from finetune.model.empty import empty_of

    empty = empty_of(model)
    return [
        _Held(parameters=parameters, is_tied=is_tied)
        for parameters, is_tied in (held_by(empty, run.recipe.adapter) for run in runs)
    ]
