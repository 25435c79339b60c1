"""The program, which says what a restored checkpoint takes in memory.

It prints by how much its memory grew at most meanwhile, and how much of what is updated is in
memory of this process alone.
"""

import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from finetune import app
from finetune.training.shared import member
from offload.engine.memory_meter import peak_host_bytes, reset_peak

GREW, ALONE = "grew by ", "not shared are "
_SHARED = re.compile(r"([0-9a-f]+)-([0-9a-f]+) rw-s .*/memfd:")


def alone_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Return the bytes of tensors that are not in memory of several processes."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    shared = [
        [int(end, 16) for end in found.groups()] for found in map(_SHARED.match, lines) if found
    ]
    return sum(
        tensor.nbytes
        for tensor in tensors
        if not any(start <= tensor.data_ptr() < end for start, end in shared)
    )


def main(argv: Sequence[str]) -> None:
    """Run the program."""
    restore, cpu = vars(member)["_restore_all"], torch.device("cpu")

    def measured(session: Any, step: int) -> None:
        reset_peak(cpu)
        before = peak_host_bytes()
        restore(session, step)
        grew, alone = peak_host_bytes() - before, alone_bytes(session.loop.weights.values())
        sys.stdout.write(f"{GREW}{grew} bytes\n{ALONE}{alone} bytes\n")
        sys.stdout.flush()

    vars(member)["_restore_all"] = measured
    app.main(argv)
