"""Typed reading of a parsed config.json."""

import reprlib
from collections.abc import Mapping
from typing import TypeVar

from offload.errors import UnsupportedModelError

T = TypeVar("T")

MAX_SIZE = 2**40  # above any real size; products of a few such sizes still fit a float


class Config:
    """Typed access to a config, with errors that name the key."""

    def __init__(
        self, values: Mapping[str, object], model_type: str, defaults: Mapping[str, int]
    ) -> None:
        """Keep the parsed config, and this family's sizes for missing keys."""
        self._values = values
        self._model_type = model_type
        self._defaults = defaults

    def size(self, *keys: str, least: int = 1) -> int:
        """Return the first of these keys that has a value: a size that cannot be guessed."""
        for key in keys:
            if self._values.get(key) is not None or key in self._defaults:
                return self.size_or(key, 0, least=least)
        raise UnsupportedModelError(
            f"the config of a {self._model_type} model has no `{keys[0]}`",
            limit="this size cannot be guessed",
            hint=f'add `"{keys[0]}": ...` to config.json',
        )

    def size_or(self, key: str, default: int, *, least: int = 0) -> int:
        """Return a size; if the key is missing or null, the family's size or the default."""
        value = self._typed(key, int, self._defaults.get(key, default), "a whole number")
        if not least <= value <= MAX_SIZE:
            raise self._wrong(key, value, f"a whole number from {least} to 2**40")
        return value

    def flag(self, key: str, *, default: bool) -> bool:
        """Return a boolean, or the default if the key is missing or null."""
        return self._typed(key, bool, default, "true or false")

    def names(self, key: str) -> list[object]:
        """Return a list, empty if the key is missing or null."""
        return self._typed(key, list, [], "a list")

    def frac(self, key: str, *, within: str, default: float) -> float:
        """Return a fraction from a config, or from a mapping in it, or the default."""
        inner = self._values.get(within)
        for values in (self._values, inner if isinstance(inner, Mapping) else {}):
            value = values.get(key)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
                raise self._wrong(key, value, "a number from 0 to 1")
            return float(value)
        return default

    def is_null(self, key: str) -> bool:
        """Whether the key is present but null."""
        return self._values.get(key, 0) is None

    def _typed(self, key: str, kind: type[T], default: T, limit: str) -> T:
        value = self._values.get(key)
        if value is None:
            return default
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise self._wrong(key, value, limit)
        return value

    def _wrong(self, key: str, value: object, limit: str) -> UnsupportedModelError:
        return UnsupportedModelError(
            f"`{key}` is {reprlib.repr(value)} in the config of a {self._model_type} model",
            limit=f"it must be {limit}",
            hint=f"correct `{key}` in config.json",
        )
