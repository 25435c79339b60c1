"""From a file and the command line to a `Recipe`, or to every reason why not.

    find the file -> Draft -> overrides -> paths -> checked against the fields -> against the rules

Every problem names file and line (or the override), the value seen, the limit, and the setting that
fixes it. To find all of them at once, the checker fixes what it reports (a misspelt key is read as
its nearest neighbour, a wrong value as the default) and checks again, so that no mistake hides
another.

Relative paths: a path in a recipe is looked up next to the recipe, then in the current directory; a
path on the command line only in the current directory. Paths that exist become absolute. A path
that does not exist and could be the id of a hub repository (`name` or `owner/name`) is kept as one.
`output.dir` is always relative to the current directory. The recipe that a run has written into its
directory is of the run there, wherever that was before: a copy goes on by itself.
"""

import difflib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from finetune.errors import ConfigError
from finetune.files.atomic import expanded
from finetune.files.seal import has_yaml_seal
from finetune.recipe.breach import Breach
from finetune.recipe.data_section import MixSource
from finetune.recipe.describe import (
    describe,
    example,
    field_schema,
    is_section,
    near_path,
    near_value,
    plain,
    sections,
    settings,
    shown,
    written,
)
from finetune.recipe.foreign_words import RENAMED, REPLACED, UNSUPPORTED
from finetune.recipe.recipe import Recipe, shipped_recipes
from finetune.recipe.rules import RIVALS
from finetune.recipe.shipped import find_shape, shipped_shapes
from finetune.recipe.yaml_source import Draft, Place, apply_overrides, joint_error, read_draft

PATH_FIELDS = (
    "model.path",
    "model.tokenizer",
    "adapter.init_from",
    "data.path",
    "data.eval_path",
)
RUN_RECIPE, RUN_CHECKPOINTS, RUN_METRICS = "recipe.yaml", "checkpoints", "metrics.jsonl"
MAX_RECIPE_BYTES = 100_000  # thirty times the longest shipped one
FILE_SUFFIXES = (
    ".jsonl",
    ".json",
    ".parquet",
    ".csv",
    ".txt",
    ".md",
    ".yaml",
    ".zst",
    ".gz",
    ".arrow",
)


def load_recipe(source: str, overrides: Sequence[str], *, check_files: bool = True) -> Recipe:
    """Read, complete and check a recipe.

    Args:
        source: Path of a recipe, or the name of a shipped one.
        overrides: `section.field=value` settings that take precedence over the file's.
        check_files: Refuse paths that can only be local and are missing. A plan needs no data.

    Raises:
        ConfigError: Anything is wrong; all problems are in the one error.
    """
    path = _find_recipe(source)
    text = _read_text(path)
    draft = read_draft(str(_shown_path(path)), text)
    output = draft.values.get("output")
    if isinstance(output, dict) and _is_in_run(path, text):
        is_named = any(word.partition("=")[0] == "output.name" for word in overrides)
        output["dir"] = None if is_named else str(_shown_path(path.parent))
    apply_overrides(draft, overrides, rivals=RIVALS)
    return recipe_from(draft, path.parent, check_files=check_files)


def is_of_run(source: str) -> bool:
    """Whether a recipe, which is there, is that of a run, in the run's directory."""
    path = _find_recipe(source)
    return _is_in_run(path, _read_text(path))


def _is_in_run(path: Path, text: str) -> bool:
    """Whether a recipe is where a run wrote it; one that was edited has lost its seal."""
    has_run = path.name == RUN_RECIPE and _exists(path.parent / RUN_CHECKPOINTS)
    return has_run and (has_yaml_seal(text) or _exists(path.parent / RUN_METRICS))


def is_recipe(word: str) -> bool:
    """Whether a word of the command line names a recipe: a YAML file, or a shipped one."""
    return "=" not in word and (word.endswith((".yaml", ".yml")) or word in shipped_recipes())


def recipe_from(draft: Draft, folder: Path, *, check_files: bool) -> Recipe:
    """Complete and check a draft.

    Args:
        draft: Settings as they were written, those of the command line among them.
        folder: Where its relative paths start.
        check_files: Refuse paths that can only be local and are missing.

    Raises:
        ConfigError: Anything is wrong; all problems are in the one error.
    """
    _resolve_paths(draft, folder, check_files=check_files)
    recipe = _check(draft)
    if recipe is None or draft.problems:
        raise joint_error(draft.problems)
    return recipe


# ---------------------------------------------------------------------------------------------
# Files


