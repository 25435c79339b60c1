import stat
from pathlib import Path

import pytest

from finetune.errors import CheckpointError
from finetune.files.manifest import MANIFEST, clear_partial, damage, whole_folder


def write(folder: Path, *, text: str = "content") -> None:
    with whole_folder(folder, unlisted=("README.md",)) as partial:
        (partial / "file.txt").write_text(text)
        (partial / "README.md").write_text("to be edited")


def test_a_folder_is_as_it_was_written_until_a_listed_file_changes(tmp_path: Path) -> None:
    folder = tmp_path / "adapter"
    write(folder)
    (folder / "README.md").write_text("edited")
    (folder / "notes.txt").write_text("added")
    assert damage(folder, needs=["file.txt"]) is None
    (folder / "file.txt").write_text("Content")
    assert "file.txt is not what was written: its SHA-256 is" in str(damage(folder, needs=[]))
    (folder / "file.txt").write_text("cont")
    assert damage(folder, needs=[]) == "file.txt has 4 bytes in place of 7"
    assert damage(folder, needs=["other.txt"]) == f"{MANIFEST} does not list other.txt"


def test_a_failure_leaves_what_was_there_and_nothing_else(tmp_path: Path) -> None:
    folder = tmp_path / "adapter"
    write(folder, text="old")

    def fail() -> None:
        with whole_folder(folder) as partial:
            (partial / "file.txt").write_text("new")
            raise OSError(28, "No space left on device", str(partial / "file.txt"))

    with pytest.raises(CheckpointError, match=r"adapter cannot be written: file\.txt: No space"):
        fail()
    assert [path.name for path in tmp_path.iterdir()] == ["adapter"]
    assert (folder / "file.txt").read_text() == "old"
    assert damage(folder, needs=["file.txt"]) is None


def test_a_link_is_replaced_and_what_it_leads_to_is_kept(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "thesis.txt").write_text("years of work")
    (tmp_path / "adapter").symlink_to(precious)
    write(tmp_path / "adapter")
    assert not (tmp_path / "adapter").is_symlink()
    assert (precious / "thesis.txt").read_text() == "years of work"


def test_a_folder_can_be_read_by_those_who_could_read_one_made_by_hand(tmp_path: Path) -> None:
    (tmp_path / "by hand").mkdir()
    write(tmp_path / "adapter")
    modes = {stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("by hand", "adapter")}
    assert len(modes) == 1


def test_only_what_a_kill_leaves_is_cleared(tmp_path: Path) -> None:
    for name in ("partial-adapter-0123abcd", "partial-adapter", "partial-adapter-mine"):
        (tmp_path / name).mkdir()
    clear_partial(tmp_path, name="adapter")
    assert {path.name for path in tmp_path.iterdir()} == {"partial-adapter", "partial-adapter-mine"}
