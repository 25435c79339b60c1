"""What is computed once for all micro-batches of a layer's visit, such as A and B in its dtype."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

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
        if self._visit is None:
            return make()
        if key not in self._values:
            self._values[key] = make()
        value: T = self._values[key]
        return value

    def once_in_pass(self, key: object, make: Callable[[], T]) -> T:
        """Return what `make` returned first in this pass."""
        known = self._of_pass
        if known is None:
            return make()
        if key not in known:
            known[key] = make()
        value: T = known[key]
        return value


VISIT_CACHE = VisitCache()
