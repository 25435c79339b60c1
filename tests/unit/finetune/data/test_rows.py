"""Rows of each form that is published: read whole, or named with what is wrong."""

import json
import math
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from finetune.data.compared import Comparison, require_known_tokens
from finetune.data.dataset import Rows, load_rows
from finetune.data.formats.tagged import Tagged
from finetune.data.rows import Conversation, LossOn
from finetune.data.tokenize import IGNORE_INDEX, Encoder, Fate
from finetune.data.top_tokens import TopTokens
from finetune.data.turns import Message
from finetune.errors import DataError, RowError
from finetune.recipe.sections import DataSection
from tests.conversations import read_conversations
from tests.doubles import tiny_tokenizer


def read(
    path: Path | str,
    data_format: str = "auto",
    *,
    columns: Mapping[str, str] | None = None,
    system: str | None = None,
    ignored: Sequence[str] = (),
    loss_on: LossOn = "assistant",
) -> list[Conversation]:
    return read_conversations(
        path=str(path),
        data_format=data_format,
        columns=columns or {},
        system=system,
        ignored=ignored,
        loss_on=loss_on,
    )


def write_jsonl(path: Path, rows: Sequence[object]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def turns(conversation: Conversation) -> list[tuple[str, str]]:
    return [(message.role, message.content) for message in conversation.messages]


QA = [("user", "1+1?"), ("assistant", "2")]
GOOD_ROWS: dict[str, dict[str, Any]] = {
    "messages": {
        "messages": [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"}]
    },
    "sharegpt": {
        "conversations": [{"from": "human", "value": "1+1?"}, {"from": "gpt", "value": "2"}]
    },
    "alpaca": {"instruction": "1+1?", "input": "", "output": "2"},
    "prompt_completion": {"prompt": "1+1?", "completion": "2"},
}


@pytest.mark.parametrize("data_format", GOOD_ROWS)
@pytest.mark.parametrize("is_named", [True, False])
def test_each_format_becomes_the_same_conversation_named_or_detected(
    tmp_path: Path, data_format: str, is_named: bool
) -> None:
    file = write_jsonl(tmp_path / "rows.jsonl", [GOOD_ROWS[data_format]])
    (conversation,) = read(file, data_format if is_named else "auto")
    assert turns(conversation) == QA
    assert conversation.source == f"{file}:1"


TOOL = {"type": "function", "function": {"name": "add", "parameters": {}}}
CALL = {"role": "assistant", "tool_calls": [{"function": {"name": "add", "arguments": {}}}]}


@pytest.mark.parametrize("data_format", ["prompt_completion", "auto"])
def test_a_prompt_and_its_completion_may_be_turns_of_which_the_completion_is_learned(
    tmp_path: Path, data_format: str
) -> None:
    asked, answered = GOOD_ROWS["messages"]["messages"]
    earlier = [{"role": "system", "content": "Add."}, asked, {"role": "assistant", "content": "3"}]
    rows: list[dict[str, Any]] = [
        {"prompt": [asked], "completion": [answered]},
        {"prompt": [asked], "completion": "2"},
        {"prompt": [*earlier, asked], "completion": [answered]},
        {
            "prompt": [asked],
            "completion": [CALL, {"role": "tool", "content": "2"}, answered],
            "tools": [TOOL],
        },
    ]
    as_text = [{key: json.dumps(value) for key, value in rows[2].items()}]
    (written,) = read(write_jsonl(tmp_path / "text.jsonl", as_text), data_format)
    one, mixed, long, called = read(write_jsonl(tmp_path / "rows.jsonl", rows), data_format)
    assert turns(one) == turns(mixed) == QA
    assert turns(written) == turns(long)
    assert [message.role for message in long.messages] == [
        *("system", "user", "assistant", "user", "assistant")
    ]
    assert long.learned("assistant") == {4}
    assert called.learned("assistant") == {1, 3}
    assert called.learned("last") == {3}
    assert [tool["function"]["name"] for tool in called.tools] == ["add"]


@pytest.mark.parametrize(
    ("prompt", "completion", "problem"),
    [
        ([], [{"role": "assistant", "content": "2"}], "its prompt has no user turn"),
        ([{"role": "user", "content": " "}], "2", "empty prompt"),
        ([{"role": "user", "content": "q"}], [], "'completion' is empty"),
        ("q", [{"role": "user", "content": "q"}], "'completion' begins with a turn of the user"),
        (
            [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}],
            "2",
            "its prompt ends with an answer",
        ),
        ([{"role": "user", "content": "q"}], 2, "'completion' must be text or a list of turns"),
    ],
)
def test_turns_of_a_prompt_or_completion_that_say_nothing_are_refused(
    tmp_path: Path, prompt: object, completion: object, problem: str
) -> None:
    row = {"prompt": prompt, "completion": completion}
    with pytest.raises(DataError, match=problem):
        read(write_jsonl(tmp_path / "rows.jsonl", [row]))


def test_an_alpaca_input_follows_the_instruction_after_a_blank_line(tmp_path: Path) -> None:
    rows = [{"instruction": "Add.", "input": "1 1", "output": "2"}]
    (conversation,) = read(write_jsonl(tmp_path / "rows.jsonl", rows))
    assert turns(conversation) == [("user", "Add.\n\n1 1"), ("assistant", "2")]


def test_named_columns_are_used(tmp_path: Path) -> None:
    file = write_jsonl(tmp_path / "rows.jsonl", [{"question": "1+1?", "answer": "2"}])
    (conversation,) = read(file, columns={"prompt": "question", "completion": "answer"})
    assert turns(conversation) == QA


@pytest.mark.parametrize("data_format", ["messages", "sharegpt"])
def test_a_named_messages_column_tells_the_two_chats_apart_by_their_turns(
    tmp_path: Path, data_format: str
) -> None:
    (chat,) = GOOD_ROWS[data_format].values()
    file = write_jsonl(tmp_path / "rows.jsonl", [{"chat": chat}])
    (conversation,) = read(file, columns={"messages": "chat", "conversations": "chat"})
    assert turns(conversation) == QA


def test_the_system_prompt_goes_to_rows_that_have_none(tmp_path: Path) -> None:
    own = [{"role": "system", "content": "own"}, *GOOD_ROWS["messages"]["messages"]]
    file = write_jsonl(tmp_path / "rows.jsonl", [GOOD_ROWS["messages"], {"messages": own}])
    first, second = read(file, system="ours")
    assert first.messages[0] == Message(role="system", content="ours")
    assert turns(second) == [("system", "own"), *QA]


def test_a_json_array_names_its_rows_by_index(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    file.write_text(json.dumps([GOOD_ROWS["alpaca"]] * 2))
    assert [row.source for row in read(file)] == [f"{file}[0]", f"{file}[1]"]


def test_blank_lines_do_not_shift_the_line_numbers(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    line = json.dumps(GOOD_ROWS["alpaca"])
    file.write_text(f"{line}\n\n{line}\n\n")
    assert [row.source for row in read(file)] == [f"{file}:1", f"{file}:3"]


BAD_LINES = [
    ('{"instruction": "a", "output": ', r"broken JSON: Expecting value at column \d+"),
    ('{"instruction": "a"}', r"no key 'output'; it has 'instruction'"),
    ('{"instruction": "a", "output": 3}', r"'output' must be text, this is a int"),
    ('{"instruction": "a", "output": " "}', r"empty answer"),
    ('["a", "b"]', r"a row must be an object, this is a list"),
    ('{"instruction": "a", "output": "\udcff"}', r"not UTF-8: byte 0xff at 32"),
    (
        r'{"instruction": "a", "output": "b\ud800"}',
        r"'output' holds half a character: '\\ud800'",
    ),
    pytest.param(
        f'{{"instruction": "a", "output": "b", "id": {"9" * 5000}}}',
        r"JSON beyond what can be read: .*5000 digits",
        id="5000 digits",
    ),
    pytest.param(
        "[" * 100_000 + "]" * 100_000,
        r"JSON beyond what can be read: .*recursion.*",
        id="100000 brackets",
    ),
]


@pytest.mark.parametrize(("line", "problem"), BAD_LINES)
def test_a_bad_row_is_named_by_file_and_line(tmp_path: Path, line: str, problem: str) -> None:
    file = tmp_path / "rows.jsonl"
    good = json.dumps(GOOD_ROWS["alpaca"])
    file.write_bytes(f"{good}\n{line}\n{good}\n".encode(errors="surrogateescape"))
    with pytest.raises(DataError, match=rf"1 of 3 rows in .*\n  {file}:2: {problem}\n"):
        read(file)


BAD_TURNS = [
    ("messages", [{"role": "user", "content": "a"}], "no assistant turn"),
    ("messages", [{"role": "robot", "content": "a"}], "unknown role 'robot'; known are system"),
    ("messages", [{"role": "assistant"}], "no key 'content'; it has 'role'"),
    ("messages", [{"role": "assistant", "content": None}], "'content' must be text"),
    ("messages", [{"role": "assistant", "content": "a"}], "it begins with an answer"),
    ("messages", "hello", "'messages' must be a list of objects, this is str"),
    ("sharegpt", [{"from": "human", "value": "a"}], "no assistant turn"),
    ("sharegpt", [{"from": "bing", "value": "a"}], "unknown role 'bing'; known are system, human"),
    ("sharegpt", [{"from": "human", "value": "a"}, {"from": "gpt", "value": ""}], "empty answer"),
]


@pytest.mark.parametrize(("data_format", "chat", "problem"), BAD_TURNS)
def test_a_bad_chat_is_named_by_file_and_line(
    tmp_path: Path, data_format: str, chat: object, problem: str
) -> None:
    key = {"messages": "messages", "sharegpt": "conversations"}[data_format]
    file = write_jsonl(tmp_path / "rows.jsonl", [GOOD_ROWS[data_format], {key: chat}])
    with pytest.raises(DataError, match=rf"{file}:2: {problem}"):
        read(file, data_format)


def test_many_bad_rows_are_counted_and_the_first_ten_named(tmp_path: Path) -> None:
    bad = [{"instruction": "a", "output": ""}] * 14
    file = write_jsonl(tmp_path / "rows.jsonl", [GOOD_ROWS["alpaca"], *bad])
    with pytest.raises(
        DataError, match=r"14 of 15 rows(.|\n)*:11: empty answer\n  and 4 more"
    ) as e:
        read(file)
    assert e.value.what.count("empty answer") == 10


def test_an_unknown_row_names_the_keys_seen_and_the_formats(tmp_path: Path) -> None:
    file = write_jsonl(tmp_path / "rows.jsonl", [{"question": "a", "answer": "b"}])
    with pytest.raises(
        DataError,
        match=r":1 has the keys question, answer, which fit no format;(.|\n)*alpaca \(instruction,"
        r" output\)(.|\n)*hint: .*data.columns",
    ):
        read(file)


def test_a_row_that_fits_two_formats_is_refused(tmp_path: Path) -> None:
    file = write_jsonl(tmp_path / "rows.jsonl", [GOOD_ROWS["alpaca"] | GOOD_ROWS["messages"]])
    with pytest.raises(DataError, match=r"fit several formats: messages, alpaca"):
        read(file)


def test_a_missing_file_names_the_nearest_one_that_exists(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "train.jsonl", [GOOD_ROWS["alpaca"]])
    with pytest.raises(DataError, match=rf"trian\.jsonl does not.*\n\nhint: .*{tmp_path}/train.j"):
        read(tmp_path / "trian.jsonl")


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"nor does its folder .*nowhere"):
        read(tmp_path / "nowhere" / "train.jsonl")


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json"])
def test_an_empty_data_set_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("[]" if name.endswith("json") else "\n")
    with pytest.raises(DataError, match=rf"{name} holds no rows; there must be at least one"):
        read(tmp_path / name)


def test_json_lines_in_a_json_file_are_told(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    file.write_text("{}\n{}\n")
    with pytest.raises(
        DataError, match=r"rows.json:2: broken JSON: Extra data.*\n\nhint: .*\.jsonl"
    ):
        read(file)


@pytest.mark.parametrize(
    ("value", "why"),
    [
        pytest.param("9" * 5000, "5000 digits", id="5000 digits"),
        pytest.param("[" * 100_000 + "]" * 100_000, "recursion", id="100000 brackets"),
    ],
)
def test_a_json_file_beyond_what_json_reads_is_refused(
    tmp_path: Path, value: str, why: str
) -> None:
    file = tmp_path / "rows.json"
    file.write_text(f"[{value}]")
    with pytest.raises(DataError, match=rf"rows\.json cannot be read as JSON: .*{why}"):
        read(file)


def test_a_json_object_is_not_a_data_set(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    file.write_text("{}")
    with pytest.raises(DataError, match=r"rows.json holds one dict"):
        read(file)


@pytest.fixture
def datasets_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hf-cache")


@pytest.mark.parametrize("data_format", GOOD_ROWS)
@pytest.mark.usefixtures("datasets_cache")
def test_parquet_rows_are_read(tmp_path: Path, data_format: str) -> None:
    file = tmp_path / "rows.parquet"
    datasets.Dataset.from_list([GOOD_ROWS[data_format]] * 2).to_parquet(str(file))
    rows = read(file)
    assert [turns(row) for row in rows] == [QA, QA]
    assert rows[1].source == f"{file}[1]"


@pytest.mark.usefixtures("datasets_cache")
def test_nulls_that_a_table_puts_into_tool_calls_are_refused(tmp_path: Path) -> None:
    def row(*, is_text: bool, **arguments: object) -> dict[str, Any]:
        given = json.dumps(arguments) if is_text else arguments
        return with_answer(tool_calls=[{"name": "add", "arguments": given}])

    file = tmp_path / "rows.parquet"
    both: list[dict[str, Any]] = [{"a": 1}, {"b": None}]
    rows = [row(is_text=False, **both[0]), row(is_text=False, b=2)]
    datasets.Dataset.from_list(rows).to_parquet(str(file))
    with pytest.raises(DataError, match=r"2 of 2 rows(.|\n)*hold nulls, and a table has them"):
        read(file)
    assert len(read(file, ignored=["tool_calls"])) == 2
    assert len(read(write_jsonl(tmp_path / "rows.jsonl", [row(is_text=False, **both[1])]))) == 1
    file = tmp_path / "texts.parquet"
    datasets.Dataset.from_list([row(is_text=True, **one) for one in both]).to_parquet(str(file))
    assert [r.messages[1].calls[0].arguments for r in read(file)] == both


@pytest.mark.usefixtures("datasets_cache")
def test_a_saved_data_set_and_its_split_are_read(tmp_path: Path) -> None:
    rows = datasets.Dataset.from_list([GOOD_ROWS["alpaca"]])
    splits = datasets.DatasetDict(
        {"train": rows, "test": datasets.concatenate_datasets([rows] * 3)}
    )
    splits.save_to_disk(str(tmp_path / "saved"))
    assert len(read(tmp_path / "saved")) == 1
    assert len(read(f"{tmp_path / 'saved'}:test")) == 3
    with pytest.raises(DataError, match=r"saved:tset cannot be loaded as a data set"):
        read(f"{tmp_path / 'saved'}:tset")


@pytest.mark.usefixtures("datasets_cache")
def test_a_data_set_saved_without_splits_has_no_part_of_one(tmp_path: Path) -> None:
    rows = datasets.Dataset.from_list([GOOD_ROWS["alpaca"]] * 2)
    rows.save_to_disk(str(tmp_path / "saved"))
    assert len(read(f"{tmp_path / 'saved'}:train")) == 2
    for split in ("test", "train[:1]"):
        with pytest.raises(DataError, match="saved without splits, and there is no"):
            read(f"{tmp_path / 'saved'}:{split}")


def test_config_and_split_of_a_hub_data_set_stand_behind_its_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = []

    def load(name: str, config: str | None, *, split: str, **others: object) -> object:
        assert others == {"data_files": None, "revision": None}
        asked.append((name, config, split))
        return datasets.Dataset.from_list([{"question": "1 + 1", "answer": "2"}])

    monkeypatch.setattr(datasets, "load_dataset", load)
    for path in ("openai/gsm8k", "openai/gsm8k#main", "openai/gsm8k#main:test"):
        rows = read(path, columns={"prompt": "question", "completion": "answer"})
        assert [row.source for row in rows] == [f"{path}[0]"]
    assert asked == [
        ("openai/gsm8k", None, "train"),
        ("openai/gsm8k", "main", "train"),
        ("openai/gsm8k", "main", "test"),
    ]


def test_a_hub_data_set_without_a_network_is_an_error_with_a_way_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def unreachable(*_: object, **__: object) -> None:
        raise ConnectionError("Couldn't reach 'some/rows' on the Hub")

    monkeypatch.setattr(datasets, "load_dataset", unreachable)
    with pytest.raises(DataError, match=r"some/rows cannot be loaded.*Couldn't reach(.|\n)*local"):
        read("some/rows")


def test_reading_rows_imports_no_torch() -> None:
    code = (
        "import sys, finetune.data.rows;"
        " sys.exit('torch' in sys.modules or 'datasets' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# --------------------------------------------------------------------------------------------------
# What a row means and training would not read
# --------------------------------------------------------------------------------------------------

TURNS = GOOD_ROWS["messages"]["messages"]
CHAT = GOOD_ROWS["sharegpt"]["conversations"]


def with_answer(**keys: object) -> dict[str, Any]:
    return {"messages": [TURNS[0], TURNS[1] | keys]}


LOST: list[tuple[str, dict[str, Any]]] = [
    ("tools", GOOD_ROWS["alpaca"] | {"tools": [{"name": "add"}]}),
    ("videos", GOOD_ROWS["sharegpt"] | {"videos": ["a.mp4"]}),
    ("system", GOOD_ROWS["sharegpt"] | {"system": "Be brief."}),
    ("system", GOOD_ROWS["alpaca"] | {"system": "Be brief."}),
    ("history", GOOD_ROWS["alpaca"] | {"history": [["a", "b"]]}),
    ("system_prompt", GOOD_ROWS["prompt_completion"] | {"system_prompt": "Be brief."}),
    ("label", GOOD_ROWS["prompt_completion"] | {"label": False}),
    ("label", GOOD_ROWS["prompt_completion"] | {"label": 1}),
    ("rejected", GOOD_ROWS["prompt_completion"] | {"rejected": "3"}),
    ("chosen", GOOD_ROWS["sharegpt"] | {"chosen": {"from": "gpt", "value": "2"}}),
    ("weight", GOOD_ROWS["alpaca"] | {"weight": 0}),
    ("weight", GOOD_ROWS["alpaca"] | {"weight": float("nan")}),
    ("weight", GOOD_ROWS["alpaca"] | {"weight": "1"}),
    ("train", GOOD_ROWS["alpaca"] | {"train": False}),
    ("weight", with_answer(weight=0.5)),
    ("train", with_answer(train="no")),
    ("tool_calls", {"messages": [TURNS[0] | {"tool_calls": [{"name": "add"}]}, TURNS[1]]}),
    ("name", {"messages": [TURNS[0] | {"name": "Ada"}, TURNS[1]]}),
    ("anything", with_answer(anything="x")),
    ("weight", {"conversations": [CHAT[0] | {"weight": 0.5}, CHAT[1]]}),
]


@pytest.mark.parametrize(("key", "row"), LOST)
def test_a_row_whose_meaning_would_be_lost_is_refused_by_name(
    tmp_path: Path, key: str, row: dict[str, Any]
) -> None:
    good = next(good for name, good in GOOD_ROWS.items() if set(good) & set(row))
    file = write_jsonl(tmp_path / "rows.jsonl", [good, row])
    with pytest.raises(
        DataError,
        match=rf"1 of 2 rows(.|\n)*:2: '{key}'( of turn \d)? would be dropped: \w(.|\n)*"
        rf"hint: `data\.ignored_columns: \[{key}\]` leaves them out on purpose",
    ):
        read(file)


@pytest.mark.parametrize(("key", "row"), [lost for lost in LOST if "messages" in lost[1]])
def test_turns_in_a_json_text_lose_no_meaning_either(
    tmp_path: Path, key: str, row: dict[str, Any]
) -> None:
    file = write_jsonl(tmp_path / "rows.jsonl", [{"messages": json.dumps(row["messages"])}])
    with pytest.raises(DataError, match=rf":1: '{key}' of turn \d would be dropped"):
        read(file)


@pytest.mark.parametrize(
    ("keys", "problem"),
    [
        (
            {"tool_calls": [{"name": "add"}], "function_call": {"name": "sub"}},
            "calls of tools under two keys",
        ),
        ({"reasoning": "1 and 1", "thinking": "2"}, "different reasoning under several of"),
    ],
)
def test_what_is_there_under_two_keys_is_not_read_from_one(
    tmp_path: Path, keys: dict[str, Any], problem: str
) -> None:
    with pytest.raises(DataError, match=problem):
        read(write_jsonl(tmp_path / "rows.jsonl", [with_answer(**keys)]))


def test_the_same_reasoning_under_two_keys_is_read(tmp_path: Path) -> None:
    row = with_answer(reasoning="1 and 1", reasoning_content="1 and 1")
    (read_row,) = read(write_jsonl(tmp_path / "rows.jsonl", [row]))
    assert read_row.messages[-1].thought == "1 and 1"


READ: list[tuple[str, dict[str, Any]]] = [
    ("tools", GOOD_ROWS["messages"] | {"tools": [{"name": "add"}]}),
    ("tools", GOOD_ROWS["sharegpt"] | {"tools": "[{}]"}),
    ("tool_calls", with_answer(tool_calls=[{"id": "1"}])),
    ("function_call", with_answer(function_call={"name": "add"})),
    ("reasoning_content", with_answer(reasoning_content="1 and 1")),
    ("weight", with_answer(weight=0)),
    ("train", with_answer(train=False)),
    ("weight", {"conversations": [CHAT[0], CHAT[1] | {"weight": 0.0}]}),
]


def test_what_is_ignored_on_purpose_is_left_out_and_known(tmp_path: Path) -> None:
    for key, row in LOST + READ:
        file = write_jsonl(tmp_path / "rows.jsonl", [row])
        (conversation,) = read(file, ignored=[key])
        assert conversation.messages == (
            Message(role="user", content="1+1?"),
            Message(role="assistant", content="2"),
        )
        assert (conversation.unused, conversation.tools) == ((key,), ())


HARMLESS: list[dict[str, Any]] = [
    GOOD_ROWS["messages"] | {"tools": None, "images": [], "system": " ", "id": 7, "lang": "en"},
    GOOD_ROWS["messages"] | {"weight": 1.0, "train": True, "label": True, "id": 0, "lang": "en"},
    with_answer(tool_calls=None, weight=1, train=True, name="") | {"id": 1, "lang": "en"},
    {"messages": [TURNS[0] | {"weight": 0, "train": False}, TURNS[1]], "id": 1, "lang": "en"},
]


def test_values_that_say_nothing_are_no_meaning_and_other_columns_are_listed(
    tmp_path: Path,
) -> None:
    rows = read(write_jsonl(tmp_path / "rows.jsonl", HARMLESS))
    assert [turns(row) for row in rows] == [QA] * len(HARMLESS)
    assert rows[0].unused == ("id", "lang")
    assert all({"id", "lang"} <= {*row.unused} for row in rows)


def test_a_question_of_no_weight_is_refused_where_the_loss_is_on_all(tmp_path: Path) -> None:
    file = write_jsonl(tmp_path / "rows.jsonl", [HARMLESS[3]])
    with pytest.raises(DataError, match=r"'weight' of turn 1 would be dropped"):
        read(file, loss_on="all")


def test_a_column_that_is_named_as_an_answer_is_read(tmp_path: Path) -> None:
    file = write_jsonl(tmp_path / "rows.jsonl", [{"system": "1+1?", "chosen": "2"}])
    (row,) = read(file, columns={"prompt": "system", "completion": "chosen"})
    assert (turns(row), row.unused) == (QA, ())


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json"])
@pytest.mark.parametrize(
    ("text", "key"),
    [
        ('{"instruction": "1+1?", "output": "2", "output": "3"}', "output"),
        ('{"messages": [{"role": "user", "role": "user", "content": "a"}]}', "role"),
    ],
)
def test_a_key_that_is_there_twice_is_refused(
    tmp_path: Path, name: str, text: str, key: str
) -> None:
    file = tmp_path / name
    file.write_text(f"[{text}]" if name.endswith("json") else text)
    with pytest.raises(DataError, match=rf"(:1|\[0\]): the key '{key}' is there twice"):
        read(file)


ODD = [
    (json.dumps(GOOD_ROWS["alpaca"]).encode("utf-16"), r"not UTF-8|broken JSON"),
    (json.dumps(GOOD_ROWS["alpaca"]).encode("utf-16-le"), r"broken JSON"),
    (b'{"instruction": "caf\xe9", "output": "b"}', r"not UTF-8: byte 0xe9"),
    (b'{"instruction": "a", "output": NaN}', r"'output' must be text, this is a float"),
    (b'{"instruction": "a", "output": 1e999}', r"'output' must be text, this is a float"),
    (b'{"instruction": "a", "input": 5, "output": "b"}', r"'input' must be text"),
    (b'{"messages": [{"role": "user", "content": [{"type": "video", "url": "a"}]}]}', r"content"),
    (b'{"messages": [{"role": "user", "content": "\\udc00"}]}', r"half a character"),
    (b'{"messages": [{"role": 3, "content": "a"}]}', r"'role' must be text"),
    (b'{"messages": {"role": "user", "content": "a"}}', r"must be a list of objects"),
    (b'{"messages": [["user", "a"]]}', r"must be a list of objects"),
]


@pytest.mark.parametrize(("line", "problem"), ODD)
def test_an_odd_row_is_refused_with_its_line(tmp_path: Path, line: bytes, problem: str) -> None:
    file = tmp_path / "rows.jsonl"
    data_format = "messages" if b"messages" in line else "alpaca"
    file.write_bytes(json.dumps(GOOD_ROWS[data_format]).encode() + b"\n" + line + b"\n")
    with pytest.raises(DataError, match=rf"rows\.jsonl:2: .*({problem})"):
        read(file, data_format)


def test_byte_order_marks_line_ends_and_control_characters_leave_texts_alone(
    tmp_path: Path,
) -> None:
    file = tmp_path / "rows.jsonl"
    row = {"instruction": "a\u2028b\x85c", "output": "\x00d\r\ne\ufeff"}
    line = json.dumps(row, ensure_ascii=False).encode()
    file.write_bytes(b"\xef\xbb\xbf" + line + b"\r\n\r\n" + line + b"\r\n")
    first, second = read(file)
    assert turns(first) == [("user", row["instruction"]), ("assistant", row["output"])]
    assert (second.messages, second.source) == (first.messages, f"{file}:3")


# ------------------------------------------------------------------------------------------ answers


def load(
    tmp_path: Path, rows: list[dict[str, Any]], data_format: str, seq_len: int = 256, **data: Any
) -> Rows:
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return load_rows(
        DataSection(path=str(file), **data),
        tiny_tokenizer(),
        seq_len=seq_len,
        seed=0,
        cache_dir=tmp_path / "cache",
        formats=(data_format,),
    )


def shown(rows: Rows) -> list[tuple[str, str, float | None]]:
    """Return of each example all of its text, what is learned of it, and its value."""
    tokenizer = tiny_tokenizer()
    return [
        (
            str(tokenizer.decode(one.input_ids)),
            str(tokenizer.decode(one.labels[one.labels != -100])),
            one.value,
        )
        for one in rows.train
    ]


def chat(*turns: str) -> str:
    """Write turns as the template does, with an empty think block before the last."""
    roles = ("user", "assistant")
    written = [f"<|im_start|>{roles[n % 2]}\n{turn}<|im_end|>" for n, turn in enumerate(turns)]
    return "\n".join(written).replace(turns[-1], f"<think>\n\n</think>\n\n{turns[-1]}")


def said(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def shared(speaker: str, value: str) -> dict[str, str]:
    return {"from": speaker, "value": value}


ASKED = [said("user", "hi"), said("assistant", "yes?"), said("user", "1+1")]
PAIR = [
    (chat("hi", "yes?", "1+1", "2"), "2<|im_end|>", 1.0),
    (chat("hi", "yes?", "1+1", "3"), "3<|im_end|>", 0.0),
]


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": ASKED, "chosen": "2", "rejected": "3"},
        {"prompt": ASKED, "chosen": [said("assistant", "2")], "rejected": "3"},
        {
            "chosen": [*ASKED, said("assistant", "2")],
            "rejected": [*ASKED, said("assistant", "3")],
        },
        {
            "prompt": "1+1",
            "chosen": [*ASKED, said("assistant", "2")],
            "rejected": [*ASKED, said("assistant", "3")],
            "messages": [*ASKED, said("assistant", "2")],
            "score_chosen": 9.0,
        },
        {
            "chosen": "\n\nHuman: hi\n\nAssistant: yes?\n\nHuman: 1+1\n\nAssistant: 2",
            "rejected": "\n\nHuman: hi\n\nAssistant: yes?\n\nHuman: 1+1\n\nAssistant: 3",
        },
        {
            "prompt": "\n\nHuman: hi\n\nAssistant: yes?\n\nHuman: 1+1\n\nAssistant:",
            "chosen": " 2",
            "rejected": " 3",
        },
        {
            "prompt": "1+1",
            "chosen": "Human: hi\n\nAssistant: yes?\n\nHuman: 1+1\n\nAssistant: 2",
            "rejected": "Human: hi\n\nAssistant: yes?\n\nHuman: 1+1\n\nAssistant: 3",
        },
        {
            "prompt": json.dumps(ASKED),
            "chosen": json.dumps([*ASKED, said("assistant", "2")]),
            "rejected": json.dumps([*ASKED, said("assistant", "3")]),
        },
        {
            "conversations": [shared("human", "hi"), shared("gpt", "yes?"), shared("human", "1+1")],
            "chosen": shared("gpt", "2"),
            "rejected": shared("gpt", "3"),
        },
        {"messages": ASKED, "chosen": said("assistant", "2"), "rejected": [said("assistant", "3")]},
        {
            "chosen": [*ASKED, said("assistant", "2")],
            "rejected": [*ASKED, said("assistant", "3")],
            "messages": [*ASKED, said("assistant", "2")],
        },
    ],
    ids=[
        "prompt",
        "answer as turns",
        "implicit",
        "as UltraFeedback's",
        "as HH's",
        "prompt as HH's",
        "prompt, and HH's",
        "JSON of turns",
        "as LLaMA-Factory's",
        "as LLaMA-Factory's, with roles",
        "implicit, with messages",
    ],
)
def test_a_pair_is_two_examples_of_one_prompt(tmp_path: Path, row: dict[str, Any]) -> None:
    assert shown(load(tmp_path, [row], "preference")) == PAIR


def test_a_pair_under_an_instruction_is_read_as_llama_factory_writes_it(tmp_path: Path) -> None:
    row = {"instruction": "Add.", "input": "1 1", "chosen": "2", "rejected": "3"}
    bare = {"instruction": "Add.", "chosen": "2", "rejected": "3"}
    named = row | {"good": "2", "bad": "3"}
    named = {key: value for key, value in named.items() if key not in ("chosen", "rejected")}
    columns = {"chosen": "good", "rejected": "bad"}
    for found in (
        load(tmp_path, [row], "preference"),
        load(tmp_path, [named], "preference", columns=columns, format="preference"),
        load(tmp_path, [row], "rated", too_long="drop"),
    ):
        assert [text for text, *_ in shown(found)] == [
            chat("Add.\n\n1 1", "2"),
            chat("Add.\n\n1 1", "3"),
        ]
        assert not any(note.startswith("Columns that are not used") for note in found.notes)
    assert shown(load(tmp_path, [bare], "preference"))[0][0] == chat("Add.", "2")


@pytest.mark.parametrize(
    "row",
    [
        {"conversations": [shared("human", "1+1"), shared("gpt", "2")]},
        {"messages": [said("user", "1+1"), said("assistant", "2")]},
        {"instruction": "1+1", "input": "", "output": "2"},
    ],
)
@pytest.mark.parametrize(("tag", "value"), [(True, 1.0), (False, 0.0), ("true", 1.0)])
def test_an_answer_with_a_kto_tag_is_read(
    tmp_path: Path, row: dict[str, Any], tag: object, value: float
) -> None:
    found = load(tmp_path, [row | {"kto_tag": tag}], "labelled")
    assert shown(found) == [(chat("1+1", "2"), "2<|im_end|>", value)]
    columns = {"label": "kto_tag"}
    again = load(tmp_path, [row | {"kto_tag": tag}], "labelled", columns=columns, format="labelled")
    assert shown(again) == shown(found)


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"conversations": [shared("human", "q")], "kto_tag": True}, "its prompt has no user turn"),
        (
            {"conversations": [shared("human", "q"), shared("gpt", "a")], "kto_tag": "maybe"},
            "neither true nor false",
        ),
        ({"kto_tag": True, "conversations": []}, "fit no format|no key"),
    ],
)
def test_a_kto_row_that_says_nothing_is_refused(
    tmp_path: Path, row: dict[str, Any], problem: str
) -> None:
    with pytest.raises(DataError, match=problem):
        load(tmp_path, [row], "labelled")


