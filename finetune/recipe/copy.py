"""A copy of a shipped recipe that runs in its new place, with the files that it names."""

import shutil
from filecmp import cmp
from pathlib import Path

from finetune.errors import ConfigError
from finetune.recipe.load import PATH_FIELDS
from finetune.recipe.recipe import shipped_recipe
from finetune.recipe.yaml_source import read_draft


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
    changed = [target for file, target in pairs if target.exists() and not _is_same(file, target)]
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
    for field in PATH_FIELDS:
        section, _, key = field.partition(".")
        value = values.get(section, {}).get(key)
        path = recipe.parent / value if isinstance(value, str) else None
        if path is None or not path.exists():
            continue
        files = sorted(path.rglob("*")) if path.is_dir() else [path]
        found += [file.relative_to(recipe.parent) for file in files if file.is_file()]
    return found


def _is_same(file: Path, target: Path) -> bool:
    return target.is_file() and cmp(file, target, shallow=False)
