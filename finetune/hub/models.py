"""The files of a model and its tokenizer that are on the hub or in its cache, by a recipe."""

from collections.abc import Callable
from pathlib import Path

from finetune.errors import ModelError
from finetune.hub.download import download_weights, fetch_description
from finetune.hub.repository import (
    Repository,
    cached_file,
    cached_folder,
    has_cached_weights,
    look_up,
    not_here,
)
from finetune.recipe.load import shape_of_id
from finetune.recipe.sections import ModelSection
from finetune.report.screen import Working


def model_of(section: ModelSection) -> Repository:
    """Return the repository of a model whose path is none on this machine."""
    return _repository(str(section.path), section.revision, "model.path", "model.revision")


def tokenizer_of(section: ModelSection) -> Repository:
    """Return the repository of a tokenizer that is not on this machine by name."""
    if section.tokenizer is None:
        return model_of(section)
    revision = section.tokenizer_revision
    if revision is None and section.tokenizer == section.path:
        revision = section.revision
    where = "model.tokenizer"
    return _repository(section.tokenizer, revision, where, f"{where}_revision")


def _repository(name: str, revision: str | None, setting: str, where: str) -> Repository:
    return Repository(
        id=name, revision=revision, kind="model", setting=setting, revision_setting=where
    )


def config_source(section: ModelSection) -> str:
    """Return the file of a config in the cache, its shipped shape, or the file once fetched.

    Raises:
        ModelError: The hub does not give it, or has none.
    """
    repository = model_of(section)
    known = (repository.id, "config.json", repository.revision)
    if (found := cached_file(*known)) is not None:
        return str(found)
    if (shape := shape_of_id(repository.id)) is not None:
        return shape
    look_up(repository)
    fetch_description(repository)
    if (found := cached_file(*known)) is not None:
        return str(found)
    raise repository.error(
        f"{repository.id} has no config.json",
        limit="a model is published as `save_pretrained` writes it",
        hint=f"look at {repository.page}/tree/main, and name a model for transformers",
    )


def has_weights(section: ModelSection) -> bool:
    """Return whether a model's weights are in the cache."""
    return has_cached_weights(str(section.path), section.revision)


def fetch(section: ModelSection, *, working: Working, note: Callable[[str], None]) -> None:
    """Fetch a model's weights if they are not in the cache; see `download_weights`."""
    download_weights(model_of(section), working=working, note=note)


def folder(section: ModelSection) -> Path | None:
    """Return the folder of a model's files in the cache, which are of one commit, or None."""
    return cached_folder(model_of(section))


def not_cached(section: ModelSection) -> ModelError:
    """Return the error that a model is not in the cache, where the hub is not asked."""
    error = not_here(model_of(section))
    assert isinstance(error, ModelError)
    return error


def tokenizer_folder(section: ModelSection, files: tuple[str, ...]) -> Path:
    """Return the folder of a tokenizer's files in the cache, fetched first if they are not there.

    Args:
        section: The model.
        files: Names of files, one of which a tokenizer has.

    Raises:
        ModelError: The hub does not give them.
    """
    repository = tokenizer_of(section)
    found = cached_folder(repository)
    if found is None or not any((found / name).exists() for name in files):
        fetch_description(repository)
        found = cached_folder(repository)
    if found is None:
        raise not_here(repository)
    return found
