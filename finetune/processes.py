"""Processes that work alongside a command, and end with it."""

import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker
from typing import TYPE_CHECKING

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
    with signals_deferred():
        resource_tracker.ensure_running()
    return multiprocessing.get_context("spawn")


@contextmanager
def signals_deferred() -> Iterator[None]:
    """Block signals in this context, in which a process starts that will ignore them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def prepare_worker() -> None:
    """Leave signals that end a command to the command, and exit with it even if it was killed."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    command = multiprocessing.parent_process()
    assert command is not None

    def end_with_command() -> None:
        command.join()
        os._exit(1)

    threading.Thread(target=end_with_command, daemon=True).start()
