"""Reward functions that are shipped: exact match, format and unit tests.

Each takes the prompt, the answer and the row, and its options by keyword. A row that lacks what a
function reads is an error that names it, and no reward of 0.
"""

import json
import re
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Mapping
from decimal import Decimal
from tempfile import TemporaryDirectory, TemporaryFile

from finetune.errors import ConfigError, DataError
from finetune.online import process_tree

_NUMBER = re.compile(
    r"(?<![\w.])(?:(?<![\w)])-)?\$?"
    r"(?:(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+)(?:[eE][+-]?[0-9]{1,4})?"
)
_CODE = re.compile(r"^[ \t]*(`{3,})[^\n`]*\n(.*?)^[ \t]*\1`*[ \t]*$", re.DOTALL | re.MULTILINE)
_LOOK_S = 0.1  # between looks at the memory of tested code
_TEST_S, _TEST_BYTES = 5.0, 2**29
_CHECK_S = 60.0
_START_S = 1.0  # what a worker's limit must leave for starting Python and for ending it


def exact_match(
    prompt: str,
    answer: str,
    row: Mapping[str, object],
    *,
    column: str = "answer",
    number: bool = False,
) -> float:
    """Return 1.0 if an answer is what the row has, else 0.0.

    White space around either is left out, and so is all of the answer up to the end of a block of
    `<think>`.

    Args:
        prompt: Not read.
        answer: The sampled text.
        row: Has the expected text, or number.
        column: The row's column that has it.
        number: Whether only the last number of each is compared, by value: `$1,234.50.` is 1234.5,
            and `#### 42` of gsm8k is 42.

    Raises:
        DataError: The row has no such column, or no number in it.
    """
    expected = row[_known(column, row)]
    if isinstance(expected, bool) or not isinstance(expected, str | int | float):
        raise DataError(
            f"the row's column `{column}` is {_kind(expected)}",
            limit="it is compared as a text or a number",
            hint="name another by `column`",
        )
    given, wanted = _concluded(answer), str(expected).strip()
    if not number:
        return float(given == wanted)
    wanted_number = _last_number(wanted)
    if wanted_number is None:
        raise DataError(
            f"the row's column `{column}` has no number: '{wanted[-40:]}'",
            limit="with `number` the last ones are compared",
            hint="leave out `number`, or such rows",
        )
    return float(_last_number(given) == wanted_number)


def format(prompt: str, answer: str, row: Mapping[str, object], *, pattern: str) -> float:
    r"""Return 1.0 if a whole answer matches a regular expression, else 0.0.

    Args:
        prompt: Not read.
        answer: The sampled text.
        row: Not read.
        pattern: Of Python's `re`, where a dot also matches the end of a line, such as
            `<think>.*</think>\s*\S.*`.
    """
    return float(re.fullmatch(pattern, answer, re.DOTALL) is not None)


def unit_tests(
    prompt: str,
    answer: str,
    row: Mapping[str, object],
    *,
    column: str = "tests",
    timeout_s: float = _TEST_S,
    memory_bytes: int = _TEST_BYTES,
) -> float:
    """Return the share of a row's tests that the code in an answer passes.

    The code is the last fenced block of the answer, or all of it if it has none. It is run once, as
    a module of a new Python in an empty folder, without environment variables and without input;
    then each test in that module, in order. A test passes if it raises nothing. What is run after a
    crash or a limit passes no more, so code that never ends gets 0.0.

    This is no sandbox. The code has the user's permissions: it can read and delete files and use
    the network. Run it in a container or a virtual machine if the model is not trusted.

    Args:
        prompt: Not read.
        answer: The sampled text.
        row: Has the tests: Python statements such as `assert add(1, 2) == 3`, as one text or as a
            list of texts, which count apart.
        column: The row's column that has them.
        timeout_s: Time for all tests of an answer, with the start of Python.
        memory_bytes: Resident memory of the tested process and its children.

    Raises:
        DataError: The row has no such column, or no tests in it.
    """
    found = row[_known(column, row)]
    tests = found if isinstance(found, list) else [found]
    if not tests or not all(isinstance(test, str) and test.strip() for test in tests):
        raise DataError(
            f"the row's column `{column}` is {_kind(found)}",
            limit="it is a text of Python statements, or a list of such texts",
            hint="name another by `column`, or leave out such rows",
        )
    blocks = _CODE.findall(answer)
    code = textwrap.dedent(blocks[-1][1]) if blocks else answer
    with TemporaryDirectory() as folder, TemporaryFile() as given, TemporaryFile() as passed:
        given.write(json.dumps([code, tests]).encode())
        given.seek(0)
        process = subprocess.Popen(
            # `-I` would be `-E -P -s`; the environment is ours, and hashes are the same each time
            [sys.executable, "-P", "-s", "-c", _TESTER],
            stdin=given,
            stdout=passed,
            stderr=subprocess.DEVNULL,
            cwd=folder,
            env={"PYTHONHASHSEED": "0"},
            start_new_session=True,
        )
        try:
            _wait(process.pid, timeout_s=timeout_s, memory_bytes=memory_bytes)
        finally:
            process_tree.end(process.pid)
            process.wait()
        passed.seek(0)
        return len({line for line in passed.read().splitlines() if line}) / len(tests)


