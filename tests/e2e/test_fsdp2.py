"""Two gloo processes that each hold a part of the model, against one that streams its layers."""

import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from peft import PeftModel
from transformers import AutoModelForCausalLM

from tests.e2e.faults import SECTIONS
from tests.e2e.full_runs import weights
from tests.e2e.runs import (
    LOSS_TOLERANCE,
    WEIGHT_TOLERANCE,
    adapter,
    assert_same_training,
    losses,
    rows_of,
    run,
)

FSDP2 = "train.parallel=fsdp2"
ENDED_S = 30.0


def recipe_of(write_recipe: Any, *, is_full: bool = False, **output: object) -> Path:
    """Write a recipe that either engine runs: an adapter with dropout, or all weights."""
    recipe: Path = write_recipe(**SECTIONS, output={"eval_every": 3, **output})
    if is_full:
        content = yaml.safe_load(recipe.read_text())
        del content["adapter"]
        content["train"] |= {"what": "all", "lr": 0.003, "max_grad_norm": 0.5}
        recipe.write_text(yaml.safe_dump(content))
    return recipe


def assert_close_runs(one: Path, other: Path) -> None:
    """Compare losses and norms of each step (REORDER)."""
    for mine, theirs in zip(rows_of(one), rows_of(other), strict=True):
        for name in ("loss", "grad_norm", "eval_loss"):
            if name in theirs:
                assert mine[name] == pytest.approx(theirs[name], rel=LOSS_TOLERANCE), name


@pytest.mark.thorough
def test_two_parts_train_as_one_stream_does(tmp_path, write_recipe, machine_file, forked) -> None:
    # 3 micro-batches: one rank has two of them, and of the held-out rows one has none
    words = ("finetune", recipe_of(write_recipe), "--machine", machine_file)
    ranks = forked.start_ranks(*words, f"output.dir={tmp_path / 'parts'}", FSDP2)
    assert run(*words, f"output.dir={tmp_path / 'stream'}") == 0
    assert [rank.end() for rank in ranks] == [0, 0], [rank.shown for rank in ranks]
    assert_same_training(tmp_path / "parts", tmp_path / "stream")


@pytest.mark.slow
def test_plain_peft_answers_with_what_two_parts_have_trained(
    tmp_path, write_recipe, machine_file, model_dir, forked
) -> None:
    words = ("finetune", recipe_of(write_recipe), "--machine", machine_file)
    ranks = forked.start_ranks(*words, f"output.dir={tmp_path / 'parts'}", FSDP2)
    assert run(*words, f"output.dir={tmp_path / 'stream'}") == 0
    assert [rank.end() for rank in ranks] == [0, 0], [rank.shown for rank in ranks]
    assert adapter(tmp_path / "parts").keys() == adapter(tmp_path / "stream").keys()
    tokens, logits = torch.arange(2, 42).reshape(2, 20), []
    for name in ("parts", "stream", None):
        model: Any = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
        if name is not None:
            model = PeftModel.from_pretrained(model, tmp_path / name / "adapter")
        with torch.no_grad():
            logits.append(model.eval()(tokens).logits)
    torch.testing.assert_close(logits[0], logits[1], rtol=1e-4, atol=1e-4)
    assert (logits[0] - logits[2]).abs().max() > 0.01  # it has learned something


@pytest.mark.slow
@pytest.mark.parametrize("is_full", [False, True])
def test_either_engine_goes_on_from_a_checkpoint_of_the_other(
    is_full, tmp_path, write_recipe, machine_file, forked
) -> None:
    recipe = recipe_of(write_recipe, is_full=is_full)
    words = ("finetune", recipe, "--machine", machine_file)
    parts, stream, whole = (tmp_path / name for name in ("parts", "stream", "whole"))
    ranks = forked.start_ranks(*words, f"output.dir={parts}", FSDP2)
    assert run(*words, f"output.dir={stream}") == 0
    assert [rank.end() for rank in ranks] == [0, 0], [rank.shown for rank in ranks]
    assert_close_runs(parts, stream)
    shutil.copytree(stream, whole)
    for run_dir in (parts, stream):  # the checkpoint before the last is of step 4
        shutil.rmtree(run_dir / "checkpoints" / "step-0000006")
    ranks = forked.start_ranks(*words, f"output.dir={stream}", "--resume", FSDP2)
    assert run(*words, f"output.dir={parts}", "--resume", "train.parallel=stream") == 0
    assert [rank.end() for rank in ranks] == [0, 0], [rank.shown for rank in ranks]
    for run_dir in (parts, stream):
        assert len(list(run_dir.glob("predicted*.json"))) == 2
        assert_close_runs(run_dir, whole)
        read = weights if is_full else adapter
        trained, expected = read(run_dir), read(whole)
        assert trained.keys() == expected.keys()
        for name, tensor in expected.items():
            assert (trained[name] - tensor).norm() <= WEIGHT_TOLERANCE * tensor.norm(), name


