import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.e2e.runs import adapter, run


def way_of(run_dir: Path) -> str:
    way: str = json.loads((run_dir / "experts.json").read_text())["experts_implementation"]
    return way


@pytest.mark.slow
def test_a_run_goes_on_as_it_was_begun_and_not_as_it_would_begin_here(
    tmp_path: Path, write_recipe, machine_file, capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []  # on so small a model the bits of both ways are the same
    grouped_mm = torch.nn.functional.grouped_mm

    def counted(*given: Any, **named: Any) -> torch.Tensor:
        calls.append("grouped_mm")
        return grouped_mm(*given, **named)

    monkeypatch.setattr(torch.nn.functional, "grouped_mm", counted)
    recipe = write_recipe()
    words = ("finetune", recipe, "--machine", machine_file)
    told = ("model.experts_implementation=grouped_mm", f"output.dir={tmp_path / 'told'}")
    assert run(*words, *told) == 0
    assert "expert kernels  grouped_mm (as the recipe says)" in capsys.readouterr().out
    assert way_of(tmp_path / "told") == "grouped_mm"
    num_whole = len(calls)
    assert num_whole > 6
    calls.clear()

    assert run(*words) == 0
    assert "expert kernels  eager (as --machine says)" in capsys.readouterr().out
    begun = tmp_path / "run"
    assert way_of(begun) == "eager"
    assert not calls

    # as if this run had been begun where grouped products are the fastest
    (begun / "experts.json").write_text('{"experts_implementation": "grouped_mm"}')
    shutil.rmtree(begun / "checkpoints")
    (begun / "checkpoints").mkdir()
    assert run(*words, "--resume") == 0
    assert "expert kernels  grouped_mm (as the run was begun)" in capsys.readouterr().out
    resumed, whole = adapter(begun), adapter(tmp_path / "told")
    assert all(torch.equal(resumed[name], whole[name]) for name in whole)
    assert len(calls) == num_whole


def test_a_run_that_triton_began_does_not_go_on_without_it(
    finished: Path, machine_file, capsys
) -> None:
    (finished / "experts.json").write_text('{"experts_implementation": "triton"}')
    words = ("finetune", finished / "recipe.yaml", "--machine", machine_file)
    assert run(*words, "--resume") == 1
    assert (
        "was begun with expert kernels triton, which cannot run here: " in capsys.readouterr().err
    )


@pytest.mark.thorough
def test_the_fastest_way_of_a_trial_is_planned_run_and_written_down(
    tmp_path: Path, write_recipe, machine_file, capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    # a CPU has nothing to try; this is what a run does on a card
    monkeypatch.setattr("finetune.training.prepare.resolve_expert_backend", lambda *_, **__: None)
    recipe = write_recipe(train={"steps": 2})
    assert run("finetune", recipe, "--machine", machine_file) == 0
    shown = capsys.readouterr().out
    (best,) = [
        line.strip().partition(":")[0]
        for line in shown.splitlines()
        if line.rstrip().endswith("(taken)")
    ]
    assert f"expert kernels  {best} (measured)" in shown
    assert way_of(tmp_path / "run") == best
    planned = json.loads((tmp_path / "run" / "predicted.json").read_text())["before measuring"]
    assert planned["experts_implementation"] == {"value": best, "source": "measured"}


@pytest.mark.gpu
def test_a_card_tries_the_ways_writes_the_fastest_down_and_resumes_with_it(
    tmp_path: Path, write_recipe, capsys
) -> None:
    recipe = write_recipe(offload={"device": "cuda"}, model={"dtype": "bfloat16"})
    assert run("finetune", recipe) == 0
    shown = capsys.readouterr().out
    assert "Experts of one layer" in shown
    assert shown.count("(taken)") == 1
    way = way_of(tmp_path / "run")
    assert f"expert kernels  {way} (measured)" in shown
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-0000006")
    assert run("finetune", recipe, "--resume") == 0
    shown = capsys.readouterr().out
    assert "Experts of one layer" not in shown
    assert f"expert kernels  {way} (as the run was begun)" in shown
