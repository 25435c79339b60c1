"""What is shown while weights are loaded, and of what they are."""

import io
from itertools import pairwise
from pathlib import Path

import pytest
from rich.console import Console
from transformers import AutoConfig

from finetune.report.screen import (
    NUM_LOADING_LINES,
    NUM_STEP_LINES,
    LoadingLines,
    Screen,
    StepLines,
)
from finetune.report.weights import inventory_table
from offload.plan.facts.weights import InventoryRow, WeightInventory
from offload.plan.machine.machine import GIB
from tests.checkpoints import loaded, write_checkpoint


def lines_of(*, seconds: float, num_parameters: int) -> list[str]:
    """Return what is printed while 10 GiB are loaded."""
    told: list[str] = []
    times = iter(seconds * i / num_parameters for i in range(num_parameters + 1))
    lines = LoadingLines(told.append, clock=lambda: next(times))
    for number in range(1, num_parameters + 1):
        lines(number * 10 * GIB // num_parameters, 10 * GIB)
    return told


def test_a_long_load_without_a_terminal_prints_a_line_each_tenth() -> None:
    told = lines_of(seconds=1000, num_parameters=5000)
    assert len(told) == NUM_LOADING_LINES
    assert told[0] == "Loading weights: 1.00 of 10.00 GiB, 11 MB/s, ETA 900 s"
    assert told[-1] == "Loading weights: 10.00 of 10.00 GiB, 11 MB/s, ETA 0 s"


def test_a_short_load_prints_little_or_nothing() -> None:
    assert lines_of(seconds=4, num_parameters=5000) == []
    assert len(lines_of(seconds=12, num_parameters=5000)) == 2


@pytest.mark.parametrize("is_terminal", [True, False])
def test_loading_shows_bytes_and_time_left(is_terminal: bool) -> None:
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=is_terminal, width=100)
    with Screen(console, is_verbose=False).loading() as on_put:
        on_put(GIB, 4 * GIB)
        on_put(4 * GIB, 4 * GIB)
    text = stream.getvalue()
    assert is_terminal == ("4.0/4.0 GiB" in text)
    assert is_terminal == ("ETA" in text)


def test_a_screen_that_is_not_heard_shows_nothing() -> None:
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True, quiet=True)
    with Screen(console, is_verbose=False).loading() as on_put:
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
    Console(file=stream, width=120).print(inventory_table(WeightInventory(rows=rows)))
    text = stream.getvalue()
    assert "5.0% of all parameters are stored encoded, 5.0% of the decoder layers' bytes" in text
    (line,) = [line for line in text.splitlines() if line.strip().startswith("experts")]
    assert line.split() == ["experts", "native", "95.00", "M", "95.0%"] + ["181.2", "MiB"] * 2


# ------------------------------------------------------------------------------------------ steps


def row(step: int, *, loss: float, seconds: float, **others: float) -> dict[str, float]:
    return {"step": step, "loss": loss, "num_tokens": 1000, "tokens_per_s": 1000 / seconds} | others


def step_lines(*, num_steps: int, seconds: float) -> list[str]:
    """Return what is printed of steps that take so long each."""
    told: list[str] = []
    now_s = 0.0
    lines = StepLines(told.append, clock=lambda: now_s, done=0, total=num_steps)
    for step in range(1, num_steps + 1):
        now_s += seconds
        lines.advance(row(step, loss=1.5, seconds=seconds))
    return told


def test_steps_without_a_terminal_are_lines_and_the_last_is_always_there() -> None:
    told = step_lines(num_steps=200, seconds=1.0)
    assert len(told) == NUM_STEP_LINES
    assert told[0] == "step 20/200, loss 1.5000, 1,000 tokens/s, ETA 180 s"
    assert told[-1] == "step 200/200, loss 1.5000, 1,000 tokens/s, ETA 0 s"
    assert step_lines(num_steps=20, seconds=0.1) == [
        "step 20/20, loss 1.5000, 10,000 tokens/s, ETA 0 s"
    ]
    assert len(step_lines(num_steps=1000, seconds=30.0)) == 500  # each minute


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_loss_on_held_out_rows_is_shown_where_it_is_taken(is_terminal: bool) -> None:
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=is_terminal, width=80)
    with Screen(console, is_verbose=False).steps(done=0, total=2) as steps:
        steps.advance(row(1, loss=2.0, seconds=1.0, eval_loss=1.25))
        shown_then = stream.getvalue()
        steps.advance(row(2, loss=1.0, seconds=1.0))
    assert "step 1: loss on held-out rows 1.2500" in shown_then
    assert is_terminal == ("\x1b" in stream.getvalue())
    assert max(map(len, stream.getvalue().splitlines())) <= 80 or is_terminal
