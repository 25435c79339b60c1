"""Where rows come from: files, folders, datasets, mixtures of them, and what is held out."""

import json
import os
import pickle
from collections import Counter
from collections.abc import Callable
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest

from finetune.data.dataset import ExampleSet, Rows, drawn, held_out_mask, load_rows, rows_per_source
from finetune.data.encode_source import TokenStore, stored_tokens
from finetune.data.rows import Conversation
from finetune.data.sources import MAX_ROW_BYTES, FileSource, open_source
from finetune.data.tokenize import encode
from finetune.errors import DataError
from finetune.recipe.sections import DataSection
from finetune.report.screen import unseen
from tests.conversations import count_rows, encoder_of, source_of, talk, tokenised
from tests.doubles import tiny_tokenizer
from tests.tiers import mostly_slow

ROWS = [{"instruction": f"{n}+{n}?", "output": f"{2 * n}"} for n in range(6)]


@pytest.fixture
def datasets_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hf-cache")


def load(tmp_path: Path, *, seq_len: int = 256, **settings: Any) -> Rows:
    return load_rows(
        DataSection(**settings),
        tiny_tokenizer(),
        seq_len=seq_len,
        seed=0,
        cache_dir=tmp_path / "cache",
    )


def write_jsonl(file: Path, rows: Any = ROWS) -> Path:
    file.parent.mkdir(exist_ok=True, parents=True)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def write_csv(file: Path) -> Path:
    lines = [f'"{row["instruction"]}",{row["output"]}' for row in ROWS]
    file.write_text("instruction,output\n" + "\n".join(lines) + "\n")
    return file


@pytest.mark.usefixtures("datasets_cache")
def test_the_same_rows_in_any_kind_of_file_are_the_same_data(tmp_path: Path) -> None:
    (tmp_path / "rows.json").write_text(json.dumps(ROWS))
    data_set = datasets.Dataset.from_list(ROWS)
    data_set.to_parquet(str(tmp_path / "rows.parquet"))
    data_set.save_to_disk(str(tmp_path / "saved"))
    write_jsonl(tmp_path / "folder" / "train-0.jsonl", ROWS[:4])
    write_jsonl(tmp_path / "folder" / "train-1.jsonl", ROWS[4:])
    paths = [
        write_jsonl(tmp_path / "rows.jsonl"),
        write_csv(tmp_path / "rows.csv"),
        *(tmp_path / name for name in ("rows.json", "rows.parquet", "saved", "folder")),
    ]
    hashes = {path.name: load(tmp_path, path=str(path)).data_hash for path in paths}
    assert len(set(hashes.values())) == 1, hashes


@pytest.mark.usefixtures("datasets_cache")
def test_rows_of_a_directory_are_named_by_file_and_line(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "folder" / "a.jsonl", ROWS[:2])
    bad = write_jsonl(tmp_path / "folder" / "b.jsonl", [*ROWS[2:4], {"instruction": "a"}])
    with pytest.raises(DataError, match=rf"1 of 5 rows in .*\n  {bad}:3: no key 'output'"):
        load(tmp_path, path=str(tmp_path / "folder"))


@pytest.mark.usefixtures("datasets_cache")
def test_files_of_a_directory_that_are_in_another_split_are_named(tmp_path: Path) -> None:
    for name in ("train", "test"):
        write_jsonl(tmp_path / "folder" / f"{name}.jsonl")
    rows = load(tmp_path, path=str(tmp_path / "folder"))
    assert len(rows.train) == 6
    assert rows.notes == (f"Files of {tmp_path / 'folder'} that are not read: test.jsonl",)
    held_out = load(tmp_path, path=f"{tmp_path / 'folder'}:test")
    assert held_out.train.sources[0] == f"{tmp_path / 'folder' / 'test.jsonl'}:1"


@pytest.mark.usefixtures("datasets_cache")
def test_a_record_of_several_lines_is_named_by_its_first(tmp_path: Path) -> None:
    file = tmp_path / "rows.csv"
    file.write_text('instruction,output\n"a\nb",c\n"d, ""e""",f\ng,h\n')
    source = open_source(str(file))
    assert list(source.rows()) == [
        ((0, 2), {"instruction": "a\nb", "output": "c"}),
        ((0, 4), {"instruction": 'd, "e"', "output": "f"}),
        ((0, 5), {"instruction": "g", "output": "h"}),
    ]