def test_pairs_whose_ratings_contradict_them_are_counted_and_named(tmp_path: Path) -> None:
    pair = {"prompt": "q", "chosen": "a", "rejected": "b"}
    ratings: list[dict[str, object]] = [
        {"score_chosen": 2.0, "score_rejected": 7.5},
        {"score_chosen": 7, "score_rejected": 2},
        {"chosen-rating": "1", "rejected-rating": "3"},
        {"chosen_rating": 3, "rejected_rating": 3},
        {"score_chosen": 1, "score_rejected": None},
        {"score_chosen": "bad", "score_rejected": "good"},
    ]
    rows = [pair | {"prompt": f"q{i}"} | rating for i, rating in enumerate(ratings)]
    file = tmp_path / "rows.jsonl"
    (note,) = [one for one in load(tmp_path, rows, "preference").notes if "ratings" in one]
    assert note == (
        f"2 of 6 rows of {file} have ratings by which the rejected answer is the better one"
        f" ({file}:1: score_chosen 2, score_rejected 7.5, {file}:3: chosen-rating 1,"
        " rejected-rating 3)"
    )
    ignored = ("score_chosen", "chosen-rating")
    again = load(tmp_path, rows, "preference", ignored_columns=ignored)
    assert not [one for one in again.notes if "ratings" in one]


