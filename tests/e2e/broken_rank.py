"""The program, with a rank 1 that fails in its third step, or differs: `main([KIND, WORDS...])`."""

from collections.abc import Sequence

import torch

from finetune import app
from finetune.data.steps import StepShare
from finetune.env import launch
from finetune.training.loop import Loop, Request
from offload.errors import TransferError

FAILING_STEP = 2  # counted from 0
FAILURES = {
    "named": TransferError("a copy failed", limit="every copy must complete", hint="try again"),
    "memory": torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    "bug": KeyError("layer"),
}


def break_rank_1(failure: Exception) -> None:
    whole = Loop.request

    def broken(self: Loop, number: int, share: StepShare) -> Request:
        if number == FAILING_STEP:
            raise failure
        return whole(self, number, share)

    if launch().index == 1:
        Loop.request = broken  # type: ignore[method-assign]


def main(argv: Sequence[str]) -> None:
    """Run the program."""
    if argv[0] in FAILURES:
        break_rank_1(FAILURES[argv[0]])
    elif launch().index == 1:
        assert argv[0] == "threads"
        torch.set_num_threads(2)
    app.main(argv[1:])
