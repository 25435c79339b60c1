"""A run of prefix tuning: samples, evaluation, resume, `chat`, and what refuses its adapter."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.e2e.runs import adapter, losses, run
from tests.e2e.talking import Plain, talk

UNUSED: dict[str, Any] = {"rank": 16, "alpha": 32.0, "targets": "all-linear", "experts": False}
PREFIX = {**UNUSED, "method": "prefix", "num_virtual_tokens": 6}
NUM_STEPS = 6


def prefix_recipe(write_recipe: Any, **sections: dict[str, Any]) -> Path:
    recipe: Path = write_recipe(
        adapter=PREFIX | sections.pop("adapter", {}),
        train={"steps": NUM_STEPS, "lr": 0.1, "micro_batch_size": 3, "grad_accum_steps": 2},
        report={"samples": 3},
        output={"eval_every": 3, "checkpoint_every": 2},
        **sections,
    )
    return recipe


@pytest.mark.slow
def test_a_run_is_evaluated_answers_resumes_and_chats_as_plain_peft(
    rows_file, tmp_path, model_dir, write_recipe, machine_file, monkeypatch, capsys
) -> None:
    words = ("finetune", prefix_recipe(write_recipe), "--machine", machine_file)
    run_dir = tmp_path / "run"
    assert run(*words) == 0
    whole = losses(run_dir), adapter(run_dir)
    assert whole[0][-1] < whole[0][0]
    answers = json.loads((run_dir / "samples_after.json").read_text())
    shutil.rmtree(run_dir / "adapter")
    for folder in sorted(run_dir.glob("checkpoints/*"))[1:]:
        shutil.rmtree(folder)
    assert run(*words, "--resume") == 0
    ours = losses(run_dir), adapter(run_dir)
    assert ours[0] == whole[0]
    assert ours[1].keys() == whole[1].keys()
    assert all(torch.equal(ours[1][name], tensor) for name, tensor in whole[1].items())
    assert json.loads((run_dir / "samples_after.json").read_text()) == answers

    said = "what follows 3"
    capsys.readouterr()
    assert talk([said], monkeypatch, run_dir, "--compare") == 0
    shown = capsys.readouterr().out
    turns = [{"role": "user", "content": said}]
    tuned = Plain(model_dir, run_dir / "adapter").answer(turns)
    plain = Plain(model_dir, None).answer(turns)
    assert tuned != plain
    assert shown == f"base: {plain}\nadapter: {tuned}\n"

    capsys.readouterr()
    asked = ("generate", run_dir, "--prompt", said, "--max-new-tokens", 123)
    assert run(*asked) == 1
    err = " ".join(capsys.readouterr().err.split())
    assert "6 virtual tokens, a prompt of" in err
    assert "the model was made for at most 128 hint: `--max-new-tokens" in err

    for command in (
        ("merge", run_dir, "--out", tmp_path / "merged"),
        ("adapter", run_dir, "--format", "vllm", "--out", tmp_path / "vllm"),
        ("score", words[1], rows_file, "--adapter", run_dir, "--machine", machine_file),
    ):
        capsys.readouterr()
        assert run(*command) != 0, command
        assert "PREFIX_TUNING" in capsys.readouterr().err
    scored = ("score", words[1], rows_file, "--checkpoints", run_dir, "--machine", machine_file)
    assert run(*scored) != 0
    assert "an adapter of the method prefix" in capsys.readouterr().err
