"""How much memory there is: free host memory within cgroups, page locks, a CUDA context."""

import os
import statistics
import subprocess
import sys
from collections.abc import Iterable

from offload.errors import MachineError
from offload.plan.machine.machine import MIB

LEAST_REHEARSED_BYTES, MAX_REHEARSED_BYTES = 256 * MIB, 4096 * MIB
# What a run imports after it has measured the machine, transformers' model code and peft: 178 to
# 186 MiB with transformers 5.23 and peft 0.21, on a CPU. The library tells whether it is there.
RUN_LIBRARIES_BYTES, RUN_LIBRARY = 182 * MIB, "peft"
NUM_CONTEXT_TRIALS, STEADY_BYTES = 3, 16 * MIB
HOLD_CONTEXT = (
    "import sys, torch; torch.zeros(1, device='cuda'); print(flush=True); sys.stdin.read()"
)


def load_per_cpu() -> float | None:
    """Return the load average per processor over the last minute; None if it is not known."""
    try:
        return os.getloadavg()[0] / (os.cpu_count() or 1)
    except OSError:
        return None


def process_bytes() -> int:
    """Return the memory of this process once it has imported what a run needs.

    What it has freed does not count, such as that of modules that were compiled when they were
    first imported: later tensors take its place.
    """
    from offload.engine.host.limits import resident_bytes
    from offload.engine.host.mapping import trim_heap

    trim_heap()
    return resident_bytes() + (0 if RUN_LIBRARY in sys.modules else RUN_LIBRARIES_BYTES)


def cuda_context_bytes() -> int:
    """Measure a CUDA context's memory by starting one in another process."""
    import torch

    torch.zeros(1, device="cuda")
    return steady_bytes(_context_trial_bytes() for _ in range(NUM_CONTEXT_TRIALS))


def steady_bytes(trials: Iterable[tuple[int, int]]) -> int:
    """Return what a context takes, though others may take or free memory of the card meanwhile.

    Args:
        trials: What was taken while one started, and what was free again once it had ended. The
            first in which these agree counts; no other is asked for.
    """
    found: list[int] = []
    for taken, freed in trials:
        found += taken, freed
        if taken > 0 and abs(taken - freed) <= STEADY_BYTES:
            return taken
    return statistics.median_low([num_bytes for num_bytes in found if num_bytes > 0] or [0])


def _context_trial_bytes() -> tuple[int, int]:
    import torch

    before_bytes, _ = torch.cuda.mem_get_info()
    with subprocess.Popen(
        [sys.executable, "-c", HOLD_CONTEXT], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        assert other.stdout is not None
        is_ready = bool(other.stdout.readline())
        during_bytes, _ = torch.cuda.mem_get_info()
        other.communicate()
    if not is_ready:
        raise MachineError(
            f"a second process got no CUDA context (exit status {other.returncode})",
            limit="its size is measured by starting one",
            hint="look at `nvidia-smi`: the card may be in exclusive mode or full",
        )
    after_bytes, _ = torch.cuda.mem_get_info()
    return before_bytes - during_bytes, after_bytes - during_bytes


def pinned_bytes(ram_bytes: int) -> int:
    """Return how much can be page-locked: try some sizes; above them only memory limits it."""
    import torch

    from offload.engine.host.pagelock import largest_lockable, open_locker

    locker = open_locker(torch.device("cuda"), fd=None)
    assert locker is not None
    most_bytes = min(MAX_REHEARSED_BYTES, ram_bytes // 2)
    worked_bytes, _ = largest_lockable(most_bytes, LEAST_REHEARSED_BYTES, locker)
    return ram_bytes if worked_bytes == most_bytes else worked_bytes
