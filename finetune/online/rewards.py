"""Rewards of answers, by functions in processes of their own.

A function of the user's may raise, hang, fill the memory or end its process, and a run of days must
not end with it. So it is called in a process, `finetune.online.reward_worker`, that is killed when
an answer has reached its limit of time or memory, with all that it has started, and begins anew for
the next one. Whatever happens is a failure of that answer and that function, in words; the other
answers are not affected. `num_workers` functions are computed at a time, and their processes stay
for the next answers, because an import may take seconds.

A function should depend on its arguments alone. Python's, numpy's and torch's generators are seeded
by them for each call, the last two if the file imports them, and hashes of texts are the same in
each process. Then values depend neither on the number of workers nor on when a run was killed.

The memory limit is looked at every 0.05 s, or less often if a look takes long. It is of resident
memory: a limit of the address space would stop imports that only reserve it, such as torch's.
"""

import json
import math
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, Self

from finetune.errors import ConfigError
from finetune.objectives.grpo import Reward
from finetune.online import process_tree
from finetune.online.functions import SHIPPED
from finetune.report.format import shown_gib

_START_S = 120.0  # for the import of a file, which may import torch
_LOOK_S, _LOOK_FRAC = 0.05, 0.1  # between looks at memory; the time that they may take
_END_S = 5.0
_PAUSE_S = 0.002
_READ_BYTES = 2**16
_MODULE = "finetune.online.reward_worker"


@dataclass(frozen=True, kw_only=True, slots=True)
class Answered:
    """An answer, and what it is an answer to."""

    prompt: str  # what the user asked last
    answer: str
    row: Mapping[str, object]  # the columns of the data's row


@dataclass(frozen=True, kw_only=True, slots=True)
class Given:
    """What one answer got."""

    values: tuple[float | None, ...]  # by function; None where it failed
    failures: tuple[str, ...]  # why, in words
    total: float | None  # the weighted sum; None if any value is


