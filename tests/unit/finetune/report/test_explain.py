"""A run's prediction and what became of it."""

import json
import stat
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from finetune.errors import CheckpointError
from finetune.report.explain import compared, details_of, draw, explain, shown_layers
from finetune.report.memory import memory_rows
from finetune.report.plan import plan_json
from finetune.report.prediction import (
    SEAL,
    changes,
    read_predictions,
    require_unchanged,
    with_timeline,
    write_prediction,
)
from finetune.report.rows import as_text
from finetune.training.report import metrics_row
from offload.plan.plan import Plan, with_costs
from tests.unit.finetune.report.made_up import (
    NUM_STEPS,
    exact,
    predict,
    record,
    write_rows,
    write_run,
)
from tests.unit.finetune.report.sealed import forge, tiny_plan


def shown(folder: Path, *, is_brief: bool = False, width: int = 140) -> str:
    console, found = Console(width=width), explain(folder)
    details = [] if is_brief else details_of(found)
    with console.capture() as capture:
        console.print(as_text([*compared(found), *details], is_compact=is_brief))
    return capture.get()


def test_the_parts_of_the_miss_are_the_miss(tmp_path: Path) -> None:
    write_run(tmp_path, slow_s=[1.0] * 5)
    (section,) = explain(tmp_path).sections
    assert {miss.name: miss.difference_s for miss in section.misses if miss.difference_s} == {
        "backward": 1.0,
        "outside the pass": 0.125,
        "data wait": 0.0625,
    }
    assert section.misses[0].layers == (2,)
    assert sum(miss.difference_s for miss in section.misses) == (
        section.wall_s - section.predicted_s
    )
    step = section.comparison[0]
    assert step.measured == step.predicted + 1.125
    assert section.wall_s == step.measured + 0.0625
    assert section.bound_s <= step.predicted
    text = shown(tmp_path)
    assert "+1.00 s compute (backward) (mostly layers 2)" in text
    assert "step took 1.19 s longer than predicted" in text


def test_a_run_that_others_disturbed_says_so_before_it_blames_a_part(tmp_path: Path) -> None:
    write_run(tmp_path, slow_s=[0.0, 4.0, 1.0, 8.0, 0.5, 6.0])
    (section,) = explain(tmp_path).sections
    assert section.is_disturbed
    assert section.load_per_cpu is None
    text = shown(tmp_path)
    assert text.index("This run was disturbed") < text.index("a step took")
    assert (
        f"steps of one size differ by {section.spread_frac:.0%} (p20 to p80). It explains" in text
    )


def test_a_busy_machine_is_a_disturbance_and_steps_of_other_lengths_are_none(
    tmp_path: Path,
) -> None:
    def changed(**values: float) -> None:
        rows = [json.loads(line) for line in metrics.read_text().splitlines()]
        metrics.write_text("".join(json.dumps(row | values) + "\n" for row in rows))

    metrics = tmp_path / "metrics.jsonl"
    write_run(tmp_path, slow_s=[1.0, 1.0, 1.1, 1.0, 1.0])
    assert not explain(tmp_path).sections[0].is_disturbed
    assert "disturbed" not in shown(tmp_path)
    changed(load_per_cpu=0.9)  # its own threads
    assert not explain(tmp_path).sections[0].is_disturbed
    changed(load_per_cpu=4.0)
    assert "with 4.0 runnable processes per processor. It" in " ".join(shown(tmp_path).split())
    metrics.write_text("")
    (tmp_path / "of lengths").mkdir()
    promised = write_run(tmp_path / "of lengths", slow_s=[])
    rows = [0.0, 4.0, 1.0, 8.0, 0.5, 6.0]
    write_rows(tmp_path / "of lengths", promised, slow_s=rows)
    file = tmp_path / "of lengths" / "metrics.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    for line in lines:  # a step is as long as its rows
        line["num_tokens"] = round(1000 * line["phases_s"]["step"])
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    (section,) = explain(tmp_path / "of lengths").sections
    assert section.spread_frac < 0.01
    assert not section.is_disturbed


