import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from transformers import PreTrainedTokenizerBase

from finetune.data.dataset import (
    ExampleSet,
    Rows,
    encode_all,
    load_examples,
    load_rows,
    split_held_out,
)
from finetune.data.rows import Conversation, Message
from finetune.data.tokenize import encode
from finetune.errors import DataError
from finetune.recipe.sections import DataSection
from tests.conversations import count_rows, talk, tokenised
from tests.doubles import tiny_tokenizer


def same(ours: ExampleSet, theirs: ExampleSet) -> bool:
    return (
        ours.input_ids.tolist() == theirs.input_ids.tolist()
        and ours.labels.tolist() == theirs.labels.tolist()
        and ours.offsets.tolist() == theirs.offsets.tolist()
        and ours.is_truncated.tolist() == theirs.is_truncated.tolist()
        and (ours.sources, ours.dropped) == (theirs.sources, theirs.dropped)
    )


def test_a_set_holds_the_encoded_rows_in_order(tmp_path: Path) -> None:
    rows = count_rows(5)
    examples = tokenised(rows, tmp_path)
    assert len(examples) == 5
    for row, example in zip(rows, examples, strict=True):
        alone = encode(row, tiny_tokenizer(), seq_len=512, loss_on="assistant")
        assert example.input_ids.tolist() == alone.input_ids.tolist()
        assert example.labels.tolist() == alone.labels.tolist()
        assert example.source == row.source
    assert examples.lengths == tuple(len(example.input_ids) for example in examples)
    assert (examples.num_truncated, examples.num_dropped, examples.notes) == (0, 0, ())


def test_cut_and_dropped_rows_are_counted_and_named(tmp_path: Path) -> None:
    rows = [talk("q", "a"), talk("q", "a" * 60, source="x:2"), talk("q" * 90, "a", source="x:3")]
    examples = tokenised(rows, tmp_path, seq_len=80)
    assert (len(examples), examples.num_truncated, examples.num_dropped) == (2, 1, 1)
    assert examples.dropped == ("x:3",)
    assert examples.notes == (
        "1 of 3 rows were cut to 80 tokens",
        "1 of 3 rows were dropped: their answers start beyond 80 tokens (x:3)",
    )


def test_a_set_with_nothing_left_to_learn_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"none of the 3 rows .* 8 tokens(.|\n)*`train\.seq_len`"):
        tokenised(count_rows(3), tmp_path, seq_len=8)


def test_the_second_load_comes_from_the_cache_and_is_the_same(tmp_path: Path) -> None:
    rows = [*count_rows(5), talk("q" * 90, "a", source="long")]
    first, second = (tokenised(rows, tmp_path, seq_len=80) for _ in range(2))
    assert (first.is_from_cache, second.is_from_cache) == (False, True)
    assert same(first, second)
    assert first.notes == second.notes
    assert [path.suffix for path in tmp_path.iterdir()] == [".npz"]


def test_other_rows_settings_or_tokenizers_do_not_share_a_cache(tmp_path: Path) -> None:
    tokenised(count_rows(5), tmp_path)
    assert not tokenised(count_rows(6), tmp_path).is_from_cache
    assert not tokenised(count_rows(5), tmp_path, seq_len=511).is_from_cache
    for tokenizer in (tiny_tokenizer(chat_template=None), tiny_tokenizer(merges=(("s", "a"),))):
        other = load_examples(
            count_rows(5),
            tokenizer,
            seq_len=512,
            loss_on="assistant",
            num_workers=0,
            cache_dir=tmp_path,
        )
        assert not other.is_from_cache
    assert tokenised(count_rows(5), tmp_path).is_from_cache


