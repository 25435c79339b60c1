"""A loop rehearsed alone, as a run is before its first step."""

from collections.abc import Sequence

from finetune.data.steps import StepShare
from finetune.training.loop import Loop, StepRecord, rehearsed


def rehearse(loop: Loop, longest: StepShare, typical: Sequence[StepShare]) -> StepRecord:
    """Run the longest step, then typical ones; return the one for calibration."""
    (record,) = rehearsed(loop.engine, {"alone": loop.rehearsal(longest, typical)})
    return record