def test_the_comparison_breaks_no_word_at_80_columns(tmp_path: Path) -> None:
    write_run(tmp_path, slow_s=[0.5] * 5)
    lines = shown(tmp_path, width=80).splitlines()
    (header,) = [line for line in lines if "lane" in line and "phase" in line]
    assert header.split() == ["lane", "phase", "predicted", "measured", "error", "p20", "p80"]
    (row,) = [line for line in lines if line.split()[:3] == ["head", "and", "loss"] and "%" in line]
    assert "compute" not in row  # a lane is named once


def test_outliers_are_left_out_and_the_spread_is_shown(tmp_path: Path) -> None:
    slow_s = [8.0, 1.0, 1.25, 1.5, 1.75, 2.0, 2.25, 2.5, 2.75, 16.0]
    write_run(tmp_path, slow_s=slow_s)
    (section,) = explain(tmp_path).sections
    step = section.comparison[0]
    base = step.predicted + 0.125
    middle = sorted(slow_s)[2:8]
    assert section.pace.num_middle == 6
    assert step.measured == base + sum(middle) / 6
    assert (step.p20, step.p50, step.p80) == (base + 1.5, base + 2.0, base + 2.75)
    assert not step.is_within_spread
    assert step.error == pytest.approx(step.predicted / step.measured - 1)
    assert sum(miss.difference_s for miss in section.misses) == pytest.approx(
        section.wall_s - section.predicted_s, abs=1e-9
    )


def test_an_error_below_the_noise_is_shown_as_such(tmp_path: Path) -> None:
    write_run(tmp_path, slow_s=[-0.5, -0.25, 0.0, 0.25, 0.5])
    (section,) = explain(tmp_path).sections
    assert section.comparison[0].is_within_spread
    text = shown(tmp_path)
    assert "(-2%)" in text
    assert "is within the spread of the steps themselves" in text


def test_a_run_that_was_stopped_is_explained_as_far_as_it_went(tmp_path: Path) -> None:
    write_run(tmp_path, slow_s=[1.0, 1.0])
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "lo')  # what a kill leaves
    found = explain(tmp_path)
    assert (found.num_done, found.num_steps) == (2, NUM_STEPS)
    assert found.measured_step is None
    assert found.memory == ()
    assert "2 of 12 steps are done; `--resume` runs the others" in shown(tmp_path)
    for drawing in draw(tmp_path, found):
        assert drawing.stat().st_size > 1000
        assert "measured" not in drawing.read_text()


def test_steps_are_held_to_the_prediction_that_was_there_before_them(tmp_path: Path) -> None:
    write_run(tmp_path, slow_s=[0.0] * 3)
    plan = exact(tiny_plan())
    slower = with_costs(plan, replace(plan.costs, optimizer_s=2.5))
    second = predict(tmp_path, slower, first_step=2)
    write_rows(tmp_path, second, slow_s=[0.0] * 2, first=4)
    found = explain(tmp_path)
    assert [(s.prediction, s.steps, s.pace.num_steps) for s in found.sections] == [
        (1, (1, 3), 3),
        (2, (4, 5), 2),
    ]
    first, later = (section.comparison[0] for section in found.sections)
    assert later.predicted == first.predicted + 2.0
    assert first.measured == later.measured
    assert found.changes == ()


def test_a_changed_prediction_is_said_first_and_the_steps_are_still_compared(
    tmp_path: Path,
) -> None:
    promised = write_run(tmp_path, slow_s=[0.0] * 3)
    assert f"unchanged since before step 1: SHA-256 {promised.seal[:12]}" in shown(tmp_path)
    forge(tmp_path / "predicted.json", '"optimizer": 0.5', '"optimizer": 0.6')
    found = explain(tmp_path)
    assert len(found.changes) == 1
    assert [section.pace.num_steps for section in found.sections] == [3]
    assert found.to_json()["changes"]
    text = shown(tmp_path)
    assert text.startswith("PREDICTION CHANGED: 3 steps were run after")
    assert "unchanged" not in text