def _find_recipe(source: str) -> Path:
    """Return the file that a path or a shipped name means."""
    path = expanded(source)
    if _exists(path) and not path.is_dir():
        return path
    shipped = shipped_recipes()
    if source.removesuffix(".yaml") in shipped:
        return shipped[source.removesuffix(".yaml")]
    if _exists(path):
        raise ConfigError(
            f"{source} is a directory",
            limit="a recipe is a YAML file or the name of a shipped one",
            hint=f"`{Path(source) / RUN_RECIPE}`, or one of {', '.join(shipped)}",
        )
    near_names = difflib.get_close_matches(path.stem, shipped, n=1)
    near_files = _near_files(path, suffix=".yaml")
    near = [*near_files, *near_names]
    raise ConfigError(
        f"there is no recipe {source}",
        limit="a recipe is the path of a YAML file or the name of a shipped one",
        hint=f"`{near[0]}`" if near else f"one of {', '.join(shipped)}",
    )


def _read_text(path: Path) -> str:
    """Return the text of a recipe file."""
    try:
        num_bytes = path.stat().st_size
        if num_bytes > MAX_RECIPE_BYTES or not path.is_file():
            raise ConfigError(
                f"{path} cannot be read: it has {num_bytes:,} bytes"
                if path.is_file()
                else f"{path} cannot be read: it is no file",
                limit=f"a recipe is a file of at most {MAX_RECIPE_BYTES:,} bytes",
                hint="`sluice recipes show quickstart` prints one to start from",
            )
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(
            f"{path} cannot be read: {reason}",
            limit="a recipe is a readable YAML file in UTF-8",
            hint="`sluice recipes show quickstart` prints one to start from",
        ) from error


def _resolve_paths(draft: Draft, recipe_dir: Path, *, check_files: bool) -> None:
    """Make the paths of a draft absolute if they exist."""
    for field in PATH_FIELDS:
        section_name, _, key = field.partition(".")
        section = draft.values.get(section_name)
        value = section.get(key) if isinstance(section, dict) else None
        if not isinstance(section, dict) or not isinstance(value, str) or not value:
            continue
        bases = _bases(draft, field, recipe_dir)
        found = _find_path(value, bases)
        if found is not None:
            section[key] = found
        elif check_files and _is_local(value):
            near = _near_files(bases[-1] / expanded(value), suffix="")
            draft.add_problem(
                draft.place(field),
                f"{field} is {shown(value)}, and there is no such file",
                limit=f"it has to exist in {' or '.join(dict.fromkeys(map(str, bases)))}",
                hint=f"`{field}: {near[0] if near else Path('FOLDER') / Path(value).name}`",
            )
    _resolve_mix(draft, recipe_dir, check_files=check_files)
    _resolve_config(draft, recipe_dir)


def _resolve_mix(draft: Draft, recipe_dir: Path, *, check_files: bool) -> None:
    """Make the paths of a mix absolute if they exist."""
    section = draft.values.get("data")
    entries = section.get("mix") if isinstance(section, dict) else None
    for number, entry in enumerate(entries if isinstance(entries, list) else ()):
        value = entry.get("path") if isinstance(entry, dict) else None
        if not isinstance(value, str) or not value:
            continue
        bases = _bases(draft, "data.mix", recipe_dir)
        found = _find_path(value, bases)
        if found is not None:
            entry["path"] = found
        elif check_files and _is_local(value):
            near = _near_files(bases[-1] / expanded(value), suffix="")
            draft.add_problem(
                draft.place("data.mix"),
                f"data.mix[{number}].path is {shown(value)}, and there is no such file",
                limit=f"it has to exist in {' or '.join(dict.fromkeys(map(str, bases)))}",
                hint=f"`path: {near[0] if near else Path('FOLDER') / Path(value).name}`",
            )


def _resolve_config(draft: Draft, recipe_dir: Path) -> None:
    """Make model.config absolute if it is a file, else check that it is a shipped shape."""
    section = draft.values.get("model")
    value = section.get("config") if isinstance(section, dict) else None
    if not isinstance(section, dict) or not isinstance(value, str) or not value:
        return
    if value in shipped_shapes():
        return
    found = _find_path(value, _bases(draft, "model.config", recipe_dir))
    if found is not None:
        section["config"] = found
        return
    try:
        find_shape(value)
    except ConfigError as error:
        draft.add_problem(
            draft.place("model.config"),
            f"model.config is {shown(value)}: {error.what}",
            limit=error.limit,
            hint=error.hint,
        )


