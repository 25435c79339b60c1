"""The program, with a rank 1 whose third step fails: `python broken_rank.py KIND WORDS...`."""

import sys
from typing import Any

import torch

from finetune import app
from finetune.env import launch
from offload.engine.engine import Engine
from offload.errors import TransferError

FAILING_CALL = 6  # three of the rehearsal come first
FAILURES = {
    "named": TransferError("a copy failed", limit="every copy must complete", hint="try again"),
    "memory": torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    "bug": KeyError("layer"),
}


def break_rank_1(failure: Exception) -> None:
    whole = Engine.forward_backward
    calls: list[None] = []

    def broken(self: Engine, *args: Any, **settings: Any) -> Any:
        calls.append(None)
        if len(calls) == FAILING_CALL:
            raise failure
        return whole(self, *args, **settings)

    if launch().index == 1:
        Engine.forward_backward = broken  # type: ignore[method-assign]


if __name__ == "__main__":
    break_rank_1(FAILURES[sys.argv[1]])
    app.main(sys.argv[2:])