def test_steps_that_loaded_more_than_planned_are_told(tmp_path: Path) -> None:
    promised = write_run(tmp_path, slow_s=[0.0] * 3)
    cold = replace(record(promised.plan), num_loads=promised.plan.schedule.num_loads + 2)
    row = metrics_row(cold, step=4, data_wait_s=0.0, seal=promised.seal)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\n")
    assert "1 of 4 steps loaded more than planned" in shown(tmp_path)


def test_a_run_without_steps_and_a_folder_without_a_run_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"holds no predicted\.json; .*\n\nhint: name the "):
        explain(tmp_path)
    write_run(tmp_path, slow_s=[])
    with pytest.raises(CheckpointError, match=r"holds no step; .*\n\nhint: `sluice finetune .*"):
        explain(tmp_path)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda row: row.pop("loss"), "loss is missing"),
        (lambda row: row.update(step="1"), 'step is "1"'),
        (lambda row: row["phases_s"].pop("stall"), "should name stall"),
        (lambda row: row["phases_s"].update(step=0.0), "should have a step above 0"),
        (lambda row: row["phases_s"].update(h2d=float("inf")), "phases_s.h2d is Infinity"),
        (lambda row: row["parts_s"].update(other=1.0), "should name no other"),
    ],
)
def test_a_damaged_step_is_named_by_its_line_and_no_later_one_is_dropped(
    change: Callable[[dict[str, Any]], object], why: str, tmp_path: Path
) -> None:
    """Rows after a line that was damaged were passed over in silence (#16)."""
    write_run(tmp_path, slow_s=[0.0] * 3)
    file = tmp_path / "metrics.jsonl"
    lines = file.read_text().splitlines(keepends=True)
    row = json.loads(lines[1])
    change(row)
    file.write_text("".join((lines[0], json.dumps(row) + "\n", lines[2])))
    with pytest.raises(CheckpointError, match=r"metrics\.jsonl:2 cannot be read: ") as caught:
        explain(tmp_path)
    assert why in caught.value.what
    file.write_text("".join((lines[0], lines[1], lines[2][:-9])))
    assert explain(tmp_path).num_done == 2
    file.write_text("".join((lines[0], lines[1], lines[2][:-1])))
    assert explain(tmp_path).num_done == 3


def test_a_damaged_measurement_is_named(tmp_path: Path) -> None:
    write_run(tmp_path, slow_s=[0.0])
    (tmp_path / "measured.json").write_text('{"step": 1,')
    with pytest.raises(
        CheckpointError, match=r"measured\.json cannot be read: .*\n\nhint: remove it"
    ):
        explain(tmp_path)


def test_the_measured_step_is_drawn_below_the_predicted_one(tmp_path: Path) -> None:
    promised = write_run(tmp_path, slow_s=[1.0] * 3)
    own = record(promised.plan, slow_layer_s=1.0)
    content = {
        "step": 3,
        SEAL: promised.seal,
        "step_s": own.step_s,
        "optimizer_s": own.optimizer_s,
        "bound_s": 4.5,
        "device": "cpu",
        "device_name": "a processor",
        "peak_bytes": 1000,
        "memory": [],
    }
    (tmp_path / "measured.json").write_text(with_timeline(content, own.timeline))
    found = explain(tmp_path)
    assert found.measured_step is not None
    assert found.measured_step.timeline.step_s == found.predicted.step_s + 1.0
    gantt, trace = draw(tmp_path, found)
    assert gantt.read_text().index(">predicted: ") < gantt.read_text().index(">measured, step 3: ")
    names = [
        e["args"]["name"]
        for e in json.loads(trace.read_text())["traceEvents"]
        if e["name"] == "process_name"
    ]
    assert names == ["predicted", "measured"]
    assert f"Step 3 took {own.step_s:.2f} s: {4.5 / own.step_s:.0%} of the R3" in shown(tmp_path)


