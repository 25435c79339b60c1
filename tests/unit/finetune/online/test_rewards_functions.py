"""The reward functions that are shipped."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from finetune.errors import DataError
from finetune.objectives.grpo import Reward
from finetune.online import functions
from finetune.online.functions import exact_match, unit_tests
from finetune.online.rewards import Answered, Rewards


@pytest.mark.parametrize(
    ("answer", "expected", "value"),
    [
        ("Paris", "Paris", 1.0),
        (" \nParis\n", "Paris ", 1.0),
        ("paris", "Paris", 0.0),
        ("Paris.", "Paris", 0.0),
        ("<think>London</think>\nParis", "Paris", 1.0),
        ("hm, London</think>Paris", "Paris", 1.0),  # the prompt may have opened the block
        ("<think>a</think>b<think>c</think>Paris", "Paris", 1.0),
        ("<think>Paris", "Paris", 0.0),
        ("Paris<think>London</think>", "Paris", 0.0),
        ("<think>Paris</think>", "Paris", 0.0),
        ("42", 42, 1.0),
        ("42.0", 42, 0.0),
    ],
)
def test_an_answer_matches_exactly(answer: str, expected: object, value: float) -> None:
    assert exact_match("", answer, {"answer": expected}) == value
    assert exact_match("", answer, {"city": expected, "answer": "x"}, column="city") == value


@pytest.mark.parametrize(
    ("answer", "expected", "value"),
    [
        ("The answer is 42.", "so it is\n#### 42", 1.0),
        ("#### 1,234,567", "1234567", 1.0),
        ("it costs $1,234.50.", 1234.5, 1.0),
        ("-$5", "-5", 1.0),
        ("$-5", "-5", 1.0),
        ("\N{MINUS SIGN}5", "-5", 1.0),
        ("10-5", "5", 1.0),
        ("from 3 to -4", "-4", 1.0),
        ("(-4)", "-4", 1.0),
        ("one of 1,2,3", "3", 1.0),
        ("1,23", "23", 1.0),
        (r"\boxed{42}", "42", 1.0),
        ("**42**%", "42", 1.0),
        ("42km", "42", 1.0),
        ("42 of x2 and H2O", "42", 1.0),
        (".5", "0.50", 1.0),
        ("0.1", "0.10000000000000001", 0.0),
        ("1e3", "1000", 1.0),
        ("2.5e-1 ", "0.25", 1.0),
        ("007", "7", 1.0),
        ("9007199254740993", "9007199254740992", 0.0),
        ("42 or 43", "42", 0.0),
        ("none", "42", 0.0),
        ("", "42", 0.0),
        ("<think>42</think> 43", "42", 0.0),
        ("<think>43</think> 42", "42", 1.0),
        ("<think>42", "42", 0.0),
    ],
)
def test_the_last_numbers_are_compared_by_value(
    answer: str, expected: object, value: float
) -> None:
    assert exact_match("", answer, {"answer": expected}, number=True) == value


@pytest.mark.parametrize(
    ("row", "options", "what"),
    [
        ({"a": 1, "b": 2}, {}, "the row has no column `answer`; it has `a`, `b`"),
        ({}, {"column": "x"}, "the row has no column `x`; it has none"),
        ({"answer": None}, {}, "the row's column `answer` is null"),
        ({"answer": True}, {}, "the row's column `answer` is true or false"),
        ({"answer": ["a", 1]}, {}, "the row's column `answer` is a list of a number and a text"),
        ({"answer": {}}, {}, "the row's column `answer` is an object"),
        ({"answer": "ten"}, {"number": True}, "the row's column `answer` has no number: 'ten'"),
    ],
)
def test_a_row_without_an_answer_is_an_error(row: dict, options: dict, what: str) -> None:
    with pytest.raises(DataError) as raised:
        exact_match("", "a", row, **options)
    assert raised.value.what == what


@pytest.mark.parametrize(
    ("answer", "value"),
    [
        ("<think>a\nb</think>c", 1.0),
        ("<think></think>c", 1.0),
        ("<think>a</think>", 0.0),
        (" <think>a</think>c", 0.0),
        ("<think>a</think>c\n", 0.0),
    ],
)
def test_a_pattern_is_of_the_whole_answer(answer: str, value: float) -> None:
    assert functions.format("", answer, {}, pattern=r"<think>.*</think>[a-z]") == value


# --------------------------------------------------------------------------------------------------
# Unit tests

ADD = "Here:\n```python\ndef add(a, b):\n    return a + b\n```\nThat is all."
TESTS = ["assert add(1, 2) == 3", "assert add(2, 2) == 5", "assert add('a', 'b') == 'ab'", "add(1)"]


def value_of(answer: str, *tests: str, **options: Any) -> float:
    return unit_tests("", answer, {"tests": list(tests)}, **options)


@pytest.fixture(autouse=True)
def no_folder_is_left(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    yield
    assert not list(folder.iterdir())


def test_the_value_is_the_share_of_tests_that_pass() -> None:
    assert value_of(ADD, *TESTS) == 0.5
    assert unit_tests("", ADD, {"t": TESTS[0]}, column="t") == 1.0
    assert unit_tests("", ADD, {"tests": "\n".join(TESTS)}) == 0.0
    assert value_of("def add(a, b): return a + b", *TESTS) == 0.5
    assert value_of("```\nbad(\n```\nbetter:\n" + ADD, *TESTS) == 0.5
    assert value_of(ADD + "\n```py\ndef add(a, b): return 5\n```", *TESTS) == 0.25
    assert value_of("1. So:\n   ```py\n   x = 1\n   ```", "assert x == 1") == 1.0
    assert value_of('````\ns = """\n```\n"""\n````', "assert s.strip() == '```'") == 1.0


