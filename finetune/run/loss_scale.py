"""The factor of the loss of a model that computes in float16.

The smallest float16 number is 6e-8, so most gradients by hidden states would be zero. The loss, and
with it each gradient, is multiplied by a power of two, which costs no digit, and gradients of what
trains are divided by it in fp32. A factor that is too large makes a gradient overflow: the step is
skipped, and the factor halved. After a while without an overflow it is doubled again.

Constants are those of torch.amp.GradScaler.
"""

import math
from dataclasses import dataclass

FIRST, GROWTH, BACKOFF, INTERVAL = 2.0**16, 2.0, 0.5, 2000
MAX_SKIPPED = 20
"""Skipped steps in a row that end a run: halved so often, the first factor is 1/16."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LossScale:
    """The factor of a step, and how it came about.

    Attributes:
        factor: Of the loss.
        num_good: Steps without an overflow since the factor has changed.
        num_skipped: Steps of the run that were skipped.
        num_in_a_row: Of these, the newest ones in a row.
    """

    factor: float = FIRST
    num_good: int = 0
    num_skipped: int = 0
    num_in_a_row: int = 0

    def skipped(self) -> "LossScale":
        """Return the factor of the step after one that was skipped."""
        return LossScale(
            factor=self.factor * BACKOFF,
            num_skipped=self.num_skipped + 1,
            num_in_a_row=self.num_in_a_row + 1,
        )

    def applied(self) -> "LossScale":
        """Return the factor of the step after one that was applied."""
        is_grown = self.num_good + 1 == INTERVAL and math.isfinite(self.factor * GROWTH)
        return LossScale(
            factor=self.factor * GROWTH if is_grown else self.factor,
            num_good=0 if self.num_good + 1 == INTERVAL else self.num_good + 1,
            num_skipped=self.num_skipped,
        )