def test_rankings_labels_and_samples_have_their_values(tmp_path: Path) -> None:
    ranked = {"prompt": "q", "completions": ["a", "b", "c"], "ranks": [2, 1, 3]}
    assert [one[1:] for one in shown(load(tmp_path, [ranked], "ranking"))] == [
        ("a<|im_end|>", -2.0),
        ("b<|im_end|>", -1.0),
        ("c<|im_end|>", -3.0),
    ]
    near = ranked | {"ranks": [1, 2**24, 2**24 + 1]}
    assert [one[2] for one in shown(load(tmp_path, [near], "ranking"))] == [
        -1,
        -(2**24),
        -(2**24) - 1,
    ]
    labels = [True, 0, "False", "1", "0", 1.0, 0.0, "1.0", " TRUE "]
    labelled = [{"prompt": "q", "completion": "a", "label": label} for label in labels]
    assert [one[2] for one in shown(load(tmp_path, labelled, "labelled"))] == [
        1,
        0,
        0,
        1,
        0,
        1,
        0,
        1,
        1,
    ]
    sampled = {"prompt": "q", "completions": ["a", "a"], "rewards": [0.5, -1]}
    assert [one[2] for one in shown(load(tmp_path, [sampled], "sampled"))] == [0.5, -1.0]


def test_log_probabilities_of_rows_are_those_of_their_tokens(tmp_path: Path) -> None:
    row = {
        "prompt": "q",
        "completions": ["ab", "c"],
        "rewards": [1, 0],
        "ref_logps": [-3, -4],
        "logprobs": [[-1, -2, -3], [-4, -5]],
    }
    rows = load(tmp_path, [row], "sampled")
    assert [one.reference for one in rows.train] == [-3.0, -4.0]
    for one, expected in zip(rows.train, row["logprobs"], strict=True):
        assert one.logprobs is not None
        assert one.logprobs[one.labels != -100].tolist() == expected
    short = row | {"logprobs": [[-1, -2], [-4, -5]]}
    with pytest.raises(DataError, match=r":1: it has 2 `logprobs` for an answer of 3 tokens"):
        load(tmp_path, [short], "sampled")
    above = row | {"ref_logps": [-3, 0.5]}
    with pytest.raises(DataError, match=r":1: 'ref_logps\[1\]' is 0.5, and the logarithm of a"):
        load(tmp_path, [above], "sampled")


