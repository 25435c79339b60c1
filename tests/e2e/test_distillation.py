"""The quickstart's model learns from a teacher's distributions what that learned from rows."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from finetune.recipe.recipe import shipped_recipe
from tests.e2e.runs import ROOT, run

QUICKSTART = ROOT / "recipes" / "quickstart"
NUM_ROWS, NUM_HELD_OUT, NUM_TOP = 240, 32, 8


def taught(folder: Path, name: str, num: int, teacher: Any) -> Path:
    """Write the first rows of a file with what a teacher says, by the guide's own function."""
    guide = (ROOT / "docs" / "guides" / "distillation.md").read_text()
    names: dict[str, Any] = {"torch": torch}
    exec(guide.split("```python\n")[1].split("```")[0], names)
    tokenizer = AutoTokenizer.from_pretrained(QUICKSTART / "model")
    lines = (QUICKSTART / f"{name}.jsonl").read_text().splitlines()[:num]
    turns = [json.loads(line)["messages"] for line in lines]
    plain = [{"prompt": asked["content"], "completion": said["content"]} for asked, said in turns]
    rows = [names["taught"](row, teacher, tokenizer, k=NUM_TOP) for row in plain]
    file = folder / f"{name}.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


@pytest.mark.slow
@pytest.mark.usefixtures("cache")
def test_the_quickstart_learns_from_a_teacher(tmp_path: Path) -> None:
    words = ("train.steps=24", "output.eval_every=24", "report.samples=0")
    recipe = shipped_recipe("quickstart")
    assert run("finetune", recipe, f"output.dir={tmp_path / 'teacher'}", *words) == 0
    base = AutoModelForCausalLM.from_pretrained(QUICKSTART / "model")
    teacher = PeftModel.from_pretrained(base, tmp_path / "teacher" / "adapter").eval()
    student = yaml.safe_load(Path(recipe).read_text())
    student["objective"] = {"method": "distill"}
    student["model"]["path"] = str(QUICKSTART / "model")
    student["data"] = {
        "path": str(taught(tmp_path, "train", NUM_ROWS, teacher)),
        "eval_path": str(taught(tmp_path, "heldout", NUM_HELD_OUT, teacher)),
    }
    del student["report"]
    file = tmp_path / "student.yaml"
    file.write_text(yaml.safe_dump(student))
    assert run("finetune", file, f"output.dir={tmp_path / 'student'}", *words[:2]) == 0
    found = json.loads((tmp_path / "student" / "report.json").read_text())["held_out"]
    before, after = found["before"], found["after"]
    assert after["eval_kl"] < 0.3 * before["eval_kl"]
    assert after["eval_top_1_agreement"] > before["eval_top_1_agreement"] + 0.2
    assert after["eval_teacher_top_k_mass"] == before["eval_teacher_top_k_mass"] > 0.9
