"""How fast a run's steps were: the time of a step, the error of its prediction, and tokens/s.

Every page, table and file takes these three from here, so that a run has one figure of each. All
are of the middle steps since the run's newest start: those between the 20th and the 80th percentile
of wall time. Their means are as robust as a median, and the parts of a step still add up.
"""

from array import array
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from finetune.report.format import shown_time
from finetune.report.rows import shown
from offload.plan.schedule.timeline import DATA_WAIT

LOW, HIGH = 0.2, 0.8
FIGURES = ("tokens/s", "step measured", "step predicted", "error")
BASIS = (
    "A step's time and tokens/s are means over the middle steps since the newest start: those"
    " between the 20th and the 80th percentile of time. tokens/s: all tokens of a step over its"
    " time, waits included. An error of -10% means that the prediction was 10% less than what was"
    " measured."
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Pace:
    """The pace of a run since its newest start."""

    predicted_s: float  # of a step, before it
    measured_s: float  # mean of the middle steps
    tokens_per_s: float  # of the same steps, with their waits for data, sampling and rewards
    num_middle: int
    num_steps: int

    @property
    def error(self) -> float:
        """Relative error of the prediction."""
        return (self.predicted_s - self.measured_s) / self.measured_s

    @property
    def basis(self) -> str:
        """What the figures are means of."""
        return f"mean of the middle {self.num_middle:,} of {self.num_steps:,} steps"

    @property
    def shown(self) -> dict[str, str]:
        """The figures as people read them, by the names of FIGURES."""
        return {
            "tokens/s": shown(self.tokens_per_s, "whole"),
            "step measured": shown_time(self.measured_s),
            "step predicted": shown_time(self.predicted_s),
            "error": shown(self.error, "error"),
        }


class Steps:
    """What the steps of one start took; rows are added as they are written."""

    def __init__(self, rows: Iterable[Mapping[str, Any]] = ()) -> None:
        """Begin with some rows of metrics."""
        # of each step: its time, the same with its wait for data, that with all waits, its tokens
        self._columns = tuple(array("d") for _ in range(4))
        for row in rows:
            self.add(row)

    def add(self, row: Mapping[str, Any]) -> None:
        """Add a step."""
        step_s, wait_s = row["phases_s"]["step"], row["phases_s"][DATA_WAIT]
        wall_s, num_tokens = step_s + learning_wait_s(row), row["num_tokens"]
        figures = (step_s, wall_s, step_s + wait_s, num_tokens)
        for column, figure in zip(self._columns, figures, strict=True):
            column.append(figure)

    def middle(self) -> list[int]:
        """Return the places of the middle steps among the rows: at least one."""
        walls = self._columns[1]
        ordered = sorted(range(len(walls)), key=walls.__getitem__)
        cut = int(LOW * len(ordered))
        return ordered[cut : len(ordered) - cut]

    def pace(self, predicted_s: float) -> Pace:
        """Return the pace of one step or more."""
        middle = self.middle()
        step_s, _, round_s, num_tokens = (sum(one[i] for i in middle) for one in self._columns)
        return Pace(
            predicted_s=predicted_s,
            measured_s=step_s / len(middle),
            tokens_per_s=num_tokens / round_s,
            num_middle=len(middle),
            num_steps=len(self._columns[0]),
        )


def learning_wait_s(row: Mapping[str, Any]) -> float:
    """Return the wait of a step for its rows, without the sampling and the rewards of a round."""
    wait_s: float = row["phases_s"][DATA_WAIT] - row.get("sample_s", 0) - row.get("reward_s", 0)
    return max(0.0, wait_s)
