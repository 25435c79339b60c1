"""Processes that prepare data beside the run, and end with it."""

import multiprocessing
import os
import signal
import threading
from typing import TYPE_CHECKING

from finetune.errors import DataError

if TYPE_CHECKING:
    from multiprocessing.context import SpawnContext


def process_context() -> "SpawnContext":
    """Return a context whose processes start from nothing.

    A fork would inherit the run's threads' locks and its page-locked memory; a fork server would
    stand between a worker and the run, which then could not see that the run was killed.
    """
    return multiprocessing.get_context("spawn")


def prepare_worker() -> None:
    """Leave Ctrl-C to the run, and end with it even where it was killed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
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
