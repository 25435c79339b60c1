"""An adapter that is kept in bf16: trained, resumed to the bit, planned, read by peft, merged."""

import json
import shutil
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from tests.e2e.runs import adapter, losses, run


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
