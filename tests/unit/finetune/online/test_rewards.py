"""Rewards by functions that behave and by functions that do not."""

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from finetune.errors import ConfigError
from finetune.objectives.grpo import Reward
from finetune.online.rewards import Answered, Given, Rewards

GIB = 2**30


def spec(function: str = "rewards.py", *, weight: float = 1.0, **values: Any) -> Reward:
    limits: dict[str, Any] = {"timeout_s": 30.0, "memory_gib": 1.0, "options": {}}
    return Reward(function=function, weight=weight, **(limits | values))


def asked(*answers: str, **row: object) -> list[Answered]:
    return [Answered(prompt="p", answer=answer, row=row) for answer in answers]


def running(pid: int) -> bool:
    """Return whether a process is there that has not ended."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return text.rpartition(")")[2].split()[0] not in "ZX"


def descendants(pid: int) -> set[int]:
    """Return those of a process as the system lists them."""
    found = set()
    for file in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in map(int, file.read_text().split()):
            found |= {child, *descendants(child)}
    return {one for one in found if running(one)}


@pytest.fixture(autouse=True)
def nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    before = descendants(os.getpid())
    yield
    assert descendants(os.getpid()) <= before
    assert not any(folder.iterdir())


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    def written(text: str, name: str = "rewards.py") -> Path:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(textwrap.dedent(text))
        return tmp_path

    return written


def rewards(folder: Path, *specs: Reward, num_workers: int = 1, **values: Any) -> Rewards:
    return Rewards(specs or (spec(),), folder=folder, num_workers=num_workers, **values)


def given(folder: Path, *specs: Reward, answers: list[Answered]) -> list[Given]:
    with rewards(folder, *specs) as one:
        return one.of(answers)


# --------------------------------------------------------------------------------------------------
# Functions that behave


def test_values_are_in_order_and_their_weighted_sum_is_the_reward(write) -> None:
    folder = write("""
        def reward(prompt, answer, row):
            return len(answer) + row["more"]

        def half(prompt, answer, row, *, of):
            return of / 2
    """)
    specs = (spec(weight=2.0), spec("rewards.py:half", weight=-0.5, options={"of": 3}))
    found = given(folder, *specs, answers=asked("a", "ab", "", more=10))
    assert found == [
        Given(values=(11.0, 1.5), failures=(), total=21.25),
        Given(values=(12.0, 1.5), failures=(), total=23.25),
        Given(values=(10.0, 1.5), failures=(), total=19.25),
    ]


DRAWS = """
import random, time
{imports}

def reward(prompt, answer, row):
    time.sleep(random.random() / 100)
    return random.random() + {draws} + hash(answer) % 7

def fails(prompt, answer, row):
    if int(answer) % 3 == 0:
        raise ValueError(answer)
    return random.gauss(0, 1)
