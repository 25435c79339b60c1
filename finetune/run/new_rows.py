"""The rows of a metrics.jsonl that is written to meanwhile."""

from pathlib import Path
from typing import Any

from finetune.errors import CheckpointError
from finetune.run.run_files import CHECKSUM, ROW, row_of


class NewRows:
    """Reads the rows of a metrics.jsonl that grows, each of them once.

    What was read before is known by the file's identity and by its last line, so the rest of it is
    not looked at again: a file that is changed before that line is not noticed, `read_rows` does.
    """

    def __init__(self, file: Path) -> None:
        """Name the file, which need not be there yet."""
        self._file = file
        self._seen = (0, 0, 0, 0)
        self._begin()

    def _begin(self) -> None:
        self._offset = self._number = 0
        self._last_line = b""
        self._is_checked = False
        self._damage: CheckpointError | None = None

    def read(self) -> tuple[bool, list[dict[str, Any]]]:
        """Return whether the file is another than before, and the rows of its new whole lines.

        Raises:
            CheckpointError: A line is damaged; also from then on, until the file is another.
        """
        seen = self._identity()
        is_known = seen[:2] == self._seen[:2] and seen[2] >= self._offset
        is_changed = seen != self._seen
        self._seen = seen
        if is_known and self._damage is not None:
            raise self._damage
        if not is_changed:
            return False, []
        try:
            start = self._offset - len(self._last_line)
            content = ROW.content(self._file, start=start) if is_known else b""
            is_known = is_known and content.startswith(self._last_line)
            if not is_known:
                self._begin()
                content = ROW.content(self._file) if seen[0] else b""
            return not is_known, self._rows(content[len(self._last_line) :])
        except CheckpointError as error:
            self._damage = error
            raise

    def _identity(self) -> tuple[int, int, int, int]:
        """Return which file it is, its size and when it was written; zeros if it is not there."""
        try:
            status = self._file.stat()
        except FileNotFoundError:
            return 0, 0, 0, 0
        return status.st_ino, status.st_dev, status.st_size, status.st_mtime_ns

    def _rows(self, content: bytes) -> list[dict[str, Any]]:
        *lines, _torn = content.split(b"\n")
        self._is_checked = self._is_checked or CHECKSUM.encode() in content
        rows = []
        for line in lines:
            source = f"{self._file}:{self._number + 1}"
            rows.append(row_of(line, source=source, is_checked=self._is_checked))
            self._number += 1
            self._offset += len(line) + 1
            self._last_line = line + b"\n"
        return rows
