"""Model shapes: the fields of a Hugging Face config, without weights.

Shipped shapes are YAML files in `recipes/shapes`, one for each published model, so that a plan can
be made for a model that was never downloaded. A shape may also be a config.json of the user's own.
"""

import difflib
import json
import re
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import BaseModel, Field

from finetune.errors import ConfigError
from finetune.files.atomic import expanded
from finetune.files.json import JsonFile
from finetune.recipe.recipe import recipes_dir
from finetune.recipe.yaml_source import CoreLoader


class _Config(BaseModel):
    model_type: Annotated[str, Field(min_length=1, max_length=100)]


_CONFIG = JsonFile(
    holds=_Config,
    error=ConfigError,
    limit="a shape is the JSON or YAML of a causal language model's config, with its model_type",
    hint="`model.config: tiny-qwen3`, or download the model's config.json again",
)
_COUNTS = re.compile(r"^(?!.*(size|dim|norm)).*(layer|block|expert|depth)")
_PUBLISHED = re.compile(r"# Published as (\S+) on Hugging Face")
MAX_PARTS, MAX_NUMBER = 20_000, 2**48


def shipped_shapes() -> dict[str, Path]:
    """Return the name and path of every shipped shape, by name."""
    return {path.stem: path for path in sorted((recipes_dir() / "shapes").glob("*.yaml"))}


def published_shapes() -> dict[str, str]:
    """Return the hub id of every shipped shape of a published model -> the shape's name."""
    heads = {
        name: path.read_text("utf-8").partition("\n")[0] for name, path in shipped_shapes().items()
    }
    found = {name: _PUBLISHED.match(head) for name, head in heads.items()}
    return {match[1]: name for name, match in found.items() if match is not None}


def shape_of(hub_id: str) -> str | None:
    """Return the shipped shape of a model on the hub, or of one that is called the same."""
    name = hub_id.rpartition("/")[2].lower()
    return published_shapes().get(hub_id, name if name in shipped_shapes() else None)


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
    content = _CONFIG.content(path)
    if path.suffix == ".yaml":
        content = _as_json(content, path)
    shape: dict[str, Any] = _CONFIG.parsed(content, source=str(path))
    _require_countable(shape, path)
    return shape


def _as_json(content: bytes, path: Path) -> bytes:
    try:
        return json.dumps(yaml.load(content, Loader=CoreLoader)).encode()
    except (ValueError, TypeError, RecursionError, yaml.YAMLError) as error:
        raise _CONFIG.refusal(str(path), f"it is not YAML: {error}") from error


def _require_countable(value: object, path: Path, key: str = "") -> None:
    """Refuse numbers that no model has, before anything of that size is built.

    Raises:
        ConfigError: The shape has such a number.
    """
    if isinstance(value, dict):
        for name, part in value.items():
            _require_countable(part, path, name)
    elif isinstance(value, list):
        for part in value:
            _require_countable(part, path, key)
    elif isinstance(value, int):
        most = MAX_PARTS if _COUNTS.search(key) else MAX_NUMBER
        if abs(value) > most:
            raise ConfigError(
                f"{path}: {key[:80]} is {value if abs(value) < 2**64 else 'above 2**64'}",
                limit=f"it can be at most {most:,}",
                hint=f"correct `{key[:80]}` in {path.name}",
            )
