"""Measured peaks of memory: torch's statistics on a GPU, the resident set on a CPU."""

import re
from pathlib import Path

import torch

_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")
_RESET_PEAK = "5"  # see proc(5): resets VmHWM to the current resident set


def reset_peak(device: torch.device) -> None:
    """Forget the peak so far."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    else:
        _CLEAR_REFS.write_text(_RESET_PEAK)


def peak_bytes(device: torch.device) -> int:
    """Return the peak of allocated device memory since `reset_peak`, or of the resident set."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    found = re.search(r"VmHWM:\s+(\d+) kB", _STATUS.read_text())
    assert found is not None
    return int(found.group(1)) * 1024