@pytest.mark.parametrize(
    "code",
    [
        "def add(",
        "import sys; sys.exit(0)",
        "import os; os._exit(0)",
        "import os; os.kill(os.getpid(), 9)",
        "import os; os.kill(os.getppid() if False else 0, 9)",
        "raise SystemExit",
        "x = input()",
        "import not_there",
        "for n in range(9): print(n)",
        "import sys\nfor n in range(9): print(n, file=sys.__stdout__, flush=True)",
        "import os; os.write(1, b'0\\n1\\n2\\n')",
        "import ctypes; ctypes.string_at(1)",
    ],
)
def test_code_that_crashes_or_pretends_gets_nothing(code: str) -> None:
    assert value_of(code, "assert add(1, 2) == 3") == 0.0


def test_what_follows_a_crash_or_a_limit_does_not_pass() -> None:
    assert value_of("", "pass", "import os; os._exit(0)", "pass", "pass") == 0.25
    start = time.monotonic()
    assert value_of("", "pass", "while True: pass", "pass", "pass", timeout_s=0.5) == 0.25
    assert value_of("import time; time.sleep(99)", "pass", timeout_s=0.3) == 0.0
    filled = "import time; kept = b'x' * 2**28; time.sleep(99)"
    assert value_of(filled, "pass", memory_bytes=2**27, timeout_s=60.0) == 0.0
    assert time.monotonic() - start < 30


def test_code_has_neither_files_nor_variables_nor_what_it_has_started_left(tmp_path: Path) -> None:
    code = f"""
import os, pathlib, subprocess, sys, time
assert os.listdir() == []
assert set(os.environ) <= {{"PYTHONHASHSEED", "LC_CTYPE"}}, os.environ
assert sys.stdin.read() == ""
assert os.getcwd() not in sys.path and "" not in sys.path
def daemon():
    os.setsid()
    if os.fork():
        os._exit(0)
open("left", "w").write("x" * 100)
for leave in (lambda: None, os.setsid, lambda: os.setpgid(0, 0), daemon):
    if os.fork() == 0:
        leave()
        pathlib.Path({str(tmp_path)!r}, str(os.getpid())).write_text("")
        time.sleep(99)
while len(os.listdir({str(tmp_path)!r})) < 5:
    time.sleep(0.01)
"""
    assert value_of(code, "pass", timeout_s=20.0) == 1.0
    pids = [file.name for file in tmp_path.iterdir() if file.name.isdecimal()]
    assert len(pids) == 4
    stats = [Path(f"/proc/{pid}/stat") for pid in pids]
    assert not [
        s for s in stats if s.exists() and s.read_text().rpartition(")")[2].split()[0] != "Z"
    ]


def test_what_code_draws_and_hashes_is_the_same_each_time() -> None:
    drawn = "import random; drawn = random.random(), hash('a')"
    assert value_of(drawn, "raise SystemExit", "assert drawn == (random.random(), 0)") == 0.0
    values = {value_of(drawn, *(f"assert hash('a') % 97 == {n}" for n in range(97))) for _ in "abc"}
    assert values == {1 / 97}
    assert value_of(drawn, "assert drawn[0] == 0.8444218515250481") == 1.0  # of seed 0


@pytest.mark.parametrize(
    ("row", "what"),
    [
        ({"test": "pass"}, "the row has no column `tests`; it has `test`"),
        ({"tests": []}, "the row's column `tests` is a list of nothing"),
        ({"tests": " "}, "the row's column `tests` is an empty text"),
        ({"tests": ["pass", 1]}, "the row's column `tests` is a list of a number and a text"),
    ],
)
def test_a_row_without_tests_is_an_error(row: dict, what: str) -> None:
    with pytest.raises(DataError) as raised:
        unit_tests("", "", row)
    assert raised.value.what == what


# --------------------------------------------------------------------------------------------------
# In their processes


def test_shipped_functions_are_computed_by_their_names(tmp_path: Path) -> None:
    def spec(name: str, **options: object) -> Reward:
        return Reward(function=name, weight=1.0, timeout_s=30.0, memory_gib=1.0, options=options)

    specs = [spec("exact_match", number=True), spec("format", pattern="4."), spec("unit_tests")]
    answered = [
        Answered(prompt="", answer="42", row={"answer": "#### 42", "tests": "assert True"}),
        Answered(prompt="", answer="4", row={"answer": "42"}),
    ]
    with Rewards(specs, folder=tmp_path, num_workers=2) as rewards:
        rewards.check()
        first, second = rewards.of(answered)
    assert first.values == (1.0, 1.0, 1.0)
    assert second.values == (0.0, 0.0, None)
    assert second.failures == (
        "unit_tests cannot judge: the row has no column `tests`; it has `answer`;"
        " name one of them by `column`",
    )
    assert not any((tmp_path / "temporary").iterdir())
