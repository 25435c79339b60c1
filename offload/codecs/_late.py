"""Functions of codecs that are imported when they are called, as a plan asks each what it is."""

from collections.abc import Callable
from importlib import import_module


def late(module: str, name: str) -> Callable[..., None]:
    """Return the function of a module, which imports it."""

    def call(*given: object) -> None:
        getattr(import_module(module), name)(*given)

    return call