@pytest.mark.usefixtures("datasets_cache")
@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"instruction,output\na,b\nc\nd,e\n", r"rows\.csv:3: 1 fields, the header has 2"),
        (b"instruction,output\na,b\nc,d,e\n", r"rows\.csv:3: 3 fields, the header has 2"),
        (b'instruction,output\na,b\n"c"x,d\n', r"rows\.csv:3: broken CSV: "),
        (b'instruction,output\na,b\n"c,d\n', r"rows\.csv:3: broken CSV: unexpected end"),
        (b"instruction,output,output\na,b,c\n", r"rows\.csv:1: the header names a column twice"),
        (b"instruction,output\na,b\nc,\xe9\n", r"rows\.csv:\d: not UTF-8.*0xe9"),
        (b"instruction,output\n", r"rows\.csv holds no rows"),
        (b"instruction,output\na,b\nc,\n", r"rows\.csv:3: empty answer"),
    ],
)
def test_a_bad_csv_is_named_by_its_line(tmp_path: Path, content: bytes, problem: str) -> None:
    file = tmp_path / "rows.csv"
    file.write_bytes(content)
    with pytest.raises(DataError, match=problem):
        load(tmp_path, path=str(file))


@pytest.mark.usefixtures("datasets_cache")
@pytest.mark.parametrize("mark", [";", "\t", "|"])
def test_a_csv_with_other_marks_between_its_fields_is_refused(tmp_path: Path, mark: str) -> None:
    file = tmp_path / "rows.csv"
    file.write_text(f"prompt{mark}completion\nq{mark}a\n")
    with pytest.raises(DataError, match=r"rows\.csv:1: the header is one column(.|\n)*by commas"):
        list(open_source(str(file)).rows())


@pytest.mark.usefixtures("datasets_cache")
def test_chats_in_a_csv_are_json_texts(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"}]
    write_jsonl(tmp_path / "rows.jsonl", [{"messages": chat}])
    quoted = json.dumps(chat).replace('"', '""')
    (tmp_path / "rows.csv").write_text(f'messages\n"{quoted}"\n')
    ours, theirs = (
        load(tmp_path, path=str(tmp_path / name), format="messages").data_hash
        for name in ("rows.csv", "rows.jsonl")
    )
    assert ours == theirs


@pytest.mark.usefixtures("datasets_cache")
def test_a_row_that_is_too_large_is_named_and_the_rows_after_it_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("finetune.data.sources.MAX_ROW_BYTES", 2**20)
    monkeypatch.setattr("finetune.data.sources._BLOCK_BYTES", 2**10)
    rows = [ROWS[0], {"instruction": "a" * 3 * 2**20, "output": "b"}, ROWS[1]]
    file = write_jsonl(tmp_path / "rows.jsonl", rows)
    with pytest.raises(DataError, match=r"1 of 3 rows(.|\n)*:2: the row has 3 MiB; at most 1"):
        load(tmp_path, path=str(file))
    assert load(tmp_path, path=str(file), skip_bad=1).train.sources[1] == f"{file}:3"


@pytest.mark.usefixtures("datasets_cache")
@pytest.mark.slow
def test_a_row_of_100_mb_is_named_and_the_rows_after_it_are_read(tmp_path: Path) -> None:
    file = write_jsonl(tmp_path / "rows.jsonl", ROWS[:2])
    with file.open("a") as out:
        out.write(json.dumps({"instruction": "a" * 10**8, "output": "b"}) + "\n")
        out.write(json.dumps(ROWS[2]) + "\n")
    with pytest.raises(DataError, match=r"1 of 4 rows(.|\n)*:3: the row has 95 MiB; at most 64"):
        load(tmp_path, path=str(file))
    assert len(load(tmp_path, path=str(file), skip_bad=1).train) == 3


@pytest.mark.usefixtures("datasets_cache")
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["json", "parquet"])
def test_a_row_of_100_mb_is_named_in_other_files_too(tmp_path: Path, kind: str) -> None:
    chat = [{"role": "user", "content": "a" * 10**8}, {"role": "assistant", "content": "b"}]
    file = tmp_path / f"rows.{kind}"
    if kind == "json":
        file.write_text(json.dumps([{"messages": chat}]))
    else:
        datasets.Dataset.from_list([{"messages": chat}]).to_parquet(str(file))
    with pytest.raises(DataError, match=r"\[0\]: the row has 95 MiB; at most 64"):
        load(tmp_path, path=str(file), format="messages")


