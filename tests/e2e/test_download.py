"""A run whose model is on a hub, which is a server on this machine."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.ranks import ROOT
from tests.hub import hub


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_run_downloads_its_model_and_says_so_once(
    tmp_path: Path, write_recipe, model_dir: Path, machine_file: Path, num_ranks: int
) -> None:
    shutil.copytree(model_dir, tmp_path / "hub" / "own" / "model")
    recipe = write_recipe(train={"steps": 1})
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    words = ("cli.py", "finetune", str(recipe), "--machine", str(machine_file))
    with hub(tmp_path / "hub") as (variables, asked):
        done = subprocess.run(
            [
                *("env", "-u", "http_proxy", "-u", "HTTP_PROXY", "OMP_NUM_THREADS=1"),
                *(f"{name}={value}" for name, value in variables.items()),
                *(sys.executable, *(launcher if num_ranks > 1 else ()), *words),
                "model.path=own/model",
            ],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
        )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("Downloading own/model: 0.00 GB, 1 file, to ") == 1, done.stdout
    assert asked.count("model.safetensors") == 1
