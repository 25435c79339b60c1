"""What the user wants: one frozen `Recipe`.

A recipe is YAML in nine sections; their fields are in `finetune.recipe.sections`. This module
treats recipes as values: their canonical text, their hash, the difference of two, their JSON
schema, and where the shipped ones are. Rules between fields are in `finetune.recipe.capabilities`;
`finetune.recipe.load` reads files, with line numbers.
"""

import difflib
import functools
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import model_validator
from pydantic_core import PydanticCustomError

from finetune.errors import ConfigError
from finetune.recipe.adapters import ADAPTERS, AdapterSection
from finetune.recipe.capabilities import broken_rules
from finetune.recipe.extensions import OBJECTIVES
from finetune.recipe.sections import Settings
from offload.plan.facts.trainable import SCORE

# ---------------------------------------------------------------------------------------------
# The recipe and its rules


class Recipe(Settings):
    """A run, complete: every setting has its value."""

    @model_validator(mode="before")
    @classmethod
    def _give_an_objective_its_head(cls, values: Any) -> Any:
        """Set what follows from an objective with a head of its own, so that a run keeps it."""
        sections = ("objective", "model", "adapter")
        if not isinstance(values, dict) or not all(
            isinstance(values.get(name, {}), dict) for name in sections
        ):
            return values
        objective, model, adapter = (values.get(name, {}) for name in sections)
        method = objective.get("method")
        chosen = OBJECTIVES.get(method) if isinstance(method, str) else None
        if chosen is None or chosen.settings.head == "tokens":
            return values
        method = ADAPTERS.get(str(adapter.get("method", AdapterSection.default)))
        if method is None or method.is_virtual:
            return values | {"model": {"head": chosen.settings.head} | model}
        whole = adapter.get("modules_to_save", ())
        if isinstance(whole, list | tuple) and SCORE not in whole:
            adapter = adapter | {"modules_to_save": [*whole, SCORE]}
        train = values.get("train", {})
        if isinstance(train, dict) and train.get("what") == "head":
            adapter = {"targets": []} | adapter
        return values | {"model": {"head": chosen.settings.head} | model, "adapter": adapter}

    @model_validator(mode="after")
    def _obey_rules(self) -> "Recipe":
        """Refuse a recipe whose fields are each valid but contradict each other."""
        breaches = list(broken_rules(self))
        if breaches:
            text = "; ".join(f"{breach.what}; {breach.limit}" for breach in breaches)
            raise PydanticCustomError("rules", "{text}", {"text": text, "breaches": breaches})
        return self


# ---------------------------------------------------------------------------------------------
# Recipes as values


def resolved_yaml(recipe: Recipe) -> str:
    """Write the recipe with every default filled in, in the order of the sections."""
    values = recipe.model_dump(mode="json")
    return yaml.safe_dump(values, sort_keys=False, allow_unicode=True, width=100)