"""


@pytest.mark.parametrize(
    ("imports", "draws"),
    [
        ("", "0"),
        pytest.param("import numpy", "numpy.random.rand()", marks=pytest.mark.slow),
        pytest.param("import torch", "torch.rand(()).item()", marks=pytest.mark.slow),
    ],
)
def test_neither_the_number_of_workers_nor_a_new_start_changes_a_bit(
    write, imports: str, draws: str
) -> None:
    folder = write(DRAWS.format(imports=imports, draws=draws))
    answers = asked(*map(str, range(12)))
    specs = (spec(), spec("rewards.py:fails"))
    with rewards(folder, *specs) as one:
        alone = one.of(answers)
        assert alone == one.of(answers[:6]) + one.of(answers[6:])
    with rewards(folder, *specs, num_workers=2) as several:
        assert several.of(answers) == alone
    assert len({one.values for one in alone}) == 12
    assert [one.failures for one in alone[:2]] == [
        ("rewards.py:fails raised ValueError: 0 (line 11)",),
        (),
    ]


def test_a_function_sees_its_folder_what_is_beside_it_and_texts_of_any_kind(write) -> None:
    write("FACTOR = 3\n", "sub/helper.py")
    folder = write(
        """
        import pathlib, pickle, sys
        import helper

        class Kept:
            pass

        def reward(prompt, answer, row):
            assert pickle.loads(pickle.dumps(Kept)) is Kept
            assert pathlib.Path("sub/helper.py").exists()
            assert answer == "\\ud800 \\U0001f600\\n\\0" and row == {"a": [1, None, {"b": "\\xe4"}]}
            return helper.FACTOR
        """,
        "sub/rewards.py",
    )
    answer = asked("\ud800 \U0001f600\n\0", a=[1, None, {"b": "\xe4"}])
    assert given(folder, spec("sub/rewards.py"), answers=answer)[0].total == 3
    assert not list(folder.rglob("__pycache__"))


def test_progress_counts_answers_and_not_functions(write) -> None:
    folder = write("def reward(p, a, r): return 1")
    seen: list[tuple[int, int]] = []
    with rewards(folder, spec(), spec(), num_workers=2) as one:
        one.of(asked("a", "b", "c"), lambda done, of: seen.append((done, of)))
        assert one.of([]) == []
    assert seen == [(1, 3), (2, 3), (3, 3)]


@pytest.mark.thorough
def test_a_large_row_goes_through(write) -> None:
    folder = write("def reward(p, a, r): return len(r['text'])")
    with rewards(folder, num_workers=2) as one:
        found = one.of(asked("a", "b", "c", text="x" * 3_000_000))
    assert [one.total for one in found] == [3_000_000] * 3


def test_a_value_may_be_any_real_number(write) -> None:
    values = "7, 7.0, numpy.float32(7), numpy.int64(7), fractions.Fraction(7)"
    folder = write(f"import numpy, fractions\ndef reward(p, a, r): return ({values})[int(a)]")
    assert [one.values for one in given(folder, answers=asked(*"01234"))] == [(7.0,)] * 5


# --------------------------------------------------------------------------------------------------
# Functions that do not

ONE = "and not one finite number"
LATE = "took longer than 1 s"
KILLED = "was ended by SIGKILL, as the system does when memory is short"
CLOSED = "ended its process, or closed its pipes"
SURVIVED = {
    "raise ValueError('no\\n good')": "raised ValueError: no good (line N)",
    "assert answer == row": "raised AssertionError (line N)",
    "json.loads('{')": "raised JSONDecodeError: *(line N)",
    "raise type('Odd', (Exception,), {'__str__': lambda self: 1 / 0})()": "raised Odd (line N)",
    "raise KeyError('x' * 10**6)": f"raised KeyError: '{'x' * 199} (line N)",
    "return globals()[answer](prompt, answer, row)": "raised RecursionError: *(line N)",
    "raise KeyboardInterrupt": "raised KeyboardInterrupt (line N)",
    "sys.exit(3)": "raised SystemExit: 3 (line N)",
    "sys.stdin.read(); return int(input())": "raised EOFError: *(line N)",
    "return float('nan')": f"returned nan, {ONE}",
    "return -float('inf')": f"returned -inf, {ONE}",
    "return 1e39": f"returned 1e+39, {ONE}",
    "return 10**400": f"returned a value of type int, {ONE}",
    "return None": f"returned None, {ONE}",
    "return True": f"returned True, {ONE}",
    "return '1'": f"returned a value of type str, {ONE}",
    "return [1.0]": f"returned 1 values, of type list, {ONE}",
    "return 1.0, 2.0": f"returned 2 values, of type tuple, {ONE}",
    "return {'a': 1}": f"returned a value of type dict, {ONE}",
    "return 1j": f"returned a value of type complex, {ONE}",
    "return (x for x in 'ab')": f"returned a value of type generator, {ONE}",
}
ENDED = {
    "os._exit(0)": "ended its process with exit code 0",
    "os.kill(os.getpid(), 9)": KILLED,
    "time.sleep(99)": LATE,
}
MORE_ENDED = {
    "os.kill(os.getppid(), 9); time.sleep(9)": CLOSED,
    "os.killpg(0, 9); time.sleep(9)": KILLED,
    "signal.setitimer(0, 0.1); time.sleep(9)": "was ended by SIGALRM",
    "ctypes.string_at(1)": "was ended by SIGSEGV",
    "while True: pass": LATE,
    "re.fullmatch('(a+)+', 'a' * 50 + 'b')": LATE,  # which lets no other thread run
    "[signal.signal(one, signal.SIG_IGN) for one in (1, 2, 15)]; time.sleep(99)": LATE,
    "os.kill(os.getpid(), signal.SIGSTOP)": LATE,
    "os.closerange(0, 256); return 1.0": "ended its process with exit code 1",
    "write_to_pipes(b'5\\n'); return 1.0": CLOSED,
    "write_to_pipes(b'{\\n'); time.sleep(9)": CLOSED,
}
FILE = """import ctypes, fcntl, json, os, random, re, signal, subprocess, sys, threading, time
{cases}
def reward(prompt, answer, row):
    return globals()[answer](prompt, answer, row) if answer in globals() else float(answer)

