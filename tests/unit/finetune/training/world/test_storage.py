from pathlib import Path

import pytest

from finetune.training.world import storage
from finetune.training.world.storage import num_moved


@pytest.fixture
def counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    file = tmp_path / "io"
    monkeypatch.setattr(storage, "_COUNTS", file)
    return file


def test_each_64_mib_read_or_written_count_and_what_goes_over_a_network_does_not(
    counts: Path,
) -> None:
    head = "rchar: 99999999999\nwchar: 99999999999\nsyscr: 1\nsyscw: 1\n"
    counts.write_text(head + f"read_bytes: {100 * 2**20}\nwrite_bytes: {27 * 2**20}\n")
    assert num_moved() == 1
    counts.write_text(head + f"read_bytes: {100 * 2**20}\nwrite_bytes: {28 * 2**20}\n")
    assert num_moved() == 2


def test_where_linux_does_not_say_nothing_was_moved(counts: Path) -> None:
    assert num_moved() == 0