@pytest.mark.usefixtures("datasets_cache")
def test_a_text_file_larger_than_a_row_may_be_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "book.txt"
    with file.open("wb") as out:
        out.truncate(MAX_ROW_BYTES + 1)
    with pytest.raises(DataError, match=r"book\.txt:1: the row has 64 MiB; .*: split it"):
        load(tmp_path, path=str(file), format="text")


@pytest.mark.usefixtures("datasets_cache")
def test_a_file_of_an_unknown_kind_is_refused_by_its_ending(tmp_path: Path) -> None:
    (tmp_path / "rows.xlsx").touch()
    with pytest.raises(DataError, match=r"rows\.xlsx has the ending \.xlsx; .*\.csv, \.parquet"):
        open_source(str(tmp_path / "rows.xlsx"))


@pytest.mark.usefixtures("datasets_cache")
def test_the_digest_is_of_the_content_and_not_of_the_name(tmp_path: Path) -> None:
    one, same = (write_jsonl(tmp_path / f"{name}.jsonl") for name in ("one", "same"))
    other = write_jsonl(tmp_path / "other.jsonl", ROWS[:5])
    digests = [open_source(str(file)).digest() for file in (one, same, other)]
    assert digests[0] == digests[1] != digests[2]
    halves = FileSource(path="x", files=(one, other)), FileSource(path="x", files=(other, one))
    assert halves[0].digest() != halves[1].digest()