def write_to_pipes(line):
    for name in os.listdir("/proc/self/fd"):
        try:
            if fcntl.fcntl(int(name), fcntl.F_GETFL) & os.O_WRONLY:
                os.write(int(name), line)
        except OSError:
            pass
"""


def matches(text: str, pattern: str) -> bool:
    start, star, end = pattern.partition("*")
    return text.startswith(start) and text.endswith(end) if star else text == pattern


@pytest.mark.parametrize(
    ("cases", "timeout_s"),
    [(SURVIVED, 30.0), (ENDED, 1.0), pytest.param(MORE_ENDED, 1.0, marks=pytest.mark.slow)],
)
def test_a_bad_function_fails_for_its_answer_alone(
    write, cases: dict[str, str], timeout_s: float
) -> None:
    text = "".join(
        f"def case_{n}(prompt, answer, row):\n    {code}\n" for n, code in enumerate(cases)
    )
    folder = write(FILE.format(cases=text))
    answers = [answer for n in range(len(cases)) for answer in (f"case_{n}", str(n))]
    with rewards(folder, spec(timeout_s=timeout_s), num_workers=2) as one:
        found = one.of(asked(*answers))
    for n, failure in enumerate(cases.values()):
        bad, good = found[2 * n : 2 * n + 2]
        assert good == Given(values=(n,), failures=(), total=n)
        assert (bad.values, bad.total, len(bad.failures)) == ((None,), None, 1)
        wanted = f"rewards.py:reward {failure}".replace("line N", f"line {2 * n + 3}")
        assert matches(bad.failures[0], wanted), bad.failures[0]


def test_a_row_that_is_not_json_fails_for_each_function(write) -> None:
    folder = write("def reward(p, a, r): return 1.0")
    answers = asked("a", of={1}) + asked("b")
    found = given(folder, spec(), spec("format", options={"pattern": "b"}), answers=answers)
    words = "cannot be sent its row: Object of type set is not JSON serializable"
    assert found == [
        Given(
            values=(None, None),
            failures=(f"rewards.py:reward {words}", f"format {words}"),
            total=None,
        ),
        Given(values=(1.0, 1.0), failures=(), total=2.0),
    ]


def test_a_function_of_much_memory_is_ended(write) -> None:
    folder = write("""
        import os, time
        kept = bytearray(2**20)

        def reward(prompt, answer, row):
            if answer == "own":
                mine = b"x" * 2**27
            if answer == "child":
                if os.fork() == 0:
                    os.setsid()
                    mine = b"x" * 2**27
                    time.sleep(99)
                time.sleep(99)
            if answer == "shared":  # a page that several have counts once
                mine = b"x" * 40 * 2**20
                for _ in range(4):
                    if os.fork() == 0:
                        time.sleep(99)
            time.sleep(0.3)
            return 1.0
    """)
    one = spec(memory_gib=100 / 1024)
    found = given(folder, one, answers=asked("", "own", "child", "shared", ""))
    assert [one.total for one in found] == [1.0, None, None, 1.0, 1.0]
    for failed in (found[1], found[2]):
        (shown,) = failed.failures
        assert shown.startswith("rewards.py:reward used 0.1"), shown
        assert shown.endswith("of memory, and 100.0 MiB is its limit")


def test_what_a_function_prints_or_closes_does_not_reach_the_answers(write, capfd) -> None:
    folder = write("""
        import os, sys

        def reward(prompt, answer, row):
            print('{"value": 5.0}', flush=True)
            print("hm", file=sys.stderr)
            os.write(1, b"x" * 50 * 2**20)
            os.system("echo hm")
            sys.stdout.close()
            sys.stdin.close()
            os.closerange(0, 3)
            return 2.0
    """)
    assert given(folder, answers=asked("a"))[0].total == 2.0
    assert capfd.readouterr() == ("", "")


FORKS = """
import os, subprocess, time
from pathlib import Path

