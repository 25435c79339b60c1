"""The only place that reads or sets environment variables."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from finetune.errors import ConfigError


def world_size() -> int:
    """Return how many processes a launcher such as `accelerate launch` has started.

    Raises:
        ConfigError: The launcher's variable holds no number.
    """
    text = os.environ.get("WORLD_SIZE", "1")
    if not text.isdecimal():
        raise ConfigError(
            f"the environment variable WORLD_SIZE is {text!r}",
            limit="a launcher sets it to the number of its processes",
            hint="`unset WORLD_SIZE`",
        )
    return int(text)


def is_offline() -> bool:
    """Tell whether the user has forbidden the Hugging Face hub."""
    return os.environ.get("HF_HUB_OFFLINE", "0").upper() in {"1", "TRUE", "YES", "ON"}


def has_proxy() -> bool:
    """Tell whether connections go through a proxy, so that a direct one proves nothing."""
    return any(name.lower() in {"https_proxy", "all_proxy"} for name in os.environ)


def cache_dir() -> Path:
    """Return where tokens of data sets and stores of weights are kept between runs."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "sluice"


@contextmanager
def loading_one_by_one() -> Iterator[None]:
    """Have transformers convert one tensor after the other.

    Its threads would run ahead, and hold a whole model whose dtype is converted in memory.
    """
    name = "HF_DEACTIVATE_ASYNC_LOAD"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
