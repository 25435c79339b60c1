import json
from pathlib import Path
from typing import Any

import pytest

from finetune.data.load import Rows, load_rows
from finetune.errors import DataError
from finetune.recipe.sections import DataSection
from tests.doubles import tiny_tokenizer

ROW = {"instruction": "1+1?", "output": "2"}


def load(tmp_path: Path, rows: list[dict[str, Any]], **settings: Any) -> Rows:
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return load_rows(
        DataSection(path=str(file), **settings),
        tiny_tokenizer(),
        seq_len=256,
        seed=0,
        cache_dir=tmp_path / "cache",
    )


def test_columns_that_are_not_used_are_listed_once(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        ROW,
        ROW | {"id": 1},
        ROW | {"lang": "en", "id": 2},
        ROW | {"note": None},
    ] * 3
    assert load(tmp_path, rows).notes == ("Columns that are not used: id, lang",)
    assert load(tmp_path, [ROW]).notes == ()


def test_columns_that_are_ignored_on_purpose_are_not_listed(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [ROW | {"tools": "[]", "id": 1}]
    with pytest.raises(DataError, match=r"'tools' would be dropped"):
        load(tmp_path, rows)
    ignored = load(tmp_path, rows, ignored_columns=["tools"])
    assert ignored.notes == ("Columns that are not used: id",)


@pytest.mark.parametrize("name", ["tool", "output"])
def test_a_column_that_no_row_holds_unused_cannot_be_ignored(tmp_path: Path, name: str) -> None:
    with pytest.raises(
        DataError,
        match=rf"ignored_columns names {name}, and no row holds(.|\n)*not used are tools(.|\n)*",
    ):
        load(tmp_path, [ROW | {"tools": "[]"}], ignored_columns=["tools", name])
