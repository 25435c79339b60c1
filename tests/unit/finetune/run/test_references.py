"""Log-probabilities that were taken before step 1 are read again to the bit, or taken anew."""

from pathlib import Path

import numpy as np

from finetune.run.references import REFERENCES, read_references, write_references


def test_what_was_written_is_read_for_the_same_rows_only(tmp_path: Path) -> None:
    sums = {"train": np.array([-1 / 3, -2e-300]), "held_out": np.array([-7.0])}
    assert read_references(tmp_path, rows="a") is None
    write_references(tmp_path, sums, rows="a")
    found = read_references(tmp_path, rows="a")
    assert found is not None
    assert {name: array.tolist() for name, array in found.items()} == {
        name: array.tolist() for name, array in sums.items()
    }
    assert read_references(tmp_path, rows="b") is None


def test_a_changed_file_is_not_read(tmp_path: Path) -> None:
    write_references(tmp_path, {"train": np.array([-1.5])}, rows="a")
    file = tmp_path / REFERENCES
    whole = file.read_text()
    for text in (whole.replace("-1.5", "-1.6"), whole[:-20], "{}", ""):
        file.write_text(text)
        assert read_references(tmp_path, rows="a") is None
