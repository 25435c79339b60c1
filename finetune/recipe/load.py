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
import json
import os
import re
import shlex
import shutil
from collections.abc import Mapping, Sequence
from filecmp import cmp
from functools import cache, lru_cache
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import BaseModel, Field, ValidationError

from finetune.errors import ConfigError
from finetune.files.atomic import JsonFile, expanded
from finetune.files.manifest import has_yaml_seal
from finetune.recipe.capabilities import RIVALS
from finetune.recipe.draft import (
    CoreLoader,
    Draft,
    apply_overrides,
    as_setting,
    joint_error,
    read_draft,
)
from finetune.recipe.recipe import (
    Recipe,
    recipes_dir,
    sections,
    shipped_recipe,
    shipped_recipes,
    shown,
)

# ---------------------------------------------------------------------------------------------
# Model shapes: the fields of a Hugging Face config, without weights.
#
# Shipped shapes are YAML files in `recipes/shapes`, one for each published model, so that a plan
# can be made for a model that was never downloaded. A shape may also be a config.json of the user's
# own.


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
SHIPPED_FACTS = "shapes/facts.json"
_NO_SHAPE = re.compile(
    r"(vision|audio)_config|(.*\.)?(architectures|attention_dropout|auto_map|\w*dtype|\w*initializer"
    r"_range|\w*_token_(id|index)|language_model_only|max_window_layers|mtp_.*|norm_topk_prob"
    r"|num_nextn_predict_layers|pretraining_tp|quantization_config|router_aux_loss_coef"
    r"|transformers_version|use_cache)"
)
"""Fields of a config that do not change what text passes through."""


@cache
def shipped_shapes() -> Mapping[str, Path]:
    """Return the name and path of every shipped shape, by name."""
    return {path.stem: path for path in sorted((recipes_dir() / "shapes").glob("*.yaml"))}


@cache
def published_ids() -> Mapping[str, str]:
    """Return the hub id of each shipped shape that is published, which its first line names."""
    found = {name: _PUBLISHED.match(path.read_text()) for name, path in shipped_shapes().items()}
    return {name: match[1] for name, match in found.items() if match}


def shape_of_id(hub_id: str) -> str | None:
    """Return the shipped shape of a hub id: by its last part, or as what it was published."""
    name = hub_id.rpartition("/")[2].lower()
    if name in shipped_shapes():
        return name
    return next((shape for shape, known in published_ids().items() if known == hub_id), None)


def shape_of(config: Mapping[str, Any], *, form: Mapping[str, Any] | None = None) -> str | None:
    """Return the shipped shape of which a config is, with fields at most that change no shape.

    Args:
        config: The fields of config.json.
        form: The `quantization_config` that the shape has too; None for any.
    """
    fields = _sized(config)
    given = {key for key, value in fields.items() if value}
    found = (
        name
        for name, shape in _shapes().items()
        if shape.items() <= fields.items() and given <= shape.keys()
        if form in (None, load_shape(name).get("quantization_config"))
    )
    return min(found, default=None, key=len)


