"""What is shown while a command works."""

import io
import json
import re
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from rich.table import Table
from transformers import AutoConfig

from finetune.data.dataset import load_rows
from finetune.recipe.sections import DataSection
from finetune.report.choice import inventory_table
from finetune.report.data_view import Bin, histogram, printable, shortened
from finetune.report.format import shown_span
from finetune.report.rows import as_text
from finetune.report.screen import (
    NUM_LINES,
    Form,
    Screen,
    StepLines,
    WorkLines,
    shown_memory,
    shown_work,
    sparkline,
)
from offload.plan.facts.facts import InventoryRow, WeightInventory
from offload.plan.machine.machine import GIB
from tests.checkpoints import loaded, write_checkpoint
from tests.doubles import tiny_tokenizer


@pytest.mark.parametrize("is_terminal", [True, False])
def test_loading_shows_bytes_and_time_left(is_terminal: bool) -> None:
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=is_terminal, width=100)
    with Screen(console, is_verbose=False).working("Loading weights", "bytes") as on_put:
        on_put(GIB, 4 * GIB)
        on_put(4 * GIB, 4 * GIB)
    text = stream.getvalue()
    assert is_terminal == ("4.00 of 4.00 GiB" in text)
    assert "B/s" not in text  # too early for a rate


def test_a_screen_that_is_not_heard_shows_nothing() -> None:
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True, quiet=True)
    with Screen(console, is_verbose=False).working("Loading weights", "bytes") as on_put:
        on_put(1, 1)
    assert stream.getvalue() == ""


@pytest.mark.parametrize("tier", ["ram", "disk"])
def test_loading_tells_of_all_bytes_of_the_layers(
    tier: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    config = AutoConfig.for_model(
        "mixtral",
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        vocab_size=64,
    )
    write_checkpoint(tmp_path / "model", config)
    told: list[tuple[int, int]] = []
    found = loaded(
        tmp_path / "model",
        "ram" if tier == "ram" else "disk",
        "bfloat16",
        on_put=lambda done, total: told.append((done, total)),
    )
    layers = found.model.model.layers
    all_bytes = sum(parameter.nbytes for parameter in layers.parameters())
    assert len(told) == len(list(layers.parameters()))
    assert {total for _, total in told} == {all_bytes}
    assert told[-1] == (all_bytes, all_bytes)
    assert all(a < b for (a, _), (b, _) in pairwise(told))


def test_experts_that_are_left_as_they_are_show_in_the_table() -> None:
    rows = (
        InventoryRow(
            kind="attention",
            codec="nf4",
            is_in_layers=True,
            num_parameters=5_000_000,
            decoded_bytes=10_000_000,
            encoded_bytes=2_600_000,
        ),
        InventoryRow(
            kind="experts",
            codec="native",
            is_in_layers=True,
            num_parameters=95_000_000,
            decoded_bytes=190_000_000,
            encoded_bytes=190_000_000,
        ),
    )
    stream = io.StringIO()
    Console(file=stream, width=120).print(as_text(inventory_table(WeightInventory(rows=rows))))
    text = stream.getvalue()
    assert "5.0% of all parameters are stored encoded, 5.0% of the decoder layers' bytes" in text
    (line,) = [line for line in text.splitlines() if line.strip().startswith("experts")]
    assert line.split() == ["experts", "native", "95.00", "M", "95.0%"] + ["181.2", "MiB"] * 2


# ------------------------------------------------------------------------------------- tokenising


def tokenising(
    folder: Path, name: str = "rows.jsonl", *, is_terminal: bool, **settings: Any
) -> list[str]:
    """Return what a screen shows of 600 rows that are tokenised."""
    rows = [{"instruction": "q", "output": f"a{n}"} for n in range(600)]
    file = folder / name
    texts = [json.dumps(row) for row in rows]
    file.write_text("\n".join(texts) if file.suffix == ".jsonl" else f"[{','.join(texts)}]")
    stream = io.StringIO()
    is_quiet = settings.pop("is_quiet", False)
    console = Console(
        file=stream, force_terminal=is_terminal, width=80, color_system=None, quiet=is_quiet
    )
    screen = Screen(console, is_verbose=False, **settings)
    load_rows(
        DataSection(path=str(file)),
        tiny_tokenizer(),
        seq_len=100,
        seed=0,
        cache_dir=folder / "cache",
        working=screen.working,
    )
    return plain_lines(stream.getvalue())


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["rows.jsonl", "rows-of-a-very-long-name.json"])
def test_a_terminal_shows_a_bar_of_the_rows_that_are_tokenised(tmp_path: Path, name: str) -> None:
    lines = tokenising(tmp_path, name, is_terminal=True)
    assert max(map(len, lines)) <= 80
    assert lines[-1].startswith("Tokenising rows")
    is_known = name.endswith("jsonl")
    assert re.search(
        r"\u2501{9,} 600 of 600 rows" if is_known else r"\u2501{9,} 600 rows", lines[-1]
    )


