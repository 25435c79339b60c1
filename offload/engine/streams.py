"""Lanes that run ops asynchronously: CUDA streams on a GPU, threads on a CPU.

Both devices have the same contract. Between `begin` and `settle`, `submit(lane, waits, body)` runs
a body after everything that was submitted to the lane before and after the given events, and
returns the event of its completion.

On a CPU every lane except compute is a thread with a FIFO queue. The compute lane is the caller's
own thread, so that its autocast, hooks and deterministic settings apply: its bodies are queued too
and run in `settle`, when everything is issued. A visit that did not wait for its load would
compute with an older layer.

On a GPU the lanes are CUDA streams, `submit` only issues, and `settle` returns at once: the host
never waits inside a step. If loads go through a staging ring, which a thread fills, another thread
issues the h2d lane, and only that thread waits for the reads. So does one for the network lane,
which waits for other ranks.
"""

import ctypes
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Protocol, cast

import torch

from offload.errors import OffloadError, SluiceError, TransferError
from offload.plan.schedule.op import Lane

_POLL_S = 0.05


class Flag:
    """The completion of a job, with the times of its start and end."""

    def __init__(self) -> None:
        self.done = threading.Event()
        self.start_s = 0.0
        self.end_s = 0.0

    def span_s(self) -> tuple[float, float]:
        """Return start and end in seconds from the start of the pass."""
        return self.start_s, self.end_s


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """A function that a lane runs once `waits` are done."""

    body: Callable[[], None]
    waits: Sequence[Flag] = ()
    flag: Flag = field(default_factory=Flag)


class _DroppedError(Exception):
    """A queued job is dropped because the pass has failed elsewhere."""


class Workers:
    """Lanes on threads of their own, which fail and stop together.

    The first error is kept and raised where the pass waits. From then on all lanes drop their
    queued jobs, until `drain`.
    """

    def __init__(
        self,
        names: Sequence[str],
        *,
        clock_s: Callable[[], float],
        prepare_thread: Callable[[], object],
    ) -> None:
        """Start a thread per name.

        Args:
            names: Of the lanes.
            clock_s: Seconds since the start of the pass.
            prepare_thread: Called first on each thread; places it on its processors.
        """
        self._clock_s = clock_s
        self._prepare_thread = prepare_thread
        self._failure: tuple[str, BaseException] | None = None
        self._is_dropping = threading.Event()
        self._queues: dict[str, SimpleQueue[Job | None]] = {name: SimpleQueue() for name in names}
        self._threads = [
            threading.Thread(target=self._work, args=(name,), name=f"sluice-{name}", daemon=True)
            for name in names
        ]
        for thread in self._threads:
            thread.start()

    def put(self, name: str, job: Job) -> None:
        """Queue a job on a lane."""
        self._queues[name].put(job)

    def run(self, job: Job) -> None:
        """Run a job on this thread, after the flags it waits for.

        Raises:
            TransferError: A lane has failed.
        """
        self._raise_failure()
        for flag in job.waits:
            self.wait(flag)
        self._run(job)

    def wait(self, flag: Flag) -> None:
        """Wait for a job of any lane.

        Raises:
            TransferError: A lane has failed; a `SluiceError` is raised unchanged.
        """
        while not flag.done.wait(_POLL_S):
            self._raise_failure()

    def finish(self) -> None:
        """Wait until all lanes are empty; raise the first error of any lane."""
        for flag in self._mark():
            self.wait(flag)
        self._raise_failure()

    def drain(self) -> None:
        """Drop queued jobs, wait for running ones, and clear the failure."""
        self._is_dropping.set()
        for flag in self._mark():
            flag.done.wait()
        self._is_dropping.clear()
        self._failure = None

    def join(self) -> None:
        """Drop queued jobs and end the threads."""
        self._is_dropping.set()
        for queue in self._queues.values():
            queue.put(None)
        for thread in self._threads:
            thread.join()

    def _raise_failure(self) -> None:
        if self._failure is None:
            return
        name, error = self._failure
        if isinstance(error, SluiceError):
            raise error
        raise TransferError(
            f"the {name} lane failed: {error!r}",
            limit="every queued transfer must complete",
            hint="see the cause above; the step was not applied and can be run again",
        ) from error

    def _mark(self) -> list[Flag]:
        """Queue an empty job on each lane, which lanes run even while dropping jobs."""
        marks = [_Mark(body=stay_put) for _ in self._queues]
        for queue, mark in zip(self._queues.values(), marks, strict=True):
            queue.put(mark)
        return [mark.flag for mark in marks]

    def _run(self, job: Job) -> None:
        job.flag.start_s = self._clock_s()
        job.body()
        job.flag.end_s = self._clock_s()
        job.flag.done.set()

    def _work(self, name: str) -> None:
        self._prepare_thread()
        queue = self._queues[name]
        while (job := queue.get()) is not None:
            try:
                self._run_queued(job)
            except _DroppedError:
                continue
            except BaseException as error:  # noqa: BLE001 - raised again where the pass waits
                self._failure = self._failure or (name, error)

    def _run_queued(self, job: Job) -> None:
        if isinstance(job, _Mark):
            job.flag.done.set()
            return
        for flag in job.waits:
            while not flag.done.wait(_POLL_S):
                self._require_going()
        self._require_going()
        self._run(job)

    def _require_going(self) -> None:
        if self._is_dropping.is_set() or self._failure is not None:
            raise _DroppedError


