"""Lines of metrics.jsonl, one per step, with a checksum, so that a changed figure is detected."""

import json
import os
import re
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from finetune.errors import CheckpointError
from finetune.run.run_files import ROW

_CHECKSUM = ', "crc32": "'
_ENDED = re.compile(rb'"crc32": "[0-9a-f]{8}"\}')


def line_of(row: Mapping[str, Any]) -> str:
    """Return a row as a line, its checksum last."""
    text = json.dumps(row).removesuffix("}")
    return f'{text}{_CHECKSUM}{_checksum(text)}"}}\n'


def read_rows(file: Path) -> list[dict[str, Any]]:
    """Return the rows of metrics.jsonl; a last line that a kill has torn is left out.

    Rows of older versions have no checksum and are taken as they are.

    Raises:
        CheckpointError: A line is damaged.
    """
    if not os.path.lexists(file):
        return []
    content = ROW.content(file)
    *lines, torn = content.split(b"\n")
    is_checked = _CHECKSUM.encode() in content  # all lines of a file have it, or none
    rows = [
        _row(line, source=f"{file}:{number}", is_checked=is_checked)
        for number, line in enumerate(lines, start=1)
    ]
    try:  # whole but for its end of line
        rows.append(_row(torn, source=f"{file}:{len(lines) + 1}", is_checked=is_checked))
    except CheckpointError:
        if _ENDED.search(torn):  # not torn: it was written completely
            raise
    return rows


def _row(line: bytes, *, source: str, is_checked: bool) -> dict[str, Any]:
    """Return a line's row.

    Raises:
        CheckpointError: The line is damaged.
    """
    row: dict[str, Any] = ROW.parsed(line, source=source)
    text, _, checksum = line.decode().rpartition(_CHECKSUM)
    if is_checked and checksum != f'{_checksum(text)}"}}':
        raise ROW.refusal(source, "its figures have another checksum")
    row.pop("crc32", None)
    return row


def _checksum(text: str) -> str:
    return f"{zlib.crc32(text.encode()):08x}"
