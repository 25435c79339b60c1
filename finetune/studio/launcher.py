"""Runs that the page starts, stops and resumes.

A run is a process of its own, `sluice finetune` in a new session, so it survives the page and the
server. What is known of it is in the folder of the runs, so that pages and servers do not fight:

- `studio.lock` in the folder is locked by the run's process, which inherits the descriptor: the
  lock ends with the process, however that ends. One run at a time is started so, because a plan
  gives a run all of the card and the RAM.
- `log.txt` in the run's directory is what the command prints.
- `stop.txt` in the run's directory is the process that was asked to stop: it is asked once, since
  a second signal ends a run without a checkpoint.
"""

import fcntl
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from finetune.errors import CheckpointError, StudioError
from finetune.recipe.load import RUN_CHECKPOINTS, RUN_RECIPE
from finetune.run.run_dir import RUN_LOG, RUN_STOP, RunDir
from finetune.run.run_lock import holder, holding
from finetune.studio.guard import RUN_NAME, inside

LOCK = "studio.lock"
RECIPES = (".yaml", ".yml")
MOST_RECIPES = 200
DEPTH = 3  # of folders with recipes
_HEAD_BYTES = 2**16
_WAIT_S = 1.0  # a reader holds the lock for a moment
_POLL_S = 0.02
# The command, with the server's own import path, as a spawned process has it.
_COMMAND = (
    "import json, sys; sys.path[:] = json.loads(sys.argv.pop(1));"
    " from finetune.app import main; main()"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Started:
    """The run that the page has started, and that has not ended."""

    name: str
    pid: int


def argv(words: Sequence[str]) -> list[str]:
    """Return how a command is called in a process of its own, with the server's import path."""
    return [sys.executable, "-P", "-c", _COMMAND, json.dumps(sys.path), *words]


class Launcher:
    """Starts, stops and resumes the runs of a folder.

    Args:
        folder: Folder of the runs.
        root: Only recipes in it are started.
        machine_file: File of `sluice probe --save`; None lets each run measure.
    """

    def __init__(self, folder: Path, *, root: Path, machine_file: Path | None) -> None:
        """Name the folders; nothing is created."""
        self.folder, self.root, self._machine_file = folder, root, machine_file

    def recipes(self) -> list[str]:
        """Return the recipes that can be started, relative to the root."""
        found: list[str] = []
        for at, folders, files in os.walk(self.root):
            here = Path(at)
            is_deep = len(here.relative_to(self.root).parts) >= DEPTH
            folders[:] = [] if is_deep else sorted(filter(lambda one: one[0] != ".", folders))
            if RUN_RECIPE in files and RUN_CHECKPOINTS in folders:  # a run's, which is resumed
                folders[:] = []
                continue
            found += [
                (here / name).relative_to(self.root).as_posix()
                for name in sorted(files)
                if _is_recipe(here / name)
            ]
            if len(found) >= MOST_RECIPES:
                break
        inner = [name for name in found if inside(self.root, name) is not None]
        return inner[:MOST_RECIPES]

    def start(self, recipe: str, name: str) -> None:
        """Start a run.

        Args:
            recipe: Relative to the root.
            name: Name of the run, whose directory is in the folder.

        Raises:
            StudioError: The recipe is outside, the name is none, or another run is at work.
            CheckpointError: There is something of that name already.
        """
        file = inside(self.root, recipe)
        if file is None or not _is_recipe(file):
            raise StudioError(
                f"{recipe!r} is no recipe in {self.root}",
                limit="only recipes in the folder that `sluice studio` was started in are started",
                hint="choose one of the list, or start the page in the folder of the recipe",
            )
        with self._new_run(name) as (run, lock):
            self._launch(run, name, lock, [str(file), f"output.name={json.dumps(name)}"])

    def start_text(self, text: str, name: str) -> None:
        """Write a recipe into the root as `NAME.yaml`, and start its run.

        Args:
            text: The recipe, with paths relative to the root.
            name: Name of the run, as in the recipe.

        Raises:
            StudioError: The name is none, another run is at work, or there is another recipe of
                this name.
            CheckpointError: There is something of that name already.
        """
        with self._new_run(name) as (run, lock):
            file = self.root / f"{name}.yaml"
            _write_new(file, text)
            self._launch(run, name, lock, [str(file)])

    def require_rows(self, rows: str) -> None:
        """Check that rows for a run are in the root.

        Args:
            rows: Relative to the root.

        Raises:
            StudioError: None are named, or there is no such file.
        """
        file = inside(self.root, rows)
        if file is None or not file.is_file():
            raise StudioError(
                f"{rows!r} is no file in {self.root}" if rows else "no file of rows is given",
                limit="a run learns from a file in the folder that `sluice studio` was started in",
                hint="name one in the field `file of rows`, for instance `chats.jsonl`",
            )

    @contextmanager
    def _new_run(self, name: str) -> Iterator[tuple[Path, int]]:
        """Find the directory of a new run, while no other starts.

        Yields:
            The directory, which may not be there, and the lock that the run inherits.

        Raises:
            StudioError: The name is none or leads elsewhere, or another run is at work.
            CheckpointError: There is something of that name already.
        """
        if re.fullmatch(RUN_NAME, name) is None:
            raise StudioError(
                f"{name!r} cannot name a run",
                limit="letters, digits, dot, dash and underscore, at most 100",
                hint="for instance `my-first-run`",
            )
        with self._turn() as lock:
            run = self.folder.resolve() / name
            if inside(self.folder, name) != run:
                raise StudioError(
                    f"{run} is a link",
                    limit="a run is a directory of the folder",
                    hint="choose another name",
                )
            try:
                RunDir(run).require_startable(may_overwrite=False)
            except CheckpointError as error:  # its hint is about options of the command
                raise CheckpointError(
                    error.what,
                    limit=error.limit,
                    hint="choose another name; a run that has stopped is resumed in the table",
                ) from error
            yield run, lock

    def resume(self, name: str) -> None:
        """Continue a run of the folder.

        Args:
            name: A run's, which is checked to be in the folder.

        Raises:
            StudioError: It is a sweep's, is at work, has no recipe, or another run is at work.
        """
        run = self.folder.resolve() / name
        if "/" in name:
            sweep = run.parent
            raise StudioError(
                f"{name} is a run of a sweep",
                limit="runs of a sweep go on together",
                hint=f"in a terminal: `sluice sweep {sweep} --resume`",
            )
        with self._turn() as lock:
            by = holder(run)
            if by is not None:
                raise StudioError(
                    f"{name} is in use by {by}",
                    limit="one process writes a run",
                    hint="wait for it, or stop it",
                )
            if not RunDir(run).recipe_file.is_file():
                raise StudioError(
                    f"{name} has no recipe: it ended before it began",
                    limit="a run that has begun can be resumed",
                    hint=f"read its {RUN_LOG}, and start it again",
                )
            self._launch(run, name, lock, [str(run / RUN_RECIPE), "--resume"])

    def stop(self, name: str) -> None:
        """Ask a run to end its step, write a checkpoint and stop, as Ctrl-C does.

        Args:
            name: A run's, which is checked to be in the folder.

        Raises:
            StudioError: It is not at work, is on another machine, or was asked already.
        """
        run, pid = self.folder.resolve() / name, at_work(self.folder, name)
        if pid is None:
            by = holder(run)
            raise StudioError(
                f"{name} is written by {by}" if by else f"{name} is not at work",
                limit="a run that is at work on this machine is stopped",
                hint="stop it on that machine" if by else "resume it, if it is to go on",
            )
        with _opened(run / RUN_STOP) as asked:
            fcntl.flock(asked, fcntl.LOCK_EX)
            if os.pread(asked, 32, 0) == str(pid).encode():
                raise StudioError(
                    f"{name} was asked to stop already",
                    limit="it ends its step and writes a checkpoint first; a second signal would"
                    " end it without one",
                    hint=f"wait, or `kill -9 {pid}`: it goes on from its last checkpoint",
                )
            try:
                os.kill(pid, signal.SIGTERM)  # a server in the background ignores Ctrl-C
            except OSError as error:
                raise StudioError(
                    f"process {pid} cannot be stopped: {error.strerror}",
                    limit="a process is stopped by its own user",
                    hint="look again: it may have ended",
                ) from error
            _write(asked, str(pid))

    @contextmanager
    def _turn(self) -> Iterator[int]:
        """Hold the lock of the folder; who inherits its descriptor holds it on.

        Raises:
            StudioError: A run that a page has started holds it.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        with _opened(self.folder / LOCK) as lock:
            end_s = time.monotonic() + _WAIT_S
            while True:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError as error:
                    if time.monotonic() < end_s:
                        time.sleep(_POLL_S)
                        continue
                    now = started(self.folder)
                    raise StudioError(
                        f"{'another run' if now is None else now.name} is at work",
                        limit="the page starts one run at a time: each is planned for all of the"
                        " card and the RAM",
                        hint="stop it or wait for it; `sluice finetune` in a terminal starts more",
                    ) from error
            yield lock

    def _launch(self, run: Path, name: str, lock: int, words: list[str]) -> None:
        machine = [] if self._machine_file is None else ["--machine", str(self._machine_file)]
        where = f"output.dir={json.dumps(str(run))}"
        command = ["finetune", words[0], where, *words[1:], *machine]
        run.mkdir(exist_ok=True)
        (run / RUN_STOP).unlink(missing_ok=True)
        with _opened(run / RUN_LOG, os.O_APPEND) as log:
            os.write(log, f"$ sluice {' '.join(command)}\n".encode())
            process = subprocess.Popen(
                argv(command),
                cwd=self.root,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                pass_fds=(lock,),
            )
        _write(lock, json.dumps({"name": name, "pid": process.pid}))
        threading.Thread(target=process.wait, daemon=True).start()  # leaves no zombie


def started(folder: Path) -> Started | None:
    """Return the run of a folder that a page has started, and that has not ended."""
    try:
        lock = os.open(folder / LOCK, os.O_RDONLY | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        with suppress(ValueError, TypeError):  # it is being written
            return Started(**json.loads(os.pread(lock, _HEAD_BYTES, 0)))
    finally:
        os.close(lock)
    return None


def at_work(folder: Path, name: str) -> int | None:
    """Return the process on this machine that writes a run, or is about to; None if none does."""
    by = holding(folder / name)
    if by is not None:
        return by.pid if by.host == socket.gethostname() else None
    now = started(folder)
    return now.pid if now is not None and now.name == name else None


def is_stopping(folder: Path, name: str) -> bool:
    """Whether the process that writes a run was asked to stop."""
    pid = at_work(folder, name)
    try:
        return pid is not None and (folder / name / RUN_STOP).read_text() == str(pid)
    except OSError:
        return False


def _is_recipe(file: Path) -> bool:
    """Whether a file is a recipe by its name and by a section that each has."""
    if file.suffix not in RECIPES or not file.is_file():
        return False
    try:
        with file.open("rb") as opened:
            head = opened.read(_HEAD_BYTES)
    except OSError:
        return False
    return re.search(rb"^data:", head, re.MULTILINE) is not None


@contextmanager
def _opened(file: Path, flags: int = 0) -> Iterator[int]:
    """Open a file of this module, which is no link.

    Raises:
        StudioError: It cannot be written.
    """
    try:
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | flags, 0o600)
    except OSError as error:
        raise StudioError(
            f"{file} cannot be written: {error.strerror}",
            limit="the folder of runs holds what the page knows of them",
            hint="`sluice studio DIR` with a folder where you may write",
        ) from error
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _write_new(file: Path, text: str) -> None:
    """Write a file; one with the same text, of a start that failed, is left as it is.

    Raises:
        StudioError: There is another file of this name, or none can be written.
    """
    try:
        with file.open("x", encoding="utf-8") as made:
            made.write(text)
    except FileExistsError as error:
        if file.is_symlink() or not file.is_file() or file.read_bytes() != text.encode():
            raise StudioError(
                f"{file} is there and is not this recipe",
                hint="choose another name, or remove it",
            ) from error
    except OSError as error:
        raise StudioError(
            f"{file} cannot be written: {error.strerror}",
            limit="the recipe of a run is written into the folder of the studio",
            hint="start `sluice studio` in a folder where you may write",
        ) from error


def _write(descriptor: int, text: str) -> None:
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, text.encode(), 0)
