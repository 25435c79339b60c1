"""What is shown of runs: finished, written to, dead before a step, damaged."""

import shutil
from pathlib import Path

import pytest

from finetune.errors import CheckpointError
from finetune.files.atomic import write_atomically
from finetune.report.pages import NUM_SAMPLES
from finetune.run.run_files import line_of, read_rows
from finetune.run.run_lock import locked
from finetune.studio.runs import Runs, report_of, run_names
from tests.unit.finetune.studio.runs_made import begun, write_answers, write_run


def line(folder: Path, name: str) -> dict[str, object]:
    found: dict[str, object] = next(r for r in Runs(folder).all()["runs"] if r["name"] == name)
    return found


def test_a_run_that_died_before_its_first_step_reads_well(tmp_path: Path) -> None:
    begun(tmp_path / "dead")
    assert line(tmp_path, "dead")["state"] == "died before step 1"
    found = Runs(tmp_path).one("dead")
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
        points = Runs(tmp_path).one("live")["charts"]["run-loss"]["data"]["values"]
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
    assert Runs(tmp_path).one("run")["samples"] == []
    write_answers(run, "before", *"abcdefg")
    first = {"prompt": "p0", "wanted": "w0", "before": "a", "after": None}
    assert Runs(tmp_path).one("run")["samples"][0] == first
    assert len(Runs(tmp_path).one("run")["samples"]) == NUM_SAMPLES
    write_answers(run, "after", *"xyzuvwt")
    samples = Runs(tmp_path).one("run")["samples"]
    assert [(one["before"], one["after"]) for one in samples] == [
        *zip("abcde", "xyzuv", strict=True)
    ]
    (run / "samples_before.json").unlink()
    assert Runs(tmp_path).one("run")["samples"][0] == first | {"before": None, "after": "x"}


def test_a_damaged_run_is_named_and_the_others_are_shown(tmp_path: Path) -> None:
    for name in ("whole", "torn"):
        write_run(begun(tmp_path / name), slow_s=[0.0] * 2)
    metrics = tmp_path / "torn" / "metrics.jsonl"
    metrics.write_text("no json\n" + metrics.read_text())
    assert line(tmp_path, "whole")["state"] == "stopped"
    assert line(tmp_path, "torn")["state"] == "damaged"
    for found in (line(tmp_path, "torn"), Runs(tmp_path).one("torn")):
        assert "metrics.jsonl:1" in str(found["problem"])


def test_a_run_whose_metrics_are_no_file_is_named(tmp_path: Path) -> None:
    (begun(tmp_path / "odd") / "metrics.jsonl").mkdir()
    assert line(tmp_path, "odd")["state"] == "damaged"
    assert "metrics.jsonl" in Runs(tmp_path).one("odd")["problem"]


def test_a_run_that_is_not_there_is_an_error_and_an_empty_folder_is_not(tmp_path: Path) -> None:
    assert Runs(tmp_path / "none").all()["runs"] == []
    with pytest.raises(CheckpointError, match="'x' is no run of"):
        Runs(tmp_path).one("x")


# ------------------------------------------------------------------- looking again and again


def num_read() -> int:
    """Return the bytes that this process has read so far."""
    found = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(found["rchar"])


def with_steps(run: Path, *steps: int) -> str:
    row = read_rows(run / "metrics.jsonl")[-1]
    return "".join(line_of(row | {"step": step, "loss": step / 2}) for step in steps)


def three_steps(folder: Path) -> Path:
    """Write a run whose lines have checksums."""
    write_run(begun(folder), slow_s=[0.0] * 3)
    (folder / "metrics.jsonl").write_text(with_steps(folder, 1, 2, 3))
    return folder


def steps_of(runs: Runs) -> list[int]:
    points = runs.one("run")["charts"]["run-loss"]["data"]["values"]
    return [point["step"] for point in points]


def test_only_the_new_lines_of_a_run_are_read(tmp_path: Path) -> None:
    run = three_steps(tmp_path / "run")
    metrics = run / "metrics.jsonl"
    with metrics.open("a") as file:
        file.write(with_steps(run, *range(4, 3000)))
    runs = Runs(tmp_path)
    assert runs.all()["runs"][0]["steps"] == 2999
    with metrics.open("a") as file:
        file.write(with_steps(run, 3000))
    before = num_read()
    found = runs.all()["runs"][0]
    assert (found["steps"], found["loss"]) == (3000, 1500.0)
    assert num_read() - before < metrics.stat().st_size / 20
    before = num_read()
    assert runs.all()["runs"][0] == found
    assert num_read() - before < metrics.stat().st_size / 20
    assert runs.all()["runs"] == Runs(tmp_path).all()["runs"], "as who reads all of it sees it"
    assert runs.one("run") == Runs(tmp_path).one("run")


@pytest.mark.parametrize("is_replaced", [False, True])
def test_a_run_that_drops_steps_and_goes_on_is_read_anew(tmp_path: Path, is_replaced: bool) -> None:
    run = three_steps(tmp_path / "run")
    metrics, runs = run / "metrics.jsonl", Runs(tmp_path)
    assert steps_of(runs) == [1, 2, 3]
    text = with_steps(run, 1, 2, 5, 6, 7, 8)
    if is_replaced:
        write_atomically(metrics, text)
    else:
        metrics.write_text(text)  # in place: the same file, and longer
    assert steps_of(runs) == [1, 2, 5, 6, 7, 8]
    metrics.write_text(with_steps(run, 1))
    assert steps_of(runs) == [1]
    metrics.unlink()
    assert runs.one("run")["charts"] == {}
    metrics.write_text(text)
    assert steps_of(runs) == [1, 2, 5, 6, 7, 8]


def test_a_line_in_two_halves_is_read_once_it_is_whole(tmp_path: Path) -> None:
    run = three_steps(tmp_path / "run")
    metrics, runs = run / "metrics.jsonl", Runs(tmp_path)
    new = with_steps(run, 4)
    for part, steps in ((new[:9], [1, 2, 3]), (new[9:-1], [1, 2, 3]), ("\n", [1, 2, 3, 4])):
        with metrics.open("a") as file:
            file.write(part)
        assert steps_of(runs) == steps


def test_a_damaged_line_that_is_added_is_named_until_the_file_is_another(tmp_path: Path) -> None:
    run = three_steps(tmp_path / "run")
    metrics, runs = run / "metrics.jsonl", Runs(tmp_path)
    whole, new = metrics.read_text(), with_steps(run, 4)
    assert steps_of(runs) == [1, 2, 3]
    for text in (new.replace('"loss": 2.0', '"loss": 1.0'), with_steps(run, 5)):
        with metrics.open("a") as file:
            file.write(text)
        for _ in range(2):
            found = runs.one("run")
            assert found["state"] == "damaged"
            assert "metrics.jsonl:4" in found["problem"]
            assert found["charts"] == {}
    write_atomically(metrics, whole + new)
    assert steps_of(runs) == [1, 2, 3, 4]


def test_a_prediction_that_cannot_be_read_for_a_while_loses_no_steps(tmp_path: Path) -> None:
    run = three_steps(tmp_path / "run")
    runs, text = Runs(tmp_path), (run / "predicted.json").read_text()
    (run / "predicted.json").write_text("{")
    assert runs.one("run")["state"] == "damaged"
    (run / "predicted.json").write_text(text)
    assert steps_of(runs) == [1, 2, 3]
    shutil.rmtree(run)
    assert runs.all()["runs"] == []
