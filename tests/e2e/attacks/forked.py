"""Starts the program many times: a server has imported everything once, and forks for each start.

`python forked.py` reads a JSON object per line: {"argv": [...], "output": FILE} starts a process
and answers with its id; {"wait": PID} answers with its exit code, negative for a signal.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

ROOT = Path(__file__).parents[3]
END_S = 300.0


class Forked:
    """The server, as a test sees it."""

    def __init__(self, folder: Path) -> None:
        words = ["env", f"PYTHONPATH={ROOT}", "OMP_NUM_THREADS=1", sys.executable, __file__]
        self._server = subprocess.Popen(
            words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
        )
        self._folder = folder
        self._num_started = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._server.communicate()

    def start(self, *argv: object, limit_bytes: int | None = None) -> "Started":
        """Start the program; `limit_bytes` is the largest file that it may write."""
        self._num_started += 1
        output = self._folder / f"output-{self._num_started}.txt"
        words = [str(word) for word in argv]
        pid = self._ask({"argv": words, "output": str(output), "limit_bytes": limit_bytes})
        return Started(pid, output, self._ask)

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

    def end(self, number: int | None = None) -> int:
        """Send a signal, if any, and return the exit code."""
        if number is not None and self.is_running():
            os.kill(self.pid, number)
        self.wait_until(lambda: False)
        return self._ask({"wait": self.pid})


def serve() -> None:
    """Answer requests until there are no more."""
    import finetune.commands.generate
    import finetune.export.merge_run
    import finetune.train  # noqa: F401 - so that a start imports nothing

    for line in sys.stdin:
        request = json.loads(line)
        if "wait" in request:
            _, status = os.waitpid(request["wait"], 0)
            answer = os.waitstatus_to_exitcode(status)
        else:
            answer = os.fork()
            if answer == 0:
                run(request)
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


def run(request: dict[str, Any]) -> None:
    """Run the program in this process, and end it."""
    import resource

    from finetune import app
    from finetune.training import loop

    loop.TIMED_S = 0.0
    output = os.open(request["output"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    if request["limit_bytes"] is not None:
        output = behind_pipe(output)
        resource.setrlimit(resource.RLIMIT_FSIZE, (request["limit_bytes"],) * 2)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    code = 1
    try:
        app.main(request["argv"])
    except SystemExit as error:
        code = int(error.code or 0)
    except BaseException as error:  # noqa: BLE001 - shown as the interpreter would
        sys.excepthook(type(error), error, error.__traceback__)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    serve()
