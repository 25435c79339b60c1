"""Answers what the page asks while its controls rest, in a second process.

A point of the break-even curve takes as long as a plan, and one process computes one at a time, so
a plan that is asked for meanwhile would wait. The second process yields to it: its priority is
lower. It measures nothing: a question about this machine comes with the machine.
"""

import os
import signal
import threading
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Self

from finetune.errors import StudioError
from finetune.interrupts import SIGNALS
from finetune.processes import prepare_worker, process_context
from finetune.studio.answer import Json, Kind, Planner
from finetune.studio.question import Question
from offload.plan.machine.machine import Machine

NICENESS = 10  # of 19; the process that serves has 0


class Background:
    """The second process, from entering this context to leaving it.

    Args:
        folder: Where pasted configs are written.
    """

    def __init__(self, folder: Path) -> None:
        """Start nothing yet."""
        self._folder = folder
        self._is_asked = threading.Lock()

    def __enter__(self) -> Self:
        """Start the process; it imports the planner while the command goes on."""
        self._start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Kill the process: it only computes, so nothing is lost."""
        self._end()

    def answer(self, kind: Kind, question: Question, here: Machine | None) -> Json:
        """Return the answer of the second process.

        Args:
            kind: Of the question.
            question: What is asked.
            here: This machine, if the question is about it.

        Raises:
            StudioError: The process has died, of this question or before; a new one has started.
        """
        with self._is_asked:
            try:
                self._pipe.send((kind, question, here))
                answer: Json = self._pipe.recv()
            except (EOFError, ConnectionError) as error:
                code = self._end()
                self._start()
                raise StudioError(
                    f"the process that answers {kind!r} in the background died (exit code {code})",
                    limit="it needs memory of its own to plan",
                    hint="change a control to ask again: a new process has started",
                ) from error
            return answer

    def _start(self) -> None:
        context = process_context()
        self._pipe, its_end = context.Pipe()
        self._process = context.Process(target=_answer_all, args=(its_end, self._folder))
        before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # until it ignores them
        try:
            self._process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        its_end.close()

    def _end(self) -> int | None:
        """Return the exit code."""
        self._process.kill()
        self._process.join()
        self._pipe.close()
        return self._process.exitcode


def _answer_all(pipe: "Connection[Json, tuple[Kind, Question, Machine | None]]", at: Path) -> None:
    prepare_worker()
    os.nice(NICENESS)
    found: Machine | None = None

    def here() -> Machine:
        assert found is not None, "a question about this machine comes with it"
        return found

    planner = Planner(here=here, folder=at)
    with suppress(EOFError, ConnectionError):  # the command has ended
        while True:
            kind, question, found = pipe.recv()
            pipe.send(planner.answer(kind, question))
