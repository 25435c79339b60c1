"""What a recipe may hold, said in words: for the limit and the hint of an error.

Everything is read off the JSON schema of `Recipe`, so no limit, default or example has a second
home here. The one thing added is `OTHER_NAMES`: what other programs call our settings.
"""

import difflib
import functools
import json
import re
from typing import Any

from finetune.recipe import Recipe

# Names of the same thing elsewhere -> ours. Too unlike in letters to be found by likeness.
OTHER_NAMES = {
    "learning_rate": "train.lr",
    "max_steps": "train.steps",
    "num_train_epochs": "train.epochs",
    "num_epochs": "train.epochs",
    "batch_size": "train.micro_batch_size",
    "per_device_train_batch_size": "train.micro_batch_size",
    "gradient_accumulation_steps": "train.grad_accum_steps",
    "global_batch_size": "train.grad_accum_steps",
    "max_seq_len": "train.seq_len",
    "max_seq_length": "train.seq_len",
    "sequence_len": "train.seq_len",
    "cutoff_len": "train.seq_len",
    "lr_scheduler": "train.schedule",
    "lr_scheduler_type": "train.schedule",
    "optim": "train.optimizer",
    "r": "adapter.rank",
    "lora_r": "adapter.rank",
    "lora_rank": "adapter.rank",
    "lora_alpha": "adapter.alpha",
    "lora_dropout": "adapter.dropout",
    "target_modules": "adapter.targets",
    "lora_target_modules": "adapter.targets",
    "use_rslora": "adapter.rslora",
    "peft_use_rslora": "adapter.rslora",
    "use_dora": "adapter.dora",
    "peft_use_dora": "adapter.dora",
    "loraplus_lr_ratio": "adapter.loraplus_ratio",
    "lora_modules_to_save": "adapter.modules_to_save",
    "train_norms": "adapter.modules_to_save",
    "train_router": "adapter.modules_to_save",
    "model_name": "model.path",
    "model_name_or_path": "model.path",
    "base_model": "model.path",
    "dataset": "data.path",
    "datasets": "data.path",
    "val_set_size": "data.eval_frac",
    "output_dir": "output.dir",
    "save_steps": "output.checkpoint_every",
    "save_total_limit": "output.keep_checkpoints",
    "eval_steps": "output.eval_every",
    "report_to": "report.log_to",
    "lora": "adapter",
    "dataloader_num_workers": "data.num_workers",
}


@functools.cache
def _schema() -> dict[str, Any]:
    """Return the JSON schema of a recipe."""
    return Recipe.model_json_schema()


def sections() -> list[str]:
    """Return the names of the sections."""
    return list(_schema()["properties"])


def settings(section: str) -> list[str]:
    """Return the names of a section's settings."""
    return list(_section_schema(section)["properties"])


def is_section(path: str) -> bool:
    """Whether a path names a section."""
    return path in sections()


def field_schema(path: str) -> dict[str, Any]:
    """Return the schema of the setting `section.field`."""
    section, _, key = path.partition(".")
    schema: dict[str, Any] = _section_schema(section)["properties"][key]
    return schema


def _section_schema(section: str) -> dict[str, Any]:
    """Return the schema of a section, which the recipe's schema holds by reference."""
    reference: str = _schema()["properties"][section]["$ref"]
    schema: dict[str, Any] = _schema()["$defs"][reference.rpartition("/")[2]]
    return schema


def example(path: str) -> Any:
    """Return a value that `section.field` may have: its default, or else its example."""
    schema = field_schema(path)
    value = schema.get("default")
    return schema["examples"][0] if value in (None, {}) else value


def shown(value: Any) -> str:
    """Write a value as in a recipe, on one line and not too long."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 80 else text[:77] + "..."


def written(value: Any) -> str:
    """Write a value as a person would in a recipe: a plain word without quotes."""
    is_word = isinstance(value, str) and re.fullmatch(r"[A-Za-z][A-Za-z0-9_./-]*", value)
    return value if is_word and value not in ("true", "false", "null") else shown(value)


# ---------------------------------------------------------------------------------------------
# Limits


def describe(schema: dict[str, Any]) -> str:
    """Say in words what a schema admits: `a whole number of at least 1`."""
    if "anyOf" in schema:
        return ", or ".join(describe(part) for part in schema["anyOf"])
    if "enum" in schema:
        return " or ".join(schema["enum"])
    if "const" in schema:
        return str(schema["const"])
    kind: str = schema["type"]
    if kind == "array":
        return f"a list of {describe(schema['items'])}"
    if kind == "object":
        return f"names, each with {describe(schema['additionalProperties'])}"
    if kind == "string":
        return f"text that matches {schema['pattern']}" if "pattern" in schema else "text"
    words = {"integer": "a whole number", "number": "a number", "boolean": "true or false"}
    bounds = {
        "minimum": "of at least",
        "exclusiveMinimum": "above",
        "maximum": "of at most",
        "exclusiveMaximum": "below",
    }
    limits = [f"{word} {schema[key]}" for key, word in bounds.items() if key in schema]
    return " ".join([words.get(kind, kind), " and ".join(limits)]).rstrip()


def near_value(value: Any, schema: dict[str, Any]) -> str | None:
    """Return the choice that a misspelt text is most like, or None."""
    parts = schema.get("anyOf", [schema])
    choices = [choice for part in parts for choice in part.get("enum", ())]
    near = difflib.get_close_matches(str(value).lower(), choices, n=1)
    return near[0] if near else None


def near_path(section: str, key: str) -> str | None:
    """Return the section or setting that an unknown key most likely means, or None.

    The same name in another section goes first, then what other programs call it, then the
    likest name in its own section, then the likest anywhere.

    Args:
        section: The section that holds the key; empty for a key beside the sections.
        key: The key that is not known.
    """
    word = key.lower().replace("-", "_").rpartition(".")[2]
    paths = [f"{name}.{setting}" for name in sections() for setting in settings(name)]
    for candidate in paths:
        if candidate.rpartition(".")[2] == word:
            return candidate
    if word in OTHER_NAMES:
        return OTHER_NAMES[word]
    near = difflib.get_close_matches(word, settings(section) if section else sections(), n=1)
    if near:
        return f"{section}.{near[0]}" if section else near[0]
    return _likest(word, paths)


def _likest(word: str, paths: list[str]) -> str | None:
    """Return the path whose last name is most like a word, or None."""
    names = {path.rpartition(".")[2]: path for path in paths}
    near = difflib.get_close_matches(word, names, n=1)
    return names[near[0]] if near else None
