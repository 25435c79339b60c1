"""What is shown of runs: finished, written to, dead before a step, damaged."""

from pathlib import Path

import pytest

from finetune.errors import CheckpointError
from finetune.report.pages.run_page import NUM_SAMPLES
from finetune.run.metrics import line_of, read_rows
from finetune.run.run_lock import locked
from finetune.studio.runs import report_of, run_json, run_names, runs_json
from tests.unit.finetune.studio.runs_made import begun, write_answers, write_run


def line(folder: Path, name: str) -> dict[str, object]:
    found: dict[str, object] = next(r for r in runs_json(folder)["runs"] if r["name"] == name)
    return found


def test_a_run_that_died_before_its_first_step_reads_well(tmp_path: Path) -> None:
    begun(tmp_path / "dead")
    assert line(tmp_path, "dead")["state"] == "died before step 1"
    found = run_json(tmp_path, "dead")
    assert found["charts"] == {}
    assert "problem" not in found
    assert "The run has done no step yet." in report_of(tmp_path, "dead")


def test_a_run_that_is_written_to_shows_when_it_ends(tmp_path: Path) -> None:
    run = begun(tmp_path / "live")
    with locked(run):
        assert line(tmp_path, "live")["state"] == "starting"
        write_run(run, slow_s=[0.0] * 3)
        with (run / "metrics.jsonl").open("a") as file:  # a line that is half written
            file.write(line_of({"step": 4})[:7])
        now = line(tmp_path, "live")
        assert now["state"] == "training"
        assert (now["steps"], now["of"]) == (3, 12)
        rows = read_rows(run / "metrics.jsonl")
        each = rows[0]["phases_s"]["step"] + rows[0]["phases_s"]["data wait"]
        assert now["eta_s"] == pytest.approx(9 * each)
        points = run_json(tmp_path, "live")["charts"]["run-loss"]["data"]["values"]
        assert [point["step"] for point in points] == [1, 2, 3]
    assert line(tmp_path, "live")["state"] == "stopped"
    assert line(tmp_path, "live")["eta_s"] is None


def test_a_finished_run_says_so_and_those_of_a_sweep_are_found(tmp_path: Path) -> None:
    run = begun(tmp_path / "sweep" / "lr-1")
    write_run(run, slow_s=[0.0] * 2)
    (run / "adapter").mkdir()
    assert run_names(tmp_path) == ["sweep/lr-1"]
    assert line(tmp_path, "sweep/lr-1")["state"] == "finished"


def test_answers_are_there_as_soon_as_they_were_given(tmp_path: Path) -> None:
    run = begun(tmp_path / "run")
    assert run_json(tmp_path, "run")["samples"] == []
    write_answers(run, "before", *"abcdefg")
    first = {"prompt": "p0", "wanted": "w0", "before": "a", "after": None}
    assert run_json(tmp_path, "run")["samples"][0] == first
    assert len(run_json(tmp_path, "run")["samples"]) == NUM_SAMPLES
    write_answers(run, "after", *"xyzuvwt")
    samples = run_json(tmp_path, "run")["samples"]
    assert [(one["before"], one["after"]) for one in samples] == [
        *zip("abcde", "xyzuv", strict=True)
    ]
    (run / "samples_before.json").unlink()
    assert run_json(tmp_path, "run")["samples"][0] == first | {"before": None, "after": "x"}


def test_a_damaged_run_is_named_and_the_others_are_shown(tmp_path: Path) -> None:
    for name in ("whole", "torn"):
        write_run(begun(tmp_path / name), slow_s=[0.0] * 2)
    metrics = tmp_path / "torn" / "metrics.jsonl"
    metrics.write_text("no json\n" + metrics.read_text())
    assert line(tmp_path, "whole")["state"] == "stopped"
    assert line(tmp_path, "torn")["state"] == "damaged"
    for found in (line(tmp_path, "torn"), run_json(tmp_path, "torn")):
        assert "metrics.jsonl:1" in str(found["problem"])


def test_a_run_whose_metrics_are_no_file_is_named(tmp_path: Path) -> None:
    (begun(tmp_path / "odd") / "metrics.jsonl").mkdir()
    assert line(tmp_path, "odd")["state"] == "damaged"
    assert "metrics.jsonl" in run_json(tmp_path, "odd")["problem"]


def test_a_run_that_is_not_there_is_an_error_and_an_empty_folder_is_not(tmp_path: Path) -> None:
    assert runs_json(tmp_path / "none")["runs"] == []
    with pytest.raises(CheckpointError, match="'x' is no run of"):
        run_json(tmp_path, "x")
