"""What is said of long work, and how often."""

import pytest

from finetune.report.screen import (
    NUM_LINES,
    StepLines,
    WorkLines,
    shown_memory,
    shown_work,
    sparkline,
)
from offload.plan.machine.machine import GIB


def lines_of(*, seconds: float, num_parameters: int) -> list[str]:
    """Return what is said while 10 GiB are loaded."""
    shown: list[str] = []
    times = iter(seconds * i / num_parameters for i in range(num_parameters + 1))

    def say(event: str, text: str, **_fields: object) -> None:
        assert event == "progress"
        shown.append(text)

    lines = WorkLines(say, "Loading weights", "bytes", clock=lambda: next(times))
    for number in range(1, num_parameters + 1):
        lines(number * 10 * GIB // num_parameters, 10 * GIB)
    return shown


def test_long_work_without_a_terminal_is_a_line_each_tenth() -> None:
    shown = lines_of(seconds=500, num_parameters=5000)
    assert len(shown) == NUM_LINES
    assert shown[0] == "Loading weights: 1.00 of 10.00 GiB, 21 MB/s, ETA 450 s"
    assert shown[-1] == "Loading weights: 10.00 of 10.00 GiB, 21 MB/s, ETA 0 s"


def test_work_of_hours_is_a_line_each_minute() -> None:
    shown = lines_of(seconds=7200, num_parameters=50_000)
    assert 110 <= len(shown) <= 135
    assert shown[0] == "Loading weights: 0.08 of 10.00 GiB, 1 MB/s, ETA 7,140 s"
    assert shown[-1] == "Loading weights: 10.00 of 10.00 GiB, 1 MB/s, ETA 0 s"


def test_short_work_says_little_or_nothing() -> None:
    assert lines_of(seconds=4, num_parameters=5000) == []
    assert len(lines_of(seconds=12, num_parameters=5000)) == 2


def test_work_of_unknown_end_is_a_line_soon_and_then_each_minute() -> None:
    shown, now_s = [], 0.0

    def say(event: str, text: str, **_fields: object) -> None:
        shown.append(text)

    lines = WorkLines(say, "Tokenising a.csv", "rows", clock=lambda: now_s)
    for second in range(1, 131):
        now_s = float(second)
        lines(100 * second, None)
    assert shown == [
        f"Tokenising a.csv: {100 * second:,} rows, 100 rows/s" for second in (5, 65, 125)
    ]


def step_lines(*, num_steps: int, seconds: float, is_each: bool = False) -> list[str]:
    """Return what is said of steps that take so long each."""
    shown: list[str] = []
    now_s = 0.0

    def say(event: str, text: str, **_fields: object) -> None:
        assert event == "step"
        shown.append(text)

    lines = StepLines(say, clock=lambda: now_s, done=0, total=num_steps, is_each=is_each)
    for step in range(1, num_steps + 1):
        now_s += seconds
        rate = 1000 / seconds
        lines.advance({"step": step, "loss": 1.5, "num_tokens": 1000, "tokens_per_s": rate})
    return shown


def test_steps_without_a_terminal_are_lines_and_the_last_is_always_there() -> None:
    shown = step_lines(num_steps=200, seconds=1.0)
    assert len(shown) == NUM_LINES
    assert shown[0] == "step 20/200, loss 1.5000, 1,000 tokens/s, ETA 180 s"
    assert shown[-1] == "step 200/200, loss 1.5000, 1,000 tokens/s, ETA 0 s"
    assert step_lines(num_steps=20, seconds=0.1) == [
        "step 20/20, loss 1.5000, 10,000 tokens/s, ETA 0 s"
    ]
    assert len(step_lines(num_steps=1000, seconds=30.0)) == 500  # each minute
    assert len(step_lines(num_steps=20, seconds=0.1, is_each=True)) == 20


def test_rows_are_counted_as_rows() -> None:
    assert shown_work(500, 2_000, "rows", seconds=2.0) == "500 of 2,000 rows, 250 rows/s, ETA 6 s"
    assert shown_work(5_000, None, "rows", seconds=2.0) == "5,000 rows, 2,500 rows/s"


def test_a_rate_is_said_once_it_means_something() -> None:
    assert shown_work(5, 2_000, "rows", seconds=0.1) == "5 of 2,000 rows"
    assert shown_work(0, 4 * GIB, "bytes", seconds=9.0) == "0.00 of 4.00 GiB"


def test_losses_are_blocks_from_the_highest_to_the_lowest() -> None:
    assert sparkline([]) == ""
    assert sparkline([3.0]) == "\u2581"
    assert sparkline([7.0, 0.0, 3.5]) == "\u2588\u2581\u2585"
    falling = sparkline([float(x) for x in range(10_000, 0, -1)])
    assert len(falling) == 24
    assert list(falling) == sorted(falling, reverse=True)
    assert sparkline([7.0, 0.0], is_ascii=True) == "@_"
    assert sparkline([7.0, float("nan"), 0.0, float("inf")], is_ascii=True) == "@?_?"


@pytest.mark.parametrize(
    ("used", "text"),
    [
        ({}, ""),
        ({"ram_held": GIB}, "RAM 1.0 GiB"),
        ({"ram_held": GIB, "ram_free": 2 * GIB}, "RAM 1.0 GiB (2.0 free)"),
        (
            {"gpu_used": GIB, "gpu_total": 8 * GIB, "ram_held": GIB},
            "GPU 1.0 of 8.0 GiB, RAM 1.0 GiB",
        ),
    ],
)
def test_memory_is_shown_as_far_as_it_is_known(used: dict[str, int], text: str) -> None:
    assert shown_memory(used) == text
