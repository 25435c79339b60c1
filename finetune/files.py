"""Files that a kill at any moment leaves whole: the old content or the new."""

import os
from pathlib import Path

PARTIAL = "partial-"


def write_atomically(file: Path, text: str) -> None:
    """Replace a file's content in one step."""
    partial = file.with_name(PARTIAL + file.name)
    partial.write_text(text)
    flush(partial)
    partial.replace(file)


def flush(path: Path) -> None:
    """Force a file, or the names in a directory, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
