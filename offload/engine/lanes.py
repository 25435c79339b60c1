"""A lane on the host: one thread with a FIFO queue, and the flags that lanes wait on."""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue

from offload.errors import SluiceError, TransferError

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
        marks = [_Mark(body=_nothing) for _ in self._queues]
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


def _nothing() -> None:
    """Do nothing."""