@pytest.mark.parametrize("damage", ["cut", "flip", "empty"])
def test_a_torn_cache_is_rebuilt_with_a_note(tmp_path: Path, damage: str) -> None:
    rows = count_rows(5)
    first = tokenised(rows, tmp_path)
    (file,) = tmp_path.iterdir()
    content = bytearray(file.read_bytes())
    if damage == "flip":
        at = content.index(np.asarray(first.input_ids[:8]).tobytes())
        content[at] ^= 0xFF
    file.write_bytes({"cut": bytes(content[:-40]), "flip": bytes(content), "empty": b""}[damage])
    second = tokenised(rows, tmp_path)
    assert not second.is_from_cache
    assert same(first, second)
    assert len(second.notes) == 1
    assert f"the token cache {file} was torn" in second.notes[0]
    assert tokenised(rows, tmp_path).is_from_cache


def test_a_cache_that_cannot_be_written_is_a_note(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    examples = tokenised(count_rows(2), tmp_path / "file" / "cache")
    assert len(examples) == 2
    assert len(examples.notes) == 1
    assert "cannot be written: Not a directory" in examples.notes[0]


def test_two_runs_write_the_same_cache_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    others: list[ExampleSet] = []

    def another_run_meanwhile(_: int) -> None:
        monkeypatch.undo()
        monkeypatch.setattr(os, "getpid", lambda: 1)
        others.append(tokenised(count_rows(2), tmp_path))

    monkeypatch.setattr(os, "fsync", another_run_meanwhile)
    ours = tokenised(count_rows(2), tmp_path)
    assert (ours.notes, others[0].notes) == ((), ())
    assert same(ours, tokenised(count_rows(2), tmp_path))
    assert len(list(tmp_path.iterdir())) == 1


def test_workers_encode_to_the_same_examples_in_order() -> None:
    rows, tokenizer = count_rows(21), tiny_tokenizer()
    ours, theirs = (
        encode_all(rows, tokenizer, seq_len=64, loss_on="assistant", num_workers=num_workers)
        for num_workers in (2, 0)
    )
    assert [example.source for example in ours] == [row.source for row in rows]
    for one, other in zip(ours, theirs, strict=True):
        assert one.input_ids.tolist() == other.input_ids.tolist()
        assert one.labels.tolist() == other.labels.tolist()


@pytest.mark.slow
def test_a_bad_row_in_a_worker_is_named() -> None:
    bad = Conversation(messages=(Message(role="assistant", content="hi"),), source="rows.jsonl:9")
    with pytest.raises(DataError, match=r"cannot render the row: .*\(rows\.jsonl:9\)"):
        encode_all(
            [*count_rows(4), bad],
            tiny_tokenizer(),
            seq_len=64,
            loss_on="assistant",
            num_workers=2,
        )


class Deadly:
    """Ends the process that unpickles it."""

    def __reduce__(self) -> tuple[Callable[[int], object], tuple[int]]:
        return os._exit, (9,)


def test_a_killed_tokenising_worker_is_an_error_and_not_a_hang() -> None:
    tokenizer = cast("PreTrainedTokenizerBase", Deadly())
    with pytest.raises(DataError, match=r"worker died while tokenising(.|\n)*num_workers: 0"):
        encode_all(count_rows(4), tokenizer, seq_len=64, loss_on="assistant", num_workers=2)


def test_held_out_rows_are_the_same_each_time_and_never_trained_on() -> None:
    rows = count_rows(50)
    train, held_out = split_held_out(rows, eval_frac=0.1, seed=3)
    assert (train, held_out) == split_held_out(rows, eval_frac=0.1, seed=3)
    assert (train, held_out) != split_held_out(rows, eval_frac=0.1, seed=4)
    assert (len(train), len(held_out)) == (45, 5)
    assert sorted(row.source for row in train + held_out) == sorted(row.source for row in rows)


def test_holding_out_all_rows_is_refused() -> None:
    with pytest.raises(DataError, match=r"data\.eval_frac 0\.9 holds out 2 of 2 rows"):
        split_held_out(count_rows(2), eval_frac=0.9, seed=0)


# --------------------------------------------------------------------------------------------------
# What a recipe names
# --------------------------------------------------------------------------------------------------

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
