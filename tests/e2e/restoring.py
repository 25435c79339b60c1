"""The program, which prints by how much its memory grew at most as a checkpoint was restored."""

import sys
from collections.abc import Sequence
from typing import Any

import torch

from finetune import app
from finetune.training.shared import member
from offload.engine.memory_meter import peak_host_bytes, reset_peak

GREW = "grew by "


def main(argv: Sequence[str]) -> None:
    """Run the program."""
    restore, cpu = vars(member)["_restore_all"], torch.device("cpu")

    def measured(*args: Any) -> None:
        reset_peak(cpu)
        before = peak_host_bytes()
        restore(*args)
        sys.stdout.write(f"{GREW}{peak_host_bytes() - before} bytes\n")
        sys.stdout.flush()

    vars(member)["_restore_all"] = measured
    app.main(argv)
