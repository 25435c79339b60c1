"""Full training in float16: fp32 masters, overflows that are survived, bits of each way to run."""

import itertools
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from offload.plan.machine.machine import Machine
from tests.e2e.runs import rows_of, run
from tests.tiers import mostly_slow

NUM_STEPS = 6


@pytest.fixture
def words(tmp_path: Path, machine_file: Path, write_recipe: Any, model_dir: Path) -> Any:
    """Return a run of a model whose gradients overflow with the first factor of the loss."""
    folder = tmp_path / "steep"
    shutil.copytree(model_dir, folder)
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    weights["model.embed_tokens.weight"] *= 2.0**-6
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    here = replace(Machine.from_json(machine_file.read_text()), dtype="float16")
    file = tmp_path / "half.json"
    file.write_text(here.to_json())
    recipe = write_recipe(
        model={"path": str(folder), "dtype": "float16"},
        train={"what": "all", "lr": 0.001, "max_grad_norm": 0.5, "steps": NUM_STEPS},
        output={"eval_every": None},
    )
    content = yaml.safe_load(recipe.read_text())
    del content["adapter"]
    recipe.write_text(yaml.safe_dump(content))
    return ("finetune", recipe, "--machine", file)


def left_by(run_dir: Path) -> tuple[list[Any], dict[str, torch.Tensor]]:
    """Return the steps of a run, and its newest checkpoint's masters and states."""
    names = ("loss", "grad_norm", "loss_scale", "num_skipped_steps")
    rows = [tuple(row[name] for name in names) for row in rows_of(run_dir)]
    newest = max((run_dir / "checkpoints").iterdir())
    return rows, load_file(newest / "trained.safetensors")


def assert_same(ours: Any, theirs: Any) -> None:
    assert ours[0] == theirs[0]
    assert ours[1].keys() == theirs[1].keys()
    assert all(torch.equal(ours[1][name], tensor) for name, tensor in theirs[1].items())


@pytest.mark.thorough
def test_overflows_are_survived_and_a_resume_keeps_factor_and_masters_to_the_bit(
    tmp_path, words, capsys
) -> None:
    assert run(*words) == 0
    shown, run_dir = " ".join(capsys.readouterr().out.split()), tmp_path / "run"
    whole = left_by(run_dir)
    steps, tensors = whole
    num = steps[-1][-1]
    assert 0 < num < NUM_STEPS
    assert shown.count("is skipped: a gradient overflows in float16") == num
    assert [norm is None for _, norm, *_ in steps] == [True] * num + [False] * (NUM_STEPS - num)
    assert steps[-1][2] == 2.0 ** (16 - num)
    assert "16 bytes each in RAM (2 weights, 4 fp32 masters, 2 gradients" in shown
    weights = {name: x for name, x in tensors.items() if ":" not in name}
    for name, weight in weights.items():
        low = tensors[f"{name}:low"]
        assert (weight.dtype, low.dtype) == (torch.float16, torch.int32)
        master = (weight.float().view(torch.int32) ^ low).view(torch.float32)
        assert torch.equal(master.half(), weight)
    assert any(bool(tensors[f"{name}:low"].any()) for name in weights)
    loaded = AutoModelForCausalLM.from_pretrained(run_dir / "model")
    assert loaded.dtype is torch.float16
    assert all(torch.equal(p, weights[name]) for name, p in loaded.named_parameters())
    for step, kept in itertools.product((4, 6), (run_dir / "checkpoints",)):
        shutil.rmtree(kept / f"step-{step:07d}", ignore_errors=True)
    shutil.rmtree(run_dir / "model")
    assert run(*words, "--resume") == 0
    assert_same(left_by(run_dir), whole)


@pytest.mark.thorough
@pytest.mark.parametrize("what", mostly_slow(["all", "adapter"], "all"))
def test_a_forward_that_overflows_ends_the_run_and_names_the_module(
    what, tmp_path, words, capsys
) -> None:
    file = tmp_path / "steep" / "model.safetensors"
    weights = load_file(file)
    weights["model.layers.2.self_attn.o_proj.weight"] *= 3e5
    weights["model.layers.2.self_attn.v_proj.weight"] *= 1e3
    save_file(weights, file, metadata={"format": "pt"})
    assert run(*words, f"train.what={what}") == 1
    said = capsys.readouterr().err
    assert "overflows in float16, first in model.layers.2.self_attn.o_proj" in said


WAYS = {
    "resident": ("offload.num_slots=4",),
    "kept graphs": ("offload.kept_graphs=1",),
}


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_move_each_way_to_run_has_the_same_bits(way, tmp_path, words) -> None:
    assert run(*words, "offload.num_slots=2") == 0
    assert run(*words, *WAYS[way], f"output.dir={tmp_path / 'other'}") == 0
    found = left_by(tmp_path / "other")
    assert found[0][-1][-1] > 0
    assert_same(found, left_by(tmp_path / "run"))
