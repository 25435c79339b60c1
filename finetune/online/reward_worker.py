"""The process of a reward function: reads answers as lines of JSON, and writes what each one gets.

`python -m finetune.online.reward_worker REQUESTS REPLIES FOLDER`, with the numbers of two pipes and
the folder for temporary files. What the function prints, reads or closes does not touch the pipes:
its three standard streams are null.

The process that is started, the guard, forks the worker and does nothing but watch. When the worker
has ended, it writes how. When the other end of REQUESTS is closed, as it is when the run ends or is
killed, it kills the worker, whatever that is doing. Either way it kills what the function has
started, and removes its temporary files. It is a subreaper, so a child of the function that leaves
its session and loses its parents is still a child of the guard. If the guard is killed, the system
kills the worker.
"""

import ctypes
import json
import numbers
import os
import random
import select
import shutil
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping, Sized
from contextlib import suppress
from hashlib import sha256
from inspect import iscoroutinefunction, signature
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from finetune.errors import ConfigError, DataError
from finetune.online import process_tree
from finetune.online.functions import SHIPPED, check_options

_SHOWN = 200
_MAX_VALUE = 3.4e38  # float32's, which is what rewards are computed in
_SET_PDEATHSIG, _SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h

_Reward = Callable[..., object]
_Outcome = dict[str, object]


