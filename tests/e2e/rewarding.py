"""Pairs of answers, and recipes that learn which is the better one."""

import json
from pathlib import Path
from typing import Any

PAIRS = [
    {"prompt": f"what follows {n}{'!' * (n % 5)}", "chosen": f"{n + 1}.", "rejected": f"{n}"}
    for n in range(36)
]
WEIGHT, MARGIN = 0.02, 0.25


def write(file: Path, rows: list[dict[str, Any]]) -> str:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


def reward_recipe(write_recipe, tmp_path: Path, model: Path, **sections: Any) -> Path:
    rows = write(tmp_path / "pairs.jsonl", PAIRS[:-4])
    held_out = write(tmp_path / "held.jsonl", [row | {"margin": MARGIN} for row in PAIRS[-4:]])
    data = {"path": rows, "format": "auto", "columns": {}}
    defaults: dict[str, dict[str, Any]] = {
        "model": {"path": str(model)},
        "objective": {"method": "reward", "beta": WEIGHT},
        "adapter": {"experts": "moe" in model.name or model.name.startswith("model")},
        "data": data | {"too_long": "drop", "eval_path": held_out, "eval_frac": None},
        "output": {"eval_every": 3},
    }
    for name, section in sections.items():
        defaults[name] = defaults.get(name, {}) | section
    return write_recipe(**defaults)
