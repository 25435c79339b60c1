"""Starts the program many times: a server has imported everything once, and forks for each start.

`python forked.py` reads a `Start` as JSON per line, starts a process and answers with its id;
{"wait": PID} answers with its exit code, negative for a signal.
"""

import atexit
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

ROOT = Path(__file__).parents[2]
END_S = 300.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Start:
    """How a process starts.

    Attributes:
        module: Its `main` is called with the arguments.
        argv: The arguments.
        output: The file that it prints to; with a terminal, the terminal's.
        variables: Of its environment, in addition to the server's.
        limit_bytes: The largest file that it may write, if there is a limit.
        has_session: Whether it begins a session of its own, as a terminal does.
        is_on_terminal: Whether `output` is the terminal of that session.
    """

    module: str
    argv: Sequence[str]
    output: str
    variables: Mapping[str, str] = field(default_factory=dict)
    limit_bytes: int | None = None
    has_session: bool = False
    is_on_terminal: bool = False


class Forked:
    """The server, as a test sees it."""

    def __init__(self, folder: Path) -> None:
        words = ["env", f"PYTHONPATH={ROOT}", "OMP_NUM_THREADS=1", sys.executable, __file__]
        self._server = subprocess.Popen(
            words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
        )
        self._folder = folder
        self._num_started = 0
        self._started: list[Started] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._server.communicate()

    def start(
        self, *argv: object, module: str = "finetune.app", output: str | None = None, **how: Any
    ) -> "Started":
        """Start the program, or the `main` of another module; `how` is the rest of a `Start`."""
        self._num_started += 1
        output = output or str(self._folder / f"output-{self._num_started}.txt")
        words = [str(word) for word in argv]
        cache = os.environ.get("XDG_CACHE_HOME")  # a test's own, which the server does not know
        variables = {"XDG_CACHE_HOME": cache} if cache else {}
        variables |= how.pop("variables", {})
        start = Start(module=module, argv=words, output=output, variables=variables, **how)
        started = Started(self._ask(asdict(start)), Path(output), self._ask)
        self._started.append(started)
        return started

    def start_ranks(self, *argv: object, of_rank_1: Sequence[object] = (), **how: Any) -> "Pair":
        """Start two ranks of one machine as a launcher does; rank 1 may have more arguments."""
        first, second = self.start_machines(*argv, sizes=(2,), more={1: of_rank_1}, **how)
        return first, second

    def start_machines(
        self,
        *argv: object,
        sizes: Sequence[int],
        more: Mapping[int, Sequence[object]] = MappingProxyType({}),
        variables: Mapping[int, Mapping[str, str]] = MappingProxyType({}),
        limits_bytes: Mapping[int, int] = MappingProxyType({}),
        **how: Any,
    ) -> "list[Started]":
        """Start ranks of several machines as their launchers do; all are this one.

        Args:
            argv: Of all ranks.
            sizes: Ranks of each machine.
            more: Further arguments, by rank.
            variables: Further variables, by rank.
            limits_bytes: The largest file that a rank may write, by rank.
            how: The rest of a `Start`.
        """
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        common = {"WORLD_SIZE": str(sum(sizes)), "MASTER_ADDR": "127.0.0.1"}
        common["MASTER_PORT"] = str(port)
        if len(sizes) > 1:
            common["SLUICE_SECRET"] = "of two machines that are this one"
        places = [(node, place) for node, size in enumerate(sizes) for place in range(size)]
        return [
            self.start(
                *(*argv, *more.get(rank, ())),
                variables=common
                | {"RANK": str(rank), "LOCAL_RANK": str(place), "GROUP_RANK": str(node)}
                | {"LOCAL_WORLD_SIZE": str(sizes[node])}
                | dict(variables.get(rank, {})),
                limit_bytes=limits_bytes.get(rank),
                **how,
            )
            for rank, (node, place) in enumerate(places)
        ]

    def end_all(self) -> None:
        """Kill what a test that failed has left running."""
        for started in self._started:
            if not started.has_ended:
                started.end(signal.SIGKILL)
        self._started.clear()

    def _ask(self, request: dict[str, Any]) -> int:
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.write(json.dumps(request) + "\n")
        self._server.stdin.flush()
        return int(self._server.stdout.readline())