def main() -> NoReturn:
    """Be the guard of a worker, and in its fork the worker."""
    requests, replies, folder = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    for pipe in (requests, replies):
        os.set_inheritable(pipe, False)  # noqa: FBT003 - by its place
    _control(_SET_CHILD_SUBREAPER, 1)
    guard = os.getpid()
    worker = os.fork()
    if worker:
        _guard(worker, requests, replies, folder)
    _control(_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() == guard:  # else it was killed before the system knew
        os.setpgid(0, 0)
        tempfile.tempdir = folder
        _work(requests, replies)
    os._exit(0)


def _control(option: int, value: int) -> None:
    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


# --------------------------------------------------------------------------------------------------
# The guard


def _guard(worker: int, requests: int, replies: int, folder: str) -> NoReturn:
    """Wait until the worker has ended or its work has; leave nothing of it."""
    wake, woken = os.pipe()
    os.set_blocking(woken, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(woken)
    poll = select.poll()
    poll.register(requests, 0)  # that it was closed is reported all the same
    poll.register(wake, select.POLLIN)
    code = _reaped(worker)
    while code is None and requests not in dict(poll.poll()):
        os.read(wake, select.PIPE_BUF)
        code = _reaped(worker)
    process_tree.end(os.getpid())
    shutil.rmtree(folder, ignore_errors=True)
    if code is not None:
        _reply(replies, {"ended": code})
    os._exit(0)


def _reaped(worker: int) -> int | None:
    """Wait for all children that have ended; return the worker's code if it is one of them."""
    code = None
    with suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            if ended[0] == worker:
                code = os.waitstatus_to_exitcode(ended[1])
    return code


def _reply(replies: int, content: Mapping[str, object]) -> None:
    with suppress(BrokenPipeError):
        os.write(replies, json.dumps(content).encode() + b"\n")


# --------------------------------------------------------------------------------------------------
# The worker


def _work(requests: int, replies: int) -> None:
    """Load a function and call it for each request."""
    me = os.getpid()
    with os.fdopen(requests, "rb") as stream:
        load = json.loads(stream.readline())
        try:
            function, digest = _loaded(load)
        except ConfigError as error:
            refusal = {"what": error.what, "limit": error.limit, "hint": error.hint}
            _reply(replies, {"refused": refusal})
            return
        _reply(replies, {"loaded": digest})
        for line in stream:
            reply = _outcome(function, json.loads(line), load)
            if os.getpid() != me:
                return  # a fork that the function has let go on
            _reply(replies, reply)


def _loaded(load: Mapping[str, Any]) -> tuple[_Reward, str]:
    """Return a function, and the digest of what it has imported from its own folder.

    Raises:
        ConfigError: It cannot be imported, is absent, or does not take what it is called with.
    """
    name, options = load["name"], load["options"]
    if load["path"] is None:
        _check_call(SHIPPED[name], name, options)
        limits = {limit: load[limit] for limit in ("timeout_s", "memory_bytes")}
        check_options(name, options, **limits)
        return SHIPPED[name], ""
    path = Path(load["path"])
    os.chdir(load["folder"])
    sys.path[:] = [str(path.parent), *load["sys_path"]]
    sys.dont_write_bytecode = True  # nothing is left in the user's folder
    before = set(sys.modules)
    module = _imported(path, load["source"].encode("latin-1"))
    function = vars(module).get(load["function"])
    if not callable(function):
        own = [
            one
            for one, value in vars(module).items()
            if callable(value)
            and one[0] != "_"
            and getattr(value, "__module__", None) == module.__name__
        ]
        raise ConfigError(
            f"objective.rewards: {path.name} has no function `{load['function']}`",
            limit=f"it has {', '.join(f'`{one}`' for one in own) or 'none'}",
            hint=f"define it, or name another: `{path.name}:NAME`",
        )
    _check_call(function, name, options)
    digest = sha256()
    for one in sorted(set(sys.modules) - before - {module.__name__}):
        file = Path(getattr(sys.modules[one], "__file__", None) or os.devnull)
        if file.is_relative_to(path.parent) and "site-packages" not in file.parts:
            digest.update(f"{file.relative_to(path.parent)}\0".encode())
            digest.update(sha256(file.read_bytes()).digest())
    return function, digest.hexdigest()


def _imported(path: Path, source: bytes) -> ModuleType:
    """Run a file's source as a module, and not what Python may have cached of the file."""
    name = path.stem if path.stem not in sys.modules else f"_{path.stem}"
    module = sys.modules[name] = ModuleType(name)
    module.__file__ = str(path)
    try:
        exec(compile(source, path, "exec"), vars(module))
    except BaseException as error:
        raise ConfigError(
            f"objective.rewards: {path.name} cannot be imported: it {_raised(error, path)}",
            hint=f"correct {path}, or install what it imports",
        ) from error
    return module


def _check_call(function: _Reward, name: str, options: Mapping[str, object]) -> None:
    """Refuse a function that cannot be called with a prompt, an answer, a row and its options."""
    shown = ""
    try:
        found = signature(function)
        parameters = [one.replace(annotation=one.empty) for one in found.parameters.values()]
        shown = str(found.replace(parameters=parameters, return_annotation=found.empty))
        found.bind("", "", {}, **options)
        if iscoroutinefunction(function):
            raise TypeError("it returns a coroutine, and no number")
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"objective.rewards: {name}{shown} cannot be called: {error}",
            limit="it is called with (prompt, answer, row), and with its `options` by name",
            hint="correct its parameters, or the names under `options`",
        ) from error


def _outcome(function: _Reward, request: Mapping[str, Any], load: Mapping[str, Any]) -> _Outcome:
    """Call a function for one answer; return its value, or why there is none."""
    prompt, answer, row = (request[key] for key in ("prompt", "answer", "row"))
    _seed("\0".join((load["name"], prompt, answer)))
    try:
        value = function(prompt, answer, row, **load["options"])
    except DataError as error:  # of a shipped function
        return {"failure": f"cannot judge: {error.what}; {error.limit or error.hint}"}
    except BaseException as error:  # noqa: BLE001 - a function may raise anything
        return {"failure": _raised(error, load["path"])}
    if isinstance(value, numbers.Real) and not isinstance(value, bool):
        with suppress(OverflowError):
            if abs(number := float(value)) <= _MAX_VALUE:
                return {"value": number}
    return {"failure": f"returned {_kind(value)}, and not one finite number"}


def _seed(text: str) -> None:
    """Seed the generators that a function may draw from, so that what it draws is repeatable."""
    seed = int.from_bytes(sha256(text.encode(errors="surrogatepass")).digest()[:4])
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(seed)


def _kind(value: object) -> str:
    """Return what a value is that is not one finite number."""
    kind = type(value).__name__
    if value is None or isinstance(value, bool | float):
        return repr(value)
    if isinstance(value, str | Mapping) or not isinstance(value, Sized):
        return f"a value of type {kind}"
    with suppress(TypeError):  # a tensor of one number has no length
        return f"{len(value)} values, of type {kind}"
    return f"a value of type {kind}"


def _raised(error: BaseException, path: str | Path | None) -> str:
    """Return what was raised, and at which line of a file."""
    if isinstance(error, SyntaxError) and error.filename == str(path):
        lines, words = [error.lineno], error.msg
    else:
        frames = traceback.walk_tb(error.__traceback__)
        places = traceback.StackSummary.extract(frames, lookup_lines=False)
        lines = [place.lineno for place in places if place.filename == str(path)]
        try:
            words = str(error)
        except Exception:  # noqa: BLE001 - its text is the user's too
            words = ""
    words = " ".join(words[:_SHOWN].split())
    place = f" (line {lines[-1]})" if lines else ""
    return f"raised {type(error).__name__}{': ' if words else ''}{words}{place}"


if __name__ == "__main__":
    main()
