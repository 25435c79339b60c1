"""Model shapes: the fields of a Hugging Face config, without weights.

Shipped shapes are YAML files in `recipes/shapes`, one for each published model, so that a plan can
be made for a model that was never downloaded. A shape may also be a config.json of the user's own.
"""

import difflib
import json
import re
from collections.abc import Mapping
from functools import lru_cache
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
_FLOAT, _FLOATS = "__float__", ("Infinity", "-Infinity", "NaN")
"""How transformers writes floats for which JSON has no form."""
MAX_PARTS, MAX_NUMBER = 20_000, 2**48


def shipped_shapes() -> dict[str, Path]:
    """Return the name and path of every shipped shape, by name."""
    return {path.stem: path for path in sorted((recipes_dir() / "shapes").glob("*.yaml"))}


def published_ids() -> dict[str, str]:
    """Return the hub id of each shipped shape that is published, which its first line names."""
    found = {name: _PUBLISHED.match(path.read_text()) for name, path in shipped_shapes().items()}
    return {name: match[1] for name, match in found.items() if match}


def shape_of_id(hub_id: str) -> str | None:
    """Return the shipped shape of a hub id: by its last part, or as what it was published."""
    name = hub_id.rpartition("/")[2].lower()
    if name in shipped_shapes():
        return name
    return next((shape for shape, known in published_ids().items() if known == hub_id), None)


def is_shipped(config: Mapping[str, Any]) -> bool:
    """Return whether a config has all the fields of a shipped shape."""
    return any(load_shape(name).items() <= config.items() for name in shipped_shapes())


def named_shape(name: str) -> str:
    """Return the shipped shape that a loose name means: `Qwen3 30B`, or the only one that fits.

    Raises:
        ConfigError: None or several fit.
    """
    ids, wanted = published_ids(), _plain(name.rpartition("/")[2])
    known = {shape: {_plain(shape), _plain(ids.get(shape, "").rpartition("/")[2])} for shape in ids}
    exact = [shape for shape, names in known.items() if wanted in names]
    fits = exact or [
        shape for shape, names in known.items() if any(one.startswith(wanted) for one in names)
    ]
    if wanted and len(fits) == 1:
        return fits[0]
    near = fits or difflib.get_close_matches(name.lower(), known, n=3, cutoff=0.4)
    raise ConfigError(
        f"{name} means several models" if fits and wanted else f"{name} is no model that is known",
        limit=f"shipped are {', '.join(ids)}",
        hint=f"{', '.join(f'`{one}`' for one in near) or '`qwen3-8b`'}, the folder of a model, or a"
        " hub id in the cache",
    )


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


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
    """Read the config fields of a shape, as transformers' `from_pretrained` reads them.

    Args:
        name_or_path: A shipped name, a YAML or JSON file, or a directory that holds a config.json.

    Raises:
        ConfigError: There is no such shape, or its file does not hold a model's config.
    """
    shape: dict[str, Any] = _with_floats(published_shape(name_or_path))
    if shape["model_type"] == "mistral" and "layer_types" in shape:
        shape["model_type"] = "ministral"
    return shape


def published_shape(name_or_path: str) -> dict[str, Any]:
    """Read the config fields of a shape as they are in its file; see `load_shape`."""
    path = find_shape(name_or_path)
    content = _CONFIG.content(path)
    if path.suffix == ".yaml":
        content = _as_json(content, path)
    shape: dict[str, Any] = _CONFIG.parsed(content, source=str(path))
    _require_countable(shape, path)
    return shape


def _with_floats(value: Any) -> Any:
    """Return a value with floats that are not finite in place of transformers' form of them."""
    if isinstance(value, dict):
        tagged = value.get(_FLOAT) if len(value) == 1 else None
        if isinstance(tagged, str) and tagged in _FLOATS:
            return float(tagged)
        return {name: _with_floats(part) for name, part in value.items()}
    return [_with_floats(part) for part in value] if isinstance(value, list) else value


@lru_cache(maxsize=32)  # a plan reads its shape for each size of micro-batch; YAML takes longest
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
