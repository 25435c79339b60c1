"""Variants of a recipe, planned as runs that could share their steps."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from finetune.errors import ConfigError
from finetune.planning.candidates import chosen_plan, shared_requests
from finetune.planning.subject import Subject, subject_of
from finetune.recipe.capabilities import require_shared
from finetune.recipe.grid import named_variants, values_of
from finetune.recipe.recipe import Recipe
from offload.errors import OffloadError
from offload.plan.machine.machine import Machine
from offload.plan.plan import Plan
from offload.plan.runs import RunsPlan, plan_runs

MOST_RUNS = 256


@dataclass(frozen=True, kw_only=True, slots=True)
class Variants:
    """Runs that could share their steps."""

    names: tuple[str, ...]  # what each changes; a number where they are all the same
    subjects: tuple[Subject, ...]  # what each plans

    @property
    def recipes(self) -> tuple[Recipe, ...]:
        """The recipe of each."""
        return tuple(subject.recipe for subject in self.subjects)

    @property
    def num_steps(self) -> tuple[int, ...] | None:
        """The steps of each; None if they depend on the rows of one."""
        numbers = [recipe.train.steps for recipe in self.recipes]
        known = tuple(number for number in numbers if number is not None)
        return known if len(known) == len(numbers) else None


def variants_of(
    model: str, overrides: Sequence[str], *, grid: Sequence[str], num_runs: int | None
) -> Variants:
    """Return the runs of a sweep: a grid over settings, so many equal runs, or those of a file.

    Args:
        model: A recipe, a shipped shape or a config.json; or a file of variants.
        overrides: Settings of all runs.
        grid: Settings with several values, `train.lr=1e-4,2e-4`; all combinations of them.
        num_runs: The number of equal runs; None for those of the grid.

    Raises:
        ConfigError: Not one of these is given, a value is missing, or the runs do not share what
            they must.
    """
    named = named_variants(model)
    if named is not None:
        if grid or num_runs is not None:
            raise ConfigError(
                f"{model} names its variants, and --sweep or --runs makes others",
                limit="a sweep is a grid over a recipe, or a file of variants",
                hint="write the values into the file",
            )
        found = Variants(
            names=tuple(named.settings),
            subjects=tuple(
                subject_of(named.recipe, [*overrides, *(f"{k}={v}" for k, v in own.items())])
                for own in named.settings.values()
            ),
        )
        _require_few(len(found.names))
        require_shared(list(zip(found.names, found.recipes, strict=True)))
        return found
    if bool(grid) == (num_runs is not None):
        raise ConfigError(
            "--runs and --sweep" if grid else "neither --runs nor --sweep",
            limit="--runs takes equal runs, --sweep a setting with several values",
            hint='`--sweep "train.lr=1e-4,2e-4"` alone',
        )
    if num_runs is not None:
        subject = subject_of(model, overrides)
        found = Variants(
            names=tuple(f"run {number + 1}" for number in range(num_runs)),
            subjects=(subject,) * num_runs,
        )
    else:
        points = list(itertools.product(*map(_values, grid)))
        _require_few(len(points))
        found = Variants(
            names=tuple(" ".join(point) for point in points),
            subjects=tuple(subject_of(model, [*overrides, *point]) for point in points),
        )
    require_shared(list(zip(found.names, found.recipes, strict=True)))
    return found


def plan_variants(variants: Variants, machine: Machine, *, num_ranks: int) -> RunsPlan:
    """Plan the runs together, on the machine with their expert backend.

    Args:
        variants: The runs.
        machine: One device of it, with the host of all.
        num_ranks: Devices that share each step.

    Raises:
        ConfigError: One does not fit alone.
    """
    recipes, facts = variants.recipes, variants.subjects[0].facts

    def planned(runs: tuple[int, ...]) -> Plan | None:
        requests = shared_requests([recipes[run] for run in runs], facts, num_ranks=num_ranks)
        return chosen_plan(facts, machine, requests)

    kinds = [tuple(shared_requests([recipe], facts, num_ranks=num_ranks)) for recipe in recipes]
    found = plan_runs(planned, num_steps=variants.num_steps or (1,) * len(recipes), kinds=kinds)
    if found is not None:
        return found
    short = next(run for run in range(len(recipes)) if planned((run,)) is None)
    raise OffloadError(
        f"{variants.names[short]} does not fit {machine.name}, not even alone",
        limit="a sweep has no run that does not fit",
        hint="`sluice plan` of this run says what is missing",
    )


def _values(text: str) -> list[str]:
    """Return a setting with each of its values."""
    key, equals, values = text.partition("=")
    found = [value.strip() for value in values_of(values)]
    if not key.strip() or not equals or not all(found):
        raise ConfigError(
            f"--sweep {text!r}",
            limit="a setting of a sweep has a name and values with commas",
            hint='`--sweep "train.lr=1e-4,2e-4"`',
        )
    double = next((one for one in found if found.count(one) > 1), None)
    if double is not None:
        raise ConfigError(
            f"--sweep {text!r} has {double} twice",
            limit="two runs would be the same",
            hint="leave out one, or `--runs 2` for equal runs",
        )
    return [f"{key.strip()}={value}" for value in found]


def _require_few(number: int) -> None:
    if number > MOST_RUNS:
        raise ConfigError(
            f"the values of --sweep make {number:,} runs",
            limit=f"at most {MOST_RUNS} are planned together",
            hint="fewer values",
        )