GOOD = {"prompt": "q", "chosen": "a", "rejected": "b"}


@pytest.mark.parametrize(
    ("data_format", "row", "problem"),
    [
        ("preference", GOOD | {"rejected": "a"}, "'chosen' and 'rejected' are the same"),
        ("preference", GOOD | {"rejected": " "}, "'rejected' is empty"),
        ("preference", GOOD | {"chosen": []}, "'chosen' is empty"),
        ("preference", GOOD | {"chosen": 3}, "'chosen' must be text or a list of turns"),
        ("preference", GOOD | {"prompt": " "}, "empty prompt"),
        ("preference", GOOD | {"chosen": str([said("assistant", "a")])}, "'chosen': broken JSON"),
        (
            "labelled",
            {"prompt": "q", "completion": "Human: q\n\nAssistant: a", "label": True},
            "'completion' begins with a turn of the user",
        ),
        ("preference", {"chosen": "a", "rejected": "b"}, "it has no prompt, and 'chosen' is no"),
        (
            "preference",
            {"chosen": ASKED[:2], "rejected": ASKED[2:] + ASKED[1:2]},
            "do not begin with the same prompt",
        ),
        (
            "preference",
            {
                "prompt": "2+2",
                "chosen": [*ASKED, said("assistant", "2")],
                "rejected": [*ASKED, said("assistant", "3")],
            },
            "'prompt' is not among the turns",
        ),
        (
            "preference",
            {"prompt": ASKED, "chosen": [said("assistant", "a") | {"weight": 0}], "rejected": "b"},
            "'weight' of turn 1 would be dropped",
        ),
        ("labelled", {"prompt": "q", "completion": "a", "label": "maybe"}, 'is "maybe", neither'),
        ("labelled", {"prompt": "q", "completion": "a", "label": 2}, "'label' is 2, neither"),
        ("labelled", {"prompt": "q", "completion": "a", "label": -1}, "'label' is -1, neither"),
        ("labelled", {"prompt": "q", "completion": "a", "label": 0.5}, "'label' is 0.5, neither"),
        ("labelled", {"prompt": "q", "completion": "a", "label": None}, "is null, neither true"),
        (
            "ranking",
            {"prompt": "q", "completions": ["a", "b"], "scores": [1, 1]},
            "'scores' are all the same",
        ),
        ("ranking", {"prompt": "q", "completions": ["a", "b"]}, "neither 'scores' and 'ranks'"),
        (
            "ranking",
            {"prompt": "q", "completions": ["a", "b", "a"], "scores": [1, 2, 3]},
            r"completions\[0\] and \[2\] are the same",
        ),
        (
            "sampled",
            {"prompt": "q", "completions": ["a", "b"], "rewards": [1]},
            "'rewards' has 1 numbers for 2 answers",
        ),
        (
            "sampled",
            {"prompt": "q", "completions": ["a", "b"], "rewards": [1, float("nan")]},
            "not a finite number",
        ),
        (
            "sampled",
            {"prompt": "q", "completions": ["a", "b"], "rewards": [1, True]},
            r"'rewards\[1\]' is true, not a finite number",
        ),
    ],
)
def test_a_row_that_cannot_be_compared_is_named_by_its_line(
    tmp_path: Path, data_format: str, row: dict[str, Any], problem: str
) -> None:
    with pytest.raises(DataError, match=rf"1 of 1 rows(.|\n)*rows\.jsonl:1: .*{problem}"):
        load(tmp_path, [row], data_format, format=data_format)


