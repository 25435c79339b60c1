"""Tensors written in a codec and read back, and the memory that takes."""

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from offload.engine.codec import Form


def encoded(codec: Form, values: torch.Tensor, garbage: int = 0xA5) -> torch.Tensor:
    buffer = torch.full((codec.num_bytes(values.shape, values.dtype),), garbage, dtype=torch.uint8)
    codec.encode(values, buffer)
    return buffer


def decoded(codec: Form, values: torch.Tensor) -> torch.Tensor:
    out = torch.full_like(values, 9, memory_format=torch.contiguous_format)
    codec.decode(encoded(codec, values), out)
    return out


def peak_bytes(work: Callable[[], object]) -> int:
    """The most that was allocated on the host at a time."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as trace:
        work()
    held = peak = 0
    events = [event for event in trace.profiler.kineto_results.events() if event.nbytes()]
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak


@contextmanager
def interpreted(kernel: str) -> Iterator[ModuleType]:
    """Import a module of kernels to be interpreted: Triton looks when they are defined."""
    pytest.importorskip("triton", reason="Triton is not installed")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        patch.delitem(sys.modules, kernel, raising=False)
        yield importlib.import_module(kernel)
    sys.modules.pop(kernel, None)
