import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import cast

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers.normalizers import Prepend
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerBase

from finetune.data.batches import BatchOrder, StepLoader, collate, plan_batches
from finetune.data.dataset import ExampleSet, encode_all, load_examples, split_held_out
from finetune.data.rows import Conversation, LossOn, Message, read_conversations
from finetune.data.tokenize import IGNORE_INDEX, Example, encode, prompt_ids, render_prompt
from finetune.errors import DataError
from tests.doubles import CHAT_TEMPLATE, thinking_tokenizer, tiny_tokenizer
from tests.tiers import mostly_slow

ROOT = Path(__file__).parents[4]
CHATS = ROOT / "tests" / "data" / "chats.jsonl"
NO_THINKING = "<|im_start|>assistant\n<think>\n\n</think>\n\n"


def talk(*contents: str, system: str | None = None, source: str = "rows.jsonl:1") -> Conversation:
    messages = [Message(role="system", content=system)] if system else []
    for index, content in enumerate(contents):
        messages.append(Message(role=("user", "assistant")[index % 2], content=content))
    return Conversation(messages=tuple(messages), source=source)


def encoded(
    row: Conversation,
    tokenizer: PreTrainedTokenizerBase,
    *,
    seq_len: int = 100_000,
    loss_on: LossOn = "assistant",
) -> Example:
    return encode(row, tokenizer, seq_len=seq_len, loss_on=loss_on)


