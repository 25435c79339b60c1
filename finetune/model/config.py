"""The config of a model: in its folder, in the hub's cache, a shipped shape, or on the hub.

What is on the hub is in `finetune.hub`, which is imported where a model is named that is there.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from finetune.errors import ModelError
from finetune.recipe.load import load_shape, published_shape
from finetune.recipe.sections import ModelSection
from finetune.report.screen import Working

PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json")
VOCABULARY_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")


def read_config(section: ModelSection) -> dict[str, Any]:
    """Return the model's config as transformers reads it, without loading torch.

    A hub id is looked up in the local cache, then among the shipped shapes, then on the hub.

    Raises:
        ModelError: The config is nowhere to be found.
        ConfigError: The file is not a config.
    """
    return load_shape(_config_source(section))


def quantization_of(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return what the fields of a config.json say about quantised weights; None if nothing."""
    for part in (config.get("text_config"), config):
        if isinstance(part, Mapping) and isinstance(part.get("quantization_config"), Mapping):
            found: Mapping[str, Any] = part["quantization_config"]
            return found
    return None


def method_of(quantization: Mapping[str, Any]) -> str:
    """Return the `quant_method` of a `quantization_config`; bitsandbytes may leave it out."""
    return str(quantization.get("quant_method", "bitsandbytes"))


def published_form(section: ModelSection) -> str:
    """Return the `quant_method` of a model's published weights; empty if they are plain.

    Raises:
        ModelError: The config is nowhere to be found.
        ConfigError: The file is not a config.
    """
    quantization = None if section.init == "random" else quantization_of(read_config(section))
    return "" if quantization is None else method_of(quantization)


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
    if not is_on_hub(path):
        return path
    from finetune.hub import models

    return models.config_source(section)


def is_on_hub(name: str | None) -> bool:
    """Return whether the name of a model or tokenizer is of the hub: it is no path here."""
    return name is not None and not Path(name).exists()


def has_weights(section: ModelSection) -> bool:
    """Return whether a model's weights are on this machine."""
    if is_on_hub(section.path):
        from finetune.hub import models

        return models.has_weights(section)
    return section.path is not None and any(Path(section.path).glob("*.safetensors"))


def fetch_model(section: ModelSection, *, working: Working, note: Callable[[str], None]) -> None:
    """Fetch published weights that are on the hub and not on this machine.

    Args:
        section: The model.
        working: Shows the progress of some work.
        note: Shows a line.

    Raises:
        ModelError: The hub refuses, the connection breaks, or the disk is full.
    """
    if is_on_hub(section.path) and section.init == "pretrained":
        from finetune.hub import models

        models.fetch(section, working=working, note=note)


def known_folder(section: ModelSection) -> Path | None:
    """Return where the files of published weights are on this machine: of the hub, of a commit.

    None if they are not here, or the weights are random.
    """
    if section.path is None or section.init == "random":
        return None
    if not is_on_hub(section.path):
        return Path(section.path)
    from finetune.hub import models

    return models.folder(section)


def commit_of(section: ModelSection) -> str | None:
    """Return the commit of a model that is in the hub's cache; None of one that is not."""
    if not is_on_hub(section.path):
        return None
    from finetune.hub import models

    folder = models.folder(section)
    return None if folder is None else folder.name


def model_folder(section: ModelSection) -> Path:
    """Return where the files of published weights are on this machine.

    Raises:
        ModelError: A model of the hub that was not downloaded.
    """
    folder = known_folder(section)
    if folder is None:
        from finetune.hub import models

        raise models.not_cached(section)
    return folder


def processor_files(section: ModelSection) -> list[Path]:
    """Return the files of a model's processor of images, in one folder; none if it has none.

    Raises:
        ModelError: The hub does not give them.
    """
    if section.path is not None:  # its tokenizer may be elsewhere
        section = section.model_copy(update={"tokenizer": None, "tokenizer_revision": None})
    folder = tokenizer_folder(section)
    return [folder / name for name in PROCESSOR_FILES if (folder / name).is_file()]


def tokenizer_folder(section: ModelSection) -> Path:
    """Return where a tokenizer's files are on this machine; those of the hub are fetched first.

    Raises:
        ModelError: The hub does not give them.
    """
    source = section.tokenizer_source
    if not is_on_hub(source):
        return Path(str(source))
    from finetune.hub import models

    return models.tokenizer_folder(section, VOCABULARY_FILES)
