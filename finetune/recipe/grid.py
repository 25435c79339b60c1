"""Settings with several values, and files of named variants: what a sweep is made of.

A file has `recipe`, a recipe's path or shipped name; `variants`, from a name to `section.field`
settings; and, if wanted, `stop`.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import yaml

from finetune.errors import ConfigError
from finetune.files.atomic import expanded
from finetune.recipe.draft import CoreLoader

STOP = "stop"
_OPEN, _CLOSE = "[{(", "]})"


@dataclass(frozen=True, kw_only=True, slots=True)
class NamedVariants:
    """A file of variants."""

    recipe: str  # the recipe that is varied: a path or a shipped name
    # The settings of each variant, by its name: path -> value, as on the command line.
    settings: Mapping[str, dict[str, str]]
    stop: Mapping[str, Any]  # when runs stop early, as it was written


def values_of(text: str) -> list[str]:
    """Split a list of values at its commas, but not at those in brackets or quotes."""
    values, depth, quote, start = [], 0, "", 0
    for place, char in enumerate(text):
        if quote:
            quote = "" if char == quote else quote
        elif char in "\"'":
            quote = char
        elif char in _OPEN:
            depth += 1
        elif char in _CLOSE:
            depth -= 1
        elif char == "," and depth == 0:
            values.append(text[start:place])
            start = place + 1
    return [*values, text[start:]]


def named_variants(source: str) -> NamedVariants | None:
    """Return what a file of variants says; None if the source is no such file.

    Raises:
        ConfigError: It is one, and something is wrong with it.
    """
    path = expanded(source)
    if not path.is_file():
        return None
    try:
        content = yaml.load(path.read_text(encoding="utf-8-sig"), Loader=CoreLoader)
    except (yaml.YAMLError, UnicodeDecodeError, OSError):
        return None  # reading it as a recipe shows what is wrong
    if not isinstance(content, dict) or "variants" not in content:
        return None
    unknown = sorted(set(content) - {"recipe", "variants", STOP})
    variants = content["variants"]
    if unknown or not isinstance(content.get("recipe"), str) or not _is_settings(variants):
        raise ConfigError(
            f"{source}: " + (f"{unknown[0]} is not known" if unknown else "it is no sweep"),
            limit="it has `recipe`, and `variants`: names, each with `section.field: value` below",
            hint="`variants:` and below it, indented, `slow: {train.lr: 1e-5}`",
        )
    recipe = content["recipe"]
    near = path.parent / expanded(recipe)
    for name in variants:
        if re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name) is None:
            raise ConfigError(
                f"{source}: a variant is named {name!r}",
                limit="a name is of letters, digits, dot, dash and underscore",
                hint=f"`{re.sub(r'[^A-Za-z0-9._-]+', '-', name).strip('-_.') or 'first'}`",
            )
    return NamedVariants(
        recipe=str(near) if near.is_file() else recipe,
        settings={
            name: {path: _text(value) for path, value in (own or {}).items()}
            for name, own in variants.items()
        },
        stop=content.get(STOP) or {},
    )


def _is_settings(variants: object) -> bool:
    return (
        isinstance(variants, dict)
        and bool(variants)
        and all(isinstance(name, str) for name in variants)
        and all(own is None or isinstance(own, dict) for own in variants.values())
    )


def _text(value: object) -> str:
    """Return a value as it is written on the command line."""
    text = yaml.safe_dump(value, default_flow_style=True, width=10_000)
    return text.removesuffix("\n").removesuffix("\n...")