class _Mark(Job):
    """Marks that everything queued before it is done or dropped; runs even after a failure."""


AHEAD_CYCLES = 20_000_000  # of a card's clock, about 10 ms: the host has queued a layer by then


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
        """Issue `body` on `lane`, to run after `waits`."""

    def settle(self) -> None:
        """Return when the host may use the pass's tensors; on a CPU they are computed then."""

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy the bytes of a contiguous tensor into another, on the running lane."""

    def finish(self) -> None:
        """Wait until every lane is empty; raise a lane's error."""

    def abort(self) -> None:
        """Drop queued work and wait for running work, so that slots can be reused."""

    def close(self) -> None:
        """End the lanes. The device is unusable afterwards."""


def copy_on_host(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy on the running thread alone, without holding the GIL.

    Not `Tensor.copy_`, which would use the cores of the compute lane. Limiting its threads by
    `torch.set_num_threads` here would limit every thread that starts to use torch later.
    """
    assert target.is_contiguous()
    assert source.is_contiguous()
    assert target.nbytes == source.nbytes
    ctypes.memmove(target.data_ptr(), source.data_ptr(), source.nbytes)


def stay_put() -> None:
    """Leave a lane's thread wherever the system runs it."""


# ---------------------------------------------------------------------------------------------- CPU


class CpuDevice:
    """Compute on the caller's thread, transfers on workers."""

    torch_device = torch.device("cpu")

    def __init__(self, *, prepare_thread: Callable[[], object] = stay_put) -> None:
        """Start the workers.

        Args:
            prepare_thread: Called first on each worker's thread.
        """
        self._start_s = time.perf_counter()
        self._computing: deque[Job] = deque()
        self._workers = Workers(
            [lane for lane in Lane if lane is not Lane.COMPUTE],
            clock_s=lambda: time.perf_counter() - self._start_s,
            prepare_thread=prepare_thread,
        )

    def begin(self) -> None:
        """Start the clock of a pass."""
        self._start_s = time.perf_counter()

    def submit(self, lane: Lane, waits: Sequence[Event], body: Callable[[], None]) -> Event:
        """Queue `body`."""
        job = Job(body=body, waits=cast("Sequence[Flag]", waits))
        if lane is Lane.COMPUTE:
            self._computing.append(job)
        else:
            self._workers.put(lane, job)
        return job.flag

    def settle(self) -> None:
        """Run the bodies queued for the compute lane, then wait for the other lanes.

        Raises:
            TransferError: A lane has failed.
        """
        while self._computing:
            self._workers.run(self._computing.popleft())
        self._workers.finish()

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy on the running lane's thread."""
        copy_on_host(target, source)

    def finish(self) -> None:
        """Same as `settle`: nothing is running after it."""
        self.settle()

    def abort(self) -> None:
        """Drop queued work and wait for running transfers."""
        self._computing.clear()
        self._workers.drain()

    def close(self) -> None:
        """Join the workers."""
        self._computing.clear()
        self._workers.join()


# --------------------------------------------------------------------------------------------- CUDA


class _CudaEvent:
    """Timing events around one op; `issued` is set once they are recorded in their stream.

    A host thread that waits for the end sleeps (`blocking`): it would take a core otherwise.
    """

    def __init__(self, base: torch.cuda.Event) -> None:
        self._base = base
        self.issued = Flag()
        self.start = torch.cuda.Event(enable_timing=True)
        self.end = torch.cuda.Event(enable_timing=True, blocking=True)

    def span_s(self) -> tuple[float, float]:
        return (
            self._base.elapsed_time(self.start) / 1e3,
            self._base.elapsed_time(self.end) / 1e3,
        )


class CudaDevice:
    """Compute on the caller's current stream, each direction of the link on a stream of its own."""

    def __init__(
        self,
        torch_device: torch.device,
        *,
        is_staged: bool,
        prepare_thread: Callable[[], object] = stay_put,
    ) -> None:
        """Create the streams of this device.

        Args:
            torch_device: The GPU.
            is_staged: Whether a thread issues the loads: they pass a staging ring or wait for
                updates on the host, or the driver makes it wait for each.
            prepare_thread: Called first on each thread that reads or issues.
        """
        self.torch_device = torch_device
        self._streams = {
            Lane.COMPUTE: torch.cuda.current_stream(torch_device),
            Lane.H2D: torch.cuda.Stream(torch_device),
            Lane.D2H: torch.cuda.Stream(torch_device),
            Lane.NETWORK: torch.cuda.Stream(torch_device),
        }
        self._base = torch.cuda.Event(enable_timing=True)
        self._start_s = time.perf_counter()
        loading = (Lane.HOST, Lane.H2D) if is_staged else ()
        self._issued_by_thread = (*loading, Lane.NETWORK)
        self._workers = Workers(
            self._issued_by_thread,
            clock_s=lambda: time.perf_counter() - self._start_s,
            prepare_thread=prepare_thread,
        )

    def begin(self) -> None:
        """Mark time zero on the caller's stream; the other streams start after its queued work."""
        self._streams[Lane.COMPUTE] = torch.cuda.current_stream(self.torch_device)
        self._base = torch.cuda.Event(enable_timing=True)
        self._base.record(self._streams[Lane.COMPUTE])
        self._start_s = time.perf_counter()
        for lane in (Lane.H2D, Lane.D2H, Lane.NETWORK):
            self._streams[lane].wait_event(self._base)

    def submit(self, lane: Lane, waits: Sequence[Event], body: Callable[[], None]) -> Event:
        """Issue `body` on the lane's stream; the host waits only for what a thread has to issue."""
        if lane is Lane.HOST:
            return self._submit_to_host(lane, waits, body)
        event = _CudaEvent(self._base)
        job = Job(
            body=lambda: self._issue(self._streams[lane], waits, body, event),
            waits=[other if isinstance(other, Flag) else _cuda(other).issued for other in waits],
            flag=event.issued,
        )
        if lane in self._issued_by_thread:
            self._workers.put(lane, job)
        else:
            self._workers.run(job)
        return event

    def settle(self) -> None:
        """Return at once: work issued later on the caller's stream runs after the pass."""

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Issue the copy on the running stream; truly asynchronous with page-locked memory."""
        target.copy_(source, non_blocking=True)

    def finish(self) -> None:
        """Wait for the threads, then for the streams."""
        self._workers.finish()
        for stream in self._streams.values():
            stream.synchronize()

    def abort(self) -> None:
        """Drop work that is not issued yet and wait for the rest: streams cannot be cleared."""
        self._workers.drain()
        self.finish()

    def close(self) -> None:
        """Join the threads and wait for the streams, which PyTorch owns and reuses."""
        self._workers.join()
        for stream in self._streams.values():
            stream.synchronize()

    def _submit_to_host(
        self, lane: Lane, waits: Sequence[Event], body: Callable[[], None]
    ) -> Event:
        """Queue a read, or an update, which starts when what it waits for has ended."""
        copies = [_cuda(other) for other in waits if not isinstance(other, Flag)]
        flags = [other for other in waits if isinstance(other, Flag)]

        def read() -> None:
            for copy in copies:
                copy.end.synchronize()
            body()

        job = Job(body=read, waits=[*flags, *(copy.issued for copy in copies)])
        self._workers.put(lane, job)
        return job.flag

    def _issue(
        self,
        stream: torch.cuda.Stream,
        waits: Sequence[Event],
        body: Callable[[], None],
        event: _CudaEvent,
    ) -> None:
        with torch.cuda.device(self.torch_device), torch.cuda.stream(stream):
            for other in waits:
                if not isinstance(other, Flag):
                    stream.wait_event(_cuda(other).end)
            event.start.record(stream)
            body()
            event.end.record(stream)


def _cuda(event: Event) -> _CudaEvent:
    return cast("_CudaEvent", event)


def release_cached(device: torch.device) -> None:
    """Return torch's cached device memory to the driver; waits for the device."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


def seconds_of(run: Callable[[], object], device: torch.device) -> float:
    """Return how long a device takes for what is queued, or a CPU for all of it.

    A card is kept busy until all is queued: launching small kernels takes the host longer than they
    take the card, and in a step the host is ahead. Where `run` waits for the card, the host counts.
    """
    if device.type != "cuda":
        start_s = time.perf_counter()
        run()
        return time.perf_counter() - start_s
    with torch.cuda.device(device):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(AHEAD_CYCLES)
        start.record()
        run()
        end.record()
        end.synchronize()
    return float(start.elapsed_time(end)) / 1e3


def device_named(name: str) -> torch.device:
    """Return the device of a name, if a model can compute there.

    Raises:
        OffloadError: There is none of this name here.
    """
    try:
        torch_device = torch.device(name)
    except RuntimeError as error:
        raise _no_device(name, f"torch knows none: {str(error).splitlines()[0]}") from error
    if torch_device.type not in ("cpu", "cuda"):
        raise _no_device(name, "layers compute on CUDA or on the CPU")
    if torch_device.type == "cuda":
        num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if not num_gpus:
            raise _no_device(name, "torch finds no CUDA here")
        if (torch_device.index or 0) >= num_gpus:
            raise _no_device(name, f"GPUs are counted from 0, and there are {num_gpus}")
    return torch_device


def _no_device(name: str, limit: str) -> OffloadError:
    return OffloadError(
        f"device is {name!r}",
        limit=limit,
        hint='`device="cpu"`, or `device="cuda"` where `torch.cuda.is_available()`',
    )


def open_device(
    torch_device: torch.device,
    *,
    is_staged: bool,
    prepare_thread: Callable[[], object] = stay_put,
) -> Device:
    """Return the lanes for a `cpu` or `cuda` device; arguments as of `CudaDevice`."""
    if torch_device.type == "cuda":
        # With its index: for a lane's own thread, "cuda" alone is always the first one.
        torch_device = torch.empty(0, device=torch_device).device
        return CudaDevice(
            torch_device,
            is_staged=is_staged,
            prepare_thread=prepare_thread,
        )
    return CpuDevice(prepare_thread=prepare_thread)