@pytest.mark.thorough
def test_tokenising_is_lines_in_a_pipe_objects_in_json_and_nothing_if_quiet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert tokenising(tmp_path, is_terminal=False) == []  # it takes no time
    monkeypatch.setattr("finetune.report.screen.LINE_EVERY_S", 0.0)
    texts = [f"Tokenising rows.jsonl: {n} of 600 rows" for n in (250, 500, 600)]

    def fresh(name: str) -> Path:
        (tmp_path / name).mkdir()
        return tmp_path / name

    lines = tokenising(fresh("pipe"), is_terminal=False)
    assert all(re.match(r"\d\d:\d\d:\d\d Tokenising", line) for line in lines)
    assert [line[9:].partition(", ")[0] for line in lines] == texts
    events = [json.loads(s) for s in tokenising(fresh("json"), is_terminal=True, form="json")]
    assert [e["text"].partition(", ")[0] for e in events] == texts
    assert {(e["event"], e["unit"], e["total"]) for e in events} == {("progress", "rows", 600)}
    assert [e["done"] for e in events] == [250, 500, 600]
    assert tokenising(fresh("quiet"), is_terminal=True, is_quiet=True) == []


# ------------------------------------------------------------------------------------------- live


def row(step: int, *, loss: float = 2.0, **others: float) -> dict[str, float]:
    return {"step": step, "loss": loss, "num_tokens": 1000, "tokens_per_s": 1000.0} | others


def memory() -> dict[str, int]:
    return {"gpu_used": 18 * GIB, "gpu_total": 24 * GIB, "ram_held": 3 * GIB, "ram_free": 9 * GIB}


def shown(width: int, *, is_terminal: bool, form: Form = "text") -> list[str]:
    """Return what 12,000 steps show at the end, as a terminal would have it, and all lines else."""
    stream = io.StringIO()
    console = Console(
        file=stream,
        force_terminal=is_terminal,
        width=width,
        color_system=None,
        legacy_windows=False,
    )
    screen = Screen(console, is_verbose=False, form=form)
    with screen.steps(done=0, total=12_000, memory=memory) as steps:
        for step in range(11_990, 12_001):
            steps.advance(row(step, loss=12_001.0 - step, tokens_per_s=14_000.0))
        with screen.working("Evaluating", "rows") as progress:
            progress(150, 200)
        steps.advance(row(12_000, tokens_per_s=14_000.0, eval_loss=1.25))
    return plain_lines(stream.getvalue())


def plain_lines(text: str) -> list[str]:
    lines = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text).replace("\r", "\n")
    return [line.rstrip() for line in lines.splitlines() if line.strip()]