def test_special_tokens_in_the_text_of_answers_are_named(tmp_path: Path) -> None:
    row = {"prompt": "q", "completion": "[1]", "label": True}
    rows = load(tmp_path, [row, row | {"completion": "a<|im_end|>"}], "labelled")
    assert len(rows.notes) == 1
    assert "1 of 2 rows" in rows.notes[0]
    assert "rows.jsonl:2: <|im_end|>" in rows.notes[0]


def test_a_missing_column_is_named_and_pairs_are_no_rows_to_repeat(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r":1 has the keys prompt, chosen, which fit no format"):
        load(tmp_path, [{"prompt": "q", "chosen": "a"}], "preference")
    with pytest.raises(
        DataError, match=r"pairs of answers are learned by `objective\.method: dpo`"
    ):
        load(tmp_path, [GOOD], "messages")


def test_what_is_too_long_or_alike_drops_the_pair_and_is_counted(tmp_path: Path) -> None:
    rows = [
        GOOD,
        {"prompt": "q" * 80, "chosen": "a", "rejected": "b"},
        {"prompt": "q", "chosen": "a" * 90 + "b", "rejected": "a" * 90 + "c"},
        {"prompt": "q", "chosen": "a", "rejected": "b" * 90},
    ]
    kept = load(tmp_path, rows, "preference", seq_len=80)
    assert [one.source[-2:] for one in kept.train] == [":1", ":1", ":4", ":4"]
    assert [one.is_truncated for one in kept.train] == [False, False, False, True]
    assert [note.partition(" (")[0] for note in kept.notes] == [
        "1 of 4 rows were cut to 80 tokens",
        "1 of 4 rows were dropped: their answers start beyond 80 tokens",
        "1 of 4 rows were dropped: within 80 tokens their answers are the same",
    ]
    dropped = load(tmp_path, rows, "preference", seq_len=80, too_long="drop")
    assert [one.source[-2:] for one in dropped.train] == [":1", ":1"]


