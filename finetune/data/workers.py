"""Processes that prepare data alongside the run, and end with it."""

import multiprocessing
import os
import signal
import threading
from multiprocessing import resource_tracker
from typing import TYPE_CHECKING

from finetune.errors import DataError
from finetune.interrupts import SIGNALS

if TYPE_CHECKING:
    from multiprocessing.context import SpawnContext


def process_context() -> "SpawnContext":
    """Return a multiprocessing context that spawns its processes.

    A fork would inherit locks held by the run's threads, and its pinned memory. With a fork server
    the run would not be a worker's parent, so the worker could not see that the run was killed.

    Python's resource tracker, which tracks their semaphores, ignores Ctrl-C and SIGTERM by itself.
    It starts with SIGHUP blocked, because closing the terminal would otherwise end it too early.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        resource_tracker.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return multiprocessing.get_context("spawn")


def num_cores() -> int:
    """Return how many processors this process may use."""
    return len(os.sched_getaffinity(0))


def prepare_worker() -> None:
    """Leave signals that end a run to the run, and exit with it even if it was killed."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    run = multiprocessing.parent_process()
    assert run is not None

    def end_with_run() -> None:
        run.join()
        os._exit(1)

    threading.Thread(target=end_with_run, daemon=True).start()


def worker_died(doing: str, error: Exception) -> DataError:
    """Return the error for a worker that was killed."""
    return DataError(
        f"a data worker died while {doing}: {error}",
        limit="each worker needs memory for the tokens of the data set",
        hint="`data.num_workers: 0` prepares the data in the main process",
    )
