"""What holds inside a block of a pass: patched attributes, and results computed once for a visit.

A and B of an adapter in the compute dtype are such results: all micro-batches share them.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar, cast


@contextmanager
def patched(*changes: tuple[dict[str, Any], Mapping[str, Any]]) -> Iterator[None]:
    """Set entries of attribute tables inside a block, past `nn.Module`, and set them back.

    Args:
        changes: Tables, as `vars` returns them, and the entries to set in each.
    """
    before = [{name: table[name] for name in new if name in table} for table, new in changes]
    try:
        for table, new in changes:
            table.update(new)
        yield
    finally:
        for (table, new), old in zip(changes, before, strict=True):
            for name in new:
                table.pop(name, None)
            table.update(old)


T = TypeVar("T")


class VisitCache:
    """Values that are the same for all micro-batches of a visit, or in a pass, computed once.

    What trains changes between passes, never within one. Without a visit, or a pass, nothing is
    kept.
    """

    def __init__(self) -> None:
        """Keep nothing until a visit or a pass begins."""
        self._visit: object = None
        self._values: dict[object, Any] = {}
        self._of_pass: dict[object, Any] | None = None

    @contextmanager
    def in_pass(self) -> Iterator[None]:
        """Keep what `once_in_pass` returns meanwhile; no visit lasts longer."""
        self._of_pass = {}
        try:
            yield
        finally:
            self._of_pass = None
            self.enter(None)

    def enter(self, visit: object) -> None:
        """Begin a visit unless it is the current one; None ends it."""
        if visit != self._visit:
            self._visit = visit
            self._values.clear()

    def once(self, key: object, make: Callable[[], T]) -> T:
        """Return what `make` returned first in this visit."""
        return _once(None if self._visit is None else self._values, key, make)

    def once_in_pass(self, key: object, make: Callable[[], T]) -> T:
        """Return what `make` returned first in this pass."""
        return _once(self._of_pass, key, make)


def _once(known: dict[object, Any] | None, key: object, make: Callable[[], T]) -> T:
    """Return what is known by a key, or make it; nothing is kept where `known` is None."""
    if known is None:
        return make()
    if key not in known:
        known[key] = make()
    return cast("T", known[key])


VISIT_CACHE = VisitCache()