def test_the_summary_compares_the_step_and_peaks_and_says_where_they_differ(
    tmp_path: Path,
) -> None:
    promised = write_run(tmp_path, slow_s=[1.0] * NUM_STEPS)
    step_s = record(promised.plan, slow_layer_s=1.0).step_s
    content = {
        "step": NUM_STEPS,
        SEAL: promised.seal,
        "step_s": step_s,
        "optimizer_s": 0.5,
        "bound_s": 4.5,
        "device": "cpu",
        "device_name": "a processor",
        "peak_bytes": 2**30,
        "memory": [],
    }
    timeline = record(promised.plan).timeline
    (tmp_path / "measured.json").write_text(with_timeline(content, timeline))
    title, header, step, memory, *words = shown(tmp_path, is_brief=True).splitlines()
    assert title.startswith("Predicted from timed steps against measured (mean of the middle 8")
    assert header.split() == ["predicted", "measured", "error", "p20", "p80"]
    assert step.split()[3:5] == [f"{step_s:.2f}", "s"]
    assert memory.split()[:2] == ["peak", "memory"]
    assert memory.split()[4:6] == ["1,024.0", "MiB"]
    assert words[0] == "15 tokens/s in the same steps, all waits included"
    assert words[1].startswith("With its wait for data a step took 1.19 s longer than predicted")
    assert "+1.00 s compute (backward) (mostly layers 2)" in "".join(words)


def test_the_summary_leaves_out_no_warning(tmp_path: Path) -> None:
    write_run(tmp_path, slow_s=[0.0, 4.0, 1.0, 8.0, 0.5, 6.0])
    forge(tmp_path / "predicted.json", '"optimizer": 0.5', '"optimizer": 0.6')
    lines = shown(tmp_path, is_brief=True).splitlines()
    assert lines[0].startswith("PREDICTION CHANGED: 6 steps were run after")
    assert "6 of 12 steps are done; `--resume` runs the others" in lines
    assert any(line.startswith("This run was disturbed") for line in lines)


def test_layers_are_written_as_ranges() -> None:
    assert shown_layers((0, 1, 2, 5, 7, 8)) == "0-2, 5, 7-8"
    assert shown_layers(()) == ""
    assert shown_layers(tuple(range(0, 20, 2))) == "0, 2, 4, 6, 8, 10, ..."


# ------------------------------------------------------------------------------------------ memory

PLANNED: dict[str, dict[str, dict[str, int]]] = {
    "predicted": {
        "device_memory": {
            "slots": 400,
            "adapters": 40,
            "kept layer inputs": 60,
            "one visit: gradients": 40,
            "fragmentation": 20,
            "context": 500,
        },
        "host_memory": {"slab": 1000, "loading": 100, "data workers": 300, "process": 600},
        "limit_bytes": {"VRAM": 24_000, "RAM": 64_000},
    }
}
FOUND = [
    {"name": "slots", "num_bytes": 400, "how": "allocated", "is_on_host": False},
    {"name": "adapters", "num_bytes": 50, "how": "tensors", "is_on_host": False},
    {"name": "slab", "num_bytes": 1000, "how": "resident pages", "is_on_host": True},
    {"name": "staging", "num_bytes": 64, "how": "resident pages", "is_on_host": True},
]


