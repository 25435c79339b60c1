"""A run that leaves the size of its micro-batches to the planner."""

import json
from pathlib import Path

import pytest
import torch
import yaml

from finetune.errors import ConfigError
from finetune.planning.ranks import require_micro_batch_per_rank
from finetune.recipe.load import load_recipe
from finetune.run.run_dir import RunDir, as_begun
from tests.e2e.runs import adapter, losses, run

OPEN = {"micro_batch_size": "auto", "grad_accum_steps": None, "tokens_per_step": 6 * 64}


def settings(run_dir: Path) -> dict[str, object]:
    train: dict[str, object] = yaml.safe_load((run_dir / "recipe.yaml").read_text())["train"]
    return train


@pytest.mark.slow
def test_an_open_size_is_settled_written_down_and_kept_by_a_resume(
    tmp_path, write_recipe, machine_file, capsys
) -> None:
    recipe = write_recipe(data={"packing": "off"}, train={**OPEN, "steps": 4})
    words = ("finetune", recipe, "--machine", machine_file)
    assert run(*words) == 0
    assert "\n rejected " in capsys.readouterr().out
    run_dir = tmp_path / "run"
    size = settings(run_dir)["micro_batch_size"]
    assert size in (1, 2, 3, 6)
    predicted = json.loads((run_dir / "predicted.json").read_text())["calibrated"]["schedule"]
    assert predicted["num_micro_batches"] == 6 // int(str(size))

    # each process has a micro-batch, or the resume is refused
    settled = as_begun(load_recipe(str(recipe), []), RunDir(run_dir).begun())
    assert settled.train.micro_batch_size == size
    too_many = settled.train.num_micro_batches + 1
    with pytest.raises(ConfigError, match=f"micro-batches for {too_many} processes"):
        require_micro_batch_per_rank(settled.train, num_ranks=too_many)

    # the settled recipe is the same run, to the bit
    again = tmp_path / "again"
    settled_words = ("--machine", machine_file, f"output.dir={again}")
    assert run("finetune", run_dir / "recipe.yaml", *settled_words) == 0
    assert losses(run_dir) == losses(again)
    first, second = adapter(run_dir), adapter(again)
    assert all(torch.equal(first[name], second[name]) for name in first)

    # another machine would choose another size: the run keeps its own
    other = 3 if size != 3 else 2
    drop_last_checkpoint(run_dir)
    file = run_dir / "recipe.yaml"
    text = "".join(file.read_text().splitlines(keepends=True)[1:-1])  # without the hash
    file.write_text(text.replace(f"micro_batch_size: {size}", f"micro_batch_size: {other}"))
    capsys.readouterr()
    assert run(*words, "--resume") == 0
    assert settings(run_dir)["micro_batch_size"] == other
    assert f"in {6 // other} micro-batches of {other} x" in capsys.readouterr().out


def drop_last_checkpoint(run_dir: Path) -> None:
    newest = sorted((run_dir / "checkpoints").glob("step-*"))[-1]
    for file in newest.iterdir():
        file.unlink()
    newest.rmdir()


@pytest.mark.slow
def test_the_first_loss_does_not_depend_on_the_size(tmp_path, write_recipe, machine_file) -> None:
    recipe = write_recipe(data={"packing": "off"}, train={**OPEN, "steps": 1})
    first = []
    for size in (1, 6):
        words = (f"train.micro_batch_size={size}", f"output.dir={tmp_path / str(size)}")
        assert run("finetune", recipe, "--machine", machine_file, *words) == 0
        first.append(losses(tmp_path / str(size))[0])
    assert first[0] == pytest.approx(first[1], rel=1e-5)
