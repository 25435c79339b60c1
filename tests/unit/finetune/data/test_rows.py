import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import datasets
import pytest

from finetune.data.rows import Conversation, LossOn
from finetune.data.tokenize import learned_turns
from finetune.data.turns import Message
from finetune.errors import DataError
from tests.conversations import read_conversations


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
    assert learned_turns(long, "assistant") == {4}
    assert learned_turns(called, "assistant") == {1, 3}
    assert learned_turns(called, "last") == {3}
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

    def load(name: str, config: str | None, *, split: str, data_files: object) -> object:
        asked.append((name, config, split, data_files))
        return [{"question": "1 + 1", "answer": "2"}]

    monkeypatch.setattr(datasets, "load_dataset", load)
    for path in ("openai/gsm8k", "openai/gsm8k#main", "openai/gsm8k#main:test"):
        rows = read(path, columns={"prompt": "question", "completion": "answer"})
        assert [row.source for row in rows] == [f"{path}[0]"]
    assert asked == [
        ("openai/gsm8k", None, "train", None),
        ("openai/gsm8k", "main", "train", None),
        ("openai/gsm8k", "main", "test", None),
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
    ("images", GOOD_ROWS["sharegpt"] | {"images": ["a.png"]}),
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
    (b'{"messages": [{"role": "user", "content": [{"type": "image", "url": "a"}]}]}', r"content"),
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
