"""Limits that keep the code readable; raise one on purpose or not at all."""

from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCES = [ROOT / "cli.py", *(ROOT / "finetune").rglob("*.py"), *(ROOT / "offload").rglob("*.py")]
MAX_FILE_LINES = 600


def test_files_are_ascii_and_not_long() -> None:
    texts = {str(path.relative_to(ROOT)): path.read_text() for path in SOURCES}
    assert [name for name, text in texts.items() if not text.isascii()] == []
    assert [name for name, text in texts.items() if text.count("\n") > MAX_FILE_LINES] == []
