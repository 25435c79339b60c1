"""What a real run writes of its prediction, told again from its files, and forged."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from finetune.run.run_dir import RunDir
from tests.e2e.runs import run

ROOT = Path(__file__).parents[2]


def rows_of(run_dir: Path) -> list[dict]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def stop_after(run_dir: Path, step: int) -> None:
    """Make of a finished run what a kill behind a later step would have left."""
    rows = (run_dir / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run_dir / "metrics.jsonl").write_text("".join(rows[: step + 1]))
    for folder in (run_dir / "checkpoints").iterdir():
        if int(folder.name.removeprefix("step-")) > step:
            shutil.rmtree(folder)
    shutil.rmtree(run_dir / "adapter")
    for name in ("report.json", "trace.json", "gantt.svg"):
        (run_dir / name).unlink()


def forge(file: Path) -> None:
    content = json.loads(file.read_text())
    content["calibrated"]["predicted"]["phases_s"]["step"] *= 1.1
    file.chmod(0o644)
    file.write_text(json.dumps(content, indent=1))


def _require_sealed_and_traced(file: Path, shown: str) -> None:
    """Memory is of the traced grade, and what was turned down stands beside it."""
    assert not file.stat().st_mode & 0o222
    predicted = json.loads(file.read_text())
    assert predicted["memory_grade"] == "traced"
    terms = predicted["calibrated"]["predicted"]["device_memory"]
    assert terms.keys() & {"one visit", "head chunk"}
    assert not any(name.startswith("one visit:") for name in terms)
    assert predicted["calibrated"]["predicted"]["peak_vram_bytes"] == sum(terms.values())
    assert "Predicted peak memory (formula)" in shown
    assert "Memory (traced): " in shown
    assert predicted["choice"]["choice"]["codec"] == "nf4"
    assert isinstance(predicted["choice"]["rejected"], list)


@pytest.mark.slow
def test_a_run_is_explained_from_its_files_resumed_and_caught_when_forged(
    tmp_path, write_recipe, machine_file, capsys
) -> None:
    recipe = write_recipe(
        train={"steps": 4}, offload={"stash": "host", "codec": "nf4", "kept_graphs": 2}
    )
    run_dir = tmp_path / "run"
    assert run("finetune", recipe, "--machine", machine_file, "--verbose") == 0
    at_end = capsys.readouterr().out
    _require_sealed_and_traced(run_dir / "predicted.json", at_end)
    first = (run_dir / "predicted.json").read_bytes()
    _require_true_rows(run_dir)

    # again, in a process that has neither torch nor the recipe's model
    report = json.loads((run_dir / "report.json").read_text())
    told = json.loads(_explained_without_torch(run_dir))
    assert told == {name: report[name] for name in told}
    assert {"changes", "sections", "measured_step", "memory"} <= told.keys()
    assert run("explain", run_dir) == 0
    again = capsys.readouterr().out
    table = at_end.partition("Predicted (calibrated) against measured")[2].partition("\nAdapter")
    assert table[0] in again
    _require_memory_by_term(report)
    _require_the_very_ops(run_dir)

    # killed behind step 3, with a checkpoint of step 2
    stop_after(run_dir, 2)
    assert run("explain", run_dir) == 0
    assert "3 of 4 steps are done" in capsys.readouterr().out
    assert (run_dir / "gantt.svg").exists()
    words = ("finetune", recipe, "--machine", machine_file, "--resume")
    assert run(*words) == 0
    assert (run_dir / "predicted.json").read_bytes() == first
    report = json.loads((run_dir / "report.json").read_text())
    assert [(s["prediction"], s["steps"]) for s in report["sections"]] == [(1, [1, 2]), (2, [3, 4])]
    assert report["changes"] == []

    # forged
    forge(run_dir / "predicted.json")
    capsys.readouterr()
    assert run("explain", run_dir) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("PREDICTION CHANGED: 2 steps were run after a prediction")
    assert "PREDICTION CHANGED: predicted.json is not what predicted-2.json was" in shown
    assert run(*words) == 1
    err = capsys.readouterr().err
    assert f"in {run_dir} a prediction was changed" in err
    assert "cannot be changed after a step was run" in err
    assert "\n\nhint: restore predicted.json" in err

    # a run that is overwritten leaves nothing of it, however read-only
    RunDir(run_dir).start(RunDir(run_dir).recipe(), experts_implementation=None)
    assert {path.name for path in run_dir.iterdir()} == {"recipe.yaml", "checkpoints"}


def _require_true_rows(run_dir: Path) -> None:
    """Check that every step's parts are its time, and that its codec and stash are among them."""
    seals = set()
    for row in rows_of(run_dir):
        parts = row["parts_s"]
        seconds = sum(sum(p) if isinstance(p, list) else p for p in parts.values())
        wall_s = row["phases_s"]["step"] + row["phases_s"]["data wait"]
        assert seconds == pytest.approx(wall_s, abs=1e-6)
        assert parts["outside the pass"] >= 0
        assert len(parts["forward"]) == len(parts["decode"]) == len(parts["backward"]) == 4
        seals.add(row["prediction_sha256"])
    assert len(seals) == 1


def _require_the_very_ops(run_dir: Path) -> None:
    """Check that what was simulated is what ran, op by op."""
    predicted, measured = (
        json.loads((run_dir / name).read_text())["timeline"]
        for name in ("predicted.json", "measured.json")
    )
    same = ("lane", "kind", "layer", "micro_batch", "waits")
    assert [[op[k] for k in same] for op in predicted] == [[op[k] for k in same] for op in measured]


def _require_memory_by_term(report: dict) -> None:
    memory = {row["name"]: row for row in report["memory"]}
    assert {"slots", "decoded layer", "slab", "stashed layer inputs"} <= memory.keys()
    assert {"adapters", "optimizer states", "embeddings, norm and head"} <= memory.keys()
    assert memory["adapters"]["error"] == 0
    terms = [row for name, row in memory.items() if name != "peak memory"]
    measured = sum(row["measured"] for row in terms if row["measured"] is not None)
    assert measured == memory["peak memory"]["measured"]
    assert 0 < report["measured_step"]["bound_s"] <= 1.5 * report["measured_step"]["step_s"]


def _explained_without_torch(run_dir: Path) -> str:
    code = (
        "import sys\nfrom finetune.app import main\n"
        f"try:\n    main(['explain', {str(run_dir)!r}, '--json'])\n"
        "except SystemExit as end:\n    assert not end.code\n"
        "heavy = {'torch', 'transformers', 'peft', 'bitsandbytes', 'numpy'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True
    )
    return done.stdout


def test_what_is_no_run_is_refused(tmp_path: Path, capsys) -> None:
    assert run("explain", tmp_path) == 1
    err = capsys.readouterr().err
    assert err.startswith(f"error: {tmp_path} holds no predicted.json; ")
    assert "\n\nhint: name the directory that `sluice finetune` wrote" in err