def _bases(draft: Draft, field: str, recipe_dir: Path) -> tuple[Path, ...]:
    """Return the directories in which a field's relative path is looked for."""
    here = Path.cwd()
    return (here,) if draft.place(field).is_override else (recipe_dir.absolute(), here)


def _find_path(value: str, bases: Sequence[Path]) -> str | None:
    """Return the absolute path of the first base in which a path exists, its `:split` kept."""
    name, colon, split = value.partition(":")
    for base in bases:
        for text, rest in ((value, ""), (name, f"{colon}{split}")):
            candidate = base / expanded(text)
            if text and _exists(candidate):
                # Path.resolve would follow links, and a hub cache links to files without a suffix.
                return f"{os.path.abspath(candidate)}{rest}"  # noqa: PTH100
    return None


def _is_local(value: str) -> bool:
    """Whether a path cannot be the id of a hub repository."""
    return (
        value.startswith((".", "/", "~")) or value.count("/") > 1 or value.endswith(FILE_SUFFIXES)
    )


def _exists(path: Path) -> bool:
    """Whether there is something at a path that this user can see."""
    try:
        return path.exists()
    except (OSError, ValueError):  # a name too long, or a folder that may not be read
        return False


def _near_files(path: Path, *, suffix: str) -> list[str]:
    """Return the paths next to a missing one that have similar names."""
    folder = path.parent
    try:
        names = [entry.name for entry in folder.iterdir() if entry.name.endswith(suffix)]
    except (OSError, ValueError):
        return []
    near = difflib.get_close_matches(path.name, names, n=2)
    return [str(_shown_path(folder / name)) for name in near]


def _shown_path(path: Path) -> Path:
    """Return a path as short as it can be written from the current directory."""
    absolute, here = path.absolute(), Path.cwd()
    return absolute.relative_to(here) if absolute.is_relative_to(here) else path


# ---------------------------------------------------------------------------------------------
# Checks


def _check(draft: Draft) -> Recipe | None:
    """Check a draft against fields and rules; note every problem and fix it to find more."""
    for name in sections():
        if draft.values.get(name) is None:
            draft.values[name] = {}  # absent, or all of its settings are commented out
    fixed: set[str] = set()
    while True:
        try:
            return Recipe.model_validate(draft.values)
        except ValidationError as error:
            details = error.errors(include_url=False)
        if details[0]["type"] == "rules":
            _note_breaches(draft, details[0]["ctx"]["breaches"], fixed)
            return None
        for detail in details:
            if detail["loc"][:2] == ("data", "mix") and len(detail["loc"]) > 2:
                _note_wrong_source(draft, detail["loc"][2:], detail["input"], fixed)
                continue
            section_name, key = ["", *map(str, detail["loc"][:2])][-2:]
            path = f"{section_name}.{key}" if section_name else key
            if detail["type"] == "extra_forbidden":
                _note_unknown(draft, section_name, key)
            elif path not in fixed:
                fixed.add(path)
                _note_wrong(draft, path)


def _note_breaches(draft: Draft, breaches: Sequence[Breach], fixed: set[str]) -> None:
    """Note the broken rules, except those that read a setting or a section that was fixed."""
    for breach in breaches:
        read = {breach.field, breach.field.partition(".")[0], *breach.reads}
        if fixed.isdisjoint(read):
            draft.add_problem(
                draft.place(breach.field), breach.what, limit=breach.limit, hint=breach.hint
            )


def _note_wrong(draft: Draft, path: str) -> None:
    """Note a section that is not a mapping, or a setting that is missing or wrong, and fix it."""
    if is_section(path):
        draft.add_problem(
            draft.place(path),
            f"{path} is {shown(draft.values[path])}",
            limit=f"{path} is a section, with settings such as {', '.join(settings(path)[:3])}",
            hint=f"`{path}:` and below it, indented, `{settings(path)[0]}: ...`",
        )
        draft.values[path] = {}
        return
    section_name, _, key = path.partition(".")
    section = draft.values[section_name]
    schema, value = field_schema(path), example(path)
    if key in section:
        seen, near = f"is {shown(section[key])}", near_value(section[key], schema)
    else:
        seen, near = "is not set", None
    draft.add_problem(
        draft.place(path),
        f"{path} {seen}",
        limit=f"it must be {describe(schema)}",
        hint=_setting(draft.place(path), path, near or value),
    )
    section[key] = value


