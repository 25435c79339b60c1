"""Rules of the house that no linter knows."""

import ast
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = (ROOT / "finetune", ROOT / "offload")
SOURCES = [ROOT / "cli.py", *(file for package in PACKAGES for file in package.rglob("*.py"))]
TESTS = list((ROOT / "tests").rglob("*.py"))
FOLDERS = sorted({file.parent for file in SOURCES[1:]})


def named(path: Path) -> str:
    return str(path.relative_to(ROOT))


def _parsed(file: Path) -> ast.Module:
    return ast.parse(file.read_text())


def test_source_is_ascii() -> None:
    assert [named(path) for path in SOURCES if not path.read_text().isascii()] == []


def test_every_folder_says_in_a_sentence_what_belongs_there() -> None:
    said = {named(folder): ast.get_docstring(_parsed(folder / "__init__.py")) for folder in FOLDERS}
    sentences = {name: (text or "").partition("\n\n")[0] for name, text in said.items()}
    assert [name for name, sentence in sentences.items() if not sentence.endswith(".")] == []


def test_no_test_module_is_imported_by_another() -> None:
    imported = {
        (named(file), node.module)
        for file in TESTS
        for node in ast.walk(_parsed(file))
        if isinstance(node, ast.ImportFrom) and node.module
        if any(part.startswith("test_") for part in node.module.split("."))
        or (node.module.startswith("tests") and any(a.name.startswith("test_") for a in node.names))
    }
    assert imported == set()