def test_on_a_card_memory_is_compared_by_term_and_what_is_left_together() -> None:
    measured = {
        "device": "cuda",
        "peak_bytes": 570,
        "peak_reserved_bytes": 600,
        "peak_host_bytes": 1764,
        "memory": FOUND,
    }
    rows = {row.name: row for row in memory_rows(PLANNED, "formula", measured)}
    assert {name: (row.predicted, row.measured) for name, row in rows.items()} == {
        "peak allocated VRAM": (540, 570),
        "slots": (400, 400),
        "adapters": (40, 50),
        "layer inputs, one visit, head chunk": (100, 120),
        "fragmentation": (20, 30),
        "peak host memory": (1700, 1764),
        "slab": (1000, 1000),
        "process, libraries, loading": (700, 700),
        "staging": (None, 64),
        "context": (500, None),
        "data workers": (300, None),
    }
    assert rows["adapters"].error == pytest.approx(-0.2)
    assert rows["context"].error is None
    assert rows["staging"].error is None
    assert "not in the plan" in rows["staging"].how
    assert "not measured" in rows["data workers"].how
    assert {row.grade for name, row in rows.items() if name != "staging"} == {"formula"}
    assert {name: row.limit for name, row in rows.items() if row.limit is not None} == {
        "peak allocated VRAM": 24_000,
        "peak host memory": 64_000,
    }


def test_on_a_cpu_all_of_it_is_one_memory() -> None:
    measured = {
        "device": "cpu",
        "device_name": "a processor",
        "peak_bytes": 2800,
        "peak_reserved_bytes": None,
        "peak_host_bytes": 2800,
        "memory": FOUND,
    }
    rows = memory_rows(PLANNED, "traced", measured)
    found = {row.name: (row.predicted, row.measured) for row in rows}
    assert found["peak memory"] == (2760, 2800)
    assert found["libraries, layer inputs, one visit, head chunk"] == (1320, 2800 - 1514)
    assert found["data workers"] == (300, None)
    assert "fragmentation" not in found
    assert {row.name for row in rows if row.grade == "traced"} == {
        "peak memory",
        "libraries, layer inputs, one visit, head chunk",
    }
    planned = sum(row.predicted or 0 for row in rows[1:] if row.measured is not None)
    assert planned == rows[0].predicted  # no term is counted twice or left out
    assert [row.limit for row in rows if row.limit is not None] == [64_000]
    before = {**PLANNED, "predicted": {**PLANNED["predicted"]}}
    del before["predicted"]["limit_bytes"]  # as runs of older versions were planned
    assert all(row.limit is None for row in memory_rows(before, "traced", measured))


# --------------------------------------------------------------------------------------- prediction


def calibrated(optimizer_s: float = 0.5) -> Plan:
    first = tiny_plan()
    return with_costs(first, replace(first.costs, grade="calibrated", optimizer_s=optimizer_s))


def write(folder: Path, *, optimizer_s: float = 0.5, first_step: int = 0) -> str:
    return write_prediction(
        folder,
        calibrated(optimizer_s),
        priced=plan_json(tiny_plan()),
        steps=(first_step, 10),
        choice={"choice": {"num_slots": 2}},
    )


def rows(seal: str, count: int = 3) -> list[dict]:
    return [{"step": number, SEAL: seal} for number in range(1, count + 1)]


def test_a_prediction_is_read_only_and_read_back_whole(tmp_path: Path) -> None:
    seal = write(tmp_path)
    mode = (tmp_path / "predicted.json").stat().st_mode
    assert not mode & (stat.S_IWUSR | stat.S_IWGRP | stat.S_IWOTH)
    (found,) = read_predictions(tmp_path)
    assert (found.number, found.sha256, found.previous_sha256) == (1, seal, None)
    assert (found.first_step, found.num_steps) == (0, 10)
    assert found.timeline == calibrated().predict()
    assert found.calibrated["grade"] == "calibrated"
    assert found.before_measuring["grade"] == "spec"
    assert changes(tmp_path, rows(seal)) == []
    require_unchanged(tmp_path, rows(seal))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"grade": "calibrated"', '"grade": "probed"'),
        ('"end_s": ', '"end_s": 1'),  # of the timeline, in the same file
        ('"num_steps": 10', '"num_steps":  10'),  # a blank is enough
    ],
)
def test_a_change_behind_the_steps_is_seen(old: str, new: str, tmp_path: Path) -> None:
    seal = write(tmp_path)
    forge(tmp_path / "predicted.json", old, new)
    (change,) = changes(tmp_path, rows(seal))
    assert change.startswith(f"3 steps were run after a prediction with SHA-256 {seal[:12]}")
    with pytest.raises(
        CheckpointError, match=r"a prediction was changed: 3 steps .*\n\nhint: restore"
    ):
        require_unchanged(tmp_path, rows(seal))


