import json
from pathlib import Path

import pytest

from finetune.recipe.load import load_recipe
from tests.e2e.runs import losses, run


@pytest.mark.thorough
def test_what_init_writes_trains(
    tmp_path: Path, model_dir: Path, machine_file: Path, cache: Path, capsys
) -> None:
    rows, recipe = tmp_path / "rows.jsonl", tmp_path / "new" / "mine.yaml"
    row = {"instruction": "what follows {}", "output": "more"}
    texts = (json.dumps(row | {"instruction": f"what follows {n}"}) for n in range(300))
    rows.write_text("\n".join(texts))
    words = ("--model", model_dir, "--data", rows, "--machine", machine_file, "--out", recipe)
    assert run("init", *words, "--yes") == 0
    assert "tokens of a row, by the model's tokenizer" in capsys.readouterr().out
    found = load_recipe(str(recipe), [])
    assert found.model.path == str(model_dir)
    assert found.data.format == "alpaca"
    run_dir = tmp_path / "run"
    settings = ["model.dtype=float32", "train.steps=2", "offload.device=cpu"]
    settings += (f"output.dir={run_dir}", "train.tokens_per_step=256", "data.num_workers=0")
    assert run("finetune", recipe, *settings, "--machine", machine_file) == 0
    assert len(losses(run_dir)) == 2