def test_the_data_hash_covers_values_and_which_answers_belong_together(tmp_path: Path) -> None:
    first = load(tmp_path, [GOOD], "preference").data_hash
    assert load(tmp_path, [GOOD], "preference").data_hash == first
    scored = {"prompt": "q", "completions": ["a", "b"], "scores": [1, 0]}
    assert load(tmp_path, [scored], "ranking").data_hash == first
    assert load(tmp_path, [scored | {"scores": [2, 0]}], "ranking").data_hash != first
    four = {"prompt": "q", "completions": ["a", "b", "c", "d"], "rewards": [1, 0, 1, 0]}
    twice = [four | {"completions": part, "rewards": [1, 0]} for part in (["a", "b"], ["c", "d"])]
    hashes = {load(tmp_path, rows, "sampled").data_hash for rows in ([four], twice)}
    assert len(hashes) == 2


def test_held_out_pairs_are_asked_for_the_chosen_answer(tmp_path: Path) -> None:
    rows = load(tmp_path, [GOOD, GOOD | {"prompt": "p"}], "preference", eval_frac=0.5)
    assert [row.messages[-1].content for row in rows.held_out_rows] == ["a"]
    assert rows.held_out is not None
    assert [one.value for one in rows.held_out] == [1.0, 0.0]