def learned(example: Example, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Return the text of each stretch of tokens with a loss."""
    is_learned = example.labels != IGNORE_INDEX
    assert (example.labels[is_learned] == example.input_ids[is_learned]).all()
    edges = np.flatnonzero(np.diff([0, *is_learned.astype(int), 0]))
    pairs = zip(edges[::2], edges[1::2], strict=True)
    return [str(tokenizer.decode(example.input_ids[a:b].tolist())) for a, b in pairs]


def masked_prefix(example: Example) -> list[int]:
    """Return the tokens before the last stretch of tokens with a loss."""
    is_masked = np.flatnonzero(example.labels == IGNORE_INDEX)
    ids: list[int] = example.input_ids[: is_masked[-1] + 1].tolist()
    return ids


@pytest.fixture(scope="module")
def thinking() -> PreTrainedTokenizerBase:
    return thinking_tokenizer([CHATS.read_text()])


@pytest.fixture(params=["tiny", "thinking"])
def tokenizer(request: pytest.FixtureRequest) -> PreTrainedTokenizerBase:
    if request.param == "tiny":
        return tiny_tokenizer()
    loaded: PreTrainedTokenizerBase = request.getfixturevalue("thinking")
    return loaded


# --------------------------------------------------------------------------------------------------
# What is learned
# --------------------------------------------------------------------------------------------------


def test_the_loss_covers_the_answer_and_its_end_of_turn(tokenizer: PreTrainedTokenizerBase) -> None:
    example = encoded(talk("What is 1+1?", "It is 2."), tokenizer)
    assert learned(example, tokenizer) == ["It is 2.<|im_end|>"]
    assert example.input_ids[-1] == tokenizer.convert_tokens_to_ids("<|im_end|>")


def test_every_answer_of_a_conversation_is_learned(tokenizer: PreTrainedTokenizerBase) -> None:
    row = talk("a b", "first answer", "c", "second", "d", "third\n\nanswer", system="Be brief.")
    answers = ["first answer", "second", "third\n\nanswer"]
    assert learned(encoded(row, tokenizer), tokenizer) == [f"{a}<|im_end|>" for a in answers]


def test_the_tokens_before_the_answer_are_those_to_generate_from(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    row = talk("one", "1", "two", "2", system="Count.")
    turns = [{"role": m.role, "content": m.content} for m in row.messages[:-1]]
    text = tokenizer.apply_chat_template(
        turns, add_generation_prompt=True, enable_thinking=False, tokenize=False
    )
    assert isinstance(text, str)
    assert text.endswith(NO_THINKING)
    prompt, reference = render_prompt(row, tokenizer)
    assert list(prompt) == tokenizer(text, add_special_tokens=False)["input_ids"]
    assert masked_prefix(encoded(row, tokenizer)) == list(prompt)
    assert prompt_ids(row.messages[:-1], tokenizer, source=row.source) == prompt
    assert reference == "2"


def test_only_the_last_answer_has_an_empty_think_block(tokenizer: PreTrainedTokenizerBase) -> None:
    text = tokenizer.decode(encoded(talk("one", "1", "two", "2"), tokenizer).input_ids.tolist())
    assert str(text).count("<think>") == 1
    assert f"{NO_THINKING}2" in text


def test_an_answer_with_reasoning_learns_the_reasoning_too(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    answer = "<think>\nAdd them.\n</think>\n\nIt is 2."
    example = encoded(talk("1+1?", answer), tokenizer)
    assert learned(example, tokenizer) == [f"{answer}<|im_end|>"]


def test_turns_after_the_last_answer_are_left_out(tokenizer: PreTrainedTokenizerBase) -> None:
    with_more, without = talk("one", "1", "thanks"), talk("one", "1")
    assert (
        encoded(with_more, tokenizer).labels.tolist() == encoded(without, tokenizer).labels.tolist()
    )


def test_an_answer_that_names_the_end_of_turn_is_learned_to_its_end(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    answer = "ChatML ends with <|im_end|> each time."
    assert learned(encoded(talk("How?", answer), tokenizer), tokenizer) == [f"{answer}<|im_end|>"]


def test_an_answer_that_stands_in_its_question_is_found_behind_it(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    row = talk("Say yes", "yes", "Say yes", "yes")
    assert learned(encoded(row, tokenizer), tokenizer) == ["yes<|im_end|>"] * 2


def test_a_token_across_the_start_of_the_last_answer_is_split() -> None:
    tokenizer = tiny_tokenizer(merges=(("\n", "A"),))
    assert tokenizer.tokenize("\nA") == ["\nA"]
    row = talk("q", "A")
    example = encoded(row, tokenizer)
    assert learned(example, tokenizer) == ["A<|im_end|>"]
    assert masked_prefix(example) == list(render_prompt(row, tokenizer)[0])


def test_a_tokenizer_that_begins_every_text_with_a_space_cannot_split_a_token() -> None:
    tokenizer = tiny_tokenizer(merges=(("\n", "A"),))
    tokenizer.backend_tokenizer.normalizer = Prepend(" ")
    with pytest.raises(DataError, match=r"cannot split the text \(rows\.jsonl:1\)"):
        encoded(talk("q", "A"), tokenizer)


def test_a_token_across_the_start_of_an_earlier_answer_has_no_loss() -> None:
    tokenizer = tiny_tokenizer(merges=(("\n", "A"),))
    row = talk("q", "A", "q", "A")
    example = encoded(row, tokenizer)
    assert learned(example, tokenizer) == ["<|im_end|>", "A<|im_end|>"]
    assert masked_prefix(example) == list(render_prompt(row, tokenizer)[0])


@pytest.mark.parametrize(
    "answer", [" \nspaces first", "\n\nnewlines first", "1", "  two", "\u00e9"]
)
def test_odd_beginnings_of_an_answer_leave_the_prompt_alone(
    thinking: PreTrainedTokenizerBase, answer: str
) -> None:
    for row in (talk("q", answer), talk("q", answer, "q", answer)):
        example = encoded(row, thinking)
        *earlier, last = learned(example, thinking)
        assert last == answer.lstrip("\n") + "<|im_end|>"
        assert [text.lstrip() for text in earlier] == [answer.lstrip() + "<|im_end|>"] * len(
            earlier
        )
        assert len(earlier) == len(row.messages) // 2 - 1
        assert masked_prefix(example) == list(render_prompt(row, thinking)[0])


def test_a_tokenizer_without_offsets_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = tiny_tokenizer()
    monkeypatch.setattr(type(tokenizer), "is_fast", False)
    with pytest.raises(DataError, match=r"does not tell where(.|\n)*tokenizer\.json"):
        encoded(talk("q", "a"), tokenizer)


def test_the_first_token_of_a_row_is_predicted_by_nothing() -> None:
    ids = np.array([5, 6, 7], dtype=np.int32)
    labels = np.array([5, IGNORE_INDEX, 7], dtype=np.int32)
    example = Example(input_ids=ids, labels=labels, source="x", is_truncated=False)
    assert example.num_loss_tokens == 1


def test_loss_on_all_learns_every_token() -> None:
    tokenizer = tiny_tokenizer()
    example = encoded(talk("one", "1"), tokenizer, loss_on="all")
    assert example.labels.tolist() == example.input_ids.tolist()


def test_without_a_template_prompt_and_answer_are_joined_and_ended() -> None:
    tokenizer = tiny_tokenizer(chat_template=None)
    row = talk("1+1=", "2", system="Add.")
    example = encoded(row, tokenizer)
    assert tokenizer.decode(example.input_ids.tolist()) == "Add.\n\n1+1=2<|endoftext|>"
    assert learned(example, tokenizer) == ["2<|endoftext|>"]
    assert masked_prefix(example) == list(render_prompt(row, tokenizer)[0])
    assert prompt_ids(row.messages[:-1], tokenizer, source="x") == render_prompt(row, tokenizer)[0]


def test_without_a_template_a_row_begins_as_the_tokenizer_begins_a_text() -> None:
    tokenizer = tiny_tokenizer(chat_template=None)
    begin = ("<|im_start|>", tokenizer.convert_tokens_to_ids("<|im_start|>"))
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[begin]
    )
    tokenizer.bos_token = "<|im_start|>"
    row = talk("1+1=", "2")
    example = encoded(row, tokenizer)
    assert tokenizer.decode(example.input_ids.tolist()) == "<|im_start|>1+1=2<|endoftext|>"
    assert masked_prefix(example) == tokenizer("1+1=")["input_ids"]


def test_without_a_template_a_longer_chat_is_refused() -> None:
    row = talk("one", "1", "two", "2", source="rows.jsonl:7")
    with pytest.raises(DataError, match=r"rows.jsonl:7 has 3 turns(.|\n)*hint: .*model.tokenizer"):
        encoded(row, tiny_tokenizer(chat_template=None))


BAD_TEMPLATES = [
    (CHAT_TEMPLATE.replace("</think>\\n\\n", "</think>\\n", 1), r"turn 2 unlike .*'1<\|im_end\|>"),
    (CHAT_TEMPLATE.replace("turn.content +", "turn.content|upper +"), r"not show the answer 'one'"),
    (
        CHAT_TEMPLATE.replace('+ "<|im_end|>\\n"', '+ "\\n"'),
        r"does not end an answer with a special",
    ),
    ("{{ raise_exception('no such role') }}", r"cannot render the row: no such role"),
]


@pytest.mark.parametrize(("template", "problem"), BAD_TEMPLATES)
def test_a_template_that_hides_what_is_learned_is_refused(template: str, problem: str) -> None:
    answer = "1" if "unlike" in problem else "one"
    with pytest.raises(DataError, match=rf"template .*{problem}.*\(rows\.jsonl:9\)"):
        encoded(talk("a", answer, source="rows.jsonl:9"), tiny_tokenizer(chat_template=template))


def test_a_long_row_is_cut_at_the_right() -> None:
    tokenizer = tiny_tokenizer()
    whole = encoded(talk("one", "1234567890"), tokenizer)
    cut = encoded(talk("one", "1234567890"), tokenizer, seq_len=len(whole.input_ids) - 5)
    assert not whole.is_truncated
    assert cut.is_truncated
    assert cut.input_ids.tolist() == whole.input_ids[:-5].tolist()
    assert learned(cut, tokenizer) == ["123456"]


# --------------------------------------------------------------------------------------------------
# Rows of files
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("file", [CHATS, ROOT / "recipes" / "quickstart" / "train.jsonl"])
def test_rows_of_files_learn_their_answers_from_the_prompt_to_generate_from(
    file: Path, thinking: PreTrainedTokenizerBase
) -> None:
    rows = read_conversations(
        path=str(file),
        data_format="auto",
        prompt_column=None,
        completion_column=None,
        messages_column=None,
        system=None,
    )
    assert len(rows) >= 12
    for row in rows[:: 1 + len(rows) // 50]:
        example = encoded(row, thinking)
        prompt, reference = render_prompt(row, thinking)
        assert learned(example, thinking)[-1] == reference.lstrip("\n") + "<|im_end|>"
        assert example.input_ids[: len(prompt)].tolist() == list(prompt)
        if "<think>" not in reference:
            assert str(thinking.decode(list(prompt))).endswith(NO_THINKING)
        num_earlier = len(learned(example, thinking)) - 1
        assert num_earlier == len(row.messages) // 2 - 1
        if not num_earlier:
            assert (example.labels[: len(prompt)] == IGNORE_INDEX).all()


# --------------------------------------------------------------------------------------------------
# A whole data set
# --------------------------------------------------------------------------------------------------


def count_rows(num_rows: int) -> list[Conversation]:
    return [
        talk(f"say {n}", str(n) * (1 + n % 7), source=f"rows.jsonl:{n + 1}")
        for n in range(num_rows)
    ]


def load(rows: list[Conversation], cache_dir: Path, *, seq_len: int = 512) -> ExampleSet:
    return load_examples(
        rows,
        tiny_tokenizer(),
        seq_len=seq_len,
        loss_on="assistant",
        num_workers=0,
        cache_dir=cache_dir,
    )


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
    examples = load(rows, tmp_path)
    assert len(examples) == 5
    for row, example in zip(rows, examples, strict=True):
        alone = encoded(row, tiny_tokenizer())
        assert example.input_ids.tolist() == alone.input_ids.tolist()
        assert example.labels.tolist() == alone.labels.tolist()
        assert example.source == row.source
    assert examples.lengths == tuple(len(example.input_ids) for example in examples)
    assert (examples.num_truncated, examples.num_dropped, examples.notes) == (0, 0, ())


def test_cut_and_dropped_rows_are_counted_and_named(tmp_path: Path) -> None:
    rows = [talk("q", "a"), talk("q", "a" * 60, source="x:2"), talk("q" * 90, "a", source="x:3")]
    examples = load(rows, tmp_path, seq_len=80)
    assert (len(examples), examples.num_truncated, examples.num_dropped) == (2, 1, 1)
    assert examples.dropped == ("x:3",)
    assert examples.notes == (
        "1 of 3 rows were cut to 80 tokens",
        "1 of 3 rows were dropped: their answers start beyond 80 tokens (x:3)",
    )


def test_a_set_with_nothing_left_to_learn_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"none of the 3 rows .* 8 tokens(.|\n)*`train\.seq_len`"):
        load(count_rows(3), tmp_path, seq_len=8)


def test_the_second_load_comes_from_the_cache_and_is_the_same(tmp_path: Path) -> None:
    rows = [*count_rows(5), talk("q" * 90, "a", source="long")]
    first, second = (load(rows, tmp_path, seq_len=80) for _ in range(2))
    assert (first.is_from_cache, second.is_from_cache) == (False, True)
    assert same(first, second)
    assert first.notes == second.notes
    assert [path.suffix for path in tmp_path.iterdir()] == [".npz"]


def test_other_rows_settings_or_tokenizers_do_not_share_a_cache(tmp_path: Path) -> None:
    load(count_rows(5), tmp_path)
    assert not load(count_rows(6), tmp_path).is_from_cache
    assert not load(count_rows(5), tmp_path, seq_len=511).is_from_cache
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
    assert load(count_rows(5), tmp_path).is_from_cache


@pytest.mark.parametrize("damage", ["cut", "flip", "empty"])
def test_a_torn_cache_is_rebuilt_with_a_note(tmp_path: Path, damage: str) -> None:
    rows = count_rows(5)
    first = load(rows, tmp_path)
    (file,) = tmp_path.iterdir()
    content = bytearray(file.read_bytes())
    if damage == "flip":
        at = content.index(np.asarray(first.input_ids[:8]).tobytes())
        content[at] ^= 0xFF
    file.write_bytes({"cut": bytes(content[:-40]), "flip": bytes(content), "empty": b""}[damage])
    second = load(rows, tmp_path)
    assert not second.is_from_cache
    assert same(first, second)
    assert len(second.notes) == 1
    assert f"the token cache {file} was torn" in second.notes[0]
    assert load(rows, tmp_path).is_from_cache


def test_a_cache_that_cannot_be_written_is_a_note(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    examples = load(count_rows(2), tmp_path / "file" / "cache")
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
        others.append(load(count_rows(2), tmp_path))

    monkeypatch.setattr(os, "fsync", another_run_meanwhile)
    ours = load(count_rows(2), tmp_path)
    assert (ours.notes, others[0].notes) == ((), ())
    assert same(ours, load(count_rows(2), tmp_path))
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
# The order of the rows
# --------------------------------------------------------------------------------------------------

SIZES = {
    "lengths": st.lists(st.integers(1, 50), min_size=1, max_size=30),
    "micro_batch_size": st.integers(1, 4),
    "num_micro_batches": st.integers(1, 4),
    "seed": st.integers(0, 9),
}


def planned(
    lengths: list[int], micro_batch_size: int, num_micro_batches: int, seed: int
) -> BatchOrder:
    return plan_batches(
        lengths,
        micro_batch_size=micro_batch_size,
        num_micro_batches=num_micro_batches,
        num_steps=40,
        seed=seed,
    )


@settings(max_examples=60, deadline=None)
@given(**SIZES)
def test_each_epoch_visits_each_row_once(
    lengths: list[int], micro_batch_size: int, num_micro_batches: int, seed: int
) -> None:
    order = planned(lengths, micro_batch_size, num_micro_batches, seed)
    visits: Counter[int] = Counter()
    for step in range(order.num_steps):
        batches = order.step(step)
        assert [len(batch) for batch in batches] == [micro_batch_size] * num_micro_batches
        visits.update(row for batch in batches for row in batch)
        epochs, rest = divmod((step + 1) * order.rows_per_step, len(lengths))
        counts = [visits[row] for row in range(len(lengths))]
        assert min(counts) >= epochs
        assert max(counts) <= epochs + (rest > 0)


@settings(max_examples=60, deadline=None)
@given(**SIZES)
def test_no_step_is_larger_than_the_longest_step(
    lengths: list[int], micro_batch_size: int, num_micro_batches: int, seed: int
) -> None:
    order = planned(lengths, micro_batch_size, num_micro_batches, seed)

    def padded(batches: tuple[tuple[int, ...], ...]) -> list[int]:
        return [len(batch) * max(lengths[row] for row in batch) for batch in batches]

    largest = padded(order.longest_step())
    assert largest[0] == max(largest) == micro_batch_size * max(lengths)
    for step in range(order.num_steps):
        sizes = padded(order.step(step))
        assert max(sizes) <= largest[0]
        if len(lengths) >= order.rows_per_step and order.rows_per_step * (step + 1) <= len(lengths):
            assert sum(sizes) <= sum(largest)


def test_a_step_is_known_without_the_ones_before_it() -> None:
    first, second = (planned([3, 1, 4, 1, 5, 9, 2], 2, 3, 7) for _ in range(2))
    in_turn = [first.step(step) for step in range(40)]
    assert [second.step(step) for step in reversed(range(40))] == in_turn[::-1]
    assert in_turn != [planned([3, 1, 4, 1, 5, 9, 2], 2, 3, 8).step(step) for step in range(40)]


def test_the_order_is_fixed_for_ever() -> None:
    order = planned([1] * 6, 2, 2, 0)
    assert [order.step(step) for step in range(3)] == [
        ((5, 0), (3, 2)),
        ((1, 4), (1, 0)),
        ((3, 4), (5, 2)),
    ]


def test_rows_of_like_length_share_a_micro_batch() -> None:
    order = planned([10, 1, 9, 2, 11, 3], 3, 2, 0)
    long, short = order.step(0)
    assert {order.lengths[row] for row in long} == {9, 10, 11}
    assert {order.lengths[row] for row in short} == {1, 2, 3}


# --------------------------------------------------------------------------------------------------
# Batches
# --------------------------------------------------------------------------------------------------


def row_of(*ids: int) -> Example:
    tokens = np.array(ids, dtype=np.int32)
    return Example(input_ids=tokens, labels=tokens, source="x", is_truncated=False)


def test_rows_are_padded_at_the_right_to_a_multiple() -> None:
    batch = collate([row_of(5, 6, 7), row_of(8)], pad_token_id=9, pad_to_multiple_of=4)
    assert batch["input_ids"].tolist() == [[5, 6, 7, 9], [8, 9, 9, 9]]
    assert batch["labels"].tolist() == [[5, 6, 7, -100], [8, -100, -100, -100]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 0], [1, 0, 0, 0]]
    assert {tensor.dtype for tensor in batch.values()} == {torch.int64}


def test_a_pad_token_within_a_row_is_attended_to() -> None:
    batch = collate([row_of(9, 9), row_of(1, 2)], pad_token_id=9, pad_to_multiple_of=2)
    assert batch["attention_mask"].tolist() == [[1, 1], [1, 1]]
    assert batch["labels"].tolist() == [[9, 9], [1, 2]]


@pytest.fixture(scope="module")
def examples(tmp_path_factory: pytest.TempPathFactory) -> ExampleSet:
    return load(count_rows(23), tmp_path_factory.mktemp("cache"))


def loader(
    examples: ExampleSet,
    *,
    micro_batch_ids: tuple[int, ...] = (0, 1, 2),
    start_step: int = 0,
    num_workers: int = 0,
    num_steps: int = 6,
) -> StepLoader:
    order = plan_batches(
        examples.lengths, micro_batch_size=2, num_micro_batches=3, num_steps=num_steps, seed=1
    )
    return StepLoader(
        examples,
        order,
        micro_batch_ids=micro_batch_ids,
        start_step=start_step,
        pad_token_id=0,
        num_workers=num_workers,
    )


def batches_of(examples: ExampleSet, *, start_step: int = 0, num_workers: int = 0) -> list[object]:
    with loader(examples, start_step=start_step, num_workers=num_workers) as steps:
        return [
            (batch.step, [{k: v.tolist() for k, v in b.items()} for b in batch.share.micro_batches])
            for batch in steps
        ]


def test_the_loader_gives_the_collated_rows_of_each_step(examples: ExampleSet) -> None:
    order = plan_batches(
        examples.lengths, micro_batch_size=2, num_micro_batches=3, num_steps=6, seed=1
    )
    with loader(examples) as steps:
        for batch in steps:
            rows = order.step(batch.step)
            for ours, indices in zip(batch.share.micro_batches, rows, strict=True):
                theirs = collate([examples[row] for row in indices], pad_token_id=0)
                assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
            assert batch.wait_s >= 0
    assert batch.step == 5


def test_the_loaders_of_two_ranks_have_the_step_between_them(examples: ExampleSet) -> None:
    with (
        loader(examples) as whole,
        loader(examples, micro_batch_ids=(1, 2)) as first,
        loader(examples, micro_batch_ids=(0,)) as second,
    ):
        for step, one, two in zip(whole, first, second, strict=True):
            parts = {
                i: batch
                for share in (one.share, two.share)
                for i, batch in zip(share.micro_batch_ids, share.micro_batches, strict=True)
            }
            for i, expected in zip(
                step.share.micro_batch_ids, step.share.micro_batches, strict=True
            ):
                assert all(torch.equal(parts[i][name], expected[name]) for name in expected)
            batches = step.share.micro_batches
            for share in (step.share, one.share, two.share):  # all know of the whole step
                assert share.num_tokens == sum(int(b["attention_mask"].sum()) for b in batches)
                assert share.num_label_tokens == sum(
                    int((b["labels"][:, 1:] != -100).sum()) for b in batches
                )


def test_a_resumed_loader_goes_on_with_the_same_batches(examples: ExampleSet) -> None:
    assert batches_of(examples, start_step=4) == batches_of(examples)[4:]


def test_workers_give_the_same_batches_and_are_gone_afterwards(
    examples: ExampleSet, worker_pids: Callable[[], list[int]]
) -> None:
    assert batches_of(examples, num_workers=2) == batches_of(examples)
    assert not worker_pids()


def test_workers_make_no_sockets_in_the_folder_for_temporary_files(
    examples: ExampleSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A Unix socket's path has at most 107 bytes; where it is longer, a run waited forever."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with loader(examples, num_workers=1) as steps:
        stream = iter(steps)
        next(stream)
        assert not list(tmp_path.iterdir())
        assert exhaust(stream) == 5


@pytest.mark.slow
def test_leaving_a_loader_early_stops_its_workers(
    examples: ExampleSet, worker_pids: Callable[[], list[int]]
) -> None:
    with loader(examples, num_workers=2, num_steps=1_000) as steps:
        next(iter(steps))
        assert len(worker_pids()) == 2
    assert not worker_pids()


@pytest.mark.slow
def test_the_loader_leaves_the_random_state_alone(examples: ExampleSet) -> None:
    before = torch.get_rng_state()
    batches_of(examples)
    batches_of(examples, num_workers=1)
    assert torch.equal(torch.get_rng_state(), before)


# torch tells of the death by a signal, which may come while it opens files or lets workers go.
@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("sent", mostly_slow([signal.SIGKILL, signal.SIGSEGV], signal.SIGKILL))
def test_a_killed_worker_is_an_error_and_not_a_hang(
    examples: ExampleSet, worker_pids: Callable[[], list[int]], sent: signal.Signals
) -> None:
    with loader(examples, num_workers=1, num_steps=100_000) as steps:
        stream = iter(steps)
        next(stream)
        (pid,) = worker_pids()
        os.kill(pid, sent)
        start_s = time.perf_counter()
        with pytest.raises(DataError, match=r"worker died while preparing(.|\n)*num_workers: 0"):
            exhaust(stream)
        assert time.perf_counter() - start_s < 20


@pytest.mark.slow
def test_an_interrupt_does_not_stop_a_worker(
    examples: ExampleSet, worker_pids: Callable[[], list[int]]
) -> None:
    with loader(examples, num_workers=1, num_steps=50) as steps:
        stream = iter(steps)
        next(stream)
        (pid,) = worker_pids()
        os.kill(pid, signal.SIGINT)
        assert exhaust(stream) == 49


def exhaust(stream: Iterator[object]) -> int:
    return sum(1 for _ in stream)


@pytest.fixture
def worker_pids() -> Callable[[], list[int]]:
    """Return what finds the processes that prepare batches: those that the test has started."""
    before = spawned()
    return lambda: [pid for pid in spawned() if pid not in before]


def spawned() -> list[int]:
    """Return our child processes that run Python, but for its own tracker."""
    pids = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
            command = (stat.parent / "cmdline").read_text()
        except OSError:  # it ended while we looked
            continue
        if int(fields[1]) == os.getpid() and fields[0] != "Z" and "spawn_main" in command:
            pids.append(int(stat.parent.name))
    return pids
