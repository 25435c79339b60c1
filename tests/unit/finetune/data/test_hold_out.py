"""Held-out rows share no document with the training rows, and rows on both sides are named."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from finetune.data.dataset import ExampleSet, Rows, load_rows
from finetune.errors import DataError
from finetune.recipe.sections import DataSection
from tests.doubles import tiny_tokenizer
from tests.tiers import mostly_slow


def load(path: Path, *, seq_len: int = 64, seed: int = 0, **settings: Any) -> Rows:
    return load_rows(
        DataSection(path=str(path), **settings),
        tiny_tokenizer(),
        seq_len=seq_len,
        seed=seed,
        cache_dir=path.parent / "cache",
    )


def write(tmp_path: Path, rows: list[Any], name: str = "rows.jsonl") -> Path:
    file = tmp_path / name
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


# -------------------------------------------------------------------------------------- documents


def numbers(examples: ExampleSet) -> set[str]:
    """Return the numbers that are in some rows; each document repeats one of its own."""
    text = str(tiny_tokenizer().decode(np.concatenate([one.input_ids for one in examples])))
    return {word for word in text.replace("<|endoftext|>", " ").split() if len(word) == 4}


@pytest.mark.parametrize("seed", mostly_slow(range(12), 0, 1))
@pytest.mark.parametrize("num_words", [1, 7, 40])
def test_no_document_is_trained_on_and_held_out(tmp_path: Path, num_words: int, seed: int) -> None:
    generator = np.random.RandomState(seed)
    texts = [
        " ".join([f"{number:04}"] * (1 + generator.randint(num_words)))
        for number in range(100, 260)
    ]
    file = write(tmp_path, [{"text": text} for text in texts])
    rows = load(file, seed=seed, eval_frac=0.1)
    assert rows.held_out is not None
    trained, held_out = numbers(rows.train), numbers(rows.held_out)
    assert not trained & held_out
    assert len(rows.held_out) == round(0.1 * len(load(file).train))
    assert len(trained) + len(held_out) >= len(texts) - 4 - 2 * 64 // 5  # rows between the sides
    assert load(file, seed=seed, eval_frac=0.1).data_hash == rows.data_hash


def test_documents_that_are_too_few_to_hold_one_out_are_refused(tmp_path: Path) -> None:
    file = write(tmp_path, [{"text": "word " * 400}])
    with pytest.raises(
        DataError, match=r"eval_frac holds out 3 of \d+ rows of .*no whole document"
    ):
        load(file, eval_frac=0.1)


def test_which_single_rows_are_held_out_has_not_changed(tmp_path: Path) -> None:
    rows = [{"prompt": f"q{n}", "completion": f"a{n}"} for n in range(20)]
    found = load(write(tmp_path, rows), eval_frac=0.2)
    assert found.held_out is not None
    assert [source.rpartition(":")[2] for source in found.held_out.sources] == [
        "2",
        "5",
        "11",
        "12",
    ]


# ------------------------------------------------------------------------------ rows on both sides


def test_held_out_rows_that_are_training_rows_too_are_counted_and_named(tmp_path: Path) -> None:
    rows = [{"prompt": f"what is {n}?", "completion": f"it is {n}"} for n in range(30)]
    train = write(tmp_path, [*rows, rows[4]])
    others = [rows[7], {"prompt": "what is it?", "completion": "it is 7"}, rows[4]]
    held_out = write(tmp_path, others, "held.jsonl")
    notes = load(train, eval_path=str(held_out)).notes
    found = [note for note in notes if "training rows too" in note]
    assert found == [
        "2 of 3 held-out rows are training rows too, so that their loss does not measure what was"
        f" learned ({held_out}:1 is {train}:8, {held_out}:3 is {train}:5)"
    ]
    assert not any("training rows too" in note for note in load(train).notes)
    clean = write(tmp_path, others[1:2], "clean.jsonl")
    assert not any("training rows too" in n for n in load(train, eval_path=str(clean)).notes)


# --------------------------------------------------------------------------------- special tokens


def test_special_tokens_in_the_text_of_rows_are_counted_and_named(tmp_path: Path) -> None:
    plain = [{"prompt": f"q{n}", "completion": f"a{n} <think> </think>"} for n in range(3)]
    written = [
        {"prompt": "how does <|im_end|> end a turn?", "completion": "so"},
        *({"prompt": f"q{n}", "completion": f"a <|endoftext|> {n}"} for n in range(3)),
    ]
    file = write(tmp_path, [*plain, *written])
    for _ in range(2):  # also from the cache
        (note,) = load(file).notes[:1]
        assert note == (
            f"4 of 7 rows of {file} hold special tokens in their text, which are read as real ones"
            f" ({file}:4: <|im_end|>, {file}:5: <|endoftext|>, {file}:6: <|endoftext|>, ...)"
        )
    assert not any("special" in note for note in load(write(tmp_path, plain)).notes)


def test_turns_after_the_last_answer_are_counted_and_named(tmp_path: Path) -> None:
    turns = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    rows = [{"messages": turns}, {"messages": [*turns, turns[0]]}]
    file = write(tmp_path, rows)
    assert load(file).notes[0] == (
        f"1 of 2 rows of {file} end with turns after their last answer, which are left out"
        f" ({file}:2: user)"
    )


def test_a_text_in_parts_is_joined_and_other_parts_are_refused(tmp_path: Path) -> None:
    answer = {"role": "assistant", "content": "a"}
    parts = [{"type": "text", "text": "q"}, {"type": "text", "text": "?", "image_url": None}]
    whole = load(write(tmp_path, [{"messages": [{"role": "user", "content": "q?"}, answer]}]))
    rows = [{"messages": [{"role": "user", "content": parts}, answer]}]
    assert load(write(tmp_path, rows)).data_hash == whole.data_hash
    parts[1] = {"type": "image_url", "image_url": "x.png"}
    with pytest.raises(DataError, match=r"part 2 of 'content' is of type 'image_url': only text"):
        load(write(tmp_path, rows))


def test_one_column_is_not_read_as_two(tmp_path: Path) -> None:
    file = write(tmp_path, [{"instruction": "q", "output": "a"}])
    for data_format in ("auto", "alpaca"):
        with pytest.raises(DataError, match="output as input and as output"):
            load(file, columns={"input": "output"}, format=data_format)


def test_a_row_whose_prompt_is_empty_is_refused(tmp_path: Path) -> None:
    rows = [{"prompt": "q", "completion": "a"}, {"prompt": " \n", "completion": "a"}]
    with pytest.raises(DataError, match=r"1 of 2 rows (.|\n)*rows.jsonl:2: empty prompt"):
        load(write(tmp_path, rows), system="Be brief.")


def test_parts_of_a_split_row_learn_each_token_once(tmp_path: Path) -> None:
    row = {"prompt": "q", "completion": "abcdefghij" * 30}
    whole = load(write(tmp_path, [row]), seq_len=1000).train[0]
    parts = list(load(write(tmp_path, [row]), too_long="split").train)
    assert len(parts) > 5
    assert sum(part.num_loss_tokens for part in parts) == whole.num_loss_tokens
    assert all(a.input_ids[-1] == b.input_ids[0] for a, b in pairwise(parts))