@pytest.mark.thorough
def test_two_processes_do_not_stream_weights_that_train(
    tmp_path, write_recipe, machine_file, forked
) -> None:
    words = ("finetune", recipe_of(write_recipe, is_full=True), "--machine", machine_file)
    ranks = forked.start_ranks(*words)
    assert [rank.end() for rank in ranks] == [1, 1]
    shown = " ".join(ranks[0].shown.split())
    assert "train.what: all and train.parallel: stream, with 2 processes" in shown
    assert "hint: `train.parallel: fsdp2`, or `--num_processes 1`" in shown
    assert not (tmp_path / "run").exists() or not any((tmp_path / "run").glob("checkpoints/*"))
    assert run(*words, f"output.dir={tmp_path / 'one'}") == 0


@pytest.mark.slow
def test_all_weights_in_bf16_train_in_parts_as_in_one_stream(
    tmp_path, write_recipe, machine_file, forked
) -> None:
    recipe = recipe_of(write_recipe, is_full=True)
    here = tmp_path / "here.json"
    here.write_text(machine_file.read_text().replace('"float32"', '"bfloat16"'))
    words = ("finetune", recipe, "--machine", here, "model.dtype=bfloat16")
    ranks = forked.start_ranks(*words, f"output.dir={tmp_path / 'parts'}", FSDP2)
    assert run(*words, f"output.dir={tmp_path / 'stream'}") == 0
    assert [rank.end() for rank in ranks] == [0, 0], [rank.shown for rank in ranks]
    assert losses(tmp_path / "parts") == pytest.approx(losses(tmp_path / "stream"), rel=1e-3)
    assert all(w.dtype is torch.bfloat16 for w in weights(tmp_path / "parts").values())


@pytest.mark.slow
def test_chosen_weights_train_in_parts_and_all_are_saved(
    tmp_path, write_recipe, machine_file, forked
) -> None:
    recipe = recipe_of(write_recipe, is_full=True)
    words = ("finetune", recipe, "--machine", machine_file, "train.what=[last_2_layers]")
    ranks = forked.start_ranks(*words, f"output.dir={tmp_path / 'parts'}", FSDP2)
    assert run(*words, f"output.dir={tmp_path / 'stream'}") == 0
    assert [rank.end() for rank in ranks] == [0, 0], [rank.shown for rank in ranks]
    assert_close_runs(tmp_path / "parts", tmp_path / "stream")
    trained, expected = weights(tmp_path / "parts"), weights(tmp_path / "stream")
    assert trained.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (trained[name] - tensor).norm() <= WEIGHT_TOLERANCE * tensor.norm(), name


@pytest.mark.slow
def test_a_main_rank_that_is_stopped_in_a_step_ends_the_other_with_the_cause(
    tmp_path, write_recipe, machine_file, forked
) -> None:
    words = ("finetune", recipe_of(write_recipe), "--machine", machine_file, FSDP2)
    ranks = forked.start_ranks(*words, "train.steps=2000")
    metrics = tmp_path / "run" / "metrics.jsonl"
    ranks[0].wait_for(lambda: metrics.exists() and metrics.read_text().count("\n") >= 4)
    ranks[0].signal(signal.SIGSTOP)
    start_s = time.monotonic()
    assert ranks[1].end() == 1
    assert time.monotonic() - start_s < ENDED_S
    what = "rank 0 is gone or does not answer: no sign of life for 20 s"
    assert f"error (rank 1): {what}" in ranks[1].shown
    ranks[0].signal(signal.SIGCONT)
    assert ranks[0].end() == 1
    assert "is gone or does not answer" in ranks[0].shown
    assert list((tmp_path / "run" / "checkpoints").glob("step-*"))
