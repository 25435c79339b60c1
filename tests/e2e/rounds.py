"""Runs that sample answers and have them rewarded, and what their rounds leave."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.e2e.conftest import RecipeWriter

NUM_ANSWERS, MOST = 4, 6
REWARDS = """
def reward(prompt, answer, row):
    return sum(one.isdigit() for one in answer) + 0.25 * (row["answer"] in answer)


def length(prompt, answer, row):
    return len(answer)
"""


def online(write_recipe: RecipeWriter, folder: Path, **sections: Mapping[str, Any]) -> Path:
    """Write a recipe of three prompts with four answers each in a step, and its rewards."""
    rewards = folder / "rewards.py"
    if not rewards.exists():
        rewards.write_text(REWARDS)
    objective = {
        "method": "grpo",
        "rewards": [str(rewards), {"function": f"{rewards}:length", "weight": 0.1}],
        "num_answers": NUM_ANSWERS,
        "max_new_tokens": MOST,
        **sections.pop("objective", {}),
    }
    plain: dict[str, Mapping[str, Any]] = {
        "objective": objective,
        "adapter": {"experts": False},
        "data": {"format": "prompt", "columns": {"prompt": "question"}},
        "train": {
            "micro_batch_size": 4,
            "grad_accum_steps": 3,
            "steps": 3,
            "lr": 0.02,
            "schedule": "constant",
            "warmup_steps": 0,
        },
        "output": {"checkpoint_every": 1},
    }
    for name, section in sections.items():
        plain[name] = {**plain.get(name, {}), **section}
    return write_recipe(**plain)


def open_round(run_dir: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((run_dir / "rounds" / "open.json").read_text())
    return found


def round_of(run_dir: Path, step: int) -> list[dict[str, Any]]:
    lines = (run_dir / "rounds" / f"{step:06d}.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]
