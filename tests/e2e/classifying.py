"""Texts and words with classes, and recipes that learn them."""

import json
from pathlib import Path
from typing import Any

NUM_CLASSES, NUM_TRAINED = 3, 36
ROWS = [{"text": f"what follows {n}{'!?.'[n % 3]}", "label": n % NUM_CLASSES} for n in range(48)]
TAGS = (0, -100, 1, 2)  # of "what", "follows", a number, a mark


def _tagged(number: int) -> dict[str, Any]:
    words = ["what", "follows", f"{number}", "!?."[number % 3] * (1 + number % 2)]
    return {"tokens": words[number % 2 :], "ner_tags": list(TAGS[number % 2 :])}


TAGGED_ROWS = [_tagged(number) for number in range(48)]


def write(file: Path, rows: list[dict[str, Any]]) -> str:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


def classify_recipe(write_recipe: Any, tmp_path: Path, **sections: Any) -> Path:
    return _recipe(write_recipe, tmp_path, ROWS, "classify", sections)


def tagging_recipe(write_recipe: Any, tmp_path: Path, **sections: Any) -> Path:
    data = {"columns": {"labels": "ner_tags"}} | sections.pop("data", {})
    return _recipe(
        write_recipe, tmp_path, TAGGED_ROWS, "classify_tokens", {**sections, "data": data}
    )


def _recipe(
    write_recipe: Any,
    tmp_path: Path,
    rows: list[dict[str, Any]],
    method: str,
    sections: dict[str, Any],
) -> Path:
    data: dict[str, Any] = {"format": "auto", "columns": {}}
    data |= {"too_long": "drop", "eval_frac": None}
    data |= {"path": write(tmp_path / "rows.jsonl", rows[:NUM_TRAINED])}
    data |= {"eval_path": write(tmp_path / "held.jsonl", rows[NUM_TRAINED:])}
    defaults: dict[str, dict[str, Any]] = {
        "model": {"num_classes": NUM_CLASSES},
        "objective": {"method": method},
        "data": data,
        "train": {"steps": 12, "lr": 0.02},
        "output": {"eval_every": 6},
    }
    for name, section in sections.items():
        defaults[name] = defaults.get(name, {}) | section
    recipe: Path = write_recipe(**defaults)
    return recipe


def ids_and_places(tokenizer: Any, row: dict[str, Any]) -> tuple[list[int], list[int]]:
    """Return the tokens of a row of words, and where each word begins."""
    ids, firsts = [tokenizer.eos_token_id], []
    for number, word in enumerate(row["tokens"]):  # a token of this tokenizer is a character
        ids += tokenizer(" " * (number > 0))["input_ids"]
        firsts.append(len(ids))
        ids += tokenizer(word)["input_ids"]
    return ids, firsts
