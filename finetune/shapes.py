"""Model shapes: the fields of a Hugging Face config, without weights.

Shipped shapes are YAML files in `recipes/shapes`, one for each published model, so that a plan can
be made for a model that was never downloaded. A shape may also be a config.json of the user's own.
"""

import difflib
import json
from pathlib import Path
from typing import Any

import yaml

from finetune.errors import ConfigError
from finetune.files import expanded
from finetune.recipe import recipes_dir


def shipped_shapes() -> dict[str, Path]:
    """Return the name and path of every shipped shape, by name."""
    return {path.stem: path for path in sorted((recipes_dir() / "shapes").glob("*.yaml"))}


def find_shape(name_or_path: str) -> Path:
    """Return the file of a shape.

    Args:
        name_or_path: A shipped name, a YAML or JSON file, or a directory that holds a config.json.

    Raises:
        ConfigError: There is no such shape and no such file.
    """
    shapes = shipped_shapes()
    if name_or_path in shapes:
        return shapes[name_or_path]
    path = expanded(name_or_path)
    if path.is_dir():
        path = path / "config.json"
    if path.is_file():
        return path
    near = difflib.get_close_matches(name_or_path.lower(), shapes, n=3)
    raise ConfigError(
        f"{name_or_path} is not a model shape",
        limit="a shape is a shipped name or the path of a config.json",
        hint="`model.config: "
        + (near[0] if near else "tiny-qwen3")
        + "`; shipped are "
        + ", ".join(near or shapes),
    )


def load_shape(name_or_path: str) -> dict[str, Any]:
    """Read the config fields of a shape.

    Args:
        name_or_path: A shipped name, a YAML or JSON file, or a directory that holds a config.json.

    Raises:
        ConfigError: There is no such shape, or its file does not hold a model's config.
    """
    path = find_shape(name_or_path)
    try:
        text = path.read_text(encoding="utf-8")
        fields = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigError(
            f"{path} cannot be read: {str(error).splitlines()[0]}",
            limit="a shape is the JSON or YAML of a model's config",
            hint="`model.config: tiny-qwen3`, or download the model's config.json again",
        ) from error
    if not isinstance(fields, dict) or "model_type" not in fields:
        raise ConfigError(
            f"{path} has no model_type",
            limit="which sizes a config must have depends on it",
            hint="give the config.json of a causal language model",
        )
    shape: dict[str, Any] = fields
    return shape