def _note_wrong_source(
    draft: Draft, place: Sequence[int | str], value: Any, fixed: set[str]
) -> None:
    """Note what is wrong in an entry of `data.mix`, and fix the whole list to find more.

    Args:
        draft: The recipe.
        place: The entry's number, and the setting in it if it is one that is wrong.
        value: What is there.
        fixed: Settings that were fixed; gets `data.mix`.
    """
    number, *keys = place
    path = f"data.mix[{number}]" + (f".{keys[0]}" if keys else "")
    names, entry = list(MixSource.model_fields), draft.values["data"].get("mix") or [{}]
    known = not keys or keys[0] in names
    given = entry[number] if isinstance(number, int) and number < len(entry) else None
    is_missing = bool(keys) and isinstance(given, dict) and keys[0] not in given
    limits = {
        "weight": "it must be a number above 0",
        "path": "it must be a file, a directory or a hub id",
        "max_rows": "it must be a whole number of at least 1",
    }
    limit = limits.get(str(keys[0]) if keys else "", f"an entry has {', '.join(names)}")
    hint = "`- {path: data/train.jsonl, weight: 1}`"
    if keys and keys[0] == "weight":
        hint = "leave the entry out, or `weight: 1`"
    elif not known:
        near = difflib.get_close_matches(str(keys[0]), names, n=1)
        hint = f"use `{near[0]}`" if near else f"remove `{keys[0]}`"
    seen = "is not set" if is_missing else f"is {shown(value)}"
    draft.add_problem(
        draft.place("data.mix"),
        f"{path} {seen}" if known else f"{path} is not a setting",
        limit=limit,
        hint=hint,
    )
    if "data.mix" not in fixed:
        fixed.add("data.mix")
    draft.values["data"]["mix"] = field_schema("data.mix")["examples"][0]


def _note_unknown(draft: Draft, section_name: str, key: str) -> None:
    """Note a key that no recipe has, and read it as its nearest neighbour if that is not set.

    Args:
        draft: The recipe.
        section_name: The section that holds the key; empty for a key at the top level.
        key: The unknown key.
    """
    path = f"{section_name}.{key}" if section_name else key
    holder = draft.values[section_name] if section_name else draft.values
    place, value, word = draft.place(path), holder.pop(key), plain(key)
    meant = RENAMED.get(word) or near_path(section_name, key)
    if word in UNSUPPORTED:
        limit, hint = f"not supported: {UNSUPPORTED[word]}", f"remove `{key}`"
    elif word in REPLACED:
        meant, other = REPLACED[word]
        equals = "=" if place.is_override else ": "
        limit, hint = f"here it is {meant}", f"use `{meant}{equals}{other}`"
    elif word in RENAMED:
        assert meant is not None
        limit, hint = f"here it is {meant}", f"use {_setting(place, meant, value)}"
        _move(draft, value, path, meant)
    elif meant is None:
        own = settings(section_name) if section_name else sections()
        owner = f"the section {section_name}" if section_name else "a recipe"
        limit, hint = f"{owner} has {', '.join(own)}", f"remove `{key}`"
    elif meant == path:
        section, _, setting = meant.partition(".")
        limit = f"in a file, {setting} is in the section {section}"
        hint = f"`{section}:` and below it, indented, `{setting}: {written(value)}`"
        _move(draft, value, path, meant)
    else:
        limit, hint = f"the nearest is {meant}", _setting(place, meant, value)
        _move(draft, value, path, meant)
    draft.add_problem(place, f"{path} is not a setting", limit=limit, hint=hint)


def _setting(place: Place, path: str, value: Any) -> str:
    """Write a setting as it is written at a place: in a recipe, or on the command line."""
    is_of_section = isinstance(value, dict) and not path.count(".")
    if is_of_section and not place.is_override:
        return f"`{path}:`"
    if is_of_section:
        return " ".join(f"`{path}.{key}={written(item)}`" for key, item in value.items())
    return f"`{path}={written(value)}`" if place.is_override else f"`{path}: {written(value)}`"


def _move(draft: Draft, value: Any, path: str, meant: str) -> None:
    """Move the value of a misspelt key to the intended setting, unless that is set."""
    section_name, dot, key = meant.partition(".")
    holder = draft.values[section_name] if dot else draft.values
    if isinstance(value, dict) == bool(dot) or not isinstance(holder, dict):
        return
    if holder.get(key or meant) not in (None, {}):
        return
    holder[key or meant] = value
    for place_path, place in list(draft.places.items()):
        if place_path == path or place_path.startswith(f"{path}."):
            draft.places[meant + place_path.removeprefix(path)] = place
