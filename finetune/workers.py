"""Processes that prepare data beside the run, and end with it."""

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
    """Return a context whose processes start from nothing.

    A fork would inherit the run's threads' locks and its page-locked memory; a fork server would
    stand between a worker and the run, which then could not see that the run was killed.

    The process that Python tracks their semaphores with ignores Ctrl-C and SIGTERM by itself; it
    starts with SIGHUP blocked, or a terminal that is closed would end it before its time.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        resource_tracker.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return multiprocessing.get_context("spawn")


def prepare_worker() -> None:
    """Leave signals that end a run to the run, and end with it even where it was killed."""
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
