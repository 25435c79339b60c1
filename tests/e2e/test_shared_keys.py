"""Models with layers that read what others have computed, from a recipe to a merged model."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.doubles import tiny_tokenizer
from tests.e2e.conftest import RecipeWriter
from tests.e2e.forked import Forked
from tests.e2e.runs import adapter, assert_same_training, losses, run
from tests.parity.tiny_models import SHARED_INDICES, SHARED_KEYS, tiny_model

GEMMA, GEMMA_3N = (f"{name}, {SHARED_KEYS}" for name in ("gemma4_text", "gemma3n_text"))
NAMES = (GEMMA, GEMMA_3N, f"glm_moe_dsa, {SHARED_INDICES}", "zaya")


def recipe_for(name: str, base: Path, write_recipe: RecipeWriter, **sections: Any) -> Path:
    """Save a tiny model of a type, with words, and write a recipe for it."""
    tokenizer = tiny_tokenizer()
    sizes = {"vocab_size": len(tokenizer)}
    if name.startswith("gemma"):
        sizes["vocab_size_per_layer_input"] = len(tokenizer)
    tiny_model(name, **sizes, max_position_embeddings=128).save_pretrained(base)
    tokenizer.save_pretrained(base)
    return write_recipe(
        model={"path": str(base), "dtype": "float32"},
        adapter={"targets": "all-linear", "experts": False},
        **sections,
    )


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
    recipe = recipe_for(
        name,
        base,
        write_recipe,
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


@pytest.mark.parametrize("name", [GEMMA, "zaya"])
@pytest.mark.filterwarnings("ignore")
@pytest.mark.slow
def test_two_ranks_train_as_one_process_does(
    name: str, tmp_path: Path, write_recipe: RecipeWriter, machine_file: Path, forked: Forked
) -> None:
    """Each has the values of its own micro-batches. A second step would enlarge roundings."""
    recipe = recipe_for(name, tmp_path / "base", write_recipe, train={"steps": 1})
    words = ("finetune", recipe, "--machine", machine_file)
    ranks = forked.start_ranks(*words, f"output.dir={tmp_path / 'two'}")
    assert run(*words, f"output.dir={tmp_path / 'one'}") == 0
    assert [rank.end() for rank in ranks] == [0, 0], [rank.shown for rank in ranks]
    assert_same_training(tmp_path / "two", tmp_path / "one")