@pytest.mark.usefixtures("datasets_cache")
def test_the_digests_of_two_parts_of_a_split_differ(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, load_dataset = write_jsonl(tmp_path / "rows.jsonl"), datasets.load_dataset

    def from_file(name: str, config: str | None, *, split: str, **_: object) -> object:
        del name, config
        return load_dataset("json", split=split, data_files=str(file))

    monkeypatch.setattr(datasets, "load_dataset", from_file)
    digests = {open_source(f"some/rows:{s}").digest() for s in ("train", "train[:1]", "train[1:2]")}
    assert len(digests) == 3


@pytest.mark.usefixtures("datasets_cache")
def test_rows_of_another_commit_than_was_asked_for_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the hub, `datasets` gives any commit that is in its cache."""
    file, load_dataset = write_jsonl(tmp_path / "rows.jsonl"), datasets.load_dataset
    asked: list[object] = []

    def any_commit(_name: str, _config: str | None, *, revision: str | None, **_: object) -> object:
        asked.append(revision)
        return load_dataset("json", split="train", data_files=str(file))

    monkeypatch.setattr(datasets, "load_dataset", any_commit)
    assert open_source("some/rows", revision="v1").num_rows()
    with pytest.raises(
        DataError, match=r"some/rows is in the cache of .*, and not at commit 0{40}"
    ):
        open_source("some/rows", revision="0" * 40).num_rows()
    assert asked == ["v1", "0" * 40]


@pytest.mark.usefixtures("datasets_cache")
def test_tokens_of_a_file_that_was_copied_come_from_the_cache_under_its_new_name(
    tmp_path: Path,
) -> None:
    first = write_jsonl(tmp_path / "first.jsonl")
    load(tmp_path, path=str(first))
    second = write_jsonl(tmp_path / "second.jsonl")
    rows = load(tmp_path, path=str(second))
    assert rows.train.is_from_cache
    assert rows.train.sources[0] == f"{second}:1"
    write_jsonl(second, [*ROWS[:5], {"instruction": "10?", "output": "x"}])
    assert not load(tmp_path, path=str(second)).train.is_from_cache


@pytest.mark.usefixtures("datasets_cache")
def test_two_formats_in_one_file_are_named_by_line(tmp_path: Path) -> None:
    chat = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    file = write_jsonl(tmp_path / "rows.jsonl", [ROWS[0], chat])
    with pytest.raises(
        DataError,
        match=r":2: no key 'instruction'; .*; it is a row of the format messages(.|\n)*hint: one"
        r" format in a file: split it, and name the parts in `data\.mix`",
    ):
        load(tmp_path, path=str(file))


@pytest.mark.usefixtures("datasets_cache")
def test_a_file_of_another_format_is_told_its_format(tmp_path: Path) -> None:
    file = write_jsonl(tmp_path / "rows.jsonl")
    with pytest.raises(DataError, match=r"6 of 6 rows(.|\n)*hint: `data\.format: alpaca`"):
        load(tmp_path, path=str(file), format="messages")


@pytest.mark.usefixtures("datasets_cache")
def test_columns_of_other_names_are_read_and_a_missing_one_is_named(tmp_path: Path) -> None:
    rows = [{"q": "1+1?", "a": "2", "sys": "Be brief."}]
    file = write_jsonl(tmp_path / "rows.jsonl", rows)
    columns = {"instruction": "q", "output": "a", "system": "sys"}
    ours = load(tmp_path, path=str(file), columns=columns)
    own = write_jsonl(tmp_path / "own.jsonl", [{"instruction": "1+1?", "output": "2"}])
    theirs = load(tmp_path, path=str(own), system="Be brief.")
    assert ours.data_hash == theirs.data_hash
    assert ours.notes == ()
    with pytest.raises(DataError, match=r"fit no format; .*alpaca \(question, a\)"):
        load(tmp_path, path=str(file), columns={"instruction": "question", "output": "a"})
    columns = {"instruction": "question", "output": "a"}
    with pytest.raises(DataError, match=r":1: no key 'question'; it has 'q', 'a', 'sys'"):
        load(tmp_path, path=str(file), format="alpaca", columns=columns)


@pytest.mark.usefixtures("datasets_cache")
def test_the_first_rows_are_read_and_no_more(tmp_path: Path) -> None:
    file = write_jsonl(tmp_path / "rows.jsonl", [*ROWS, {"bad": 1}])
    rows = load(tmp_path, path=str(file), max_rows=4)
    assert rows.train.sources == tuple(f"{file}:{n}" for n in (1, 2, 3, 4))


# --------------------------------------------------------------------------------------------------
# Documents
# --------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("datasets_cache")
def test_documents_are_joined_and_cut_and_all_of_them_is_learned(tmp_path: Path) -> None:
    texts = ["abcdefg", "hi", "jklmnopqrstu"]
    file = write_jsonl(tmp_path / "rows.jsonl", [{"text": text} for text in texts])
    rows = load(tmp_path, path=str(file), seq_len=8)
    tokenizer = tiny_tokenizer()
    stream = [
        token for text in texts for token in [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]
    ]
    assert rows.train.input_ids.tolist() == stream
    assert rows.train.labels.tolist() == stream
    assert rows.train.lengths == (8, 8, 8)
    assert rows.train.sources == (f"{file}:1", f"{file}:2", f"{file}:3")
    assert rows.notes == (f"{file}: 3 documents, joined",)
    assert load(tmp_path, path=str(file), seq_len=10).train.lengths == (10, 10, 4)
    assert load(tmp_path, path=str(file), seq_len=10).train.is_from_cache


@pytest.mark.usefixtures("datasets_cache")
@pytest.mark.parametrize(
    ("name", "value"), [("system", "Be brief."), ("loss_on", "last"), ("too_long", "drop")]
)
def test_a_setting_about_turns_is_refused_where_all_rows_are_documents(
    name: str, value: str, tmp_path: Path
) -> None:
    """The format is read from the columns, so no rule of recipes knows it."""
    file = write_jsonl(tmp_path / "rows.jsonl", [{"text": "abcdefg"}])
    settings: dict[str, Any] = {name: value}
    with pytest.raises(DataError, match=f"all rows are documents, and data.{name} say"):
        load(tmp_path, path=str(file), **settings)


@pytest.mark.usefixtures("datasets_cache")
def test_text_files_are_a_document_each(tmp_path: Path) -> None:
    (tmp_path / "texts").mkdir()
    for name, text in (("a", "abc\n"), ("b", "de\r\nf")):
        (tmp_path / "texts" / f"{name}.txt").write_bytes(text.encode())
    rows = load(tmp_path, path=str(tmp_path / "texts"))
    ends = "<|endoftext|>"
    assert tiny_tokenizer().decode(rows.train.input_ids) == f"abc\n{ends}de\r\nf{ends}"
    (tmp_path / "texts" / "b.txt").write_text(" \n")
    with pytest.raises(DataError, match=r"b\.txt:1: empty text"):
        load(tmp_path, path=str(tmp_path / "texts"))


# ---------------------------------------------------------------------------------------------- mix


@pytest.mark.parametrize(
    ("sizes", "weights", "max_rows", "counts"),
    [
        ((10,), (1.0,), None, (10,)),
        ((10, 10), (1.0, 1.0), None, (10, 10)),
        ((10, 10), (3.0, 1.0), None, (30, 10)),
        ((100, 10), (3.0, 1.0), None, (100, 33)),
        ((5, 7, 11), (0.5, 0.3, 0.2), None, (28, 16, 11)),
        ((10, 10), (3.0, 1.0), 8, (6, 2)),
        ((10, 10, 10), (1.0, 1.0, 1.0), 4, (2, 1, 1)),
        ((1000, 3), (0.1, 0.2), None, (1000, 2000)),
    ],
)
def test_an_epoch_has_exact_shares_and_every_row_unless_it_is_cut(
    sizes: tuple[int, ...], weights: tuple[float, ...], max_rows: int | None, counts: object
) -> None:
    assert rows_per_source(sizes, weights, max_rows=max_rows) == counts


def test_no_count_is_a_row_away_from_its_share_whatever_the_weights() -> None:
    random = np.random.RandomState(0)
    for _ in range(300):
        num = random.randint(1, 6)
        sizes = random.randint(1, 500, num).tolist()
        weights = [round(float(w), 3) + 0.001 for w in random.rand(num)]
        counts = rows_per_source(sizes, weights, max_rows=None)
        shares = [Fraction(str(w)) / sum(Fraction(str(v)) for v in weights) for w in weights]
        for count, size, share in zip(counts, sizes, shares, strict=True):
            assert count >= size
            assert abs(count - share * sum(counts)) < 1
        assert any(count - size <= 1 for count, size in zip(counts, sizes, strict=True))


def test_a_source_is_drawn_whole_as_often_as_it_fits_and_then_in_part() -> None:
    rows = drawn(23, 10, seed=4, source=1).tolist()
    assert Counter(Counter(rows).values()) == {2: 7, 3: 3}
    assert rows == sorted(rows)
    assert rows == drawn(23, 10, seed=4, source=1).tolist()
    others = [drawn(23, 10, seed=5, source=1).tolist(), drawn(23, 10, seed=4, source=2).tolist()]
    assert rows not in others
    assert len(set(drawn(4, 10, seed=4, source=0).tolist())) == 4


# --------------------------------------------------------------------------------------------------
# In a recipe
# --------------------------------------------------------------------------------------------------


def write(file: Path, name: str, num_rows: int) -> str:
    rows = [{"instruction": f"{name} {n}?", "output": f"{name}{n}"} for n in range(num_rows)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


def load_mix(tmp_path: Path, *, seed: int = 0, **settings: Any) -> Rows:
    return load_rows(
        DataSection(**settings),
        tiny_tokenizer(),
        seq_len=256,
        seed=seed,
        cache_dir=tmp_path / "cache",
    )


@pytest.fixture
def mix(tmp_path: Path) -> list[dict[str, Any]]:
    chat = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "c"}]
    (tmp_path / "c.jsonl").write_text(json.dumps({"messages": chat}) + "\n")
    return [
        {"path": write(tmp_path / "a.jsonl", "a", 12), "weight": 3},
        {"path": write(tmp_path / "b.jsonl", "b", 9), "weight": 1, "max_rows": 2},
        {"path": str(tmp_path / "c.jsonl"), "weight": 0.5, "system": "Hi."},
    ]


def test_sources_are_mixed_by_weight_each_in_its_own_form(
    tmp_path: Path, mix: list[dict[str, Any]]
) -> None:
    rows = load_mix(tmp_path, mix=mix)
    files = Counter(Path(source.rpartition(":")[0]).name for source in rows.train.sources)
    assert files == {"a.jsonl": 12, "b.jsonl": 4, "c.jsonl": 2}
    assert {source.rpartition(":")[2] for source in rows.train.sources[12:16]} == {"1", "2"}
    assert "Hi." in str(tiny_tokenizer().decode(rows.train[-1].input_ids))
    assert [note.partition(": ")[2] for note in rows.notes] == [
        "12 of an epoch's 18 rows (66.7 %), 1.00 times its 12",
        "4 of an epoch's 18 rows (22.2 %), 2.00 times its 2",
        "2 of an epoch's 18 rows (11.1 %), 2.00 times its 1",
    ]
    assert len(load_mix(tmp_path, mix=mix, max_rows=9).train) == 9


def test_the_data_hash_covers_weights_seed_and_order(
    tmp_path: Path, mix: list[dict[str, Any]]
) -> None:
    first = load_mix(tmp_path, mix=mix, max_rows=9)
    again = load_mix(tmp_path, mix=mix, max_rows=9)
    assert again.train.is_from_cache
    assert again.data_hash == first.data_hash
    assert [e.source for e in again.train] == [e.source for e in first.train]
    heavier = [mix[0] | {"weight": 9}, *mix[1:]]
    others = [
        load_mix(tmp_path, mix=heavier, max_rows=9),
        load_mix(tmp_path, mix=mix, max_rows=9, seed=1),
        load_mix(tmp_path, mix=mix[::-1], max_rows=9),
    ]
    assert len({rows.data_hash for rows in [first, *others]}) == 4


def test_the_arrays_of_a_mix_are_those_of_its_examples(
    tmp_path: Path, mix: list[dict[str, Any]]
) -> None:
    train = load_mix(tmp_path, mix=mix).train
    assert train.input_ids.tolist() == [t for e in train for t in e.input_ids.tolist()]
    assert train.labels.tolist() == [t for e in train for t in e.labels.tolist()]
    assert train.lengths == tuple(len(example.input_ids) for example in train)
    assert train.loss_tokens.tolist() == [example.num_loss_tokens for example in train]
    assert train.offsets.tolist() == [0, *np.cumsum(train.lengths).tolist()]
    for loss_on in ("assistant", "all"):
        whole = load_mix(tmp_path, path=mix[0]["path"], loss_on=loss_on).train
        assert whole.loss_tokens.tolist() == [example.num_loss_tokens for example in whole]


def test_tokens_go_to_another_process_as_the_name_of_their_store(
    tmp_path: Path, mix: list[dict[str, Any]]
) -> None:
    train = load_mix(tmp_path, mix=[*mix, {"path": write(tmp_path / "d.jsonl", "d", 900)}]).train
    sent = pickle.dumps(train)
    assert len(sent) < train.input_ids.nbytes / 10
    received: ExampleSet = pickle.loads(sent)
    assert received.digest() == train.digest()
    assert received[-1].source == train[-1].source


def test_held_out_rows_of_a_mix_are_of_all_its_sources_and_not_trained_on(
    tmp_path: Path, mix: list[dict[str, Any]]
) -> None:
    rows = load_mix(tmp_path, mix=mix[:2], eval_frac=0.5)
    assert rows.held_out is not None
    assert len(rows.held_out) == 7
    assert not {*rows.held_out.sources} & {*rows.train.sources}
    assert [row.source for row in rows.held_out_rows] == list(rows.held_out.sources)
    assert list(rows.held_out_rows)[2].source == rows.held_out.sources[2]


def test_max_rows_is_of_the_training_rows_whatever_is_held_out(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", "a", 8)
    rows = load_mix(tmp_path, path=path, eval_path=path, max_rows=3)
    assert rows.held_out is not None
    assert (len(rows.train), len(rows.held_out)) == (3, 8)


def test_a_missing_source_of_a_mix_is_named(tmp_path: Path, mix: list[dict[str, Any]]) -> None:
    with pytest.raises(DataError, match=r"d\.jsonl does not exist"):
        load_mix(tmp_path, mix=[*mix, {"path": str(tmp_path / "d.jsonl")}])


def test_weights_that_make_an_endless_epoch_are_refused() -> None:
    with pytest.raises(
        DataError, match=r"an epoch of 2,000,000,002 rows, entry 2 seen 2,000,000,000 times"
    ):
        rows_per_source([2, 1], [1e-9, 1], max_rows=None)
    assert sum(rows_per_source([2, 1], [1e-9, 1], max_rows=50)) == 50


# ----------------------------------------------------------------------------------------- hold out


def load_hold_out(path: Path, *, seq_len: int = 64, seed: int = 0, **settings: Any) -> Rows:
    return load_rows(
        DataSection(path=str(path), **settings),
        tiny_tokenizer(),
        seq_len=seq_len,
        seed=seed,
        cache_dir=path.parent / "cache",
    )


def write_hold_out(tmp_path: Path, rows: list[Any], name: str = "rows.jsonl") -> Path:
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
    file = write_hold_out(tmp_path, [{"text": text} for text in texts])
    rows = load_hold_out(file, seed=seed, eval_frac=0.1)
    assert rows.held_out is not None
    trained, held_out = numbers(rows.train), numbers(rows.held_out)
    assert not trained & held_out
    assert len(rows.held_out) == round(0.1 * len(load_hold_out(file).train))
    assert len(trained) + len(held_out) >= len(texts) - 4 - 2 * 64 // 5  # rows between the sides
    assert load_hold_out(file, seed=seed, eval_frac=0.1).data_hash == rows.data_hash


def test_documents_that_are_too_few_to_hold_one_out_are_refused(tmp_path: Path) -> None:
    file = write_hold_out(tmp_path, [{"text": "word " * 400}])
    with pytest.raises(
        DataError, match=r"eval_frac holds out 3 of \d+ rows of .*no whole document"
    ):
        load_hold_out(file, eval_frac=0.1)


def test_which_single_rows_are_held_out_has_not_changed(tmp_path: Path) -> None:
    rows = [{"prompt": f"q{n}", "completion": f"a{n}"} for n in range(20)]
    found = load_hold_out(write_hold_out(tmp_path, rows), eval_frac=0.2)
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
    train = write_hold_out(tmp_path, [*rows, rows[4]])
    others = [rows[7], {"prompt": "what is it?", "completion": "it is 7"}, rows[4]]
    held_out = write_hold_out(tmp_path, others, "held.jsonl")
    notes = load_hold_out(train, eval_path=str(held_out)).notes
    found = [note for note in notes if "training rows too" in note]
    assert found == [
        "2 of 3 held-out rows are training rows too, so that their loss does not measure what was"
        f" learned ({held_out}:1 is {train}:8, {held_out}:3 is {train}:5)"
    ]
    assert not any("training rows too" in note for note in load_hold_out(train).notes)
    clean = write_hold_out(tmp_path, others[1:2], "clean.jsonl")
    assert not any(
        "training rows too" in n for n in load_hold_out(train, eval_path=str(clean)).notes
    )


# --------------------------------------------------------------------------------- special tokens


def test_special_tokens_in_the_text_of_rows_are_counted_and_named(tmp_path: Path) -> None:
    plain = [{"prompt": f"q{n}", "completion": f"a{n} <think> </think>"} for n in range(3)]
    written = [
        {"prompt": "how does <|im_end|> end a turn?", "completion": "so"},
        *({"prompt": f"q{n}", "completion": f"a <|endoftext|> {n}"} for n in range(3)),
    ]
    file = write_hold_out(tmp_path, [*plain, *written])
    for _ in range(2):  # also from the cache
        (note,) = load_hold_out(file).notes[:1]
        assert note == (
            f"4 of 7 rows of {file} hold special tokens in their text, which are read as real ones"
            f" ({file}:4: <|im_end|>, {file}:5: <|endoftext|>, {file}:6: <|endoftext|>, ...)"
        )
    assert not any(
        "special" in note for note in load_hold_out(write_hold_out(tmp_path, plain)).notes
    )


def test_turns_after_the_last_answer_are_counted_and_named(tmp_path: Path) -> None:
    turns = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    rows = [{"messages": turns}, {"messages": [*turns, turns[0]]}]
    file = write_hold_out(tmp_path, rows)
    assert load_hold_out(file).notes[0] == (
        f"1 of 2 rows of {file} end with turns after their last answer, which are left out"
        f" ({file}:2: user)"
    )


def test_a_text_in_parts_is_joined_and_other_parts_are_refused(tmp_path: Path) -> None:
    answer = {"role": "assistant", "content": "a"}
    parts = [{"type": "text", "text": "q"}, {"type": "text", "text": "?", "image_url": None}]
    whole = load_hold_out(
        write_hold_out(tmp_path, [{"messages": [{"role": "user", "content": "q?"}, answer]}])
    )
    rows = [{"messages": [{"role": "user", "content": parts}, answer]}]
    assert load_hold_out(write_hold_out(tmp_path, rows)).data_hash == whole.data_hash
    parts[1] = {"type": "video_url", "video_url": "x.mp4"}
    with pytest.raises(DataError, match=r"part 2 of 'content' is of type 'video_url': only texts"):
        load_hold_out(write_hold_out(tmp_path, rows))


def test_one_column_is_not_read_as_two(tmp_path: Path) -> None:
    file = write_hold_out(tmp_path, [{"instruction": "q", "output": "a"}])
    for data_format in ("auto", "alpaca"):
        with pytest.raises(DataError, match="output as input and as output"):
            load_hold_out(file, columns={"input": "output"}, format=data_format)


def test_a_row_whose_prompt_is_empty_is_refused(tmp_path: Path) -> None:
    rows = [{"prompt": "q", "completion": "a"}, {"prompt": " \n", "completion": "a"}]
    with pytest.raises(DataError, match=r"1 of 2 rows (.|\n)*rows.jsonl:2: empty prompt"):
        load_hold_out(write_hold_out(tmp_path, rows), system="Be brief.")


def test_parts_of_a_split_row_learn_each_token_once(tmp_path: Path) -> None:
    row = {"prompt": "q", "completion": "abcdefghij" * 30}
    whole = load_hold_out(write_hold_out(tmp_path, [row]), seq_len=1000).train[0]
    parts = list(load_hold_out(write_hold_out(tmp_path, [row]), too_long="split").train)
    assert len(parts) > 5
    assert sum(part.num_loss_tokens for part in parts) == whole.num_loss_tokens
    assert all(a.input_ids[-1] == b.input_ids[0] for a, b in pairwise(parts))


# ------------------------------------------------------------------------------------------ dataset


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


def load_dataset(tmp_path: Path, rows: list[dict[str, Any]], **settings: Any) -> Rows:
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
    assert load_dataset(tmp_path, rows).notes == ("Columns that are not used: id, lang",)
    assert load_dataset(tmp_path, [ROW]).notes == ()


def test_columns_that_are_ignored_on_purpose_are_not_listed(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [ROW | {"tools": "[]", "id": 1}]
    with pytest.raises(DataError, match=r"'tools' would be dropped"):
        load_dataset(tmp_path, rows)
    ignored = load_dataset(tmp_path, rows, ignored_columns=["tools"])
    assert ignored.notes == ("Columns that are not used: id",)


@pytest.mark.parametrize("name", ["tool", "output"])
def test_a_column_that_no_row_holds_unused_cannot_be_ignored(tmp_path: Path, name: str) -> None:
    with pytest.raises(
        DataError,
        match=rf"ignored_columns names {name}, and no row holds(.|\n)*not used are tools(.|\n)*",
    ):
        load_dataset(tmp_path, [ROW | {"tools": "[]"}], ignored_columns=["tools", name])
