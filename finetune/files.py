"""Paths as users write them, and files that a kill leaves whole: the old content or the new."""

import os
from pathlib import Path

PARTIAL = "partial-"


def expanded(text: str) -> Path:
    """Return a path with its `~` or `~user` written out, if there is such a user."""
    try:
        return Path(text).expanduser()
    except (RuntimeError, ValueError):  # a home that nobody knows, or no text that a path can have
        return Path(text)


def write_atomically(file: Path, text: str, *, mode: int | None = None) -> None:
    """Replace a file's content in one step; `mode` is its permissions, if not the usual ones."""
    partial = file.with_name(PARTIAL + file.name)
    partial.unlink(missing_ok=True)  # one that a kill has left may be read-only
    partial.write_text(text)
    if mode is not None:
        partial.chmod(mode)
    flush(partial)
    partial.replace(file)


def flush(path: Path) -> None:
    """Force a file, or the names in a directory, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