def begun():
    number = os.getpid()
    (Path("pids") / str(number)).touch()

def reward(prompt, answer, row):
    if os.fork() == 0:  # leaves the group
        os.setpgid(0, 0)
        begun()
        time.sleep(99)
    if os.fork() == 0:  # leaves the session
        os.setsid()
        begun()
        time.sleep(99)
    if os.fork() == 0:  # and loses its parent too, as a daemon does
        os.setsid()
        if os.fork() == 0:
            begun()
            time.sleep(99)
        os._exit(0)
    if os.fork() == 0:  # goes on with the worker's own loop
        begun()
        return 5.0
    while len(os.listdir("pids")) < 4:
        time.sleep(0.01)
    if answer == "ends":
        os._exit(1)
    if answer == "waits":
        Path("waits").touch()
        time.sleep(99)
    return 1.0
"""


@pytest.mark.parametrize(
    ("answer", "failure"),
    [
        pytest.param("", None, marks=pytest.mark.thorough),
        pytest.param("ends", "ended its process with exit code 1", marks=pytest.mark.thorough),
        ("waits", "took longer than 2 s"),
    ],
)
def test_what_a_function_has_started_ends_with_it(write, answer: str, failure: str | None) -> None:
    folder = write(FORKS)
    (folder / "pids").mkdir()
    with rewards(folder, spec(timeout_s=2.0)) as one:
        (found,) = one.of(asked(answer))
        pids = [int(file.name) for file in (folder / "pids").iterdir()]
        assert len(pids) == 4
        if failure is None:
            assert found.total == 1.0
        else:
            assert found.failures == (f"rewards.py:reward {failure}",)
            assert not any(map(running, pids))
    assert not any(map(running, pids))


ALONE = """
import sys, tempfile
tempfile.tempdir = sys.argv[1] + "/temporary"
from pathlib import Path
from finetune.objectives.grpo import Reward
from finetune.online.rewards import Answered, Rewards

spec = Reward(
    function="rewards.py", weight=1.0, timeout_s=60.0, memory_gib=1.0, options={}
)
with Rewards([spec], folder=Path(sys.argv[1]), num_workers=1) as rewards:
    rewards.of([Answered(prompt="", answer="waits", row={})])
