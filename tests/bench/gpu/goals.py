"""What is aimed at on a card, and which measurements reach it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

TWICE = 1.95  # M*, whole micro-batches as they come
LONG_TOKENS = 8192  # of a micro-batch, from which the compute lane has goals
Row = Mapping[str, Any]


def value_of(row: Row, name: str) -> float | None:
    """Return one of a row's quantities, of quantiles the median; None where it has none."""
    found = row.get(name)
    if isinstance(found, Mapping):
        found = found.get("p50")
    return None if found is None else float(found)


@dataclass(frozen=True, kw_only=True, slots=True)
class Goal:
    """One aim.

    Attributes:
        text: In words.
        quantity: Of a row; rows without it do not count.
        is_reached: Whether a value is good enough.
        of: Which rows it is about.
    """

    text: str
    quantity: str
    is_reached: Callable[[float], bool]
    of: Callable[[Row], bool] = lambda _: True


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """A goal, and the rows that it is about.

    Attributes:
        goal: What is aimed at.
        num_reached: Rows that reach it.
        misses: The others: case, part and value.
    """

    goal: Goal
    num_reached: int
    misses: tuple[tuple[str, str, float], ...]

    @property
    def num(self) -> int:
        """Rows that the goal is about."""
        return self.num_reached + len(self.misses)


def _has_twice_m_star(row: Row) -> bool:
    return (row.get("of_m_star") or 0.0) >= TWICE


def _is_training(row: Row) -> bool:
    return row["case"] in ("moe30b", "dense")


def _is_long(case: str) -> Callable[[Row], bool]:
    return lambda row: row["case"] == case and row.get("seq_len", 0) >= LONG_TOKENS


def _is_flagship(row: Row) -> bool:
    return row["case"] == "flagship"


GOALS = (
    Goal(text="streamed equals resident to the bit", quantity="is_equal", is_reached=bool),
    Goal(text="no test fails", quantity="exit_status", is_reached=lambda status: status == 0),
    Goal(
        text="at 2 M* at least 97 % of the resident rate",
        quantity="resident_share",
        is_reached=lambda share: share >= 0.97,
        of=_has_twice_m_star,
    ),
    Goal(
        text="at least 95 % of R3",
        quantity="r3_share",
        is_reached=lambda share: share >= 0.95,
        of=_is_training,
    ),
    Goal(
        text="exposed transfer under 3 % at 2 M*",
        quantity="exposed_frac",
        is_reached=lambda frac: frac < 0.03,
        of=_has_twice_m_star,
    ),
    Goal(
        text="calibrated prediction within 5 %",
        quantity="calibrated_error",
        is_reached=lambda error: abs(error) <= 0.05,
    ),
    Goal(
        text="peak VRAM within 3 %",
        quantity="memory_error",
        is_reached=lambda error: abs(error) <= 0.03,
    ),
    Goal(
        text="the flagship's plan within 10 % before a step is timed",
        quantity="blind_error",
        is_reached=lambda error: abs(error) <= 0.10,
        of=_is_flagship,
    ),
    Goal(
        text="a dense model's layers at 75 % of their best product, recompute counted",
        quantity="lane_share",
        is_reached=lambda share: share >= 0.75,
        of=_is_long("dense"),
    ),
    Goal(
        text="a mixture's layers at 55 % of their best product, recompute counted",
        quantity="lane_share",
        is_reached=lambda share: share >= 0.55,
        of=_is_long("moe30b"),
    ),
    Goal(
        text="faster than every peer at equal work that streams",
        quantity="of_ours",
        is_reached=lambda ratio: ratio < 1,
        of=lambda row: not row.get("is_resident"),
    ),
    Goal(
        text="as fast as the fastest peer where all fits",
        quantity="of_ours",
        is_reached=lambda ratio: ratio <= 1,
        of=lambda row: bool(row.get("is_resident")),
    ),
)


def verdicts(rows: Sequence[Row]) -> tuple[Verdict, ...]:
    """Hold measurements against the goals."""
    found = []
    for goal in GOALS:
        values = [(row, value_of(row, goal.quantity)) for row in rows if goal.of(row)]
        known = [(row, value) for row, value in values if value is not None]
        misses = [(r["case"], r["part"], v) for r, v in known if not goal.is_reached(v)]
        found.append(Verdict(goal=goal, num_reached=len(known) - len(misses), misses=tuple(misses)))
    return tuple(found)
