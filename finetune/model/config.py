"""The config of a model: in its folder, in the hub's cache, a shipped shape, or on the hub."""

import contextlib
import socket
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from finetune.env import has_proxy, is_offline
from finetune.errors import ModelError
from finetune.files.shards import INDEX, SINGLE
from finetune.recipe.load import load_shape, published_shape, shape_of_id, shipped_shapes
from finetune.recipe.sections import ModelSection

_CONNECT_TIMEOUT_S = 3.0


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
    if Path(path).exists():
        return path
    found = cached_file(path, "config.json")
    return str(found) if found is not None else shape_of_id(path) or _hub_config(path)


def cached_file(hub_id: str, name: str) -> Path | None:
    """Return a file of a hub repository from the local cache, or None."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    with contextlib.suppress(HFValidationError):
        found = try_to_load_from_cache(hub_id, name)
        if isinstance(found, str):
            return Path(found)
    return None


def is_hub_reachable() -> bool:
    """Return within seconds whether the hub answers; its client would retry for half a minute."""
    from huggingface_hub import constants

    if is_offline():
        return False
    if has_proxy():
        return True
    host = urlsplit(constants.ENDPOINT)
    port = host.port or (80 if host.scheme == "http" else 443)
    try:
        socket.create_connection((host.hostname or "", port), _CONNECT_TIMEOUT_S).close()
    except OSError:
        return False
    return True


def has_weights(path: str) -> bool:
    """Return whether a model's weights are on this machine."""
    if Path(path).is_dir():
        return any(Path(path).glob("*.safetensors"))
    return any(cached_file(path, name) is not None for name in (SINGLE, INDEX))


def _hub_config(hub_id: str) -> str:
    """Return the file of a config after downloading it."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    if not is_hub_reachable():
        raise ModelError(
            f"model.path: {hub_id} is no local directory and not in the cache",
            limit="the Hugging Face hub cannot be reached",
            hint="`model.path: DIR` with a downloaded model, or a shipped shape"
            f" ({', '.join(shipped_shapes())}) as `model.config`",
        )
    try:
        file: str = hf_hub_download(hub_id, "config.json")
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        raise ModelError(
            f"model.path: {hub_id} has no config.json on the hub ({type(error).__name__})",
            limit="it must be a repository that you may read",
            hint=f"look at https://huggingface.co/{hub_id}, or run `hf auth login`",
        ) from error
    return file


def local_folder(source: str) -> Path:
    """Return where a model's files are on this machine.

    Raises:
        ModelError: A hub id that was not downloaded.
    """
    if Path(source).is_dir():
        return Path(source)
    for name in ("config.json", "tokenizer_config.json"):
        found = cached_file(source, name)
        if found is not None:
            return found.parent
    raise ModelError(
        f"{source} is no local directory and not in the cache",
        limit="weights are read from this machine",
        hint=f"`hf download {source}`",
    )
