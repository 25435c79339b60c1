"""Signals that ask a command to end: Ctrl-C, SIGTERM of a scheduler, SIGHUP of a closed terminal.

All three raise the same exception, so that open files are closed and temporary files are removed.
While steps run, the first signal is deferred until the current step has ended and a checkpoint is
written; a second one raises at once. A signal that was ignored when the program started stays
ignored: nohup ignores SIGHUP, and a shell ignores Ctrl-C for background jobs.
"""

import errno
import os
import signal
import sys
import termios
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_EXIT_BASE = 128  # what shells add to a signal's number

_Handler = Callable[[int, FrameType | None], None]


class Interrupted(KeyboardInterrupt):
    """A signal has asked the command to end."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


def exit_code(number: int) -> int:
    """Return the exit code of a command that a signal has ended: 130, 143 or 129."""
    return _EXIT_BASE + number


def shown_signal(number: int, ranks: Sequence[int], *, of: int) -> str:
    """Return which signal ended a run and which of its ranks got one; nothing of a lone process."""
    if of == 1:
        return ""
    who = f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
    who = "all ranks" if len(ranks) == of else who
    return f" by {signal.Signals(number).name} to {who}"


@contextmanager
def raised() -> Iterator[None]:
    """Let each of the signals raise `Interrupted`."""

    def stop(number: int, _frame: FrameType | None) -> None:
        _leave_lost_terminal()
        raise Interrupted(number)

    with _handled(stop):
        yield


@contextmanager
def collected() -> Iterator[list[int]]:
    """Defer the first signal, so that the current step ends; a second one raises at once."""
    received: list[int] = []

    def note(number: int, _frame: FrameType | None) -> None:
        _leave_lost_terminal()
        if received:
            raise Interrupted(number)
        received.append(number)

    with _handled(note):
        yield received


@contextmanager
def deferred() -> Iterator[None]:
    """Let the first signal raise `Interrupted` at the end, and a second one at once."""
    with collected() as received:
        yield
    if received:
        raise Interrupted(received[0])


@contextmanager
def _handled(handler: _Handler) -> Iterator[None]:
    """Install this handler for the signals that are not ignored."""
    if threading.current_thread() is not threading.main_thread():
        yield  # signals are the main thread's
        return
    heeded = [number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, handler) for number in heeded}
    try:
        yield
    finally:
        for number, handled in before.items():
            signal.signal(number, handled)


def _leave_lost_terminal() -> None:
    """Redirect output to null if the terminal is closed: an error would lose the checkpoint."""
    for stream in (sys.__stdout__, sys.__stderr__):
        if stream is None or stream.closed:
            continue
        try:
            termios.tcgetattr(stream.fileno())
        except termios.error as error:
            if error.args[0] == errno.EIO:
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, stream.fileno())
                os.close(nowhere)
        except (OSError, ValueError):
            continue  # no file of the system's
