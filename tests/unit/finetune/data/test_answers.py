"""Rows that compare answers are read whole, from each form that they are published in, or named."""

import json
from pathlib import Path
from typing import Any

import pytest

from finetune.data.dataset import Rows, load_rows
from finetune.errors import DataError
from finetune.recipe.sections import DataSection
from tests.doubles import tiny_tokenizer


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
