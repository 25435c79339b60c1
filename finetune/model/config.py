"""The config of a model: in its folder, in the hub's cache, a shipped shape, or on the hub."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

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
from finetune.recipe.load import load_shape, published_shape, shape_of_id
from finetune.recipe.sections import ModelSection
from finetune.report.screen import Working

VOCABULARY_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")


def read_config(section: ModelSection) -> dict[str, Any]:
    """Return the model's config as transformers reads it, without loading torch.

    A hub id is looked up in the local cache, then among the shipped shapes, then on the hub.

    Raises:
        ModelError: The config is nowhere to be found.
        ConfigError: The file is not a config.
    """
    return load_shape(_config_source(section))


def published_config(section: ModelSection) -> dict[str, Any]:
    """Return the model's config as it is in its file; see `read_config`."""
    return published_shape(_config_source(section))


def _config_source(section: ModelSection) -> str:
    """Return the shipped shape, file or directory that holds a model's config."""
    if section.config is not None:
        return section.config
    path = section.path
    assert path is not None
    if Path(path).is_dir() and not (Path(path) / "config.json").exists():
        raise ModelError(
            f"model.path: {path} holds no config.json",
            limit="a model's directory is as `save_pretrained` writes it",
            hint="`model.path: DIR` with a downloaded model",
        )
    repository = hub_model(section)
    return path if repository is None else _hub_config(repository)


def _hub_config(repository: Repository) -> str:
    """Return the file of a config in the cache, its shipped shape, or the file once fetched."""
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


def hub_model(section: ModelSection) -> Repository | None:
    """Return the hub repository of a model; None if its files are on this machine by name."""
    return None if section.path is None else _on_hub(section.path, section.revision, "model.path")


def hub_tokenizer(section: ModelSection) -> Repository | None:
    """Return the hub repository of a model's tokenizer; None if it is on this machine by name."""
    if section.tokenizer is None:
        return hub_model(section)
    revision = section.tokenizer_revision
    if revision is None and section.tokenizer == section.path:
        revision = section.revision
    return _on_hub(section.tokenizer, revision, "model.tokenizer")


def _on_hub(name: str, revision: str | None, setting: str) -> Repository | None:
    if Path(name).exists():
        return None
    where = "model.revision" if setting == "model.path" else f"{setting}_revision"
    return Repository(
        id=name, revision=revision, kind="model", setting=setting, revision_setting=where
    )


def has_weights(section: ModelSection) -> bool:
    """Return whether a model's weights are on this machine."""
    repository = hub_model(section)
    if repository is None:
        return section.path is not None and any(Path(section.path).glob("*.safetensors"))
    return has_cached_weights(repository.id, repository.revision)


def fetch_model(section: ModelSection, *, working: Working, note: Callable[[str], None]) -> None:
    """Fetch published weights that are on the hub and not on this machine.

    Args:
        section: The model.
        working: Shows the progress of some work.
        note: Shows a line.

    Raises:
        ModelError: The hub refuses, the connection breaks, or the disk is full.
    """
    repository = hub_model(section)
    if repository is not None and section.init == "pretrained":
        download_weights(repository, working=working, note=note)


def known_folder(section: ModelSection) -> Path | None:
    """Return where the files of published weights are on this machine: of the hub, of a commit.

    None if they are not here, or the weights are random.
    """
    if section.path is None or section.init == "random":
        return None
    repository = hub_model(section)
    return Path(section.path) if repository is None else cached_folder(repository)


def commit_of(section: ModelSection) -> str | None:
    """Return the commit of a model that is in the hub's cache; None of one that is not."""
    repository = hub_model(section)
    folder = None if repository is None else cached_folder(repository)
    return None if folder is None else folder.name


def model_folder(section: ModelSection) -> Path:
    """Return where the files of published weights are on this machine.

    Raises:
        ModelError: A model of the hub that was not downloaded.
    """
    folder, repository = known_folder(section), hub_model(section)
    if folder is None:
        assert repository is not None, "a local path is always known"
        raise not_here(repository)
    return folder


def tokenizer_folder(section: ModelSection) -> Path:
    """Return where a tokenizer's files are on this machine; those of the hub are fetched first.

    Raises:
        ModelError: The hub does not give them.
    """
    repository = hub_tokenizer(section)
    if repository is None:
        return Path(str(section.tokenizer_source))
    folder = cached_folder(repository)
    if folder is None or not any((folder / name).exists() for name in VOCABULARY_FILES):
        fetch_description(repository)
        folder = cached_folder(repository)
    if folder is None:
        raise not_here(repository)
    return folder
