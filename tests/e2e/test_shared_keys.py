"""Models with layers that read what others have computed, from a recipe to a merged model."""

import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.doubles import tiny_tokenizer
from tests.e2e.conftest import RecipeWriter
from tests.e2e.runs import adapter, losses, run
from tests.parity.tiny_models import SHARED_INDICES, SHARED_KEYS, tiny_model

NAMES = (f"gemma4_text, {SHARED_KEYS}", f"glm_moe_dsa, {SHARED_INDICES}", "zaya")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.slow
def test_a_run_is_packed_resumed_to_the_bit_merged_and_talked_to(
    name: str,
    tmp_path: Path,
    write_recipe: RecipeWriter,
    machine_file: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    base, merged, run_dir = (tmp_path / part for part in ("base", "merged", "run"))
    tokenizer = tiny_tokenizer()
    sizes = {"vocab_size": len(tokenizer)}
    if SHARED_KEYS in name:
        sizes["vocab_size_per_layer_input"] = len(tokenizer)
    tiny_model(name, **sizes, max_position_embeddings=128).save_pretrained(base)
    tokenizer.save_pretrained(base)
    recipe = write_recipe(
        model={"path": str(base), "dtype": "float32"},
        adapter={"targets": "all-linear", "experts": False},
        train={"steps": 4},
        data={"packing": True},
        output={"checkpoint_every": 2},
        report={"samples": 1, "log_to": []},
    )
    words = ("--machine", machine_file)
    assert run("plan", recipe, *words, "--verbose") == 0
    assert "values that layers share" in capsys.readouterr().out
    assert run("finetune", recipe, *words) == 0
    whole, shown = adapter(run_dir), losses(run_dir)
    assert shown[-1] < shown[0]

    shutil.rmtree(run_dir / "checkpoints" / "step-0000004")
    shutil.rmtree(run_dir / "adapter")
    assert run("finetune", recipe, *words, "--resume") == 0
    assert losses(run_dir) == shown
    assert all(torch.equal(adapter(run_dir)[key], one) for key, one in whole.items())

    assert run("generate", run_dir, "--prompt", "what follows 3", "--max-new-tokens", "2") == 0
    assert run("merge", run_dir, "--out", merged) == 0
    ids = torch.arange(5, 25).view(2, 10)
    before, after = (
        AutoModelForCausalLM.from_pretrained(path).eval()(input_ids=ids).logits
        for path in (base, merged)
    )
    assert (after - before).abs().max() > 1e-4
