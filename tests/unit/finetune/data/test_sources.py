import json
from pathlib import Path
from typing import Any

import datasets
import pytest

from finetune.data.dataset import Rows, load_rows
from finetune.data.sources import MAX_ROW_BYTES, FileSource, open_source
from finetune.errors import DataError
from finetune.recipe.sections import DataSection
from tests.doubles import tiny_tokenizer

ROWS = [{"instruction": f"{n}+{n}?", "output": f"{2 * n}"} for n in range(6)]


@pytest.fixture(autouse=True)
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


def test_rows_of_a_directory_are_named_by_file_and_line(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "folder" / "a.jsonl", ROWS[:2])
    bad = write_jsonl(tmp_path / "folder" / "b.jsonl", [*ROWS[2:4], {"instruction": "a"}])
    with pytest.raises(DataError, match=rf"1 of 5 rows in .*\n  {bad}:3: no key 'output'"):
        load(tmp_path, path=str(tmp_path / "folder"))


def test_files_of_a_directory_that_are_in_another_split_are_named(tmp_path: Path) -> None:
    for name in ("train", "test"):
        write_jsonl(tmp_path / "folder" / f"{name}.jsonl")
    rows = load(tmp_path, path=str(tmp_path / "folder"))
    assert len(rows.train) == 6
    assert rows.notes == (f"Files of {tmp_path / 'folder'} that are not read: test.jsonl",)
    held_out = load(tmp_path, path=f"{tmp_path / 'folder'}:test")
    assert held_out.train.sources[0] == f"{tmp_path / 'folder' / 'test.jsonl'}:1"


def test_a_record_of_several_lines_is_named_by_its_first(tmp_path: Path) -> None:
    file = tmp_path / "rows.csv"
    file.write_text('instruction,output\n"a\nb",c\n"d, ""e""",f\ng,h\n')
    source = open_source(str(file))
    assert list(source.rows()) == [
        ((0, 2), {"instruction": "a\nb", "output": "c"}),
        ((0, 4), {"instruction": 'd, "e"', "output": "f"}),
        ((0, 5), {"instruction": "g", "output": "h"}),
    ]


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


@pytest.mark.parametrize("mark", [";", "\t", "|"])
def test_a_csv_with_other_marks_between_its_fields_is_refused(tmp_path: Path, mark: str) -> None:
    file = tmp_path / "rows.csv"
    file.write_text(f"prompt{mark}completion\nq{mark}a\n")
    with pytest.raises(DataError, match=r"rows\.csv:1: the header is one column(.|\n)*by commas"):
        list(open_source(str(file)).rows())


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


@pytest.mark.slow
def test_a_row_of_100_mb_is_named_and_the_rows_after_it_are_read(tmp_path: Path) -> None:
    file = write_jsonl(tmp_path / "rows.jsonl", ROWS[:2])
    with file.open("a") as out:
        out.write(json.dumps({"instruction": "a" * 10**8, "output": "b"}) + "\n")
        out.write(json.dumps(ROWS[2]) + "\n")
    with pytest.raises(DataError, match=r"1 of 4 rows(.|\n)*:3: the row has 95 MiB; at most 64"):
        load(tmp_path, path=str(file))
    assert len(load(tmp_path, path=str(file), skip_bad=1).train) == 3


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


def test_a_text_file_larger_than_a_row_may_be_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "book.txt"
    with file.open("wb") as out:
        out.truncate(MAX_ROW_BYTES + 1)
    with pytest.raises(DataError, match=r"book\.txt:1: the row has 64 MiB; .*: split it"):
        load(tmp_path, path=str(file), format="text")


def test_a_file_of_an_unknown_kind_is_refused_by_its_ending(tmp_path: Path) -> None:
    (tmp_path / "rows.xlsx").touch()
    with pytest.raises(DataError, match=r"rows\.xlsx has the ending \.xlsx; .*\.csv, \.parquet"):
        open_source(str(tmp_path / "rows.xlsx"))


def test_the_digest_is_of_the_content_and_not_of_the_name(tmp_path: Path) -> None:
    one, same = (write_jsonl(tmp_path / f"{name}.jsonl") for name in ("one", "same"))
    other = write_jsonl(tmp_path / "other.jsonl", ROWS[:5])
    digests = [open_source(str(file)).digest() for file in (one, same, other)]
    assert digests[0] == digests[1] != digests[2]
    halves = FileSource(path="x", files=(one, other)), FileSource(path="x", files=(other, one))
    assert halves[0].digest() != halves[1].digest()


def test_the_digests_of_two_parts_of_a_split_differ(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, load_dataset = write_jsonl(tmp_path / "rows.jsonl"), datasets.load_dataset

    def from_file(name: str, config: str | None, *, split: str, data_files: object) -> object:
        del name, config, data_files
        return load_dataset("json", split=split, data_files=str(file))

    monkeypatch.setattr(datasets, "load_dataset", from_file)
    digests = {open_source(f"some/rows:{s}").digest() for s in ("train", "train[:1]", "train[1:2]")}
    assert len(digests) == 3


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


def test_two_formats_in_one_file_are_named_by_line(tmp_path: Path) -> None:
    chat = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    file = write_jsonl(tmp_path / "rows.jsonl", [ROWS[0], chat])
    with pytest.raises(
        DataError,
        match=r":2: no key 'instruction'; .*; it is a row of the format messages(.|\n)*hint: one"
        r" format in a file: split it, and name the parts in `data\.mix`",
    ):
        load(tmp_path, path=str(file))


def test_a_file_of_another_format_is_told_its_format(tmp_path: Path) -> None:
    file = write_jsonl(tmp_path / "rows.jsonl")
    with pytest.raises(DataError, match=r"6 of 6 rows(.|\n)*hint: `data\.format: alpaca`"):
        load(tmp_path, path=str(file), format="messages")


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


def test_the_first_rows_are_read_and_no_more(tmp_path: Path) -> None:
    file = write_jsonl(tmp_path / "rows.jsonl", [*ROWS, {"bad": 1}])
    rows = load(tmp_path, path=str(file), max_rows=4)
    assert rows.train.sources == tuple(f"{file}:{n}" for n in (1, 2, 3, 4))


# --------------------------------------------------------------------------------------------------
# Documents
# --------------------------------------------------------------------------------------------------


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
