"""Lanes that run ops asynchronously: CUDA streams on a GPU, a worker thread on a CPU.

Both devices keep one contract. `submit(lane, waits, body)` issues a body behind everything that
was submitted to the lane before and behind the given events, and returns the event of its
completion.

On a CPU the compute lane is the caller's own thread (a body runs inside `submit`), the copy lane
a worker with a FIFO queue. A visit that
did not wait for its load would compute with an older layer.

On a GPU both lanes are CUDA streams and `submit` only issues. The host never waits inside a step;
`finish` is the one place that does, and it is called after the step.
"""

import ctypes
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Protocol, cast

import torch

from offload.errors import TransferError
from offload.plan.schedule import Lane

_POLL_S = 0.05


class Event(Protocol):
    """The completion of one op."""

    def span_s(self) -> tuple[float, float]:
        """Return start and end in seconds from the device's last `begin`, after `finish`."""


class Device(Protocol):
    """Where compute runs, and the lanes that feed it."""

    torch_device: torch.device

    def begin(self) -> None:
        """Start the clock of a pass."""

    def submit(self, lane: Lane, waits: Sequence[Event], body: Callable[[], None]) -> Event:
        """Issue `body` on `lane` behind `waits`."""

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy the bytes of a flat host tensor into a flat device tensor, on the running lane."""

    def finish(self) -> None:
        """Wait until every lane is empty; raise what a lane raised."""

    def abort(self) -> None:
        """Drop all queued work and wait for what is running, so that slots can be used anew."""

    def close(self) -> None:
        """End the lanes. The device is unusable afterwards."""


# ---------------------------------------------------------------------------------------------- CPU


class _ThreadEvent:
    """A flag with the times of the op that sets it."""

    def __init__(self) -> None:
        self.done = threading.Event()
        self.start_s = 0.0
        self.end_s = 0.0

    def span_s(self) -> tuple[float, float]:
        return self.start_s, self.end_s


class _AbortedError(Exception):
    """A queued op was dropped because the pass failed elsewhere."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Job:
    """An op in the copy worker's queue. A marker has no body and is never dropped."""

    body: Callable[[], None] | None
    waits: Sequence[_ThreadEvent] = ()
    event: _ThreadEvent = field(default_factory=_ThreadEvent)


