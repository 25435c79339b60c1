"""Tokens that a model lacks: refused where they are used, and only there."""

import json
from pathlib import Path

import pytest

from finetune.data.compared import require_known_rows
from finetune.data.dataset import Rows, load_rows
from finetune.data.tokenize import require_known_ids
from finetune.errors import DataError
from finetune.recipe.sections import DataSection
from tests.doubles import tiny_tokenizer

NUM = len(tiny_tokenizer())


def load(tmp_path: Path, tokenizer: object, answer: str) -> Rows:
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps({"prompt": "q", "completion": answer}) + "\n")
    section = DataSection(path=str(file))
    cache = tmp_path / answer
    return load_rows(section, tokenizer, seq_len=64, seed=0, cache_dir=cache)  # type: ignore[arg-type]


def test_a_token_more_is_no_obstacle_until_a_row_has_it(tmp_path: Path) -> None:
    """A model was loaded before its embedding was found to be smaller (#41)."""
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens(["<image>"])
    require_known_rows(load(tmp_path, tokenizer, "a b"), tokenizer, NUM)
    rows = load(tmp_path, tokenizer, "a <image>")
    words = rf"<image> has the number {NUM}, and the model has {NUM} tokens, from 0 \(.*rows\.jsonl"
    with pytest.raises(DataError, match=words):
        require_known_rows(rows, tokenizer, NUM)
    require_known_rows(rows, tokenizer, NUM + 1)


def test_the_token_that_pads_must_be_known(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    rows = load(tmp_path, tokenizer, "a b")
    tokenizer.add_special_tokens({"pad_token": "<pad>"})
    with pytest.raises(DataError, match=r"<pad> has the number \d+, .*\(what pads rows\)"):
        require_known_rows(rows, tokenizer, NUM)


def test_of_no_tokens_none_is_unknown() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens(["<image>"])
    require_known_ids([[], [1, 2]], tokenizer, NUM, where="a prompt")
    with pytest.raises(DataError, match=r"\(a prompt\)"):
        require_known_ids([[], [1, NUM]], tokenizer, NUM, where="a prompt")
