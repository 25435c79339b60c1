"""Adapters of other methods than LoRA, from a recipe to a merged model, against plain peft."""

import json
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from tests.e2e.runs import adapter, losses, run

METHODS = ("loha", "lokr", "ia3", "vera", "oft", "miss", "hira")


def section(method: str) -> dict[str, Any]:
    """Return a section in which the default of each field that the method does not read is left."""
    rank = 16 if method == "ia3" else 4
    return {
        "method": method,
        "rank": rank,
        "alpha": 32.0,
        "targets": "all-linear",
        "experts": False,
    }


def logits(model: Any, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        result: torch.Tensor = model.eval()(input_ids=ids).logits
    return result


@pytest.mark.thorough
@pytest.mark.parametrize(
    "method",
    [m if m == "vera" else pytest.param(m, marks=pytest.mark.slow) for m in METHODS],
)
def test_a_method_trains_as_planned_is_read_by_peft_and_merges(
    method, write_recipe, model_dir, machine_file, cache, tmp_path, capsys
) -> None:
    recipe = write_recipe(adapter=section(method), report={"samples": 0})
    words, run_dir = ("--machine", machine_file), tmp_path / "run"
    assert run("finetune", recipe, *words, "train.steps=4") == 0
    stopped = losses(run_dir)
    assert run("finetune", recipe, *words, "--resume", "train.steps=6") == 0
    assert losses(run_dir)[:4] == stopped
    assert min(losses(run_dir)) < stopped[0]

    base: Any = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    ids = torch.arange(1, 12)[None]
    before = logits(base, ids)
    plain = PeftModel.from_pretrained(base, str(run_dir / "adapter"), is_trainable=True)
    peft_count = sum(p.numel() for p in plain.parameters() if p.requires_grad)
    capsys.readouterr()
    assert run("plan", recipe, *words, "--json") == 0
    planned = json.loads(capsys.readouterr().out)
    assert planned["model"]["num_adapter_parameters"] == peft_count

    trained = logits(plain, ids)
    assert (trained - before).abs().max() > 1e-3
    assert run("merge", run_dir, "--out", tmp_path / "merged") == 0
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    torch.testing.assert_close(logits(merged, ids), trained, rtol=1e-4, atol=1e-5)
    assert adapter(run_dir)