class Started:
    """One start of the program."""

    def __init__(self, pid: int, output: Path, ask: Callable[[dict[str, Any]], int]) -> None:
        self.pid = pid
        self.has_ended = False
        self._output = output
        self._ask = ask

    @property
    def shown(self) -> str:
        """What it has printed, once it has ended and nothing more comes."""
        before = -1
        while self._output.exists() and before != (before := self._output.stat().st_size):
            time.sleep(0.05)
        return self._output.read_text() if self._output.exists() else ""

    def is_running(self) -> bool:
        state = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0]
        return state != "Z"

    def wait_until(self, condition: Callable[[], bool]) -> None:
        """Wait until something holds, or the process has ended."""
        end_s = time.monotonic() + END_S
        while self.is_running() and not condition():
            assert time.monotonic() < end_s, self.shown
            time.sleep(0.0005)

    def wait_for(self, condition: Callable[[], bool]) -> None:
        """Wait until something holds, which must be before the process has ended."""
        self.wait_until(condition)
        assert self.is_running(), self.shown

    def signal(self, number: int, *, to_group: bool = False) -> None:
        """Send a signal to it, or to all processes of its session."""
        (os.killpg if to_group else os.kill)(self.pid, number)

    def end(self, number: int | None = None) -> int:
        """Send a signal, if any, and return the exit code."""
        if number is not None and self.is_running():
            self.signal(number)
        self.wait_until(lambda: False)
        self.has_ended = True
        return self._ask({"wait": self.pid})


Pair = tuple[Started, Started]


def serve() -> None:
    """Answer requests until there are no more."""
    import finetune.commands.generate
    import finetune.export.merge
    import finetune.sweep.sweep
    import finetune.training.kinds.adapter
    import finetune.training.process_group  # noqa: F401 - so that a start imports nothing

    for line in sys.stdin:
        request = json.loads(line)
        if "wait" in request:
            _, status = os.waitpid(request["wait"], 0)
            answer = os.waitstatus_to_exitcode(status)
        else:
            answer = os.fork()
            if answer == 0:
                run(Start(**request))
        sys.stdout.write(f"{answer}\n")
        sys.stdout.flush()


def behind_pipe(output: int) -> int:
    """Return a pipe to a process without a limit, which writes what comes to the file."""
    read, write = os.pipe()
    if os.fork() == 0:
        os.close(write)
        while words := os.read(read, 65536):
            os.write(output, words)
        os._exit(0)
    os.close(read)
    os.close(output)
    return write


def run(start: Start) -> None:
    """Run a `main` in this process, and end it."""
    import resource

    from finetune.training import loop

    loop.TIMED_S = 0.0
    os.environ.update(start.variables)
    tempfile.tempdir = None  # asked for again, in this environment
    if start.has_session:
        os.setsid()
    output = os.open(start.output, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
    if start.limit_bytes is not None:
        output = behind_pipe(output)
        resource.setrlimit(resource.RLIMIT_FSIZE, (start.limit_bytes,) * 2)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.dup2(output if start.is_on_terminal else os.open(os.devnull, os.O_RDONLY), 0)
    os.close(output)
    code = 1
    try:
        importlib.import_module(start.module).main(start.argv)
        code = 0
    except SystemExit as error:
        code = int(error.code or 0)
    except BaseException as error:  # noqa: BLE001 - shown as the interpreter would
        sys.excepthook(type(error), error, error.__traceback__)
    atexit._run_exitfuncs()  # as an interpreter does that ends
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    serve()
