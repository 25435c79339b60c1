import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from finetune.commands.look import look_at, seq_len_for
from finetune.errors import DataError
from finetune.recipe.load import Draft, recipe_from
from tests.doubles import tiny_tokenizer


def written(tmp_path: Path, rows: Sequence[Any]) -> str:
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


def looked(path: str, tokenizer: Path | None = None):
    return look_at(path, tokenizer=None if tokenizer is None else str(tokenizer), note=print)


PAIR = {"prompt": "which?", "chosen": "this", "rejected": "that"}
ROWS: dict[str, tuple[dict[str, Any], str]] = {
    "messages": (
        {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
        "sft",
    ),
    "alpaca": ({"instruction": "a", "output": "b"}, "sft"),
    "prompt_completion": ({"prompt": "a", "completion": "b"}, "sft"),
    "text": ({"text": "a document"}, "sft"),
    "preference": (PAIR, "dpo"),
    "labelled": ({"prompt": "a", "completion": "b", "label": True}, "kto"),
    "ranking": ({"prompt": "a", "completions": ["b", "c"], "scores": [1.0, 0.5]}, "dpo"),
    "sampled": ({"prompt": "a", "completions": ["b", "c"], "rewards": [1.0, 0.0]}, "grpo"),
}


@pytest.mark.parametrize("name", ROWS)
def test_rows_say_what_they_are_and_what_learns_from_them(name: str, tmp_path: Path) -> None:
    row, method = ROWS[name]
    found = looked(written(tmp_path, [row] * 3))
    assert (found.data_format, found.num_rows) == (name, 3)
    assert found.objective.get("method", "sft") == method
    draft = Draft(name="x")
    draft.values.update(
        model={"path": "Qwen/Qwen3-8B"},
        data={"path": found.path, "format": found.data_format},
        train={"tokens_per_step": 16384, "epochs": 1},
        output={"name": "x"},
    )
    if found.objective:
        draft.values["objective"] = found.objective
    assert recipe_from(draft, tmp_path, check_files=True).objective.method == method


def test_lengths_are_those_of_the_tokenizer_where_there_is_one(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()  # a token a character
    tokenizer.save_pretrained(tmp_path / "model")
    rows = [{"prompt": "a" * n, "completion": "b"} for n in (10, 400, 30)]
    found = looked(written(tmp_path, rows), tmp_path / "model")
    assert found.is_tokenised
    base = found.lengths[0] - 10
    assert found.lengths == (base + 10, base + 30, base + 400)
    assert found.num_tokens(2048) == 3 * base + 440
    assert (found.quantile(0.5), found.quantile(1.0)) == (base + 30, base + 400)
    assert "by the model's tokenizer" in list(found.lines())[1]


def test_without_a_tokenizer_lengths_are_assumed_and_it_is_said(tmp_path: Path) -> None:
    rows = [{"prompt": "a" * 299, "completion": "b"}]
    found = looked(written(tmp_path, rows))
    assert (found.lengths, found.is_tokenised) == ((100,), False)
    assert "assumed at 3 characters a token" in list(found.lines())[1]


def test_both_answers_of_a_pair_count_as_tokens_of_its_row(tmp_path: Path) -> None:
    found = looked(written(tmp_path, [PAIR] * 4))
    assert len(found.lengths) == 8
    assert found.num_tokens(2048) == sum(found.lengths)


def test_all_rows_are_counted_and_the_first_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("finetune.commands.look.NUM_LOOKED", 10)
    found = looked(written(tmp_path, [{"text": "abc" * (n + 1)} for n in range(25)]))
    assert (found.num_rows, found.num_looked, found.lengths) == (25, 10, tuple(range(1, 11)))
    assert found.num_tokens(2048) == round(25 * 5.5)


def test_sequences_hold_99_of_100_rows_in_whole_thousands(tmp_path: Path) -> None:
    found = looked(written(tmp_path, [{"text": "a" * 3 * n} for n in (10, 3000, 2049)]))
    assert seq_len_for(found, least=2048) == 3072
    short = looked(written(tmp_path, [{"text": "short"}]))
    assert seq_len_for(short, least=2048) == 2048


@pytest.mark.parametrize(
    ("rows", "what"),
    [
        ([], "holds no rows"),
        ([{"nothing": "known"}], "fit no format"),
        ([{"text": "good"}, {"text": " "}], "1 of 2 rows in"),
    ],
)
def test_rows_that_cannot_be_used_are_refused(
    rows: list[dict[str, str]], what: str, tmp_path: Path
) -> None:
    with pytest.raises(DataError) as caught:
        looked(written(tmp_path, rows))
    assert what in caught.value.what