def test_a_prediction_that_is_taken_away_is_missed(tmp_path: Path) -> None:
    seal = write(tmp_path)
    (tmp_path / "predicted.json").unlink()
    assert "none of the files here has" in changes(tmp_path, rows(seal))[0]
    with pytest.raises(CheckpointError, match=r"holds no predicted\.json; .*\n\nhint: name"):
        read_predictions(tmp_path)


def test_rows_that_lose_their_seal_are_seen(tmp_path: Path) -> None:
    seal = write(tmp_path)
    assert changes(tmp_path, [*rows(seal), {"step": 4}]) == ["1 steps name no prediction"]


def test_a_resumed_run_keeps_the_first_prediction_and_adds_its_own(tmp_path: Path) -> None:
    first = write(tmp_path)
    before = (tmp_path / "predicted.json").read_bytes()
    second = write(tmp_path, optimizer_s=0.75, first_step=2)
    third = write(tmp_path, optimizer_s=0.25, first_step=2)
    assert (tmp_path / "predicted.json").read_bytes() == before
    found = read_predictions(tmp_path)
    assert [p.number for p in found] == [1, 2, 3]
    assert [p.previous_sha256 for p in found] == [None, first, second]
    assert [p.first_step for p in found] == [0, 2, 2]
    mixed = [*rows(first, 2), {"step": 3, SEAL: third}]
    assert changes(tmp_path, mixed) == []


def test_a_later_prediction_holds_the_first_one_too(tmp_path: Path) -> None:
    """Rows of the first start may all have been dropped: it ended before its first checkpoint."""
    write(tmp_path)
    second = write(tmp_path, optimizer_s=0.75)
    assert changes(tmp_path, rows(second)) == []
    forge(tmp_path / "predicted.json", "calibrated", "calibrateD")
    assert changes(tmp_path, rows(second)) == [
        "predicted.json is not what predicted-2.json was written after"
    ]
    (tmp_path / "predicted.json").unlink()
    assert changes(tmp_path, rows(second)) == [
        "predicted.json is not what predicted-2.json was written after"
    ]
    write(tmp_path)  # never in the place of another
    names = sorted(file.name for file in tmp_path.glob("predicted*"))
    assert names == ["predicted-2.json", "predicted-3.json"]


def test_tenth_and_later_starts_keep_their_order(tmp_path: Path) -> None:
    seals = [write(tmp_path, optimizer_s=number / 8) for number in range(1, 12)]
    assert [p.sha256 for p in read_predictions(tmp_path)] == seals
    assert changes(tmp_path, rows(seals[-1])) == []


@pytest.mark.parametrize("text", ["", "[]", '{"calibrated": 1}', '"x"'])
def test_what_is_no_prediction_is_said_to_be_none(text: str, tmp_path: Path) -> None:
    (tmp_path / "predicted.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"predicted\.json cannot be read: .*\n\nhint: "):
        read_predictions(tmp_path)


def test_a_file_that_is_called_like_one_in_the_making_is_kept(tmp_path: Path) -> None:
    partial = tmp_path / "partial-predicted.json"
    partial.write_text("{")
    partial.chmod(0o444)
    seal = write(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {partial.name, "predicted.json"}
    assert partial.read_text() == "{"
    assert json.loads((tmp_path / "predicted.json").read_text())["first_step"] == 0
    assert changes(tmp_path, rows(seal)) == []