class Rewards:
    """Reward functions, and the processes that compute them."""

    def __init__(
        self,
        specs: Sequence[Reward],
        *,
        folder: Path,
        num_workers: int,
        start_timeout_s: float = _START_S,
    ) -> None:
        """Read the files of functions, which later changes do not affect; nothing is started.

        Args:
            specs: The functions.
            folder: The folder of relative paths, in which functions run.
            num_workers: Functions that are computed at a time.
            start_timeout_s: Time for a process to import a function.

        Raises:
            ConfigError: A file cannot be read, or no function has such a name.
        """
        self._both = [(spec, _Function.read(spec, folder.absolute())) for spec in specs]
        self._num_workers = num_workers
        self._start_timeout_s = start_timeout_s
        self._digests: dict[int, str] = {}  # of what each function has imported, once it is known
        self._workers: dict[tuple[int, int], _Worker] = {}  # by place and function
        self._polled = self._next_look = 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End all processes, and what they have started; waits for them."""
        for worker in self._workers.values():
            worker.leave()
        while self._workers:
            _, worker = self._workers.popitem()
            worker.end()

    def check(self) -> None:
        """Import all functions, each in a process that ends; waits for them.

        Raises:
            ConfigError: A file cannot be imported, a function is absent or cannot be called with
                its options, or a shipped function's options are wrong.
        """
        problems = list[ConfigError]()
        for number in range(len(self._both)):
            try:
                self._run([_Task(answer=0, spec=number, line=None)], lambda task, value, why: None)
            except ConfigError as error:
                problems.append(error)
            finally:
                self.close()
        if problems:
            *others, last = problems
            title = [f"{len(problems)} problems of rewards"] if others else []
            what = "\n\n".join([*title, *map(str, others), last.what])
            raise ConfigError(what, limit=last.limit, hint=last.hint)

    def digest(self) -> str:
        """Return a digest of the functions, options and weights; imports functions if need be.

        It covers the contents of each file and of what it imports from its own folder, and no
        limits: they decide which answers fail, and not what the others get.

        Raises:
            ConfigError: A file cannot be imported, or a function cannot be called.
        """
        if len(self._digests) < len(self._both):
            self.check()
        parts = [
            (function.name, function.source, self._digests[number], spec.weight, dict(spec.options))
            for number, (spec, function) in enumerate(self._both)
        ]
        return sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()

    def of(
        self,
        answered: Sequence[Answered],
        progress: Callable[[int, int], None] = lambda done, of: None,
    ) -> list[Given]:
        """Return what each answer gets, in their order; waits for all functions.

        Args:
            answered: The answers.
            progress: Called with how many answers are done, of how many.

        Raises:
            ConfigError: A function cannot be imported.
        """
        values: list[list[float | None]] = [[None] * len(self._both) for _ in answered]
        failures: list[dict[int, str]] = [{} for _ in answered]
        num_left, num_done = [len(self._both)] * len(answered), 0

        def note(task: _Task, value: float | None, failure: str | None) -> None:
            nonlocal num_done
            values[task.answer][task.spec] = value
            if failure is not None:
                failures[task.answer][task.spec] = f"{self._both[task.spec][1].name} {failure}"
            num_left[task.answer] -= 1
            if not num_left[task.answer]:
                num_done += 1
                progress(num_done, len(answered))

        tasks = list[_Task]()
        for number, one in enumerate(answered):
            line, why = _request(one)
            for spec in range(len(self._both)):
                task = _Task(answer=number, spec=spec, line=line)
                if line is None:
                    note(task, None, why)
                else:
                    tasks.append(task)
        try:
            self._run(tasks, note)
        except BaseException:
            self.close()
            raise
        weights = [spec.weight for spec, _ in self._both]
        return [
            Given(
                values=tuple(found),
                failures=tuple(why[spec] for spec in sorted(why)),
                total=_total(found, weights),
            )
            for found, why in zip(values, failures, strict=True)
        ]

    # ----------------------------------------------------------------------------------- the loop

    def _run(self, tasks: "Sequence[_Task]", note: "_Note") -> None:
        """Have tasks computed, each as soon as a worker is free, and note what comes of them."""
        left = deque(tasks)
        while True:
            busy = {place for (place, _), worker in self._workers.items() if worker.task}
            for place in range(self._num_workers):
                if left and place not in busy:
                    self._begin(place, left.popleft())
            if not any(worker.task for worker in self._workers.values()):
                return
            self._wait()
            for key, worker in list(self._workers.items()):
                for reply in worker.replies():
                    self._take(key, reply, note)
                    if key not in self._workers:
                        break
            self._enforce(note)

    def _begin(self, place: int, task: "_Task") -> None:
        key = (place, task.spec)
        worker = self._workers.get(key)
        if worker is not None and process_tree.has_ended(worker.pid):
            self._workers.pop(key).end()
            worker = None
        if worker is None:
            spec, function = self._both[task.spec]
            worker = self._workers[key] = _Worker(function.load(spec))
            worker.deadline = time.monotonic() + self._start_timeout_s
        worker.task = task
        if worker.is_loaded:
            self._ask(worker)

    def _ask(self, worker: "_Worker") -> None:
        """Send a loaded worker the request of its task."""
        assert worker.task is not None
        assert worker.task.line is not None
        worker.deadline = time.monotonic() + self._both[worker.task.spec][0].timeout_s
        worker.send(worker.task.line)

    def _wait(self) -> None:
        """Wait until a worker has written, can read more of its request, or may be at a limit."""
        poll = select.poll()
        until = self._next_look
        for worker in self._workers.values():
            poll.register(worker.output, select.POLLIN)
            if worker.unsent:
                poll.register(worker.input, select.POLLOUT)
            if worker.task is not None:
                until = min(until, worker.deadline)
        ready = dict(poll.poll(max(0.0, until - time.monotonic()) * 1e3 + 1))
        self._polled = time.monotonic()
        for worker in self._workers.values():
            worker.can_read = worker.output in ready
            if worker.input in ready:
                worker.send(b"")

    def _take(self, key: tuple[int, int], reply: Mapping[str, Any], note: "_Note") -> None:
        """Act on what a worker has written."""
        worker, (_, spec) = self._workers[key], key
        if "refused" in reply:
            self._lose(key, "", note, ConfigError(**reply["refused"]))
        elif "ended" in reply:
            self._lose(key, _shown_end(reply["ended"]), note)
        elif "loaded" in reply:
            if self._digests.setdefault(spec, reply["loaded"]) != reply["loaded"]:
                raise ConfigError(
                    f"objective.rewards: what {self._both[spec][1].name} imports has changed"
                    " since the run began",
                    limit="all answers are judged by the same functions",
                    hint="`--resume` goes on with the new ones",
                )
            worker.is_loaded = True
            if worker.task is not None and worker.task.line is None:
                worker.task = None
            elif worker.task is not None:
                self._ask(worker)
        elif worker.task is not None:
            task, worker.task = worker.task, None
            note(task, reply.get("value"), reply.get("failure"))

    def _lose(
        self, key: tuple[int, int], why: str, note: "_Note", refusal: ConfigError | None = None
    ) -> None:
        """End a worker that does not answer any more; its answer has failed.

        A function that was imported before may fail to be when its process begins anew, as where
        memory is short: that is no reason to end a run.
        """
        worker, name = self._workers.pop(key), self._both[key[1]][1].name
        worker.end()
        if not worker.is_loaded:
            error = refusal or ConfigError(
                f"objective.rewards: {name} {why} as it was imported",
                hint="correct the file: what it does outside of functions is done at each start;"
                " or raise the limit",
            )
            if key[1] not in self._digests or worker.task is None or worker.task.line is None:
                raise error
            why = f"could not be imported again: {error.what}"
        if worker.task is not None:
            note(worker.task, None, why)

    def _enforce(self, note: "_Note") -> None:
        """End workers that are at a limit."""
        now = self._polled  # what has been written since then is not read yet
        busy = {key: worker for key, worker in self._workers.items() if worker.task is not None}
        for key, worker in busy.items():
            if now >= worker.deadline:
                limit_s = self._both[key[1]][0].timeout_s
                limit_s = limit_s if worker.is_loaded else self._start_timeout_s
                self._lose(key, f"took longer than {limit_s:g} s", note)
        if now < self._next_look:
            return
        begin, processes = time.monotonic(), process_tree.processes()
        for key, worker in busy.items():
            if key not in self._workers:
                continue
            limit = self._both[key[1]][0].memory_bytes
            pids = [one.pid for one in process_tree.members(worker.pid, processes)]
            used = process_tree.used_bytes(pids, limit_bytes=limit)
            if used > limit:
                words = f"used {shown_gib(used)} of memory, and {shown_gib(limit)} is its limit"
                self._lose(key, words, note)
            elif worker.has_ended:  # at the last look, so what it had written is read
                self._lose(key, _shown_end(None), note)
            else:
                worker.has_ended = process_tree.has_ended(worker.pid)
        end = time.monotonic()
        self._next_look = end + max(_LOOK_S, (end - begin) / _LOOK_FRAC)


def rewards_of(sections: Sequence[Reward], *, num_workers: int = 1) -> Rewards:
    """Return the rewards of a recipe, in processes that run in the current directory.

    Raises:
        ConfigError: A file cannot be read, or no function has such a name.
    """
    return Rewards(sections, folder=Path.cwd(), num_workers=num_workers)


def require_functions(sections: Sequence[Reward]) -> None:
    """Check that the rewards of a recipe can be computed; waits for their imports.

    Raises:
        ConfigError: One cannot.
    """
    rewards_of(sections).check()


def _request(one: Answered) -> tuple[bytes | None, str | None]:
    """Return what a worker reads of an answer, or why nothing can be sent."""
    content = {"prompt": one.prompt, "answer": one.answer, "row": one.row}
    try:
        return json.dumps(content).encode() + b"\n", None
    except (TypeError, ValueError, RecursionError) as error:
        return None, f"cannot be sent its row: {error}"


def _total(values: Sequence[float | None], weights: Sequence[float]) -> float | None:
    known = [value for value in values if value is not None]
    if len(known) < len(values):
        return None
    return math.fsum(weight * value for weight, value in zip(weights, known, strict=True))


def _shown_end(code: int | None) -> str:
    """Return how a process has ended, by its code as `subprocess` has it; None if not known."""
    if code is None:
        return "ended its process, or closed its pipes"
    if code >= 0:
        return f"ended its process with exit code {code}"
    names = {number.value: number.name for number in signal.Signals}
    why = ", as the system does when memory is short" if -code == signal.SIGKILL else ""
    return f"was ended by {names.get(-code, f'signal {-code}')}{why}"


# --------------------------------------------------------------------------------------------------
# A function, and the process that computes it


@dataclass(frozen=True, kw_only=True, slots=True)
class _Function:
    """What a function is called, and the text that defines it."""

    name: str  # as failures name it, whatever folder its file is in
    path: Path | None  # of its file; None if it is shipped
    function: str  # its name in the file
    source: str | None  # the file's bytes, as Latin-1
    folder: Path

    @classmethod
    def read(cls, spec: Reward, folder: Path) -> Self:
        """Read the file of a function.

        Raises:
            ConfigError: It cannot be read, no function has such a name, or the options are not
                what JSON has.
        """
        try:
            json.dumps(spec.options)
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"objective.rewards: the options of {spec.function} cannot be sent: {error}",
                limit="they are texts, numbers, true, false, null, and lists and mappings of them",
                hint="put a date in quotes",
            ) from error
        if spec.function in SHIPPED:
            return cls(
                name=spec.function, path=None, function=spec.function, source=None, folder=folder
            )
        file, _, function = spec.function.rpartition(":")
        file, function = (file, function) if file.endswith(".py") else (spec.function, "reward")
        if not file.endswith(".py"):
            raise ConfigError(
                f"objective.rewards: {spec.function} is no reward function",
                limit=f"it is a file of Python, or one of {', '.join(SHIPPED)}",
                hint="`rewards.py`, or `rewards.py:NAME` for a function that is not `reward`",
            )
        path = folder / file
        try:
            source = path.read_bytes().decode("latin-1")
        except OSError as error:
            raise ConfigError(
                f"objective.rewards: {path}: {error.strerror}",
                limit="it is read when the run begins",
                hint="write the file, or give its path",
            ) from error
        name = f"{path.name}:{function}"
        return cls(name=name, path=path, function=function, source=source, folder=folder)

    def load(self, spec: Reward) -> bytes:
        """Return the first line that a worker reads."""
        content = {
            "name": self.name,
            "path": None if self.path is None else str(self.path),
            "function": self.function,
            "source": self.source,
            "folder": str(self.folder),
            "sys_path": sys.path,
            "options": spec.options,
            "timeout_s": spec.timeout_s,
            "memory_bytes": spec.memory_bytes,
        }
        return json.dumps(content).encode() + b"\n"


@dataclass(frozen=True, kw_only=True, slots=True)
class _Task:
    """One function for one answer; without a line only the import of the function."""

    answer: int
    spec: int
    line: bytes | None


_Note = Callable[[_Task, float | None, str | None], None]


class _Worker:
    """A process of a function, with what is between it and here."""

    def __init__(self, load: bytes) -> None:
        theirs, self.input = os.pipe()
        self.output, reply = os.pipe()
        os.set_blocking(self.input, False)
        self._folder = tempfile.mkdtemp(prefix="sluice-reward-")
        words = (theirs, reply, self._folder)
        try:
            self._process = subprocess.Popen(
                # `env` adds to the environment, which only finetune/env.py may read
                ["env", "PYTHONHASHSEED=0", sys.executable, "-m", _MODULE, *map(str, words)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                cwd=Path(__file__).parents[2],  # where this very package is found first
                pass_fds=(theirs, reply),
                start_new_session=True,
            )
        finally:
            os.close(theirs)
            os.close(reply)
        self.pid = self._process.pid
        self.task: _Task | None = None
        self.is_loaded = False
        self.deadline = math.inf
        self.unsent = b""
        self.can_read = self.has_ended = False
        self._received = b""
        self._is_open = True
        self.send(load)

    def send(self, line: bytes) -> None:
        """Write as much as the pipe takes of what is not yet sent, with another line after it."""
        self.unsent += line
        with suppress(BlockingIOError, BrokenPipeError):  # one that has ended is found elsewhere
            while self.unsent:
                self.unsent = self.unsent[os.write(self.input, self.unsent) :]

    def replies(self) -> list[dict[str, Any]]:
        """Read the lines that have come; the last is of an end if the pipe was closed."""
        if not self.can_read:
            return []
        self.can_read = False
        read = os.read(self.output, _READ_BYTES)
        *lines, self._received = (self._received + read).split(b"\n")
        found = list(map(_reply, lines))
        return found if read else [*found, {"ended": None}]

    def leave(self) -> None:
        """Close the requests, at which the process ends with all that it has started."""
        if self._is_open:
            self._is_open = False
            os.close(self.input)
            os.close(self.output)

    def end(self) -> None:
        """End the process and what it has started; waits for that."""
        self.leave()
        end = time.monotonic() + _END_S
        while not process_tree.has_ended(self.pid) and time.monotonic() < end:
            time.sleep(_PAUSE_S)
        process_tree.end(self.pid)  # nothing is left, unless the guard was killed
        shutil.rmtree(self._folder, ignore_errors=True)
        self._process.wait()


def _reply(line: bytes) -> dict[str, Any]:
    """Read what a worker has written; a function may have written to its pipe."""
    with suppress(ValueError):
        found = json.loads(line)
        if isinstance(found, dict):
            return found
    return {"ended": None}
