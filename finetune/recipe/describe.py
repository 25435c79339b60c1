"""What a recipe may hold, in words, for the limit and the hint of an error.

Everything is read off the JSON schema of `Recipe`, so no limit, default or example is written here
again. Other trainers' names for our settings are in `finetune.recipe.foreign_words`.
"""

import difflib
import functools
import json
import re
from collections.abc import Sequence
from typing import Any

from finetune.recipe.recipe import Recipe


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
    """Write a value as a person would in a recipe: plain words without quotes."""
    is_word = isinstance(value, str) and re.fullmatch(r"[A-Za-z][A-Za-z0-9_./-]*", value)
    return value if is_word and value not in ("true", "false", "null") else shown(value)


# ---------------------------------------------------------------------------------------------
# Limits


def describe(schema: dict[str, Any]) -> str:
    """Describe in words what a schema accepts: `a whole number of at least 1`."""
    if "anyOf" in schema:
        return ", or ".join(describe(part) for part in schema["anyOf"])
    if "enum" in schema:
        return " or ".join(schema["enum"])
    if "const" in schema:
        return str(schema["const"])
    if "$ref" in schema:
        part = _schema()["$defs"][schema["$ref"].rpartition("/")[2]]
        return f"sources, each with {', '.join(part['required'])} and, if need be," + (
            f" {', '.join(name for name in part['properties'] if name not in part['required'])}"
        )
    kind: str = schema["type"]
    if kind == "array":
        return f"a list of {describe(schema['items'])}"
    if kind == "object":
        names = schema.get("propertyNames", {}).get("enum", ())
        known = f" ({', '.join(names)})" if names else ""
        return f"names{known}, each with {describe(schema['additionalProperties'])}"
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

    The same name in another section is preferred, then a name a few letters away in the same
    section, then one in any section.

    Args:
        section: The section that holds the key; empty for a key at the top.
        key: The key that is not known.
    """
    word = plain(key)
    paths = [f"{name}.{setting}" for name in sections() for setting in settings(name)]
    for candidate in paths:
        if candidate.rpartition(".")[2] == word:
            return candidate
    near = _nearest(word, settings(section) if section else sections())
    if near is not None:
        return f"{section}.{near}" if section else near
    names = {path.rpartition(".")[2]: path for path in paths}
    near = _nearest(word, list(names))
    return None if near is None else names[near]


def plain(key: str) -> str:
    """Return a key without its section, in the spelling of settings."""
    return key.lower().replace("-", "_").rpartition(".")[2]


def _nearest(word: str, names: Sequence[str]) -> str | None:
    """Return the name that a word misspells: at most one letter in four differs."""
    nearest = min(names, key=lambda name: _num_edits(word, name))
    return nearest if _num_edits(word, nearest) <= max(1, len(word) // 4) else None


def _num_edits(a: str, b: str) -> int:
    """Count the letters to add, drop, change or swap with the next one to get from `a` to `b`."""
    before, row = [0] * (len(b) + 1), list(range(len(b) + 1))
    for i, letter in enumerate(a, 1):
        earlier, before, row = before, row, [i]
        for j, other in enumerate(b, 1):
            row.append(min(before[j] + 1, row[j - 1] + 1, before[j - 1] + (letter != other)))
            if i > 1 and j > 1 and letter == b[j - 2] and other == a[i - 2]:
                row[j] = min(row[j], earlier[j - 2] + 1)
    return row[-1]
