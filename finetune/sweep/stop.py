"""When a run of a sweep stops early: once it is worse than the best by more than a margin."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from finetune.errors import ConfigError
from finetune.recipe.grid import STOP
from finetune.recipe.yaml_source import CoreLoader
from finetune.training.shared.together import Evaluated

_FIELDS = ("worse_than_best_by", "after_steps")


@dataclass(frozen=True, kw_only=True, slots=True)
class StopRule:
    """Compares a run with the lowest loss that any run had on held-out rows by the same step.

    Attributes:
        worse_than_best_by: A run whose loss is higher than that by more stops.
        after_steps: No run stops before so many steps.
    """

    worse_than_best_by: float
    after_steps: int


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
    """Judges runs that train together, by their losses and those of runs before them.

    Attributes:
        rule: When a run stops; None for never.
        names: Of the runs, in the order of their numbers.
        before: Reads the losses so far of all runs of the sweep: name -> step -> loss.
        note: Says which run stops, and why.
        losses: Those that were read, once there is one to judge, and those judged since.
    """

    rule: StopRule | None
    names: Sequence[str]
    before: Callable[[], Mapping[str, Mapping[int, float]]]
    note: Callable[[str], None]
    losses: dict[str, dict[int, float]] | None = None

    def __call__(self, losses: Mapping[int, Evaluated]) -> Mapping[int, str]:
        """Return why runs are to stop, by number."""
        rule = self.rule
        if rule is None:
            return {}
        if self.losses is None:
            self.losses = {name: dict(steps) for name, steps in self.before().items()}
        found = self.losses
        for number, one in losses.items():
            found.setdefault(self.names[number], {})[one.step] = one.loss
        verdicts = {}
        for number, one in losses.items():
            best, name = min(
                (loss, name)
                for name, steps in found.items()
                for step, loss in steps.items()
                if step <= one.step
            )
            if one.step >= rule.after_steps and one.loss > best + rule.worse_than_best_by:
                verdicts[number] = (
                    f"stopped after step {one.step}: loss on held-out rows {one.loss:.4f}, more"
                    f" than {rule.worse_than_best_by:g} above {best:.4f} of {name}"
                )
                self.note(f"{self.names[number]}: {verdicts[number]}")
        return verdicts