# What the new Python runs. The code is run by its fork, so that there is one to whom what the code
# has started is left, and who can be killed with it: it stops when the fork has ended. The fork
# keeps its output for itself: nothing that the code prints counts, and neither does an exit code.
_TESTER = """\
import ctypes, json, os, random, signal, sys, types

def main():
    code, tests = json.load(sys.stdin)
    passed = os.dup(1)
    nowhere = os.open(os.devnull, os.O_RDWR)
    os.dup2(nowhere, 0)
    os.dup2(nowhere, 1)
    sys.stdin = open(0, closefd=False)
    random.seed(0)
    module = sys.modules["answer"] = types.ModuleType("answer")
    me = os.getpid()
    exec(compile(code, "answer.py", "exec"), module.__dict__)
    for number, test in enumerate(tests):
        try:
            exec(compile(test, f"test {number}", "exec"), module.__dict__)
        except BaseException:
            continue
        if os.getpid() == me:
            os.write(passed, f"{number}\\n".encode())

ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER
tester = os.fork()
if tester:
    os.waitpid(tester, 0)
    os.kill(os.getpid(), signal.SIGSTOP)
os.setpgid(0, 0)
try:
    main()
finally:
    os._exit(0)
"""


def _wait(pid: int, *, timeout_s: float, memory_bytes: int) -> None:
    """Wait until a child has stopped, has ended or has reached a limit."""
    pause_s = 0.001
    end = time.monotonic() + timeout_s
    look = time.monotonic() + _LOOK_S
    while not process_tree.has_stopped(pid) and time.monotonic() < end:
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _LOOK_S / 5)
        if time.monotonic() >= look:
            tree = process_tree.members(pid, process_tree.processes())
            pids = [pid, *(process.pid for process in tree)]
            if process_tree.used_bytes(pids, limit_bytes=memory_bytes) > memory_bytes:
                return
            look = time.monotonic() + _LOOK_S


# --------------------------------------------------------------------------------------------------
# What they read


def _known(column: str, row: Mapping[str, object]) -> str:
    """Return the name of a column that the row has."""
    if column in row:
        return column
    there = ", ".join(f"`{name}`" for name in row) or "none"
    raise DataError(
        f"the row has no column `{column}`; it has {there}",
        hint="name one of them by `column`",
    )


def _kind(value: object) -> str:
    """Return what a value is, in the words of JSON."""
    if isinstance(value, list):
        return "a list of " + (" and ".join(sorted({_kind(one) for one in value})) or "nothing")
    kinds = {str: "a text", bool: "true or false", int: "a number", float: "a number"}
    words = kinds.get(type(value), "null" if value is None else "an object")
    return "an empty text" if isinstance(value, str) and not value.strip() else words


def _concluded(answer: str) -> str:
    """Return what follows a block of `<think>`; nothing if that has not ended."""
    _, _, after = answer.rpartition("</think>")
    return "" if "<think>" in after else after.strip()


def _last_number(text: str) -> Decimal | None:
    found = _NUMBER.findall(text.replace("\N{MINUS SIGN}", "-"))
    return Decimal(re.sub(r"[$,]", "", found[-1])) if found else None


# --------------------------------------------------------------------------------------------------
# What is checked before a run

SHIPPED: Mapping[str, Callable[..., float]] = {
    "exact_match": exact_match,
    "format": format,
    "unit_tests": unit_tests,
}
_KINDS: Mapping[str, tuple[type[object], ...]] = {
    "column": (str,),
    "number": (bool,),
    "pattern": (str,),
    "timeout_s": (int, float),
    "memory_bytes": (int,),
}


def check_options(
    name: str, options: Mapping[str, object], *, timeout_s: float, memory_bytes: int
) -> None:
    """Check the values of a shipped function's options.

    Args:
        name: The function's.
        options: Those that are given; their names are known to be the function's.
        timeout_s: The limit of one answer.
        memory_bytes: The limit of the process.

    Raises:
        ConfigError: A value is of another type, no regular expression, or not below the limit.
    """
    at = f"objective.rewards: {name}"
    for option, value in options.items():
        kinds = _KINDS[option]
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            raise ConfigError(
                f"{at} has `{option}: {value!r}`",
                limit=f"it is of type {' or '.join(kind.__name__ for kind in kinds)}",
                hint=f"give `{option}` another value",
            )
    if name == "format":
        try:
            re.compile(str(options["pattern"]), re.DOTALL)
        except re.error as error:
            raise ConfigError(
                f"{at} has a `pattern` that is no regular expression: {error}",
                limit="it is one of Python's `re`",
                hint="correct it; in YAML, single quotes keep backslashes as they are",
            ) from error
    if name == "unit_tests":
        time_s, used = options.get("timeout_s", _TEST_S), options.get("memory_bytes", _TEST_BYTES)
        assert isinstance(time_s, int | float)
        assert isinstance(used, int)
        if not 0 < time_s <= timeout_s - _START_S or not 0 < used < memory_bytes:
            raise ConfigError(
                f"{at} has `timeout_s: {time_s:g}` and `memory_bytes: {used}` for the code, and"
                f" {timeout_s:g} s and {memory_bytes} bytes for itself",
                limit="code at its limits gets 0.0, so they are above 0 and below the function's,"
                f" by {_START_S:g} s",
                hint=f"give the function {time_s + _START_S:g} s and more than {used} bytes, or the"
                " code less",
            )
        if unit_tests("", "", {"tests": "pass"}, timeout_s=_CHECK_S) != 1:
            raise ConfigError(
                f"{at} cannot start {sys.executable} without environment variables",
                limit="code is tested so",
                hint="use a Python that runs by `env -i`, such as one of a virtual environment",
            )
