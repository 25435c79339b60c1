import json
import os
from pathlib import Path

import pytest

from finetune.errors import CheckpointError
from finetune.run import run_files
from finetune.run.run_files import line_of, read_rows

PHASES = dict.fromkeys(run_files.PHASES, 0.5)
ROWS = [
    {"step": step, "loss": 1.0 / step, "num_loads": 4, "phases_s": PHASES, "parts_s": {}}
    for step in (1, 2, 3)
]
LINES = "".join(map(line_of, ROWS))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    found = tmp_path / "metrics.jsonl"
    found.write_text(LINES)
    return found


def test_rows_are_read_as_they_were_written(file: Path) -> None:
    assert read_rows(file) == ROWS
    assert read_rows(file.with_name("none")) == []


def test_every_flipped_bit_is_seen(file: Path) -> None:
    with file.open("r+b", buffering=0) as written:  # in place: a file cut to 0 first goes to disk
        for at, byte in enumerate(LINES.encode()):
            for changed in (*(byte ^ 1 << bit for bit in range(8)), byte):
                os.pwrite(written.fileno(), bytes([changed]), at)
                if changed == byte:
                    continue
                with pytest.raises(CheckpointError, match=r"metrics.jsonl:[123] cannot be read: "):
                    read_rows(file)
    assert read_rows(file) == ROWS


@pytest.mark.parametrize("num_bytes", range(1, 60))
def test_a_line_that_a_kill_has_torn_is_left_out(num_bytes: int, file: Path) -> None:
    file.write_text(LINES[:-num_bytes])
    assert read_rows(file) == (ROWS if num_bytes == 1 else ROWS[:2])


def test_rows_of_older_versions_are_taken_as_they_are(file: Path) -> None:
    old = json.dumps(ROWS[0])
    file.write_text(f'{old}\n{{"step": 2, "lo')
    assert read_rows(file) == ROWS[:1]
    file.write_text(f'{{"step": 1, "lo\n{old}\n')
    with pytest.raises(CheckpointError, match=r"metrics\.jsonl:1 cannot be read: it is not JSON"):
        read_rows(file)
