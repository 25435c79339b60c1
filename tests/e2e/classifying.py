"""Texts with classes, and a recipe that learns them."""

import json
from pathlib import Path
from typing import Any

NUM_CLASSES = 3
ROWS = [{"text": f"what follows {n}{'!?.'[n % 3]}", "label": n % NUM_CLASSES} for n in range(48)]


def write(file: Path, rows: list[dict[str, Any]]) -> str:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


def classify_recipe(write_recipe: Any, tmp_path: Path, **sections: Any) -> Path:
    data = {"format": "auto", "prompt_column": None, "completion_column": None}
    data |= {"too_long": "drop", "eval_frac": None}
    data |= {"path": write(tmp_path / "rows.jsonl", ROWS[:36])}
    data |= {"eval_path": write(tmp_path / "held.jsonl", ROWS[36:])}
    defaults: dict[str, dict[str, Any]] = {
        "model": {"num_classes": NUM_CLASSES},
        "objective": {"method": "classify"},
        "data": data,
        "train": {"steps": 12, "lr": 0.02},
        "output": {"eval_every": 6},
    }
    for name, section in sections.items():
        defaults[name] = defaults.get(name, {}) | section
    recipe: Path = write_recipe(**defaults)
    return recipe
