import json
import stat
from dataclasses import replace
from pathlib import Path

import pytest

from finetune.errors import CheckpointError
from finetune.report.plan import plan_json
from finetune.report.prediction import (
    SEAL,
    changes,
    read_predictions,
    require_unchanged,
    write_prediction,
)
from offload.plan.plan import Plan, with_costs
from tests.unit.finetune.report.sealed import forge, tiny_plan


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
