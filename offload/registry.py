"""Extensions by name: a module each in a folder of ours, or an entry point of another package.

An extension is a value of its kind's class. In the tree it is `EXTENSION` of a module, whose name
is the extension's. Another package declares its own:

    [project.entry-points."sluice.codecs"]
    my_codec = "my_package.my_codec:EXTENSION"

Names are known without importing any extension; one is imported when it is asked for. Modules of
extensions are pure: they import torch inside functions, or name a module beside them that does.
"""

import importlib
import pkgutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import EntryPoint, entry_points
from typing import TypeVar

from offload.errors import OffloadError

Extension = TypeVar("Extension")


@dataclass(frozen=True, kw_only=True, slots=True)
class Clash:
    """Values of a recipe's setting that an extension does not go with."""

    field: str  # dotted path of the setting
    values: tuple[object, ...]  # values that are refused
    is_all_but: bool = False  # whether all others are refused, and not these
    limit: str  # why, as an error says it
    fix: str  # what the setting can be


class Registry(Mapping[str, Extension]):
    """The extensions of a kind, those of the tree first.

    Args:
        kind: Plural noun; entry points are in the group `sluice.KIND`.
        ours: Those of the tree: the dotted name of their folder, or a table.
        type_: Class of the extensions.
    """

    def __init__(
        self, kind: str, ours: str | Mapping[str, Extension], type_: type[Extension]
    ) -> None:
        self.kind, self._package, self._type = kind, ours, type_
        self._loaded: dict[str, Extension] = {} if isinstance(ours, str) else {**ours}

    @cached_property
    def _ours(self) -> tuple[str, ...]:
        if not isinstance(self._package, str):
            return tuple(self._package)
        path = importlib.import_module(self._package).__path__
        names = (module.name for module in pkgutil.iter_modules(path))
        return tuple(name for name in names if not name.startswith("_"))

    @cached_property
    def _others(self) -> dict[str, EntryPoint]:
        found: dict[str, EntryPoint] = {}
        for point in entry_points(group=f"sluice.{self.kind}"):
            if point.name in self._ours or point.name in found:
                first = found.get(point.name)
                raise OffloadError(
                    f"{_described(point)} is named {point.name}, and so is"
                    f" {_described(first) if first else 'one of Sluice itself'}",
                    limit=f"each of sluice.{self.kind} has a name of its own",
                    hint=f"rename the entry point of {_package(point)}, or `pip uninstall"
                    f" {_package(point)}`",
                )
            found[point.name] = point
        return found

    @property
    def foreign(self) -> tuple[str, ...]:
        """The names of those of other packages."""
        return tuple(self._others)

    def __iter__(self) -> Iterator[str]:
        return iter((*self._ours, *self._others))

    def __len__(self) -> int:
        return len(self._ours) + len(self._others)

    def __getitem__(self, name: str) -> Extension:
        """Return an extension, imported if it was not yet.

        Raises:
            KeyError: There is none of this name.
            OffloadError: That of another package is not of this kind, or two have one name.
        """
        others = self._others  # also for a name of ours, which none of them may have
        if name in self._loaded:
            return self._loaded[name]
        if name in self._ours:
            module = importlib.import_module(f"{self._package}.{name}")
            self._loaded[name] = module.EXTENSION
        else:
            self._loaded[name] = self._checked(others[name])
        return self._loaded[name]

    def _checked(self, point: EntryPoint) -> Extension:
        extension = point.load()
        if not isinstance(extension, self._type):
            raise OffloadError(
                f"{_described(point)} is a {type(extension).__name__}",
                limit=f"an entry point of sluice.{self.kind} is a {self._type.__name__}",
                hint=f"correct {point.name} there, or `pip uninstall {_package(point)}`",
            )
        return extension


def _package(point: EntryPoint) -> str:
    return point.dist.name if point.dist else point.module


def _described(point: EntryPoint) -> str:
    return f"{point.value} of the package {_package(point)}"
