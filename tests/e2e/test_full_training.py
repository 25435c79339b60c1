"""Full training and training in 16 bits from a recipe: what a run leaves, and its resume."""

import itertools
import json
import random
import shutil
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from finetune.recipe.recipe import shipped_recipe
from offload.engine.host.weights import LateUpdates
from offload.plan.machine.machine import Machine
from tests.e2e.full_runs import assert_same_runs, full_recipe
from tests.e2e.runs import adapter, assert_same_training, losses, rows_of, run
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
    assert "Predicted from timed steps against measured" in shown
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
    assert "Predicted from timed steps against measured" in shown
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    assert report["exact_match"]["after"] > report["exact_match"]["before"]
    assert report["last_loss"] < 0.5 * report["first_loss"]


# ------------------------------------------------------------------------------------- full float16


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
    assert run(*words, "--verbose") == 0
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


# ------------------------------------------------------------------------------------------ float16


@pytest.fixture
def steep_model(tmp_path: Path, model_dir: Path) -> Path:
    """Return a model of such small embeddings that gradients of its first layer are large."""
    folder = tmp_path / "steep"
    shutil.copytree(model_dir, folder)
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    weights["model.embed_tokens.weight"] *= 2.0**-9
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture
def words_float16(tmp_path: Path, machine_file: Path, write_recipe: Any, steep_model: Path) -> Any:
    here = replace(Machine.from_json(machine_file.read_text()), dtype="float16")
    file = tmp_path / "half.json"
    file.write_text(here.to_json())
    recipe = write_recipe(model={"path": str(steep_model), "dtype": "float16"}, train={"lr": 0.001})
    return ("finetune", recipe, "--machine", file)


def adapter_float16(run_dir: Path) -> dict[str, torch.Tensor]:
    return load_file(run_dir / "adapter" / "adapter_model.safetensors")


def numbers(run_dir: Path) -> list[tuple[object, ...]]:
    names = ("loss", "grad_norm", "loss_scale", "num_skipped_steps")
    return [tuple(row[name] for name in names) for row in rows_of(run_dir)]


@pytest.mark.thorough
@pytest.mark.parametrize("kept", mostly_slow([2, 4], 2))
def test_overflows_are_skipped_and_counted_and_a_resume_goes_on_to_the_bit(
    kept, tmp_path, words_float16, capsys
) -> None:
    assert run(*words_float16) == 0
    shown = capsys.readouterr().out
    run_dir = tmp_path / "run"
    rows = rows_of(run_dir)
    num = rows[-1]["num_skipped_steps"]
    assert 0 < num < 6
    assert shown.count("is skipped: a gradient overflows in float16") == num
    assert [row["grad_norm"] is None for row in rows].count(True) == num
    assert rows[0]["loss_scale"] == 2.0**16
    assert rows[-1]["loss_scale"] == 2.0 ** (16 - num)
    shutil.copytree(run_dir, tmp_path / "whole")
    for step in (2, 4, 6):
        if step > kept:
            shutil.rmtree(run_dir / "checkpoints" / f"step-{step:07d}", ignore_errors=True)
    shutil.rmtree(run_dir / "adapter")
    assert run(*words_float16, "--resume") == 0
    assert numbers(run_dir) == numbers(tmp_path / "whole")
    ours, theirs = adapter_float16(run_dir), adapter_float16(tmp_path / "whole")
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.slow
def test_two_ranks_skip_the_same_steps_as_one_process(tmp_path, words_float16, forked) -> None:
    ranks = forked.start_ranks(*words_float16, f"output.dir={tmp_path / 'two'}")
    assert run(*words_float16, f"output.dir={tmp_path / 'one'}") == 0
    assert [rank.end() for rank in ranks] == [0, 0], [rank.shown for rank in ranks]
    assert rows_of(tmp_path / "two")[-1]["num_skipped_steps"] > 0
    for mine, other in zip(numbers(tmp_path / "two"), numbers(tmp_path / "one"), strict=True):
        assert mine[2:] == other[2:]
    assert_same_training(tmp_path / "two", tmp_path / "one")


# ------------------------------------------------------------------------------------ adapter dtype


@pytest.mark.thorough
def test_an_adapter_in_bf16_resumes_to_the_bit_and_loads_in_peft(
    write_recipe, model_dir, machine_file, cache, tmp_path, capsys
) -> None:
    recipe = write_recipe(
        adapter={"dtype": "bfloat16"},
        train={"optimizer": "adamw_8bit"},
        report={"samples": 0},
    )
    words, run_dir = ("--machine", machine_file), tmp_path / "run"
    assert run("finetune", recipe, *words) == 0
    kept = adapter(run_dir)
    assert {tensor.dtype for tensor in kept.values()} == {torch.bfloat16}
    assert losses(run_dir)[-1] < losses(run_dir)[0]
    before = losses(run_dir)

    shutil.rmtree(run_dir / "checkpoints" / "step-0000006")
    shutil.rmtree(run_dir / "adapter")
    assert [folder.name for folder in (run_dir / "checkpoints").iterdir()] == ["step-0000004"]
    assert run("finetune", recipe, *words, "--resume") == 0
    assert losses(run_dir) == before
    assert all(torch.equal(tensor, kept[name]) for name, tensor in adapter(run_dir).items())

    capsys.readouterr()
    planned = {}
    for dtype in ("float32", "bfloat16"):
        assert run("plan", recipe, *words, "--json", f"adapter.dtype={dtype}") == 0
        planned[dtype] = json.loads(capsys.readouterr().out)["predicted"]["device_memory"]
    num = sum(tensor.numel() for tensor in kept.values())
    assert planned["float32"]["adapters"] == 4 * num
    assert planned["bfloat16"]["adapters"] == 2 * num

    base: Any = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    plain = PeftModel.from_pretrained(base, str(run_dir / "adapter")).eval()
    ids = torch.arange(1, 12)[None]
    with torch.no_grad():
        expected = plain(input_ids=ids).logits
        assert run("merge", run_dir, "--out", tmp_path / "merged") == 0
        merged: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
        torch.testing.assert_close(merged(input_ids=ids).logits, expected, rtol=1e-4, atol=1e-5)
