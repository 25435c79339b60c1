"""Attributes of modules and configs that have other values inside a block."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any


@contextmanager
def meanwhile(*changes: tuple[dict[str, Any], Mapping[str, Any]]) -> Iterator[None]:
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
