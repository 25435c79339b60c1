import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from finetune.data.dataset import ExampleSet, Rows, held_out_mask, load_rows
from finetune.data.encode_source import TokenStore, stored_tokens
from finetune.data.rows import Conversation
from finetune.data.tokenize import encode
from finetune.errors import DataError
from finetune.recipe.sections import DataSection
from finetune.report.screen import unseen
from tests.conversations import count_rows, encoder_of, source_of, talk, tokenised
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
    assert not examples.is_truncated.any()
    assert (examples.dropped, examples.notes) == ((), ())


def test_cut_and_dropped_rows_are_counted_and_named(tmp_path: Path) -> None:
    rows = [talk("q", "a"), talk("q", "a" * 60, source="x:2"), talk("q" * 90, "a", source="x:3")]
    examples = tokenised(rows, tmp_path, seq_len=80)
    assert examples.is_truncated.tolist() == [False, True]
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
    assert [path.name[:7] for path in tmp_path.iterdir()] == ["tokens-"]


def test_other_rows_settings_or_tokenizers_do_not_share_a_cache(tmp_path: Path) -> None:
    tokenised(count_rows(5), tmp_path)
    assert not tokenised(count_rows(6), tmp_path).is_from_cache
    assert not tokenised(count_rows(5), tmp_path, seq_len=511).is_from_cache
    for tokenizer in (tiny_tokenizer(chat_template=None), tiny_tokenizer(merges=(("s", "a"),))):
        assert not tokenised(count_rows(5), tmp_path, tokenizer=tokenizer).is_from_cache
    assert tokenised(count_rows(5), tmp_path).is_from_cache


@pytest.mark.parametrize("damage", ["cut", "flip", "empty", "gone", "no list"])
def test_a_torn_cache_is_rebuilt_with_a_note(tmp_path: Path, damage: str) -> None:
    rows = count_rows(5)
    first = tokenised(rows, tmp_path)
    (folder,) = tmp_path.iterdir()
    file = folder / ("arrays.json" if damage == "no list" else "labels.bin")
    content = bytearray(file.read_bytes())
    content[8] ^= 0xFF
    damaged = {"cut": bytes(content[:-4]), "flip": bytes(content), "empty": b""}
    if damage in damaged:
        file.write_bytes(damaged[damage])
    else:
        file.unlink()
    second = tokenised(rows, tmp_path)
    assert not second.is_from_cache
    assert second.labels.tolist() == tokenised(rows, tmp_path / "other").labels.tolist()
    assert len(second.notes) == 1
    assert f"the token cache {folder} was torn" in second.notes[0]
    assert tokenised(rows, tmp_path).is_from_cache
    assert len(first) == len(second)


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

    monkeypatch.setattr(os, "fsync", another_run_meanwhile)  # just before the store is renamed
    ours = tokenised(count_rows(2), tmp_path)
    assert (ours.notes, others[0].notes) == ((), ())
    assert same(ours, tokenised(count_rows(2), tmp_path))
    assert len(list(tmp_path.iterdir())) == 1


def stored(
    rows: list[Conversation], cache_dir: Path, tokenizer: Any = None, *, num_workers: int
) -> TokenStore:
    encoder = encoder_of(tokenizer, seq_len=64)
    store, _ = stored_tokens(
        source_of(rows),
        encoder,
        num_workers=num_workers,
        cache_dir=cache_dir,
        notes=[],
        working=unseen,
    )
    return store


@pytest.mark.thorough
def test_workers_encode_to_the_same_tokens_in_order(tmp_path: Path) -> None:
    rows = count_rows(521)  # three chunks
    ours, theirs = (
        stored(rows, tmp_path / f"{num_workers}", num_workers=num_workers) for num_workers in (2, 0)
    )
    for file in sorted(theirs.folder.iterdir()):
        assert (ours.folder / file.name).read_bytes() == file.read_bytes(), file.name
    assert theirs.places[:, 1].tolist() == list(range(521))


@pytest.mark.slow
def test_a_bad_row_in_a_worker_is_named(tmp_path: Path) -> None:
    bad = talk("hi", "", source="rows.jsonl:9")
    with pytest.raises(DataError, match=r"rows\.jsonl:9: empty answer"):
        stored([*count_rows(4), bad], tmp_path, num_workers=2)


class Deadly:
    """Ends the process that unpickles it."""

    def __init__(self) -> None:
        self.tokenizer = tiny_tokenizer()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["tokenizer"], name)

    def __reduce__(self) -> tuple[Callable[[int], object], tuple[int]]:
        return os._exit, (9,)


def test_a_killed_tokenising_worker_is_an_error_and_not_a_hang(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"worker died while tokenising(.|\n)*num_workers: 0"):
        stored(count_rows(4), tmp_path, Deadly(), num_workers=2)
    assert not list(tmp_path.iterdir())


def test_held_out_rows_are_the_same_each_time() -> None:
    mask = held_out_mask(50, eval_frac=0.1, seed=3)
    assert mask.sum() == 5
    assert mask.tolist() == held_out_mask(50, eval_frac=0.1, seed=3).tolist()
    assert mask.tolist() != held_out_mask(50, eval_frac=0.1, seed=4).tolist()


def test_holding_out_all_rows_is_refused() -> None:
    with pytest.raises(DataError, match=r"data\.eval_frac 0\.9 holds out 2 of 2 rows"):
        held_out_mask(2, eval_frac=0.9, seed=0)


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