@pytest.mark.parametrize("width", [80, 120])
def test_a_terminal_shows_steps_losses_and_memory_in_two_lines_that_fit(width: int) -> None:
    lines = shown(width, is_terminal=True)
    assert max(map(len, lines)) <= width
    bar, below = lines[-2:]
    assert bar.startswith("step 12000/12000 ")
    assert bar.endswith("loss 2.0000, 14,000 tokens/s, ETA 0 s")
    losses, used = below.split("  ")
    assert used == "GPU 18.0 of 24.0 GiB, RAM 3.0 GiB (9.0 free)"
    assert losses[0] == "\u2588"  # the highest
    assert any(line.startswith("Evaluating") and "150 of 200 rows" in line for line in lines)
    assert "step 12000: loss on held-out rows 1.2500" in lines
    assert not any(line.startswith("Evaluating") for line in lines[-2:])  # it is over


def test_lines_of_a_pipe_begin_with_the_time() -> None:
    *_, step, evaluation = shown(80, is_terminal=False)
    assert re.fullmatch(r"\d\d:\d\d:\d\d step 12000/12000, loss 2.*, ETA 0 s", step)
    assert re.fullmatch(r"\d\d:\d\d:\d\d step 12000: loss on held-out rows 1.2500", evaluation)


@pytest.mark.parametrize("is_terminal", [True, False])
def test_json_logs_are_an_object_a_line_and_have_each_step(is_terminal: bool) -> None:
    events = [json.loads(line) for line in shown(40, is_terminal=is_terminal, form="json")]
    assert [e["step"] for e in events if e["event"] == "step"] == [*range(11_990, 12_001), 12_000]
    assert all(datetime.fromisoformat(e["time"]).tzinfo for e in events)
    first, last = events[0], events[-1]
    assert first["loss"] == 11.0
    assert first["memory_bytes"] == memory()
    assert first["total_steps"] == 12_000
    assert first["eta_s"] == pytest.approx(10 / 14)
    assert (last["event"], last["eval_loss"]) == ("evaluation", 1.25)


def test_json_logs_hold_notes_and_tables_whole() -> None:
    stream = io.StringIO()
    screen = Screen(Console(file=stream, width=40), is_verbose=False, form="json")
    table = Table()
    table.add_row("x" * 60)
    screen.show(table)
    screen.note("[brackets] and all of " + "a long line " * 10)
    shown, noted = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert (shown["event"], noted["event"]) == ("table", "note")
    assert "x" * 60 in shown["text"]
    assert noted["text"].startswith("[brackets] and all")


# ----------------------------------------------------------------------------------------- progress


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
    assert shown_work(3, 9, "rows", seconds=60.0) == "3 of 9 rows, 0.05 rows/s, ETA 120 s"
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


# ---------------------------------------------------------------------------------------- data view


@pytest.mark.parametrize(
    ("lengths", "bins"),
    [
        ([1], [(1, 1, 1)]),
        ([1, 2, 3], [(1, 1, 1), (2, 2, 1), (3, 3, 1)]),
        ([1, 11, 20], [(n, n + 1, 1 if n in (1, 11, 19) else 0) for n in range(1, 20, 2)]),
        ([21], [(n, min(n + 2, 21), int(n == 19)) for n in range(1, 21, 3)]),
    ],
)
def test_each_row_is_in_the_bin_of_its_length(
    lengths: list[int], bins: list[tuple[int, int, int]]
) -> None:
    expected = tuple(Bin(first=first, last=last, num_rows=num) for first, last, num in bins)
    assert histogram(lengths) == expected


def test_control_characters_are_written_out_and_others_are_left() -> None:
    assert (
        printable("a\x1b[1m\r\n\tb\x07\u00e9\u4e2d\u2028")
        == "a\\x1b[1m\\x0d\n\tb\\x07\u00e9\u4e2d\u2028"
    )


def test_a_long_text_keeps_its_beginning_and_its_end() -> None:
    assert shortened("a" * 400) == "a" * 400
    text = shortened("a" * 300 + "b" * 300)
    assert text == "a" * 200 + " [... 200 characters ...] " + "b" * 200


@pytest.mark.parametrize(("low", "high", "text"), [(9, 9, "9"), (9, 1200, "9 to 1,200")])
def test_counts_that_are_all_one_are_written_as_one(low: int, high: int, text: str) -> None:
    assert shown_span(low, high) == text
