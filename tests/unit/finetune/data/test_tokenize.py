from pathlib import Path

import numpy as np
import pytest
from tokenizers.normalizers import Prepend
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerBase

from finetune.data.rows import Conversation, LossOn
from finetune.data.tokenize import IGNORE_INDEX, Example, encode, prompt_ids, render_prompt
from finetune.errors import DataError
from tests.conversations import read_conversations, talk
from tests.doubles import CHAT_TEMPLATE, thinking_tokenizer, tiny_tokenizer

ROOT = Path(__file__).parents[4]
CHATS = ROOT / "tests" / "data" / "chats.jsonl"
NO_THINKING = "<|im_start|>assistant\n<think>\n\n</think>\n\n"


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
    prompt, reference, _ = render_prompt(row, tokenizer, empty_think="prompt")
    assert list(prompt) == tokenizer(text, add_special_tokens=False)["input_ids"]
    assert masked_prefix(encoded(row, tokenizer)) == list(prompt)
    assert (
        prompt_ids(row.messages[:-1], tokenizer, source=row.source, empty_think="prompt") == prompt
    )
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
    assert masked_prefix(example) == list(render_prompt(row, tokenizer, empty_think="prompt")[0])


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
    assert masked_prefix(example) == list(render_prompt(row, tokenizer, empty_think="prompt")[0])


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
        assert masked_prefix(example) == list(render_prompt(row, thinking, empty_think="prompt")[0])


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
    assert masked_prefix(example) == list(render_prompt(row, tokenizer, empty_think="prompt")[0])
    assert (
        prompt_ids(row.messages[:-1], tokenizer, source="x", empty_think="prompt")
        == render_prompt(row, tokenizer, empty_think="prompt")[0]
    )


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
        system=None,
    )
    assert len(rows) >= 12
    for row in rows[:: 1 + len(rows) // 50]:
        example = encoded(row, thinking)
        prompt, reference, _ = render_prompt(row, thinking, empty_think="prompt")
        assert learned(example, thinking)[-1] == reference.lstrip("\n") + "<|im_end|>"
        assert example.input_ids[: len(prompt)].tolist() == list(prompt)
        if "<think>" not in reference:
            assert str(thinking.decode(list(prompt))).endswith(NO_THINKING)
        num_earlier = len(learned(example, thinking)) - 1
        assert num_earlier == len(row.messages) // 2 - 1
        if not num_earlier:
            assert (example.labels[: len(prompt)] == IGNORE_INDEX).all()
