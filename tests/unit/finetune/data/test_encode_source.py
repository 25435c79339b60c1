import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset

from finetune.data.dataset import Rows, load_rows
from finetune.data.sources import open_source
from finetune.errors import DataError
from finetune.recipe.sections import DataSection
from finetune.report.screen import Work
from tests.doubles import tiny_tokenizer

HEAD = "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
PROMPT_TOKENS = len(HEAD) - len("<|im_start|><|im_end|><|im_start|>") + 3


def write(tmp_path: Path, *rows: object) -> Path:
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def qa(answer: str) -> dict[str, str]:
    return {"instruction": "q", "output": answer}


def load(tmp_path: Path, *, seq_len: int = 100, tokenizer: Any = None, **settings: Any) -> Rows:
    return load_rows(
        DataSection(path=str(tmp_path / "rows.jsonl"), **settings),
        tokenizer or tiny_tokenizer(),
        seq_len=seq_len,
        seed=0,
        cache_dir=tmp_path / "cache",
    )


LONG = "abcdefghij" * 20
# The last question is written otherwise than earlier ones, so each answer has a text of its own.
REWRITES = (
    "{% for m in messages %}{% set is_last = loop.index0 + 2 >= messages|length %}"
    "{{ '<|im_start|>' + m.role + (' now' if is_last and m.role == 'user' else '') }}\n"
    "{{ m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def test_long_rows_are_cut_dropped_split_or_refused_and_counted(tmp_path: Path) -> None:
    file = write(tmp_path, qa("a"), qa(LONG))
    whole = load(tmp_path, seq_len=1000).train[1]
    cut = load(tmp_path)
    assert cut.train[1].labels.tolist() == whole.labels[:100].tolist()
    assert cut.notes == ("1 of 2 rows were cut to 100 tokens",)
    dropped = load(tmp_path, too_long="drop")
    assert dropped.train.sources == (f"{file}:1",)
    assert dropped.notes == (
        f"1 of 2 rows were dropped: they have more than 100 tokens ({file}:2)",
    )
    split = load(tmp_path, too_long="split")
    assert split.train.lengths == (PROMPT_TOKENS + 2, 100, 100, PROMPT_TOKENS + 3)
    first, *others = list(split.train)[1:]
    for name in ("input_ids", "labels"):  # a part begins with the last token of the one before
        parts = [getattr(first, name), *(getattr(part, name)[1:] for part in others)]
        assert [t for part in parts for t in part.tolist()] == getattr(whole, name).tolist()
    assert sum(part.num_loss_tokens for part in (first, *others)) == whole.num_loss_tokens
    assert [end for part in (first, *others) for end in part.end_ids] == [*whole.end_ids]
    assert split.train.sources[1:] == (f"{file}:2",) * 3
    assert split.notes == (f"1 of 2 rows were split into parts of at most 100 tokens ({file}:2)",)
    for _ in range(2):  # also from the cache
        with pytest.raises(DataError, match=rf"1 of 2 rows have more than 100 tokens: {file}:2;"):
            load(tmp_path, too_long="error")


def test_parts_of_a_prompt_are_no_examples(tmp_path: Path) -> None:
    write(tmp_path, {"instruction": "q" * 250, "output": "a"})
    assert load(tmp_path, too_long="split").train.lengths == (PROMPT_TOKENS + 251 - 198,)
    with pytest.raises(DataError, match=r"none of the 1 rows has an answer within 100 tokens"):
        load(tmp_path)


def test_as_many_bad_rows_are_skipped_as_the_recipe_allows_each_named(tmp_path: Path) -> None:
    file = write(tmp_path, qa("a"), qa(" "), {"instruction": "q"}, qa("b"))
    with pytest.raises(DataError, match=r"2 of 4 rows(.|\n)*:2: empty answer\n(.|\n)*:3: no key"):
        load(tmp_path)
    rows = load(tmp_path, skip_bad=2)
    assert rows.train.sources == (f"{file}:1", f"{file}:4")
    assert rows.notes == (
        f"2 bad rows of {file} were skipped:\n  {file}:2: empty answer\n"
        f"  {file}:3: no key 'output'; it has 'instruction'",
    )
    assert load(tmp_path, skip_bad=3).notes == rows.notes
    with pytest.raises(DataError, match=r"2 of 4 rows(.|\n)*and `data\.skip_bad` allows 1"):
        load(tmp_path, skip_bad=1)  # the tokens are cached


def test_a_row_that_the_template_refuses_may_be_skipped_too(tmp_path: Path) -> None:
    refused = {"messages": [{"role": "user", "content": "q"}] * 2}
    refused["messages"] = [*refused["messages"], {"role": "assistant", "content": "a"}]
    raising = tiny_tokenizer()
    raising.chat_template = (
        "{% for m in messages %}{% if m.content == 'x' %}{{ raise_exception('no x') }}{% endif %}"
        "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )
    file = write(tmp_path, qa("a"), {"instruction": "x", "output": "b"})

    def loaded(skip_bad: int) -> Rows:
        return load_rows(
            DataSection(path=str(file), skip_bad=skip_bad),
            raising,
            seq_len=100,
            seed=0,
            cache_dir=tmp_path / "cache",
        )

    with pytest.raises(DataError, match=r"cannot render the row: no x \(.*rows\.jsonl:2\)"):
        loaded(0)
    assert loaded(1).train.sources == (f"{file}:1",)
    assert f"1 bad rows of {file} were skipped" in loaded(1).notes[0]


def test_rows_that_say_the_same_are_dropped_on_request_and_counted(tmp_path: Path) -> None:
    same = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    file = write(tmp_path, qa("a"), qa("b"), qa("a") | {"id": 1}, qa("a") | {"input": "r"}, qa("b"))
    assert len(load(tmp_path).train) == 5
    rows = load(tmp_path, drop_duplicates=True)
    assert rows.train.sources == (f"{file}:1", f"{file}:2", f"{file}:4")
    assert f"2 rows of {file} were dropped as duplicates" in rows.notes
    write(tmp_path, {"messages": same}, {"messages": [*same[:1], same[1] | {"train": True}]})
    assert len(load(tmp_path, drop_duplicates=True).train) == 1


def test_documents_that_say_the_same_are_dropped_before_they_are_joined(tmp_path: Path) -> None:
    write(tmp_path, {"text": "abc"}, {"text": "abc"}, {"text": "d"})
    rows = load(tmp_path, drop_duplicates=True)
    ends = "<|endoftext|>"
    assert tiny_tokenizer().decode(rows.train.input_ids) == f"abc{ends}d{ends}"


def progress_of(file: Path, **settings: Any) -> tuple[list[str], list[tuple[int, int | None]]]:
    """Return the works that tokenising a file shows, and their numbers."""
    works, numbers = [], []

    @contextmanager
    def working(what: str, unit: str) -> Iterator[Work]:
        assert unit == "rows"
        works.append(what)
        yield lambda done, total: numbers.append((done, total))

    load_rows(
        DataSection(path=str(file), **settings),
        tiny_tokenizer(),
        seq_len=100,
        seed=0,
        cache_dir=file.parent / "cache",
        working=working,
    )
    return works, numbers


@pytest.mark.thorough
def test_tokenising_counts_rows_of_a_known_number_once(tmp_path: Path) -> None:
    file = write(tmp_path, *[qa(str(n)) for n in range(600)])
    with file.open("a") as out:
        out.write("\n \n")  # blank lines are no rows
    works, numbers = progress_of(file)
    assert works == ["Tokenising rows.jsonl"]
    assert numbers == [(0, 600), (250, 600), (500, 600), (600, 600)]
    assert progress_of(file) == ([], [])  # it is in the cache
    assert progress_of(file, max_rows=300)[1] == [(0, 300), (250, 300), (300, 300)]


def test_tokenising_rows_that_have_to_be_decoded_counts_without_an_end(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    file.write_text(json.dumps([qa(str(n)) for n in range(300)]))
    assert progress_of(file)[1] == [(0, None), (250, None), (300, None)]


def test_data_sets_and_parquet_files_know_how_many_rows_they_have(tmp_path: Path) -> None:
    rows = Dataset.from_list([qa(str(n)) for n in range(300)])
    rows.to_parquet(tmp_path / "rows.parquet")
    rows.save_to_disk(tmp_path / "saved")
    (tmp_path / "text.txt").write_text("a\nb\n")
    sources = [open_source(str(tmp_path / n)) for n in ("rows.parquet", "saved", "text.txt")]
    assert [source.num_rows() for source in sources] == [300, 300, 1]
    assert [len(list(source.rows())) for source in sources] == [300, 300, 1]


def test_rows_that_differ_in_what_is_trained_are_no_duplicates(tmp_path: Path) -> None:
    def chat(*, trained: bool) -> dict[str, Any]:
        answer = {"role": "assistant", "content": "a", "train": trained}
        last = {"role": "assistant", "content": "b"}
        user = {"role": "user", "content": "q"}
        return {"messages": [user, answer, user, last]}

    file = write(tmp_path, chat(trained=True), chat(trained=False), chat(trained=True))
    rows = load(tmp_path, drop_duplicates=True)
    assert rows.train.sources == (f"{file}:1", f"{file}:2")
    assert rows.notes == (f"1 rows of {file} were dropped as duplicates",)


def test_a_row_of_several_texts_of_which_one_is_cut_away_is_counted(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = REWRITES
    turns = [("user", "q"), ("assistant", "a"), ("user", LONG), ("assistant", "b")]
    write(tmp_path, {"messages": [{"role": role, "content": text} for role, text in turns]})
    rows = load(tmp_path, seq_len=100, tokenizer=tokenizer)
    assert len(rows.train) == 1
    assert rows.notes == ("1 of 1 rows were cut to 100 tokens",)