def test_rated_pairs_have_a_margin_and_one_label_at_the_end_of_each_answer(tmp_path: Path) -> None:
    rows = load(tmp_path, [GOOD | {"margin": 0.5}, GOOD | {"prompt": "p"}], "rated")
    assert [one.value for one in rows.train] == [1.5, 0.0, 1.0, 0.0]
    assert [labels for _, labels, _ in shown(rows)] == ["<|im_end|>"] * 4
    assert all(one.labels[-1] == one.input_ids[-1] for one in rows.train)
    texts = [text for text, _, _ in shown(rows)]
    paired = load(tmp_path, [GOOD, GOOD | {"prompt": "p"}], "preference")
    assert texts == [text for text, _, _ in shown(paired)]


@pytest.mark.parametrize(
    ("margin", "problem"),
    [(-1, "'margin' is -1, and the chosen answer is the better one"), ("x", "not a number")],
)
def test_a_margin_that_is_none_is_an_error(tmp_path: Path, margin: object, problem: str) -> None:
    with pytest.raises(DataError, match=problem):
        load(tmp_path, [GOOD | {"margin": margin}], "rated")


def test_a_margin_can_be_ignored(tmp_path: Path) -> None:
    row = GOOD | {"margin": -1}
    rows = load(tmp_path, [row], "rated", ignored_columns=("margin",))
    assert [one.value for one in rows.train] == [1.0, 0.0]


# ------------------------------------------------------------------------------------------- tagged


WORDS = ("streams", "of", "New", "York's", "layers", "inside", "all")
LABELS = (1, -100, 2, 3, 0, 0, -100)


def byte_level() -> PreTrainedTokenizerFast:
    """Return a byte-level BPE as GPT-2's, which puts a space before a text."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    backend.train_from_iterator(["streams of layers in New York all"] * 9, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|end|>")


def encoder(tokenizer: Any, *, seq_len: int = 64) -> Encoder:
    return Encoder(
        tokenizer=tokenizer,
        seq_len=seq_len,
        loss_on="last",
        too_long="drop",
        empty_think="prompt",
    )


def tagged(words: tuple[str, ...] = WORDS, labels: tuple[int, ...] = LABELS) -> Tagged:
    return Tagged(words=words, labels=labels, source="here:1")


def test_the_first_token_of_a_word_has_its_class_as_in_transformers() -> None:
    tokenizer = byte_level()
    fate, (one,) = tagged().encode(encoder(tokenizer))
    split = tokenizer(list(WORDS), is_split_into_words=True)
    expected, before = [-100], None
    for word in split.word_ids():
        expected.append(-100 if word is None or word == before else LABELS[word])
        before = word
    end = max(place for place, label in enumerate(expected) if label != -100) + 1
    assert len(split.word_ids()) > len(WORDS)  # some words are several tokens
    assert fate is Fate.WHOLE
    assert one.input_ids.tolist() == [tokenizer.eos_token_id, *split["input_ids"]][:end]
    assert one.labels.tolist() == expected[:end]


def test_the_class_is_at_the_first_letter_where_a_space_is_a_token_of_its_own() -> None:
    tokenizer = byte_level()
    _, (one,) = tagged(("all", "\u00fcber"), (0, 1)).encode(encoder(tokenizer))
    tokens = tokenizer.convert_ids_to_tokens(one.input_ids.tolist())
    assert one.labels[-1] == 1
    assert tokens[-2:] == ["\u0120", "\u00c3"]  # a space, and the first byte of the letter


def test_a_space_may_be_part_of_the_first_token() -> None:
    tokenizer = tiny_tokenizer(merges=((" ", "b"),))
    _, (one,) = tagged(("a", "b", "cd"), (0, 1, 2)).encode(encoder(tokenizer))
    assert tokenizer.convert_ids_to_tokens(one.input_ids.tolist()[1:]) == ["a", " b", " ", "c"]
    assert one.labels.tolist() == [-100, 0, 1, -100, 2]


def test_words_that_begin_in_one_token_are_refused() -> None:
    tokenizer = tiny_tokenizer(merges=(("a", " "), ("a ", "b")))
    with pytest.raises(RowError, match=r"'b' begins with no token of its own"):
        tagged(("a", "b"), (0, 1)).encode(encoder(tokenizer))


def test_a_row_that_is_too_long_is_dropped() -> None:
    row = tagged(("abc", "de"), (0, 1))
    assert row.encode(encoder(tiny_tokenizer(), seq_len=6))[0] is Fate.WHOLE  # of 7 tokens, 6
    assert row.encode(encoder(tiny_tokenizer(), seq_len=5)) == (Fate.TOO_LONG, [])


def test_what_comes_after_the_last_class_is_left_out() -> None:
    _, (one,) = tagged(("ab", "cd"), (1, -100)).encode(encoder(tiny_tokenizer()))
    assert one.labels.tolist() == [-100, 1]
    assert torch.tensor(one.input_ids).shape == (2,)


# ------------------------------------------------------------------------------------------ teacher


NAMES = ("top_ids", "top_logprobs")
LOW, HIGH = math.log(0.2), math.log(0.7)


def load_teacher(tmp_path: Path, rows: list[dict[str, Any]], **more: Any) -> Rows:
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    seq_len = more.pop("seq_len", 64)
    return load_rows(
        DataSection(path=str(file), **more),
        tiny_tokenizer(),
        seq_len=seq_len,
        seed=0,
        cache_dir=tmp_path / "cache",
        formats=("distilled",),
    )


def row(answer: str, num: int, *, prompt: str = "q") -> dict[str, Any]:
    """Return a row with so many lists: of the token's number, and one list has another token."""
    ids = [[n, n + 1] for n in range(num - 1)] + [[7]]
    logprobs = [[LOW, HIGH]] * (num - 1) + [[-0.1]]
    return {"prompt": prompt, "completion": answer, "top_ids": ids, "top_logprobs": logprobs}