class CpuDevice:
    """Compute on the caller's thread, copies on a worker."""

    torch_device = torch.device("cpu")

    def __init__(self, *, before_copy: Callable[[], None] | None = None) -> None:
        """Start the copy worker.

        Args:
            before_copy: Called on the worker before each of its ops; throttles or jitters the lane.
        """
        self._before_copy = before_copy
        self._queue: SimpleQueue[_Job | None] = SimpleQueue()
        self._failure: BaseException | None = None
        self._aborting = threading.Event()
        self._clock_s = time.perf_counter()
        self._worker = threading.Thread(target=self._work, name="sluice-h2d", daemon=True)
        self._worker.start()

    def begin(self) -> None:
        """Start the clock of a pass."""
        self._clock_s = time.perf_counter()

    def submit(self, lane: Lane, waits: Sequence[Event], body: Callable[[], None]) -> Event:
        """Queue `body` on the copy worker, or run it here when the lane is the compute lane.

        Raises:
            TransferError: The copy lane has failed.
        """
        job = _Job(body=body, waits=cast("Sequence[_ThreadEvent]", waits))
        if lane is Lane.COMPUTE:
            self._run(job, self._wait_here)
        else:
            self._queue.put(job)
        return job.event

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy on the running thread alone, with the interpreter free.

        Not `Tensor.copy_`, which would take the cores of the compute lane. To limit its threads by
        `torch.set_num_threads` here would limit every thread that starts to use torch later.
        """
        assert target.is_contiguous()
        assert source.is_contiguous()
        assert target.nbytes == source.nbytes
        ctypes.memmove(target.data_ptr(), source.data_ptr(), source.nbytes)

    def finish(self) -> None:
        """Wait until the copy worker is idle; raise what it raised."""
        self._wait_here(self._queue_marker())

    def abort(self) -> None:
        """Drop the copies that are queued and wait for the one that runs."""
        self._aborting.set()
        self._queue_marker().done.wait()
        self._aborting.clear()
        self._failure = None

    def close(self) -> None:
        """Join the copy worker."""
        self._aborting.set()
        self._queue.put(None)
        self._worker.join()

    def _queue_marker(self) -> _ThreadEvent:
        marker = _Job(body=None)
        self._queue.put(marker)
        return marker.event

    def _run(self, job: _Job, wait: Callable[[_ThreadEvent], None]) -> None:
        for event in job.waits:
            wait(event)
        job.event.start_s = time.perf_counter() - self._clock_s
        if job.body is not None:
            job.body()
        job.event.end_s = time.perf_counter() - self._clock_s
        job.event.done.set()

    def _wait_here(self, event: _ThreadEvent) -> None:
        while not event.done.wait(_POLL_S):
            if self._failure is not None:
                raise TransferError(
                    f"the host-to-device lane failed: {self._failure!r}",
                    limit="every queued copy must complete",
                    hint="see the cause above; the step was not applied and can be run again",
                ) from self._failure

    def _wait_on_worker(self, event: _ThreadEvent) -> None:
        while not event.done.wait(_POLL_S):
            if self._aborting.is_set():
                raise _AbortedError

    def _work(self) -> None:
        while (job := self._queue.get()) is not None:
            is_dropped = self._aborting.is_set() or self._failure is not None
            if job.body is not None and is_dropped:
                continue
            try:
                if job.body is not None and self._before_copy is not None:
                    self._before_copy()
                self._run(job, self._wait_on_worker)
            except _AbortedError:
                continue
            except Exception as error:  # noqa: BLE001 - raised again on the waiting thread
                self._failure = error


# --------------------------------------------------------------------------------------------- CUDA


class _CudaEvent:
    """Timing events around one op."""

    def __init__(self, base: torch.cuda.Event) -> None:
        self._base = base
        self.start = torch.cuda.Event(enable_timing=True)
        self.end = torch.cuda.Event(enable_timing=True)

    def span_s(self) -> tuple[float, float]:
        return (
            self._base.elapsed_time(self.start) / 1e3,
            self._base.elapsed_time(self.end) / 1e3,
        )


class CudaDevice:
    """Compute on the caller's current stream, copies on a stream of their own."""

    def __init__(self, torch_device: torch.device) -> None:
        """Create the copy stream of this device."""
        self.torch_device = torch_device
        self._streams = {
            Lane.COMPUTE: torch.cuda.current_stream(torch_device),
            Lane.H2D: torch.cuda.Stream(torch_device),
        }
        self._base = torch.cuda.Event(enable_timing=True)

    def begin(self) -> None:
        """Mark time zero on the caller's stream; the copy stream starts behind what it holds."""
        self._streams[Lane.COMPUTE] = torch.cuda.current_stream(self.torch_device)
        self._base = torch.cuda.Event(enable_timing=True)
        self._base.record(self._streams[Lane.COMPUTE])
        self._streams[Lane.H2D].wait_event(self._base)

    def submit(self, lane: Lane, waits: Sequence[Event], body: Callable[[], None]) -> Event:
        """Issue `body` on the lane's stream; the host does not wait."""
        event = _CudaEvent(self._base)
        stream = self._streams[lane]
        with torch.cuda.stream(stream):
            for other in waits:
                stream.wait_event(cast("_CudaEvent", other).end)
            event.start.record(stream)
            body()
            event.end.record(stream)
        return event

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Issue the copy on the running stream; truly asynchronous from a page-locked source."""
        target.copy_(source, non_blocking=True)

    def finish(self) -> None:
        """Wait for both streams."""
        for stream in self._streams.values():
            stream.synchronize()

    def abort(self) -> None:
        """Wait for what was issued: a CUDA stream cannot be emptied."""
        self.finish()

    def close(self) -> None:
        """Wait for both streams; PyTorch owns and reuses them."""
        self.finish()


def open_device(torch_device: torch.device) -> Device:
    """Return the lanes for a `cpu` or `cuda` device."""
    return CudaDevice(torch_device) if torch_device.type == "cuda" else CpuDevice()
