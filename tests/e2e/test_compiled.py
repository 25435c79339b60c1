"""Runs whose layers torch compiles."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

ROOT = Path(__file__).parents[2]


@pytest.mark.exhaustive
def test_a_compiled_run_resumes_to_the_bit_in_another_process(
    tmp_path: Path, write_recipe, machine_file
) -> None:
    recipe = write_recipe(
        adapter={"targets": "all-linear", "dropout": 0.1, "experts": False},
        train={"steps": 4, "compile": True},
        output={"checkpoint_every": 2},
    )

    def finetune(folder: str, *words: str) -> tuple[str, dict[str, torch.Tensor]]:
        kernels = f"TORCHINDUCTOR_CACHE_DIR={tmp_path / f'kernels{len(words)}'}"
        program = ["env", kernels, sys.executable, ROOT / "cli.py", "finetune", recipe]
        done = subprocess.run(
            [*program, "--machine", machine_file, f"output.dir={tmp_path / folder}", *words],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout, load_file(tmp_path / folder / "adapter" / "adapter_model.safetensors")

    shown, whole = finetune("run")
    assert "Compiling the layers, trying the longest batch" in shown
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-0000004")
    shutil.rmtree(tmp_path / "run" / "adapter")
    _, resumed = finetune("run", "--resume")
    assert all(torch.equal(resumed[name], whole[name]) for name in whole)
    _, plain = finetune("plain", "train.compile=false")
    assert any(not torch.equal(plain[name], whole[name]) for name in whole)