def num_labels(tmp_path: Path, answer: str) -> int:
    """Count the tokens of an answer, its end included, by an error that names it."""
    with pytest.raises(DataError, match=r"for an answer of (\d+) tokens, its end included") as info:
        load_teacher(tmp_path, [row(answer, 99)])
    return int(str(info.value).split("for an answer of ")[1].split()[0])


def test_lists_are_put_at_the_tokens_of_the_answer_the_likeliest_first(tmp_path: Path) -> None:
    num = num_labels(tmp_path, "abcd")
    rows = load_teacher(
        tmp_path, [row("abcd", num), row("ab", num_labels(tmp_path, "ab"), prompt="other")]
    )
    for example in (rows.train[index] for index in range(2)):
        assert example.top is not None
        is_label = example.labels != IGNORE_INDEX
        assert (example.top.counts > 0).tolist() == is_label.tolist()
        ids, logprobs = example.top.table(is_label, 3)
        num = int(is_label.sum())
        assert ids.tolist() == [[n + 1, n, -1] for n in range(num - 1)] + [[7, -1, -1]]
        assert logprobs[0].tolist() == [np.float32(HIGH), np.float32(LOW), 0.0]
        assert example.top.table(is_label, 1)[0][:, 0].tolist() == [*range(1, num), 7]


def test_an_answer_that_is_cut_keeps_the_lists_of_what_is_left(tmp_path: Path) -> None:
    num = num_labels(tmp_path, "abcdefgh")
    whole = load_teacher(tmp_path, [row("abcdefgh", num)]).train[0]
    seq_len = len(whole.input_ids) - 3
    cut = load_teacher(tmp_path, [row("abcdefgh", num)], seq_len=seq_len).train[0]
    assert cut.is_truncated
    assert whole.top is not None
    assert cut.top is not None
    assert cut.top.counts.tolist() == whole.top.counts[:seq_len].tolist()
    assert cut.top.ids.tolist() == whole.top.ids[: len(cut.top.ids)].tolist()
    assert len(cut.top.ids) == cut.top.counts.sum() < len(whole.top.ids)


def test_a_step_has_a_table_of_its_label_tokens_in_their_order(tmp_path: Path) -> None:
    texts = ["abcd", "a", "abc"]
    rows = load_teacher(tmp_path, [row(t, num_labels(tmp_path, t), prompt=t) for t in texts]).train
    comparison = Comparison.of(rows, is_mismatched=False, seq_len=64)
    assert comparison is not None
    assert comparison.num_top == 2
    ids_NK, logps_NK = comparison._teacher_of([rows[2], rows[0]])
    assert ids_NK is not None
    assert logps_NK is not None
    sizes = [rows[2].num_loss_tokens, rows[0].num_loss_tokens]
    assert ids_NK.shape == logps_NK.shape == (sum(sizes), 2)
    expected = [pair for num in sizes for pair in [*([n + 1, n] for n in range(num - 1)), [7, -1]]]
    assert ids_NK.tolist() == expected
    assert ids_NK.dtype == torch.int64


def test_the_data_hash_and_duplicates_cover_what_the_teacher_says(tmp_path: Path) -> None:
    one = row("ab", num_labels(tmp_path, "ab"))
    other = {**one, "top_logprobs": [[x - 0.01 for x in xs] for xs in one["top_logprobs"]]}
    assert load_teacher(tmp_path, [one]).data_hash != load_teacher(tmp_path, [other]).data_hash
    kept = load_teacher(tmp_path, [one, other, one], drop_duplicates=True).train
    assert len(kept) == 2
    assert kept[1].top is not None
    assert kept[1].top.logprobs[0] == np.float32(HIGH - 0.01)


@pytest.mark.parametrize(
    ("ids", "logprobs", "problem"),
    [
        ([[1]], [[-1.0], [-1.0]], r"'top_ids' has 1 lists, 'top_logprobs' 2"),
        ([[1], [2, 3]], [[-1.0], [-1.0]], r"top_ids\[1\] has 2 tokens, top_logprobs\[1\] 1 "),
        ([[1], []], [[-1.0], []], r"top_ids\[1\] has 0 tokens, top_logprobs\[1\] 0 numbers"),
        ([[1], [2, 5, 2]], [[-1.0], [-2.0] * 3], r"top_ids\[1\] has a token twice"),
        ([[1], [-2]], [[-1.0], [-1.0]], r"top_ids\[1\] has a number that is no token"),
        ([[1, 2]], [[0.3, 0.4]], r"adds up to a probability of 2\.\d+: it needs natural log"),
        ([[1]], [[float("nan")]], r"top_logprobs\[0\] has a number that is not finite"),
        ([[1.5]], [[-1.0]], r"'top_ids' must be lists of tokens"),
        ([["a"]], [[-1.0]], r"'top_ids' must be lists of tokens"),
        ([[1]], [[None]], r"'top_logprobs' must be lists of numbers"),
        ([1], [[-1.0]], r"top_ids\[0\] must be a list, this is int"),
    ],
)
def test_lists_that_are_no_distributions_are_named(
    ids: list[Any], logprobs: list[Any], problem: str
) -> None:
    with pytest.raises(RowError, match=problem):
        TopTokens.read(ids, logprobs, NAMES)


def test_a_teacher_of_another_vocabulary_is_refused(tmp_path: Path) -> None:
    rows = load_teacher(tmp_path, [row("ab", num_labels(tmp_path, "ab"))])
    require_known_tokens(rows, 8)
    with pytest.raises(DataError, match=r"has the token 7, and the model has 7, from 0"):
        require_known_tokens(rows, 7)


def test_the_guide_makes_rows_whose_lists_fit_their_answers(tmp_path: Path) -> None:
    guide = (Path(__file__).parents[4] / "docs" / "guides" / "distillation.md").read_text()
    code = guide.split("```python\n")[1].split("```")[0]
    tokenizer, num = tiny_tokenizer(), []
    names: dict[str, Any] = {"torch": torch}
    exec(code, names)  # what a reader would paste

    class Uniform(torch.nn.Module):
        device = torch.device("cpu")

        def forward(self, ids: torch.Tensor) -> Any:
            num.append(ids.shape[1])
            logits = torch.nn.functional.one_hot(ids.roll(-1), len(tokenizer)) * 9.0
            return type("Output", (), {"logits": logits})

    plain = [{"prompt": "q", "completion": text} for text in ("a", "abcd", "two words")]
    made = [names["taught"](one, Uniform(), tokenizer, k=3) for one in plain]
    rows = load_teacher(tmp_path, made).train
    assert len(rows) == len(num) == 3
    for example in (rows[index] for index in range(3)):
        assert example.top is not None
        is_label = example.labels != IGNORE_INDEX
        likeliest = example.top.table(is_label, 1)[0][:, 0]
        assert likeliest.tolist() == example.input_ids[is_label].tolist()