def _sized(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the fields of a config and of its parts that may size something, by dotted name."""
    found: dict[str, Any] = {}
    for key, value in config.items():
        if not _NO_SHAPE.fullmatch(prefix + key):
            is_part = key == "text_config" and isinstance(value, Mapping)
            found |= _sized(value, f"{key}.") if is_part else {prefix + key: value}
    return found


@cache
def _shapes() -> Mapping[str, Mapping[str, Any]]:
    return {name: _sized(load_shape(name)) for name in shipped_shapes()}


@cache
def shipped_facts() -> Mapping[str, Any]:
    """Return the facts of every shipped shape as JSON, by name: `ModelFacts.from_json` reads them.

    `make generate` writes them, from the models that are built.
    """
    found: Mapping[str, Any] = json.loads((recipes_dir() / SHIPPED_FACTS).read_text("utf-8"))
    return found


def named_shape(name: str) -> str:
    """Return the shipped shape that a loose name means: `Qwen3 30B`, or the only one that fits.

    Raises:
        ConfigError: None or several fit.
    """
    ids, wanted = published_ids(), plain_name(name.rpartition("/")[2])
    known = {
        shape: {plain_name(shape), plain_name(ids.get(shape, "").rpartition("/")[2])}
        for shape in ids
    }
    exact = [shape for shape, names in known.items() if wanted in names]
    fits = exact or [
        shape for shape, names in known.items() if any(one.startswith(wanted) for one in names)
    ]
    first = min(fits, default="", key=len)  # of a model and others that are made of it
    if wanted and first and all(shape.startswith(first) for shape in fits):
        return first
    near = fits or difflib.get_close_matches(name.lower(), known, n=3, cutoff=0.4)
    raise ConfigError(
        f"{name} means several models" if fits and wanted else f"{name} is no model that is known",
        limit=f"shipped are {', '.join(ids)}",
        hint=f"{', '.join(f'`{one}`' for one in near) or '`qwen3-8b`'}, the folder of a model, or a"
        " hub id in the cache",
    )


def plain_name(name: str) -> str:
    """Return the letters and digits of a name, in small letters."""
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


PATH_FIELDS = (
    "model.path",
    "model.tokenizer",
    "adapter.init_from",
    "data.path",
    "data.eval_path",
    "objective.rewards",
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
    _check_command(draft, check_files=check_files)
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
            hint=f"`{Path(source) / RUN_RECIPE}`, or one that `sluice recipes list` has",
        )
    near_names = difflib.get_close_matches(path.stem, shipped, n=1)
    near_files = _near_files(path, suffix=".yaml")
    near = [*near_files, *near_names]
    raise ConfigError(
        f"there is no recipe {source}",
        limit="a recipe is the path of a YAML file or the name of a shipped one",
        hint=f"`{near[0]}`" if near else "`sluice recipes list` has the shipped ones",
    )


_ROWS = (".jsonl", ".csv", ".parquet")


def _read_text(path: Path) -> str:
    """Return the text of a recipe file."""
    if path.suffix in _ROWS:
        raise ConfigError(
            f"{path} holds rows, and no recipe",
            limit="a recipe is a YAML file that names its rows by `data.path`",
            hint=f"`sluice init --model MODEL --data {path}` writes one for them",
        )
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
    for path_field in PATH_FIELDS:
        section_name, _, key = path_field.partition(".")
        section = draft.values.get(section_name)
        value = section.get(key) if isinstance(section, dict) else None
        if not isinstance(section, dict) or not isinstance(value, str) or not value:
            continue
        _resolve(draft, section, key, path_field, recipe_dir, check_files=check_files)
    for of_list, key in (("data.mix", "path"), ("objective.rewards", "function")):
        section_name, _, name = of_list.partition(".")
        section = draft.values.get(section_name)
        entries = section.get(name) if isinstance(section, dict) else None
        for number, entry in enumerate(entries if isinstance(entries, list) else ()):
            holder, at = (entry, key) if isinstance(entry, dict) else (entries, number)
            value = entry.get(key) if isinstance(entry, dict) else entry
            if isinstance(value, str) and value:
                where = f"{of_list}[{number}].{key}"
                _resolve(draft, holder, at, where, recipe_dir, check_files=check_files)
    _resolve_config(draft, recipe_dir)


def _resolve(
    draft: Draft,
    holder: Any,  # a mapping, or a list
    key: str | int,
    where: str,
    recipe_dir: Path,
    *,
    check_files: bool,
) -> None:
    """Make one path absolute if it exists, else note that it does not where it is no hub id.

    Args:
        draft: The recipe.
        holder: The section, or the entry of a mix, that has the path.
        key: Its name there.
        where: Its name in errors.
        recipe_dir: Of the recipe's file.
        check_files: Whether a path that does not exist is a problem.
    """
    value, of_setting = holder[key], where.partition("[")[0]
    bases = _bases(draft, of_setting, recipe_dir)
    found = _find_path(value, bases)
    if found is not None:
        holder[key] = found
    elif where == "model.path" and check_files and "/" not in value:
        if value not in shipped_shapes():
            _note_no_model(draft, value, bases)
    elif check_files and _is_local(value):
        near = _near_files(bases[-1] / expanded(value), suffix="")
        shown_key = where if where == of_setting else key
        draft.add_problem(
            draft.place(of_setting),
            f"{where} is {shown(value)}, and there is no such file or folder",
            limit="it has to exist"
            if Path(value).is_absolute()
            else f"it has to exist in {' or '.join(dict.fromkeys(map(str, bases)))}",
            hint=f"`{shown_key}: {near[0]}`" if near else f"set `{shown_key}` to one that exists",
        )


def _note_no_model(draft: Draft, value: str, bases: Sequence[Path]) -> None:
    """Note a model's path that is one word, and neither a folder nor a shipped shape."""
    ids = published_ids()
    near = difflib.get_close_matches(value.lower(), ids, n=3)
    shapes = f"the nearest are {', '.join(near)}" if near else "`sluice recipes list` has them"
    place = draft.place("model.path")
    draft.add_problem(
        place,
        f"model.path is {shown(value)}, and there is no such folder in"
        f" {' or '.join(dict.fromkeys(map(str, bases)))}",
        limit=f"it is a model's folder, a hub id such as owner/name, or a shipped shape: {shapes}",
        hint=as_setting(place, "model.path", ids[near[0]] if near else "Qwen/Qwen3-0.6B"),
    )


def _check_command(draft: Draft, *, check_files: bool) -> None:
    """Note a `report.notify` that cannot be called: it is words, the first of them a program."""
    section = draft.values.get("report")
    command = section.get("notify") if isinstance(section, dict) else None
    if not isinstance(command, str) or not command.strip():
        return  # the field has its own rules
    try:
        program = shlex.split(command)[0]
    except ValueError as error:
        draft.add_problem(
            draft.place("report.notify"),
            f"report.notify is {shown(command)}: {str(error).lower()}",
            limit="it is read as words, as a shell reads them",
            hint="close the quotes; for pipes, `report.notify: sh -c '...'`",
        )
        return
    if check_files and shutil.which(program) is None:
        draft.add_problem(
            draft.place("report.notify"),
            f"report.notify is {shown(command)}, and there is no program {program}",
            limit="it has to be on the PATH, or an executable file from the current directory",
            hint=f"`report.notify: curl -s -d @- {program}`"
            if "://" in program
            else "install it, or give its path (`chmod +x` on a script), or `report.notify: null`",
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
        from finetune.recipe.corrections import note, note_breaches

        if details[0]["type"] == "rules":
            note_breaches(draft, details[0]["ctx"]["breaches"], fixed)
            return None
        for detail in details:
            note(draft, detail, fixed)


def copy_recipe(name: str, to: Path) -> list[Path]:
    """Copy a recipe, and the files that it names to the same places relative to the copy.

    Returns:
        The recipe's copy, then the files copied with it; an existing file is left unchanged.

    Raises:
        ConfigError: There is no such recipe, or another file is where one would be written.
    """
    source = shipped_recipe(name)
    pairs = [(source.parent / path, to.parent / path) for path in _named_files(source)]
    missing = [(file, target) for file, target in pairs if not target.exists()]
    changed = [
        target
        for file, target in pairs
        if target.exists() and not (target.is_file() and cmp(file, target, shallow=False))
    ]
    for taken in [to] if to.exists() else changed:
        raise ConfigError(f"{taken} exists", hint="name a file in a new folder")
    for file, target in missing:
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, target)
    to.write_text(source.read_text())
    return [to, *(target for _, target in missing)]


def _named_files(recipe: Path) -> list[Path]:
    """Return the files that a recipe names relative to its own folder; those of named folders."""
    values = read_draft(str(recipe), recipe.read_text()).values
    found: list[Path] = []
    for path_field in PATH_FIELDS:
        section, _, key = path_field.partition(".")
        value = values.get(section, {}).get(key)
        path = recipe.parent / value if isinstance(value, str) else None
        if path is None or not path.exists():
            continue
        files = sorted(path.rglob("*")) if path.is_dir() else [path]
        found += [file.relative_to(recipe.parent) for file in files if file.is_file()]
    return found