def recipe_hash(recipe: Recipe) -> str:
    """Return the sha256 of the recipe's canonical JSON: equal settings, equal hash."""
    values = recipe.model_dump(mode="json")
    canonical = json.dumps(values, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(canonical.encode("ascii")).hexdigest()


def differences(a: Recipe, b: Recipe) -> list[str]:
    """List the settings in which two recipes differ, as `train.lr: 0.0001 -> 0.0002`."""
    before, after = _flat(a), _flat(b)
    return [
        f"{path}: {json.dumps(before.get(path))} -> {json.dumps(after.get(path))}"
        for path in {**before, **after}
        if before.get(path) != after.get(path)
    ]


def is_longer(before: Recipe, after: Recipe) -> bool:
    """Whether `train.steps` was raised."""
    steps = before.train.steps, after.train.steps
    return steps[0] is not None and steps[1] is not None and steps[0] < steps[1]


def json_schema() -> str:
    """Return the JSON schema of a recipe, for editors that complete and check YAML."""
    schema = {"$schema": "https://json-schema.org/draft/2020-12/schema"}
    return json.dumps(schema | Recipe.model_json_schema(), indent=2) + "\n"


def _flat(recipe: Recipe) -> dict[str, Any]:
    """Return dotted path -> value for every field of every section."""
    return {
        f"{section}.{field}": value
        for section, fields in recipe.model_dump(mode="json").items()
        for field, value in fields.items()
    }


def with_settings(recipe: Recipe, values: Mapping[str, object]) -> Recipe:
    """Return the recipe with other values of some settings, by dotted path; no rule is checked."""
    for path, value in values.items():
        name, _, field = path.partition(".")
        section = getattr(recipe, name)
        assert field in type(section).model_fields, path
        recipe = recipe.model_copy(update={name: section.model_copy(update={field: value})})
    return recipe


def with_seq_len(recipe: Recipe, seq_len: int) -> Recipe:
    """Return the recipe with another sequence length, its step cut to whole micro-batches."""
    asked, size = recipe.train, recipe.train.micro_batch_size
    assert asked.tokens_per_step is not None
    tokens = whole_units(asked.tokens_per_step, seq_len * (1 if size == "auto" else size))
    return with_settings(recipe, {"train.seq_len": seq_len, "train.tokens_per_step": tokens})


def whole_units(tokens: int, unit: int) -> int:
    """Return the tokens of as many whole units as fit into a step; at least one."""
    return max(1, tokens // unit) * unit


# ---------------------------------------------------------------------------------------------
# Shipped recipes


def recipes_dir() -> Path:
    """Return the folder of shipped recipes: in an installed package, or in a checkout."""
    packaged = Path(__file__).parents[1] / "recipes"
    return packaged if packaged.is_dir() else Path(__file__).parents[2] / "recipes"


def shipped_recipes() -> dict[str, Path]:
    """Return the name and path of every shipped recipe, by name."""
    return {path.stem: path for path in sorted(recipes_dir().glob("*.yaml"))}


def shipped_recipe(name: str) -> Path:
    """Return the path of a shipped recipe.

    Raises:
        ConfigError: None has this name.
    """
    recipes = shipped_recipes()
    if name not in recipes:
        raise ConfigError(
            f"{name} is not a shipped recipe",
            limit=f"shipped are {', '.join(recipes)}",
            hint="`sluice recipes list`",
        )
    return recipes[name]


# ---------------------------------------------------------------------------------------------
# What a recipe may hold, in words, for the limit and the hint of an error.
#
# Everything is read off the JSON schema of `Recipe`, so no limit, default or example is written
# here again. Other trainers' names for our settings are in `finetune.recipe.foreign_words`.


@functools.cache
def _schema() -> dict[str, Any]:
    """Return the JSON schema of a recipe."""
    return Recipe.model_json_schema()


def sections() -> list[str]:
    """Return the names of the sections."""
    return list(Recipe.model_fields)


def settings(section: str, choice: str = "") -> list[str]:
    """Return the names of a section's settings: with a choice of its method, or with any."""
    every = _choices(section)
    chosen = [every[choice]] if choice in every else every.values()
    return list(dict.fromkeys(name for one in chosen for name in one["properties"]))


def choices_with(section: str, key: str, value: object = None) -> list[str]:
    """Return the choices of a section's method that have a setting, which may have the value."""
    found = {choice: one["properties"].get(key) for choice, one in _choices(section).items()}
    return [name for name, one in found.items() if one and value in one.get("enum", (value,))]


def section_with_method(name: object) -> str | None:
    """Return the section whose method can be of this name, or None."""
    chosen = (one for one in sections() if len(_choices(one)) > 1 and name in list(_choices(one)))
    return next(chosen, None)


def choice_of(section: str, values: Mapping[str, Any]) -> str:
    """Return the method that a section's values choose; empty if it has nothing to choose."""
    every = _choices(section)
    default = next(name for name, one in every.items() if "method" not in one.get("required", ()))
    method = values.get("method", default)
    return method if isinstance(method, str) and method in every else default


def is_section(path: str) -> bool:
    """Whether a path names a section."""
    return path in sections()


def field_schema(path: str, choice: str = "") -> dict[str, Any]:
    """Return the schema of the setting `section.field`, with a choice of the section's method."""
    section, _, key = path.partition(".")
    every = _choices(section)
    if key == "method" and len(every) > 1:
        return {"type": "string", "enum": list(every), "default": choice_of(section, {})}
    chosen = every[choice] if choice in every else every[choices_with(section, key)[0]]
    schema: dict[str, Any] = chosen["properties"][key]
    return schema


@functools.cache
def _choices(section: str) -> dict[str, dict[str, Any]]:
    """Return the schemas of a section by the choice of its method; empty where it has none."""
    reference: str = _schema()["properties"][section]["$ref"]
    schema = _schema()["$defs"][reference.rpartition("/")[2]]
    if "oneOf" not in schema:
        return {"": schema}
    return {one["properties"]["method"]["const"]: one for one in schema["oneOf"]}


def example(schema: dict[str, Any]) -> Any:
    """Return a value that a setting may have: its default, or else its example."""
    value = schema.get("default")
    return schema["examples"][0] if value in (None, {}) else value


def shown(value: Any) -> str:
    """Write a value as in a recipe, on one line and not too long."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 80 else text[:77] + "..."


def written(value: Any) -> str:
    """Write a value as a person would in a recipe: plain words without quotes."""
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return f"[{', '.join(map(written, value))}]"
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


def near_value(value: Any, schema: dict[str, Any]) -> Any:
    """Return the choice that a misspelt text is most like, or None; in a list if it is of one."""
    parts = schema.get("anyOf", [schema])
    items = [part["items"] for part in parts if part.get("type") == "array"]
    if isinstance(value, str) and any("enum" in item for item in items):
        near = near_value(value, {"anyOf": items})
        return near and [near]
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
    """Return the name that a word misspells."""
    near = difflib.get_close_matches(word, names, n=1, cutoff=0.75)
    return near[0] if near else None
