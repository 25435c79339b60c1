"""What a suggested recipe is to be best at.

A rounded form of the layers is smaller, and so moves and fits better, but it is another base to
train on. A goal says how much speed an exact form has to have for it to be preferred.
"""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass

from finetune.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class Goal:
    """How one of several forms of the layers is chosen.

    Attributes:
        name: As it is typed.
        meaning: What is chosen, in words that follow the name.
        least_frac: Share of the best form's tokens per second that is enough; of the forms that
            have it, the one that rounds least is chosen.
        is_longest: Whether this is of the longest sequence, and not of tokens per second.
    """

    name: str
    meaning: str
    least_frac: float
    is_longest: bool = False


_GOALS = (
    Goal(
        name="balanced",
        meaning="what rounds least, of the forms with half of the fastest one's speed",
        least_frac=0.5,
    ),
    Goal(name="fastest", meaning="the most tokens per second, rounded or not", least_frac=1.0),
    Goal(name="quality", meaning="what rounds least, of the forms that fit", least_frac=0.0),
    Goal(
        name="context",
        meaning="what rounds least, of the forms with nine tenths of the longest sequence",
        least_frac=0.9,
        is_longest=True,
    ),
)
GOALS: Mapping[str, Goal] = {goal.name: goal for goal in _GOALS}
DEFAULT_GOAL = _GOALS[0].name


def goal_named(name: str) -> Goal:
    """Return a goal.

    Raises:
        ConfigError: There is none of this name.
    """
    plain = name.strip().lower()
    if plain in GOALS:
        return GOALS[plain]
    near = difflib.get_close_matches(plain, GOALS, n=1, cutoff=0.0)[0]
    raise ConfigError(
        f"{name!r} is not a goal", limit=f"goals are {', '.join(GOALS)}", hint=f"`--goal {near}`"
    )
