"""Full training from a recipe: what a run leaves, and that it resumes to the bit."""

import json
import random
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from finetune.recipe.recipe import shipped_recipe
from offload.engine.host_gradients import LateUpdates
from offload.plan.machine.machine import Machine
from tests.e2e.full_runs import assert_same_runs, full_recipe
from tests.e2e.runs import losses, rows_of, run
from tests.tiers import mostly_slow


def load_whole(folder: Path) -> tuple[Any, dict[str, Any]]:
    """Return what plain transformers loads, and what it says about it."""
    found: Any = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    return found[0], found[1]


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", mostly_slow(["bfloat16", "float32"], "float32"))
def test_plain_transformers_loads_what_a_run_leaves(
    dtype, tmp_path, write_recipe, machine_file, capsys, model_dir
) -> None:
    recipe = full_recipe(write_recipe, dtype=dtype)
    here = replace(Machine.from_json(machine_file.read_text()), dtype=dtype)
    machine = ("--machine", tmp_path / "here.json")  # a run measures its own step
    machine[1].write_text(here.to_json())
    assert run("finetune", recipe, *machine, "report.samples=4") == 0
    shown, run_dir = capsys.readouterr().out, tmp_path / "run"
    assert "Predicted (calibrated) against measured" in shown
    assert f"Model: {run_dir / 'model'}" in shown
    assert "adapter" not in shown.replace("no adapter", "")
    loaded, info = load_whole(run_dir / "model")
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert loaded.dtype is getattr(torch, dtype)
    assert AutoTokenizer.from_pretrained(run_dir / "model").chat_template
    checkpoint = load_file(run_dir / "checkpoints" / "step-0000006" / "trained.safetensors")
    base = dict(
        AutoModelForCausalLM.from_pretrained(model_dir, dtype=loaded.dtype).named_parameters()
    )
    for name, parameter in loaded.named_parameters():
        assert torch.equal(parameter, checkpoint[name])
        assert not torch.equal(parameter, base[name])
    card = (run_dir / "model" / "README.md").read_text()
    assert "library_name: transformers" in card
    assert "with all weights trained" in card
    assert "LoRA" not in card
    found = [row["eval_loss"] for row in rows_of(run_dir) if "eval_loss" in row]
    assert found[-1] < found[0]
    names = {path.name for path in run_dir.iterdir()}
    assert "adapter" not in names
    for command in (("merge", run_dir, "--out", tmp_path / "merged"),):
        assert run(*command) == 1
        assert "merge is not needed" in capsys.readouterr().err
    assert run("finetune", recipe, *machine, "report.samples=4", "--overwrite") == 0
    assert run("generate", run_dir, "--prompt", "what follows 3", "--max-new-tokens", 3) == 0


@pytest.mark.thorough
@pytest.mark.parametrize(
    "optimizer",
    mostly_slow(["adamw", "adamw_bf16", "adamw_8bit", "adafactor", "lion", "sgd"], "adamw_bf16"),
)
def test_a_run_that_ends_between_backward_and_update_resumes_to_the_bit(
    optimizer, tmp_path, write_recipe, machine_file, monkeypatch
) -> None:
    recipe, whole = full_recipe(write_recipe, what=["model.layers.*"]), tmp_path / "whole"
    machine: tuple[object, ...] = ("--machine", machine_file, f"train.optimizer={optimizer}")
    assert run("finetune", recipe, *machine, f"output.dir={whole}") == 0
    num_updated, update = 0, LateUpdates.run

    def run_some(self: LateUpdates, *where: Any) -> None:
        nonlocal num_updated
        num_updated += 1
        if num_updated > 26:  # some layers of a later step are updated, others never
            raise OSError("killed")
        update(self, *where)

    with monkeypatch.context() as patch:
        patch.setattr(LateUpdates, "run", run_some)
        assert run("finetune", recipe, *machine) != 0
    done = losses(tmp_path / "run")
    assert 2 <= len(done) < 6
    assert run("finetune", recipe, *machine, "--resume") == 0
    assert_same_runs(tmp_path / "run", whole)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_a_killed_run_resumes_to_the_bit(
    seed, tmp_path, write_recipe, machine_file, forked, cache
) -> None:
    recipe, whole = full_recipe(write_recipe), tmp_path / "whole"
    assert run("finetune", recipe, "--machine", machine_file, f"output.dir={whole}") == 0
    metrics, chance = tmp_path / "run" / "metrics.jsonl", random.Random(seed)
    words: tuple[object, ...] = ("finetune", recipe, "--machine", machine_file)
    process = forked.start(*words)
    goal = chance.randrange(2, 6)
    process.wait_for(lambda: metrics.exists() and metrics.read_text().count("\n") >= goal)
    time.sleep(chance.random() * 0.05)
    assert process.end(signal.SIGKILL) == -signal.SIGKILL
    process = forked.start(*words, "--resume")
    assert process.end() == 0, process.shown
    assert_same_runs(tmp_path / "run", whole)


@pytest.mark.parametrize(
    ("what", "is_chosen"),
    [
        (
            ["last_1_layer", "model.layers.2.*", "model.norm.weight"],
            lambda n: ".layers.2." in n or ".layers.3." in n or n == "model.norm.weight",
        ),
        pytest.param(["norms"], lambda n: "norm" in n, marks=pytest.mark.slow),
    ],
    ids=["layers", "norms"],
)
def test_only_what_patterns_and_groups_name_trains(
    what, is_chosen, tmp_path, write_recipe, machine_file, model_dir
) -> None:
    recipe = full_recipe(write_recipe, what=what)
    assert run("finetune", recipe, "--machine", machine_file) == 0
    base = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    trained = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model")
    before = dict(base.named_parameters())
    changed = {n for n, p in trained.named_parameters() if not torch.equal(p, before[n])}
    assert changed == {n for n in before if is_chosen(n)}
    predicted = json.loads((tmp_path / "run" / "predicted.json").read_text())
    numbers = predicted["calibrated"]["model"]
    assert numbers["num_adapter_parameters"] == 0
    assert numbers["num_module_parameters"] == sum(before[n].numel() for n in changed)


def test_a_pattern_that_matches_nothing_is_refused(write_recipe, machine_file, capsys) -> None:
    recipe = full_recipe(write_recipe, what=["layers.0.*"])
    assert run("finetune", recipe, "--machine", machine_file) == 1
    shown = capsys.readouterr().err
    assert "layers.0.* matches no weight" in shown
    assert "`train.what: [model.layers.0." in shown


@pytest.mark.long
@pytest.mark.slow
def test_the_quickstart_learns(tmp_path, capsys, cache, machine_file) -> None:
    recipe = shipped_recipe("quickstart_full")
    settings = ("train.steps=30", "report.samples=24", "output.eval_every=30")
    words = ("--machine", machine_file, *settings)
    assert run("finetune", recipe, f"output.dir={tmp_path / 'run'}", *words) == 0
    shown = capsys.readouterr().out
    assert "Predicted (calibrated) against measured" in shown
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    assert report["exact_match"]["after"] > report["exact_match"]["before"]
    assert report["last_loss"] < 0.5 * report["first_loss"]