"""


def wait_for(condition: Callable[[], bool], *, limit_s: float = 20) -> None:
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.mark.parametrize(
    "number", [signal.SIGKILL, pytest.param(signal.SIGINT, marks=pytest.mark.thorough)]
)
def test_nothing_is_left_of_a_run_that_is_killed(write, number: signal.Signals) -> None:
    folder = write(FORKS)
    (folder / "pids").mkdir()
    run = subprocess.Popen([sys.executable, "-c", ALONE, str(folder)], stderr=subprocess.DEVNULL)
    wait_for((folder / "waits").exists)
    all_of_it = descendants(run.pid)  # guard, worker, and what that has started
    run.send_signal(number)
    run.wait()
    assert len(all_of_it) in (5, 6)
    wait_for(lambda: not any(map(running, all_of_it)))
    assert not any(running(int(file.name)) for file in (folder / "pids").iterdir())


def test_an_interrupt_ends_all_processes_and_the_next_call_begins_anew(write) -> None:
    folder = write("""
        import time

        def reward(prompt, answer, row):
            time.sleep(float(answer))
            return 1.0
    """)
    with rewards(folder, num_workers=2) as one:
        before = descendants(os.getpid())
        threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            one.of(asked("0", "60", "60"))
        assert descendants(os.getpid()) == before
        assert one.of(asked("0"))[0].total == 1.0

        def stop(done: int, of: int) -> None:
            raise InterruptedError

        with pytest.raises(InterruptedError):
            one.of(asked("0", "60"), stop)
        assert descendants(os.getpid()) == before


def test_a_worker_that_is_killed_between_answers_is_no_failure(write) -> None:
    folder = write("""
        import os

        def reward(prompt, answer, row):
            return os.getpid()
    """)
    before = descendants(os.getpid())
    with rewards(folder) as one:
        (first,) = one.of(asked("a"))
        assert first.total is not None
        pid = int(first.total)
        os.kill(pid, signal.SIGKILL)
        wait_for(lambda: descendants(os.getpid()) <= before)
        (second,) = one.of(asked("a"))
        assert second.failures == ()
        assert second.total != first.total


@pytest.mark.thorough
def test_a_function_that_cannot_be_imported_again_fails_for_its_answer(write) -> None:
    folder = write("""
        import os
        if os.path.exists("dies"):
            os.kill(os.getpid(), 9)
        if os.path.exists("raises"):
            raise OSError("not now")

        def reward(prompt, answer, row):
            if answer:
                open(answer, "w")
                os._exit(0)
            return 1.0
    """)
    with rewards(folder) as one:
        assert one.of(asked(""))[0].total == 1.0
        for name, why in (
            ("dies", f"rewards.py:reward {KILLED} as it was imported"),
            ("raises", "rewards.py cannot be imported: it raised OSError: not now (line 6)"),
        ):
            assert one.of(asked(name))[0].total is None
            (failed,) = one.of(asked(""))
            (folder / name).unlink()
            start = "rewards.py:reward could not be imported again: objective.rewards: "
            assert failed.failures == (start + why,)
            assert one.of(asked(""))[0].total == 1.0


# --------------------------------------------------------------------------------------------------
# What is checked before a run

REFUSED: dict[str, tuple[str | None, dict[str, Any], str]] = {
    "no file": (None, {}, "rewards.py: No such file or directory"),
    "no module": (
        "import os\nimport not_there\n",
        {},
        "rewards.py cannot be imported: it raised ModuleNotFoundError: No module named 'not_there'"
        " (line 2)",
    ),
    "no syntax": (
        "def reward(p, a, r):\n    return 1 +\n",
        {},
        "rewards.py cannot be imported: it raised SyntaxError: invalid syntax (line 2)",
    ),
    "a null": ("\0", {}, "rewards.py cannot be imported: it raised "),
    "exits": ("exit()", {}, "rewards.py cannot be imported: it raised SystemExit: None (line 1)"),
    "dies": (
        "import os; os._exit(1)",
        {},
        "rewards.py:reward ended its process with exit code 1 as it was imported",
    ),
    "hangs": (
        "import time; time.sleep(99)",
        {},
        "rewards.py:reward took longer than 3 s as it was imported",
    ),
    "another name": (
        "import re\ndef length(p, a, r): pass\ndef _own(): pass\nclass Other: pass",
        {},
        "rewards.py has no function `reward`; it has `length`, `Other`",
    ),
    "no function": ("reward = 1", {}, "rewards.py has no function `reward`; it has none"),
    "two parameters": (
        "def reward(prompt: str, answer) -> float: pass",
        {},
        "rewards.py:reward(prompt, answer) cannot be called: too many positional arguments; it is"
        " called with (prompt, answer, row), and with its `options` by name",
    ),
    "one that is missing": (
        "def reward(p, a, r, *, least): pass",
        {},
        "rewards.py:reward(p, a, r, *, least) cannot be called: missing a required ",
    ),
    "one that is not known": (
        "def reward(p, a, r, *, least=1): pass",
        {"options": {"most": 2}},
        "rewards.py:reward(p, a, r, *, least=1) cannot be called: got an unexpected keyword"
        " argument 'most'",
    ),
    "asynchronous": (
        "async def reward(p, a, r): pass",
        {},
        "rewards.py:reward(p, a, r) cannot be called: it returns a coroutine, and no number",
    ),
    "no such name": (
        "",
        {"function": "exact_macth"},
        "exact_macth is no reward function; it is a file of Python, or one of exact_match, format,"
        " unit_tests",
    ),
    "a date": (
        "",
        {"options": {"since": {1}}},
        "the options of rewards.py cannot be sent: Object of type set is not JSON serializable",
    ),
    "an option's kind": (
        "",
        {"function": "exact_match", "options": {"number": "yes"}},
        "exact_match has `number: 'yes'`; it is of type bool",
    ),
    "an option that is none": (
        "",
        {"function": "exact_match", "options": {"colum": "a"}},
        "exact_match(prompt, answer, row, *, column='answer', number=False) cannot be called: got"
        " an unexpected keyword argument 'colum'",
    ),
    "no pattern": (
        "",
        {"function": "format"},
        "format(prompt, answer, row, *, pattern) cannot be called: missing a required ",
    ),
    "a pattern": (
        "",
        {"function": "format", "options": {"pattern": "a("}},
        "format has a `pattern` that is no regular expression: missing ), unterminated subpattern"
        " at position 1",
    ),
    "less time": (
        "",
        {"function": "unit_tests", "timeout_s": 5.5},
        "unit_tests has `timeout_s: 5` and `memory_bytes: 536870912` for the code, and 5.5 s and"
        " 1073741824 bytes for itself; code at its limits gets 0.0, so they are above 0 and below"
        " the function's, by 1 s",
    ),
}


DEFAULT = ("no file", "no module", "two parameters", "no such name", "a pattern")


@pytest.mark.parametrize(
    "case",
    [pytest.param(one, marks=() if one in DEFAULT else pytest.mark.slow) for one in REFUSED],
)
def test_what_cannot_be_called_is_refused_before_the_run(write, tmp_path: Path, case: str) -> None:
    text, values, what = REFUSED[case]
    if text is not None:
        write(text)
    with pytest.raises(ConfigError) as raised:
        rewards(tmp_path, spec(**values), start_timeout_s=3.0 if case == "hangs" else 60.0).check()
    shown = f"{raised.value}".partition("\n\nhint: ")
    assert f"objective.rewards: {what}" in shown[0].replace(f"{tmp_path}/", "")
    assert shown[2]


@pytest.mark.thorough
def test_all_problems_are_reported_at_once(write) -> None:
    folder = write("def two(prompt, answer): pass")
    specs = [spec(), spec("format", options={"pattern": "."}), spec("rewards.py:two")]
    with pytest.raises(ConfigError) as raised:
        rewards(folder, *specs).check()
    shown = str(raised.value)
    assert shown.startswith(
        "2 problems of rewards\n\nobjective.rewards: rewards.py has no function"
    )
    assert "\n\nobjective.rewards: rewards.py:two(prompt, answer) cannot be called" in shown


# --------------------------------------------------------------------------------------------------
# Changes


def test_a_changed_file_is_another_digest_and_other_values_with_the_next_run(write) -> None:
    write("VALUE = 1\n", "helper.py")
    text = "import helper\ndef reward(p, a, r, *, more=0): return {} * helper.VALUE + more\n"
    folder = write(text.format(1))
    with rewards(folder) as one:
        first = one.digest()
        assert one.of(asked("a"))[0].total == 1
        write(text.format(2))  # of the same length, within the same second
        assert one.digest() == first
        one.close()
        assert one.of(asked("a"))[0].total == 1, "a run goes on with what it has begun with"
    with rewards(folder) as one:
        assert one.of(asked("a"))[0].total == 2


@pytest.mark.thorough
def test_a_digest_is_of_the_files_options_and_weights(write) -> None:
    write("VALUE = 1\n", "helper.py")
    text = "import helper\ndef reward(p, a, r, *, more=0): return {}\n"
    digests = [rewards(write(text.format(1))).digest()]
    folder = write(text.format(2))
    digests.append(rewards(folder).digest())
    write("VALUE = 3\n", "helper.py")
    digests.append(rewards(folder).digest())
    digests.append(rewards(folder, spec(weight=2.0)).digest())
    digests.append(rewards(folder, spec(options={"more": 1})).digest())
    assert len(set(digests)) == 5
    assert rewards(folder, spec(timeout_s=5.0, memory_gib=0.5)).digest() == digests[2]
    moved = folder / "moved"
    moved.mkdir()
    for name in ("rewards.py", "helper.py"):
        (moved / name).write_text((folder / name).read_text())
    assert rewards(folder, spec("moved/rewards.py")).digest() == digests[2]


@pytest.mark.thorough
def test_what_a_file_imports_may_not_change_within_a_run(write) -> None:
    write("VALUE = 1\n", "helper.py")
    folder = write("import helper, os\ndef reward(p, a, r): return os._exit(1) if a else 1\n")
    with rewards(folder) as one:
        assert [found.total for found in one.of(asked("", "dies"))] == [1.0, None]
        write("VALUE = 2\n", "helper.py")
        with pytest.raises(ConfigError, match=r"what rewards\.py:reward imports has changed"):
            one.of(asked(""))


def test_a_worker_imports_no_torch(write) -> None:
    folder = write("""
        import sys

        def reward(prompt, answer, row):
            return len({"torch", "numpy", "pydantic"} & set(sys.modules))
    """)
    assert given(folder, answers=asked("a"))[0].total == 0
