"""A head that trains alone against plain torch, transformers and peft."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from torch.nn import functional

from tests.e2e.classifying import NUM_TRAINED, ROWS, classify_recipe
from tests.e2e.plain_heads import Plain, steps_of
from tests.e2e.runs import adapter, losses, rows_of, run

LR, SEED, NUM_STEPS = 0.05, 3, 6
TRAIN = {
    # all rows in each step, so that their order does not matter
    **{"what": "head", "micro_batch_size": 4, "grad_accum_steps": 9, "lr": LR, "seed": SEED},
    "steps": NUM_STEPS,
}
NO_ADAPTER: dict[str, Any] = {"rank": 16, "alpha": 32.0, "experts": False, "targets": []}


def head_recipe(write_recipe: Any, tmp_path: Path, **train: Any) -> Path:
    return classify_recipe(
        write_recipe,
        tmp_path,
        adapter=NO_ADAPTER,
        train=TRAIN | train,
        data={"packing": "off"},
        output={"eval_every": 3, "checkpoint_every": 3},
    )


def test_reorder_a_head_alone_learns_as_in_plain_torch_and_plain_peft_loads_it(
    tmp_path, model_dir, write_recipe, machine_file, capsys
) -> None:
    recipe, run_dir = head_recipe(write_recipe, tmp_path), tmp_path / "run"
    assert run("finetune", recipe, "--machine", machine_file) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "none: the head alone trains, 96" in shown
    assert "48 features once" in shown
    assert "visited for the features, and in no step" in shown
    assert "Features: 48 features in" in shown

    plain, held_out = (Plain.of(model_dir, rows, seed=SEED) for rows in (ROWS[:36], ROWS[36:]))
    features, head = plain.features(), plain.model.score.weight
    expected = steps_of(
        [head], lambda: functional.linear(features, head), plain.labels, LR, NUM_STEPS
    )
    rows = rows_of(run_dir)
    assert losses(run_dir) == pytest.approx([one for one, _ in expected], rel=1e-5)
    assert [row["accuracy"] for row in rows] == pytest.approx([one for _, one in expected])
    assert expected[-1][0] < 0.9 * expected[0][0]
    assert [row["num_loads"] for row in rows] == [0] * NUM_STEPS
    with torch.no_grad():
        outputs = functional.linear(held_out.features(), head)
    assert rows[-1]["eval_loss"] == pytest.approx(
        functional.cross_entropy(outputs, held_out.labels).item(), rel=1e-5
    )
    hits = (outputs.argmax(1) == held_out.labels).float().mean().item()
    assert rows[-1]["eval_accuracy"] == pytest.approx(hits)
    assert 0 <= rows[-1]["eval_f1"] <= 1

    ((name, found),) = load_file(run_dir / "adapter" / "adapter_model.safetensors").items()
    assert name == "base_model.model.score.weight"
    torch.testing.assert_close(found, head.data, rtol=1e-4, atol=1e-5)
    base = Plain.of(model_dir, ROWS[:NUM_TRAINED], seed=SEED + 1)
    loaded = PeftModel.from_pretrained(base.model, str(run_dir / "adapter")).eval()
    with torch.no_grad():
        torch.testing.assert_close(
            base.logits(loaded), functional.linear(features, head), rtol=1e-4, atol=1e-5
        )
    assert_reported(run_dir, capsys)


def assert_reported(run_dir: Path, capsys: Any) -> None:
    """What was predicted is compared with what was measured, and all say what has trained."""
    page = (run_dir / "report.html").read_text()
    assert "a new head alone, on features of the frozen layers" in page
    assert "48 features in" in page
    card = (run_dir / "adapter" / "README.md").read_text()
    assert "a head alone, on frozen layers" in card
    report = json.loads((run_dir / "report.json").read_text())
    assert report["features"]["num_features"] == 48
    (section,) = report["sections"]
    phases = {row["name"]: row for row in section["comparison"]}
    assert phases["head and loss"]["predicted"] > 0
    assert phases["forward"]["predicted"] == phases["backward"]["predicted"] == 0
    assert run("explain", run_dir) == 0
    assert "Features: 48 features in" in " ".join(capsys.readouterr().out.split())


def test_move_a_head_alone_resumes_to_the_bit(tmp_path, write_recipe, machine_file) -> None:
    recipe, run_dir = head_recipe(write_recipe, tmp_path), tmp_path / "run"
    words = ("finetune", recipe, "--machine", machine_file)
    assert run(*words) == 0
    whole = tmp_path / "whole"
    shutil.copytree(run_dir, whole)
    shutil.rmtree(run_dir / "adapter")
    newest = max(run_dir.glob("checkpoints/*"), key=lambda one: int(one.name.rpartition("-")[2]))
    assert int(newest.name.rpartition("-")[2]) == NUM_STEPS
    shutil.rmtree(newest)
    assert run(*words, "--resume") == 0
    assert losses(run_dir) == losses(whole)
    ours, theirs = adapter(run_dir), adapter(whole)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
