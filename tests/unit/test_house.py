"""Limits that keep the code readable; raise one on purpose or not at all."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = [ROOT / "cli.py", *(ROOT / "finetune").rglob("*.py"), *(ROOT / "offload").rglob("*.py")]
MAX_FILE_LINES, MAX_FUNCTION_LINES = 600, 60


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_files_and_functions_stay_short(path: Path) -> None:
    text = path.read_text()
    assert text.isascii()
    assert text.count("\n") <= MAX_FILE_LINES
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef):
            assert node.end_lineno is not None
            # A kernel is handed each pointer and size by itself: its signature is not counted.
            first = node.body[0].lineno if path.name == "kernels.py" else node.lineno
            assert node.end_lineno - first < MAX_FUNCTION_LINES, node.name
