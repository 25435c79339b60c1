"""The losses on held-out rows so far: the lowest, which checkpoint is the best, when to stop.

All of it follows from the rows of metrics.jsonl and the existing checkpoints, so a resumed run
needs no extra state.
"""

import math
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

EVAL_LOSS = "eval_loss"
EVAL_PREFIX = "eval_"
_SHOWN = (
    "accuracy",
    "f1",
    "rewards/accuracies",
    "rewards/margins",
    "logps/accuracies",
    "logps/margins",
    "kl",
)


def shown_evaluation(row: Mapping[str, Any]) -> str:
    """Return the loss on held-out rows, and what else was measured on them, in a line.

    Args:
        row: Of metrics.jsonl, with that loss.
    """
    names = (name for name in _SHOWN if EVAL_PREFIX + name in row)
    more = (f", {name} {row[EVAL_PREFIX + name]:.4f}" for name in names)
    return f"loss on held-out rows {row[EVAL_LOSS]:.4f}{''.join(more)}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluations:
    """A summary of a run's losses on held-out rows.

    It follows transformers' `EarlyStoppingCallback`: any lower loss is the new lowest, but only one
    that is lower by more than `min_delta` resets the count.

    Attributes:
        patience: Losses in a row that may fail to be lower before the run stops; None: any number.
        min_delta: A loss counts as lower if it is lower by more than this.
        lowest: Of all losses.
        num_without: Losses since the last one that counted as lower.
        best_step: The step with the lowest loss of those that have a checkpoint; 0 for none.
        best_loss: Its loss.
    """

    patience: int | None
    min_delta: float
    lowest: float = math.inf
    num_without: int = 0
    best_step: int = 0
    best_loss: float = math.inf

    @property
    def are_enough(self) -> bool:
        """Whether the run is to stop: `patience` losses in a row were not lower."""
        return self.patience is not None and self.num_without >= self.patience

    def after(self, step: int, loss: float, *, is_saved: bool = True) -> "Evaluations":
        """Return the summary after one more loss; a best step is saved before the next one."""
        is_best = is_saved and loss < self.best_loss
        return replace(
            self,
            lowest=min(self.lowest, loss),
            num_without=0 if self.lowest - loss > self.min_delta else self.num_without + 1,
            best_step=step if is_best else self.best_step,
            best_loss=loss if is_best else self.best_loss,
        )

    def after_rows(
        self, rows: Iterable[Mapping[str, Any]], *, saved: Container[int]
    ) -> "Evaluations":
        """Return the summary after rows of metrics.jsonl.

        Args:
            rows: In their order; those without a loss on held-out rows are passed over.
            saved: Steps with a checkpoint.
        """
        found = self
        for row in rows:
            if EVAL_LOSS in row:
                step = row["step"]
                found = found.after(step, row[EVAL_LOSS], is_saved=step in saved)
        return found
