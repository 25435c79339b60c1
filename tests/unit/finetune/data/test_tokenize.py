"""Rows as tokens, by template, and which of the tokens carry loss."""

import json
import resource
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken
from tokenizers.normalizers import Prepend
from tokenizers.processors import TemplateProcessing
from transformers import GenerationConfig, PreTrainedTokenizerBase

from finetune.data.chat_template import (
    Limits,
    Stops,
    Switch,
    eos_ids,
    merge_generation_config,
    read_generation_config,
    render,
    serving,
    switch_of,
)
from finetune.data.compared import require_known_rows
from finetune.data.dataset import ExampleSet, Rows, load_rows
from finetune.data.rows import Conversation, LossOn
from finetune.data.tokenize import (
    IGNORE_INDEX,
    Example,
    encode,
    prompt_ids,
    render_prompt,
    require_known_ids,
)
from finetune.data.turns import Message
from finetune.errors import DataError, ModelError
from finetune.recipe.sections import DataSection
from tests.chat_templates import (
    CHATML,
    GPT_OSS,
    OFF_BY_DEFAULT,
    PARTS,
    QWEN3,
    R1,
    SPECIAL,
    TEMPLATES,
)
from tests.conversations import read_conversations, talk, tokenised
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


# Parts of users, as in `PARTS`; the words of others are texts.
MIXED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'user' %}"
    "{% for part in m.content %}{{ part.text }}{% endfor %}{% else %}{{ m.content + '' }}"
    "{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.mark.parametrize("template", [PARTS, MIXED])
@pytest.mark.parametrize("system", [None, "be brief"])
def test_a_template_that_loops_over_parts_writes_what_one_for_texts_does(
    template: str, system: str | None
) -> None:
    messages = [Message(role="system", content=system)] if system else []
    messages += [Message(role="user", content="ab"), Message(role="assistant", content="cd")]
    row = Conversation(messages=tuple(messages), source="rows.jsonl:1")
    found, expected = (
        encode(row, tiny_tokenizer(chat_template=one), seq_len=100, loss_on="assistant")
        for one in (template, CHATML)
    )
    assert found.input_ids.tolist() == expected.input_ids.tolist()
    assert found.labels.tolist() == expected.labels.tolist()


def test_a_template_that_writes_nothing_of_a_question_is_refused() -> None:
    template = "{% for m in messages %}<|im_start|>{{ m.role }}<|im_end|>{% endfor %}"
    with pytest.raises(DataError, match=r"writes nothing of what a user says \(rows\.jsonl:9\)"):
        encoded(talk("a", "b", source="rows.jsonl:9"), tiny_tokenizer(chat_template=template))


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


# ---------------------------------------------------------------------------------------- templates


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def says(text: str, **keys: object) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **keys}


SYSTEM = {"role": "system", "content": "Be brief."}
CALL = {"id": "abcdefghi", "function": {"name": "add", "arguments": '{"a": 1, "b": "two"}'}}
CALLS: dict[str, Any] = {"role": "assistant", "content": None, "tool_calls": [CALL]}
RESULT = {"role": "tool", "tool_call_id": "abcdefghi", "name": "add", "content": "3"}
TOOL = {
    "type": "function",
    "function": {"name": "add", "parameters": {"properties": {"a": {"type": "number"}}}},
}
KINDS: dict[str, list[dict[str, Any]]] = {
    "one": [user("Q"), says("A")],
    "two": [user("Q"), says("A"), user("R"), says("B")],
    "system": [SYSTEM, user("Q"), says("A"), user("R"), says("B")],
    "skipped": [user("Q"), says("A", train=False), user("R"), says("B")],
    "tool": [user("Q"), CALLS, RESULT, says("A")],
    "thought": [user("Q"), says("A", reasoning_content="hm")],
    "thoughts": [
        user("Q"),
        says("A", reasoning_content="hm"),
        user("R"),
        says("B", reasoning_content="so"),
    ],
    "written thoughts": [
        user("Q"),
        says("<think> hm </think> A"),
        user("R"),
        says("<think>\nso\n</think>\n\nB"),
    ],
    "thought before a call": [user("Q"), CALLS | {"reasoning_content": "hm"}, RESULT, says("A")],
}

Q3 = "<|im_start|>user\nQ<|im_end|>\n<|im_start|>assistant\n"
Q3_R = "\n<|im_start|>user\nR<|im_end|>\n<|im_start|>assistant\n"
Q3_TOOL = (
    '<|im_start|>system\n# Tools\n<tools>\n{"type": "function", "function": {"description": "",'
    ' "name": "add", "parameters": {"properties": {"a": {"type": "number"}}}}}\n</tools><|im_end|>'
    "\n"
)
Q3_CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": "two"}}\n</tool_call><|im_end|>'
Q3_RESULT = (
    "\n<|im_start|>user\n<tool_response>\n3\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
)
NO_THOUGHT = "<think>\n\n</think>\n\n"
L3 = "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\n"
L3_A = "<|start_header_id|>assistant<|end_header_id|>\n\n"
L3_U = "<|start_header_id|>user<|end_header_id|>\n\n"
L3_TOOL = (
    'Functions:\n{"type": "function", "function": {"description": "", "name": "add",'
    ' "parameters": {"properties": {"a": {"type": "number"}}}}}\n'
)
M_TOOL = (
    '[AVAILABLE_TOOLS] [{"type": "function", "function": {"description": "", "name": "add",'
    ' "parameters": {"properties": {"a": {"type": "number"}}}}}][/AVAILABLE_TOOLS]'
)
M_CALL = '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1, "b": "two"}, "id": "abcdefghi"}]</s>'
M_RESULT = '[TOOL_RESULTS] {"content": "3", "call_id": "abcdefghi"}[/TOOL_RESULTS]'
R1_Q, R1_R = "<|user|>Q<|assistant|><think>\n", "<|user|>R<|assistant|><think>\n"
G_U, G_A = "<start_of_turn>user\n", "<end_of_turn>\n<start_of_turn>model\n"
O3 = "<|start|>system<|message|>Reasoning: medium<|end|>"
O3_Q = "<|start|>user<|message|>Q<|end|><|start|>assistant"
O3_R = "<|start|>user<|message|>R<|end|><|start|>assistant"
O3_FINAL, O3_HM = "<|channel|>final<|message|>", "<|channel|>analysis<|message|>hm<|end|>"
O3_TOOL = (
    "<|start|>developer<|message|># Tools\n\nnamespace functions {\n\ntype add = (_: {\na: number,"
    "\n}) => any;\n\n} // namespace functions<|end|>"
)
O3_CALL = ' to=functions.add<|channel|>commentary json<|message|>{"a": 1, "b": "two"}<|call|>'
O3_RESULT = (
    '<|start|>functions.add to=assistant<|channel|>commentary<|message|>"3"<|end|>'
    "<|start|>assistant"
)

LEARNED: dict[tuple[str, str], list[str]] = {
    ("chatml", "one"): [Q3 + "«A<|im_end|>»"],
    ("chatml", "two"): [Q3 + "«A<|im_end|>»" + Q3_R + "«B<|im_end|>»"],
    ("chatml", "system"): [
        "<|im_start|>system\nBe brief.<|im_end|>\n" + Q3 + "«A<|im_end|>»" + Q3_R + "«B<|im_end|>»"
    ],
    ("chatml", "skipped"): [Q3 + "A<|im_end|>" + Q3_R + "«B<|im_end|>»"],
    ("qwen3", "one"): [Q3 + NO_THOUGHT + "«A<|im_end|>»"],
    ("qwen3", "two"): [Q3 + "«A<|im_end|>»" + Q3_R + NO_THOUGHT + "«B<|im_end|>»"],
    ("qwen3", "skipped"): [Q3 + "A<|im_end|>" + Q3_R + NO_THOUGHT + "«B<|im_end|>»"],
    ("qwen3", "system"): [
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        + Q3
        + "«A<|im_end|>»"
        + Q3_R
        + NO_THOUGHT
        + "«B<|im_end|>»"
    ],
    ("qwen3", "tool"): [
        Q3_TOOL + Q3 + "«" + Q3_CALL + "»" + Q3_RESULT + NO_THOUGHT + "«A<|im_end|>»"
    ],
    ("qwen3", "thought"): [Q3 + "«<think>\nhm\n</think>\n\nA<|im_end|>»"],
    ("qwen3", "thoughts"): [Q3 + "«A<|im_end|>»" + Q3_R + "«<think>\nso\n</think>\n\nB<|im_end|>»"],
    ("qwen3", "thought before a call"): [
        Q3_TOOL
        + Q3
        + "«<think>\nhm\n</think>\n\n"
        + Q3_CALL
        + "»"
        + Q3_RESULT
        + NO_THOUGHT
        + "«A<|im_end|>»"
    ],
    ("llama3", "one"): [L3 + "<|eot_id|>" + L3_U + "Q<|eot_id|>" + L3_A + "«A<|eot_id|>»"],
    ("llama3", "two"): [
        L3
        + "<|eot_id|>"
        + L3_U
        + "Q<|eot_id|>"
        + L3_A
        + "«A<|eot_id|>»"
        + L3_U
        + "R<|eot_id|>"
        + L3_A
        + "«B<|eot_id|>»"
    ],
    ("llama3", "system"): [
        L3
        + "Be brief.<|eot_id|>"
        + L3_U
        + "Q<|eot_id|>"
        + L3_A
        + "«A<|eot_id|>»"
        + L3_U
        + "R<|eot_id|>"
        + L3_A
        + "«B<|eot_id|>»"
    ],
    ("llama3", "tool"): [
        L3
        + "<|eot_id|>"
        + L3_U
        + L3_TOOL
        + "Q<|eot_id|>"
        + L3_A
        + '«{"name": "add", "parameters": {"a": 1, "b": "two"}}<|eot_id|>»'
        + '<|start_header_id|>ipython<|end_header_id|>\n\n"3"<|eot_id|>'
        + L3_A
        + "«A<|eot_id|>»"
    ],
    ("mistral", "one"): ["<s>[INST] Q[/INST]« A</s>»"],
    ("mistral", "two"): ["<s>[INST] Q[/INST]« A</s>»[INST] R[/INST]« B</s>»"],
    ("mistral", "system"): [
        "<s>[INST] Be brief.\n\nQ[/INST]« A</s>»",
        "<s>[INST] Q[/INST] A</s>[INST] Be brief.\n\nR[/INST]« B</s>»",
    ],
    ("mistral", "skipped"): ["<s>[INST] Q[/INST] A</s>[INST] R[/INST]« B</s>»"],
    ("mistral", "tool"): [
        f"<s>{M_TOOL}[INST] Q[/INST]«{M_CALL}»{M_RESULT}« A</s>»",
    ],
    ("gemma3", "one"): [f"<bos>{G_U}Q{G_A}«A<end_of_turn>»"],
    ("gemma3", "two"): [f"<bos>{G_U}Q{G_A}«A<end_of_turn>»\n{G_U}R{G_A}«B<end_of_turn>»"],
    ("gemma3", "system"): [
        f"<bos>{G_U}Be brief.\n\nQ{G_A}«A<end_of_turn>»\n{G_U}R{G_A}«B<end_of_turn>»"
    ],
    ("gpt_oss", "one"): [f"{O3}{O3_Q}«{O3_FINAL}A<|return|>»"],
    ("gpt_oss", "two"): [f"{O3}{O3_Q}«{O3_FINAL}A<|end|>»{O3_R}«{O3_FINAL}B<|return|>»"],
    ("gpt_oss", "system"): [
        f"{O3}<|start|>developer<|message|># Instructions\n\nBe brief.\n\n<|end|>{O3_Q}"
        f"«{O3_FINAL}A<|end|>»{O3_R}«{O3_FINAL}B<|return|>»"
    ],
    ("gpt_oss", "tool"): [f"{O3}{O3_TOOL}{O3_Q}«{O3_CALL}»{O3_RESULT}«{O3_FINAL}A<|return|>»"],
    ("gpt_oss", "thought"): [f"{O3}{O3_Q}«{O3_HM}<|start|>assistant{O3_FINAL}A<|return|>»"],
    ("gpt_oss", "thoughts"): [
        f"{O3}{O3_Q}«{O3_FINAL}A<|end|>»{O3_R}"
        f"«{O3_HM.replace('hm', 'so')}<|start|>assistant{O3_FINAL}B<|return|>»"
    ],
    ("gpt_oss", "thought before a call"): [
        f"{O3}{O3_TOOL}{O3_Q}«{O3_HM}<|start|>assistant{O3_CALL}»{O3_RESULT}«{O3_FINAL}A<|return|>»"
    ],
    ("r1", "one"): [f"{R1_Q}«\n</think>\n\nA<|eot|>»"],
    ("r1", "two"): [
        f"{R1_Q}«\n</think>\n\nA<|eot|>»",
        f"<|user|>Q<|assistant|>A<|eot|>{R1_R}«\n</think>\n\nB<|eot|>»",
    ],
    ("r1", "system"): [
        f"<|system|>Be brief.{R1_Q}«\n</think>\n\nA<|eot|>»",
        f"<|system|>Be brief.<|user|>Q<|assistant|>A<|eot|>{R1_R}«\n</think>\n\nB<|eot|>»",
    ],
    ("r1", "skipped"): [f"<|user|>Q<|assistant|>A<|eot|>{R1_R}«\n</think>\n\nB<|eot|>»"],
    ("r1", "thought"): [f"{R1_Q}«hm\n</think>\n\nA<|eot|>»"],
    ("r1", "thoughts"): [
        f"{R1_Q}«hm\n</think>\n\nA<|eot|>»",
        f"<|user|>Q<|assistant|>A<|eot|>{R1_R}«so\n</think>\n\nB<|eot|>»",
    ],
    ("r1", "written thoughts"): [
        f"{R1_Q}« hm </think> A<|eot|>»",
        f"<|user|>Q<|assistant|> A<|eot|>{R1_R}«so\n</think>\n\nB<|eot|>»",
    ],
    ("off_by_default", "one"): ["<|user|>Q<|assistant|></think>«A<|eot|>»"],
    ("off_by_default", "thought"): ["<|user|>Q<|assistant|><think>«\nhm\n</think>\n\nA<|eot|>»"],
}
LEARNED_BLOCKS: dict[tuple[str, str], list[str]] = {
    ("qwen3", "one"): [f"{Q3}«{NO_THOUGHT}A<|im_end|>»"],
    ("qwen3", "two"): [
        f"{Q3}«{NO_THOUGHT}A<|im_end|>»",
        f"{Q3}A<|im_end|>{Q3_R}«{NO_THOUGHT}B<|im_end|>»",
    ],
    ("qwen3", "skipped"): [f"{Q3}A<|im_end|>{Q3_R}«{NO_THOUGHT}B<|im_end|>»"],
    ("qwen3", "tool"): [
        f"{Q3_TOOL}{Q3}«{NO_THOUGHT}{Q3_CALL}»",
        f"{Q3_TOOL}{Q3}{Q3_CALL}{Q3_RESULT}«{NO_THOUGHT}A<|im_end|>»",
    ],
    ("qwen3", "thought"): [f"{Q3}«<think>\nhm\n</think>\n\nA<|im_end|>»"],
}
REFUSED = {
    ("r1", "tool"): "leaves out the tool add",
    ("chatml", "tool"): "leaves out the tool add",
    ("chatml", "thought"): "leaves out the reasoning 'hm'",
    ("llama3", "thought"): "leaves out the reasoning 'hm'",
    ("mistral", "thought"): "leaves out the reasoning 'hm'",
    ("gemma3", "thought"): "leaves out the reasoning 'hm'",
    ("gemma3", "tool"): "roles must alternate",
}


def tokenizer_of(template: str) -> PreTrainedTokenizerBase:
    tokenizer = tiny_tokenizer(chat_template=TEMPLATES[template])
    tokenizer.add_special_tokens({"additional_special_tokens": list(SPECIAL)})
    return tokenizer


def examples(tmp_path: Path, template: str, row: dict[str, Any], **settings: Any) -> list[Example]:
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps(row) + "\n")
    return list(
        load_rows(
            DataSection(path=str(file), **settings),
            tokenizer_of(template),
            seq_len=2000,
            seed=0,
            cache_dir=tmp_path / "cache",
        ).train
    )


def shown(example: Example, tokenizer: PreTrainedTokenizerBase) -> str:
    """Write an example with what is learned between « and »."""
    text, was_learned = "", False
    for token, label in zip(example.input_ids.tolist(), example.labels.tolist(), strict=True):
        assert label in (token, IGNORE_INDEX)
        if (label == token) != was_learned:
            text += "»" if was_learned else "«"
        was_learned = label == token
        text += str(tokenizer.decode([token]))
    return text + ("»" if was_learned else "")


def row_of(kind: str) -> dict[str, Any]:
    has_tools = any(turn.get("tool_calls") for turn in KINDS[kind])
    return {"messages": KINDS[kind], **({"tools": [TOOL]} if has_tools else {})}


@pytest.mark.thorough
@pytest.mark.parametrize(("template", "kind"), LEARNED)
def test_what_is_learned_is_what_is_written_by_hand(
    tmp_path: Path, template: str, kind: str
) -> None:
    found = examples(tmp_path, template, row_of(kind))
    expected = [text.replace("»«", "") for text in LEARNED[template, kind]]
    assert [shown(one, tokenizer_of(template)) for one in found] == expected


@pytest.mark.parametrize(("template", "kind"), LEARNED_BLOCKS)
def test_an_empty_think_block_is_learned_on_request_after_the_default_prompt(
    tmp_path: Path, template: str, kind: str
) -> None:
    found = examples(tmp_path, template, row_of(kind), empty_think="learn")
    expected = [text.replace("»«", "") for text in LEARNED_BLOCKS[template, kind]]
    assert [shown(one, tokenizer_of(template)) for one in found] == expected


@pytest.mark.parametrize("template", ["chatml", "r1", "off_by_default"])
def test_a_block_that_no_server_leaves_out_cannot_be_learned(tmp_path: Path, template: str) -> None:
    with pytest.raises(DataError, match=r"empty_think is learn(.|\n)*`data.empty_think: prompt`"):
        examples(tmp_path, template, row_of("one"), empty_think="learn")


@pytest.mark.parametrize(("template", "kind"), REFUSED)
def test_what_a_template_cannot_write_is_refused_by_line(
    tmp_path: Path, template: str, kind: str
) -> None:
    with pytest.raises(DataError, match=rf"{REFUSED[template, kind]}.*\(.*rows\.jsonl:1\)"):
        examples(tmp_path, template, row_of(kind))


# --------------------------------------------------------------------------------------------------
# Calls, and turns that are chosen
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments", [{}, {"n": 1}, {"city": "Oslo", "deep": {"a": [1, None]}}, {"x": 'say "}}"'}]
)
@pytest.mark.parametrize("template", ["qwen3", "llama3", "mistral", "gpt_oss"])
def test_a_call_is_learned_whatever_its_arguments(
    tmp_path: Path, template: str, arguments: dict[str, Any]
) -> None:
    call = {"id": "abcdefghi", "function": {"name": "add", "arguments": arguments}}
    row = {"messages": [user("Q"), CALLS | {"tool_calls": [call]}, RESULT, says("A")]}
    (example,) = examples(tmp_path, template, row)
    text = shown(example, tokenizer_of(template))
    first, second = [part.split("»")[0] for part in text.split("«")[1:]]
    assert json.dumps(arguments) in first
    assert first.endswith(("<|im_end|>", "<|eot_id|>", "</s>", "<|call|>"))
    assert second.strip().removeprefix(O3_FINAL).startswith("A<") or second == " A</s>"


def test_an_answer_and_two_calls_are_learned_together(tmp_path: Path) -> None:
    calls = [CALL, {"name": "mul", "arguments": {"c": 2}}]
    row = {"messages": [user("Q"), says("Let me see.", tool_calls=calls)]}
    (example,) = examples(tmp_path, "qwen3", row)
    two = Q3_CALL.replace("<|im_end|>", "\n<tool_call>\n")
    assert shown(example, tokenizer_of("qwen3")) == (
        f'{Q3}{NO_THOUGHT}«Let me see.\n{two}{{"name": "mul", "arguments": {{"c": 2}}}}\n'
        "</tool_call><|im_end|>»"
    )


def test_a_call_ends_with_its_turn_also_where_tags_of_calls_are_special(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps(row_of("tool")) + "\n")
    tokenizer = tokenizer_of("qwen3")
    tokenizer.add_special_tokens({"additional_special_tokens": ["</tool_call>", "<tool_call>"]})
    rows = load_rows(
        DataSection(path=str(file)), tokenizer, seq_len=2000, seed=0, cache_dir=tmp_path / "cache"
    )
    assert [shown(one, tokenizer) for one in rows.train] == LEARNED["qwen3", "tool"]


def test_only_the_last_answer_is_learned_on_request_or_one_that_says_so(tmp_path: Path) -> None:
    row = row_of("two")
    (last,) = examples(tmp_path, "chatml", row, loss_on="last")
    assert shown(last, tokenizer_of("chatml")) == LEARNED["chatml", "skipped"][0]
    row["messages"] = [user("Q"), says("A", train=True), user("R"), says("B")]
    (both,) = examples(tmp_path, "chatml", row, loss_on="last")
    assert shown(both, tokenizer_of("chatml")) == LEARNED["chatml", "two"][0]
    (whole,) = examples(tmp_path, "chatml", row_of("two"), loss_on="all")
    assert whole.labels.tolist() == whole.input_ids.tolist()


@pytest.mark.parametrize("off", [{"train": False}, {"weight": 0}])
def test_a_row_without_a_trained_turn_is_counted(tmp_path: Path, off: dict[str, Any]) -> None:
    file = tmp_path / "rows.jsonl"
    rows = [row_of("one"), {"messages": [user("Q"), says("A", **off)]}]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    loaded = load_rows(
        DataSection(path=str(file)),
        tokenizer_of("chatml"),
        seq_len=200,
        seed=0,
        cache_dir=tmp_path / "cache",
    )
    assert loaded.notes == (f"1 of 2 rows were dropped: none of their turns is trained ({file}:2)",)


BAD_CALLS = [
    ({"function": {"arguments": "{}"}}, r"tool call 1 names no function"),
    ({"name": "add", "arguments": "{"}, r"broken JSON in '\{'"),
    ({"name": "add", "arguments": "[1]"}, r"arguments of tool call 1, of add, are no JSON object"),
]


@pytest.mark.parametrize(("call", "problem"), BAD_CALLS)
def test_a_bad_call_is_named_by_line(tmp_path: Path, call: dict[str, Any], problem: str) -> None:
    row = {"messages": [user("Q"), CALLS | {"tool_calls": [call]}]}
    with pytest.raises(DataError, match=rf"rows\.jsonl:1: .*{problem}"):
        examples(tmp_path, "qwen3", row)


def test_two_calls_at_once_are_refused_where_the_template_writes_one(tmp_path: Path) -> None:
    row = {"messages": [user("Q"), CALLS | {"tool_calls": [CALL, CALL]}]}
    with pytest.raises(DataError, match=r"only supports single tool-calls at once! \(.*:1\)"):
        examples(tmp_path, "llama3", row)
    with pytest.raises(DataError, match=r"does not write the tool call add of turn 2"):
        examples(tmp_path, "gpt_oss", row)


def test_sharegpt_calls_are_the_same_as_those_of_messages(tmp_path: Path) -> None:
    call = json.dumps({"name": "add", "arguments": {"a": 1, "b": "two"}})
    chat = [
        {"from": "human", "value": "Q"},
        {"from": "function_call", "value": call},
        {"from": "observation", "value": "3"},
        {"from": "gpt", "value": "A"},
    ]
    (example,) = examples(
        tmp_path, "qwen3", {"conversations": chat, "tools": json.dumps([TOOL["function"]])}
    )
    assert [shown(example, tokenizer_of("qwen3"))] == LEARNED["qwen3", "tool"]


def test_a_call_in_sharegpt_may_be_left_out_of_the_loss(tmp_path: Path) -> None:
    call = json.dumps({"name": "add", "arguments": {"a": 1, "b": "two"}})
    chat = [
        {"from": "human", "value": "Q"},
        {"from": "function_call", "value": call, "train": False},
        {"from": "observation", "value": "3"},
        {"from": "gpt", "value": "A"},
    ]
    (example,) = examples(tmp_path, "qwen3", {"conversations": chat})
    assert shown(example, tokenizer_of("qwen3")).count("«") == 1


@pytest.mark.parametrize("off", [{"train": False}, {"weight": 0}])
def test_a_turn_left_out_is_refused_where_the_loss_is_on_all(
    tmp_path: Path, off: dict[str, Any]
) -> None:
    row = {"messages": [user("Q"), says("A", **off)]}
    with pytest.raises(DataError, match=rf"'{next(iter(off))}' of turn 2 would be dropped"):
        examples(tmp_path, "chatml", row, loss_on="all")


@pytest.mark.parametrize("kind", ["tool", "thought"])
def test_tools_and_reasoning_are_refused_without_a_template(tmp_path: Path, kind: str) -> None:
    file = tmp_path / "rows.jsonl"
    row = {"messages": KINDS[kind][:2], **({"tools": [TOOL]} if kind == "tool" else {})}
    file.write_text(json.dumps(row) + "\n")
    with pytest.raises(DataError, match=r"rows\.jsonl:1 has tools, reasoning or images, and"):
        load_rows(
            DataSection(path=str(file)),
            tiny_tokenizer(chat_template=None),
            seq_len=200,
            seed=0,
            cache_dir=tmp_path / "cache",
        )


# ------------------------------------------------------------------------------------ chat template


ASKED = Message(role="user", content="Why?")
GROWS = (
    "{% set ns = namespace(x='0123456789') %}{% for i in range(60) %}{% set ns.x = ns.x + ns.x %}"
    "{% endfor %}"
)
LOOPS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"


def rendered(template: str, limits: Limits) -> str:
    tokenizer = tiny_tokenizer(chat_template=template)
    return render([ASKED], tokenizer, source="rows.jsonl:7", limits=limits)


@pytest.mark.parametrize(
    ("template", "limits", "problem"),
    [
        (LOOPS, Limits(cpu_s=0.1), r"computes for more than 0\.1 s for one row"),
        (GROWS, Limits(memory_bytes=2**26), r"takes more than 67108864 bytes for one row"),
        ("{{ 'ab' * 10**12 }}", Limits(memory_bytes=2**26), r"takes more than 67108864 .*"),
        (
            "{{ messages[0].content + 'ab' * 60 }}",
            Limits(num_chars=100),
            r"writes 12\d characters for one row",
        ),
    ],
)
def test_a_template_without_end_is_stopped_and_names_its_row(
    template: str, limits: Limits, problem: str
) -> None:
    def state() -> object:
        timer = signal.getitimer(signal.ITIMER_VIRTUAL)
        return resource.getrlimit(resource.RLIMIT_AS), signal.getsignal(signal.SIGVTALRM), timer

    before = state()
    with pytest.raises(DataError, match=rf"the chat template {problem} \(rows\.jsonl:7\)"):
        rendered(template, limits)
    assert state() == before


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ 1 // 0 }}", "division"),
        ("{{ messages[0].name.first }}", "no attribute 'name'"),
        ("{{ messages[0]['content'] + 1 }}", "can only concatenate"),
        ("{{ 'abc'.encode('no such') }}", "unknown encoding"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
        ("{{ range(10**9) }}", "Range too big"),
        ("{% for m in messages %}", "Unexpected end of template"),
        ("{{ messages.append(1) }}", "is unsafe"),
        ("{{ raise_exception('Only one\nturn') }}", "Only one"),
    ],
)
def test_whatever_a_template_raises_is_an_error_with_its_row(template: str, reason: str) -> None:
    row = Conversation(
        messages=(ASKED, Message(role="assistant", content="So.")), source="rows.jsonl:7"
    )
    with pytest.raises(DataError, match=rf"cannot render the row: .*({reason}).* \(rows\.jsonl:7"):
        encode(row, tiny_tokenizer(chat_template=template), seq_len=99, loss_on="assistant")


# -------------------------------------------------------------------------------------------- spans


SPANS_CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CHANNELS = (
    "{% for m in messages %}{{ '<|start|>' + m.role }}{% if m.role == 'assistant' %}"
    "{{ '<|channel|>final<|message|>' + m.content + ('<|return|>' if loop.last else '<|end|>') }}"
    "{% else %}{{ '<|message|>' + m.content + '<|end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"
)


def tokenizer_with(template: str, *special: str) -> PreTrainedTokenizerBase:
    tokenizer = tiny_tokenizer(chat_template=template)
    tokenizer.add_special_tokens({"additional_special_tokens": list(special)})
    return tokenizer


def row(*contents: str, system: str | None = None) -> Conversation:
    messages = [Message(role="system", content=system)] if system else []
    for index, content in enumerate(contents):
        messages.append(Message(role=("user", "assistant")[index % 2], content=content))
    return Conversation(messages=tuple(messages), source="rows.jsonl:3")


def learned_spans(conversation: Conversation, tokenizer: PreTrainedTokenizerBase) -> str:
    example = encode(conversation, tokenizer, seq_len=10_000, loss_on="assistant")
    ids = example.input_ids[example.labels != IGNORE_INDEX].tolist()
    return str(tokenizer.decode(ids))


@pytest.mark.parametrize("answer", ["A", "a", "an", "final", "channel", "l", ""])
def test_an_answer_that_the_template_writes_before_it_is_learned(answer: str) -> None:
    special = ("<|start|>", "<|channel|>", "<|message|>", "<|return|>", "<|end|>")
    tokenizer = tokenizer_with(CHANNELS, *special)
    head = "<|channel|>final<|message|>"
    assert learned_spans(row("Which?", answer), tokenizer) == f"{head}{answer}<|return|>"
    assert (
        learned_spans(row("Which?", answer, "And?", answer), tokenizer)
        == f"{head}{answer}<|end|>{head}{answer}<|return|>"
    )


def test_an_answer_that_its_reasoning_names_is_learned_where_think_tokens_are_special() -> None:
    answer = "<think>\nthe answer is 7\n</think>\n\n7"
    for template in (SPANS_CHATML, CHAT_TEMPLATE):
        tokenizer = tokenizer_with(template, "<think>", "</think>")
        assert learned_spans(row("q", answer), tokenizer) == f"{answer}<|im_end|>"


def test_an_end_of_turn_that_takes_the_newline_after_it_is_learned() -> None:
    tokenizer = tokenizer_with(SPANS_CHATML.replace("<|im_end|>", "<|end|>"))
    tokenizer.add_tokens([AddedToken("<|end|>", rstrip=True, special=True)], special_tokens=True)
    assert tokenizer.tokenize("<|end|>\nx") == ["<|end|>\n", "x"]
    assert learned_spans(row("q", "a", "q", "b"), tokenizer) == "a<|end|>b<|end|>"


LOSSY = [
    (
        SPANS_CHATML.replace("for m in messages", "for m in messages if m.role != 'system'"),
        row("q", "a", system="Be brief."),
        "leaves out turn 1, of the role system",
    ),
    (
        SPANS_CHATML.replace("m.content +", "m.content.split('</think>')[-1] +"),
        row("q", "<think>\nhm\n</think>\n\nb"),
        "leaves out the reasoning before the last answer",
    ),
    (
        SPANS_CHATML.replace("m.content +", "m.content|replace('hm', 'mh') +"),
        row("q", "<think>\nhm\n</think>\n\nb"),
        "does not show the reasoning 'hm' as it is",
    ),
    (
        SPANS_CHATML.replace("m.content +", "m.content + m.content +"),
        row("q", "a"),
        "writes the answer of turn 2 2 times",
    ),
    (
        SPANS_CHATML.replace("m.content +", "(m.content if m.content != 'a' else '') +"),
        row("q", "a"),
        "does not show the answer 'a' as it is",
    ),
    (
        SPANS_CHATML.replace("m.role +", "m.content|length|string +"),
        row("q", "ab"),
        "writes other text around turn 2 for another answer",
    ),
    (
        "{% for m in messages %}{{ m.role + ': ' + m.content + ' ' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant:' }}{% else %}{{ '<|im_end|>' }}{% endif %}",
        row("q", "a", "what is <|im_end|>?", "b"),
        "does not end an answer with a special token",
    ),
]


@pytest.mark.parametrize(("template", "lossy", "problem"), LOSSY)
def test_a_template_that_changes_or_drops_a_text_is_refused(
    template: str, lossy: Conversation, problem: str
) -> None:
    with pytest.raises(DataError, match=rf"the chat template {problem}.*\(rows\.jsonl:3\)"):
        learned_spans(lossy, tokenizer_with(template))


def test_a_template_that_cuts_the_reasoning_of_earlier_answers_is_not_refused() -> None:
    cuts = SPANS_CHATML.replace(
        "m.content +", "(m.content if loop.last else m.content.split('</think>')[-1]) +"
    )
    answer = "<think>hm</think>b"
    assert (
        learned_spans(row("q", answer, "q", answer), tokenizer_with(cuts))
        == f"b<|im_end|>{answer}<|im_end|>"
    )


def test_an_end_that_is_no_single_token_is_refused() -> None:
    tokenizer = tokenizer_with(SPANS_CHATML)
    tokenizer.split_special_tokens = True
    with pytest.raises(DataError, match=r"ends an answer with <\|im_end\|>, no single token"):
        learned_spans(row("q", "a"), tokenizer)


# -------------------------------------------------------------------------------------------- stops


RENAMES_THE_LAST_END = (
    "{% for m in messages %}{{ '<|start|>' + m.role + '\n' + m.content }}"
    "{{ '<|done|>' if loop.last and m.role == 'assistant' else '<|next|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant\n' }}{% endif %}"
)


def renaming_tokenizer() -> PreTrainedTokenizerBase:
    tokenizer = tiny_tokenizer(chat_template=RENAMES_THE_LAST_END)
    tokenizer.add_special_tokens(
        {"additional_special_tokens": ["<|start|>", "<|done|>", "<|next|>"]}
    )
    return tokenizer


def rows(*talks: tuple[str, ...]) -> list[Conversation]:
    return [
        Conversation(
            messages=tuple(
                Message(role=("user", "assistant")[n % 2], content=text)
                for n, text in enumerate(talk)
            ),
            source=f"rows.jsonl:{number}",
        )
        for number, talk in enumerate(talks, start=1)
    ]


def load(
    tmp_path: Path,
    tokenizer: PreTrainedTokenizerBase,
    *talks: tuple[str, ...],
    seq_len: int = 512,
) -> ExampleSet:
    return tokenised(rows(*talks), tmp_path, seq_len=seq_len, tokenizer=tokenizer)


def ends(examples: ExampleSet, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    return [str(tokenizer.convert_ids_to_tokens(token)) for token in examples.answer_ends]


def test_the_end_of_answers_is_read_from_the_rows_also_from_the_cache(tmp_path: Path) -> None:
    for template, end in ((None, "<|endoftext|>"), (tiny_tokenizer().chat_template, "<|im_end|>")):
        tokenizer = tiny_tokenizer(chat_template=template)
        for is_from_cache in (False, True):
            examples = load(tmp_path, tokenizer, ("q", "<|endoftext|> ends"), ("q", "b"))
            assert examples.is_from_cache == is_from_cache
            assert ends(examples, tokenizer) == [end]
            assert examples[0].end_ids == examples.answer_ends


def test_the_end_of_last_answers_comes_before_the_more_frequent_one_of_earlier_ones(
    tmp_path: Path,
) -> None:
    tokenizer = renaming_tokenizer()
    examples = load(tmp_path, tokenizer, ("q", "a"), ("q", "a", "q", "b", "q", "c", "q", "d"))
    assert ends(examples, tokenizer) == ["<|done|>", "<|next|>"]
    assert Stops(trained=examples.answer_ends, base=(0,)).shown(tokenizer) == (
        "Answers end with different tokens: <|done|> (105), <|next|> (106);"
        " generation stops at <unk> (0) too"
    )


def test_an_end_that_was_cut_off_is_not_learned_and_not_reported(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    examples = load(tmp_path, tokenizer, ("q", "a" * 90), ("q", "b" * 90), seq_len=80)
    assert examples.answer_ends == ()
    assert "no end is learned" in Stops(trained=(), base=(7,)).shown(tokenizer)


def test_trained_ends_come_first_and_none_is_named_twice() -> None:
    stops = Stops(trained=(9, 4), base=(2, 9))
    assert stops.ids == (9, 4, 2)


def write(folder: Path, name: str, content: object) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(json.dumps(content))
    return folder


@pytest.mark.parametrize(
    ("base", "trained", "merged"),
    [
        ({"eos_token_id": 1, "temperature": 0.6}, 5, {"eos_token_id": [5, 1], "temperature": 0.6}),
        ({"eos_token_id": [1, 5]}, [5], {"eos_token_id": [5, 1]}),
        ({"eos_token_id": 5}, 5, None),
        ({"do_sample": True}, [5, 6], {"do_sample": True, "eos_token_id": [5, 6]}),
        (None, 5, {"bos_token_id": 3, "eos_token_id": [5, 1]}),
    ],
)
def test_a_merged_model_stops_where_it_was_trained_to_and_where_its_base_does(
    tmp_path: Path, base: dict[str, Any] | None, trained: object, merged: dict[str, Any] | None
) -> None:
    folder = write(tmp_path / "base", "config.json", {"bos_token_id": 3, "eos_token_id": 1})
    if base is not None:
        write(folder, "generation_config.json", base)
    adapter = write(tmp_path / "adapter", "generation_config.json", {"eos_token_id": trained})
    out = tmp_path / "out"
    out.mkdir()
    merge_generation_config(folder, adapter, out)
    assert read_generation_config(out) == merged
    if merged is not None:
        assert GenerationConfig.from_pretrained(out).eos_token_id == merged["eos_token_id"]


@pytest.mark.parametrize("text", ["{", "[1]", "\xff", '{"eos_token_id": "<|im_end|>"}'])
def test_a_damaged_generation_config_is_named(tmp_path: Path, text: str) -> None:
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "generation_config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(ModelError, match=r"adapter/generation_config\.json"):
        eos_ids(read_generation_config(adapter) or {}, source=adapter / "generation_config.json")


# ------------------------------------------------------------------------------------------- switch


SWITCH_ASKED = {"role": "user", "content": "Q"}
PLAIN = [SWITCH_ASKED, {"role": "assistant", "content": "A"}]
THOUGHT = [SWITCH_ASKED, {"role": "assistant", "content": "A", "reasoning_content": "hm"}]
RENAMED = QWEN3.replace("enable_thinking", "reasons")
NOT_A_SWITCH = CHATML.replace(
    "<|im_start|>assistant\n' }}", "<|im_start|>assistant' + (mood | default('') | string) }}"
)


@pytest.mark.parametrize(
    ("template", "switch"),
    [
        (CHATML, None),
        (GPT_OSS, None),  # its variable changes the system turn alone
        (R1, None),
        (NOT_A_SWITCH, None),  # its variable is a text
        (QWEN3, Switch(name="enable_thinking", default=True)),
        (RENAMED, Switch(name="reasons", default=True)),
        (OFF_BY_DEFAULT, Switch(name="thinking", default=False)),
    ],
)
def test_a_switch_is_found_by_rendering(template: str, switch: Switch | None) -> None:
    assert switch_of(tiny_tokenizer(chat_template=template)) == switch


def loaded(tmp_path: Path, template: str, chats: list[Any], **settings: Any) -> Rows:
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps({"messages": turns}) + "\n" for turns in chats))
    tokenizer = tiny_tokenizer(chat_template=template)
    tokenizer.add_special_tokens({"additional_special_tokens": list(SPECIAL)})
    data = DataSection(path=str(file), **settings)
    return load_rows(data, tokenizer, seq_len=500, seed=0, cache_dir=tmp_path / "cache")


OFF = "2 of 3 rows are trained after the prompt with reasons=False, and servers send it without"
ON = "1 of 3 rows are trained after the prompt with thinking=True, and servers send it without"
EMPTY = "2 of 3 rows are without reasoning, and the prompt lets the model think: they learn"


@pytest.mark.parametrize(
    ("template", "settings", "kwargs", "said"),
    [
        (CHATML, {}, {}, None),
        (RENAMED, {}, {"reasons": False}, OFF),
        (RENAMED, {"empty_think": "learn"}, {}, EMPTY),
        (RENAMED, {"loss_on": "all"}, {}, None),
        (OFF_BY_DEFAULT, {}, {"thinking": True}, ON),
        (R1, {}, {}, EMPTY),
    ],
)
def test_rows_that_follow_another_prompt_than_servers_send_are_counted_also_from_the_cache(
    tmp_path: Path,
    template: str,
    settings: dict[str, Any],
    kwargs: dict[str, bool],
    said: str | None,
) -> None:
    chats = [PLAIN, PLAIN] if template == CHATML else [PLAIN, THOUGHT, PLAIN]
    for _ in range(2):
        prompted = loaded(tmp_path, template, chats, **settings).prompted
        assert prompted.template_kwargs == kwargs
        assert len(prompted.notes) == (said is not None)
        assert (said or "") in "".join(prompted.notes)
        assert bool(prompted.section()) == (said is not None)


def test_the_card_has_the_flag_of_each_server(tmp_path: Path) -> None:
    section = loaded(tmp_path, QWEN3, [PLAIN]).prompted.section()
    for flag in (
        """`vllm serve MODEL --default-chat-template-kwargs '{"enable_thinking": false}'`""",
        "`llama-server -m MODEL.gguf --jinja --chat-template-kwargs"
        """ '{"enable_thinking": false}'`""",
        "`ollama run NAME --think=false`",
        "`apply_chat_template(..., add_generation_prompt=True, enable_thinking=False)`",
    ):
        assert flag in section
    assert serving({}) == (
        "vLLM: `vllm serve MODEL`",
        "llama.cpp: `llama-server -m MODEL.gguf --jinja`",
        "Ollama: `ollama run NAME`",
    )


# --------------------------------------------------------------------------------------- vocabulary


NUM = len(tiny_tokenizer())


def load_vocabulary(tmp_path: Path, tokenizer: object, answer: str) -> Rows:
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps({"prompt": "q", "completion": answer}) + "\n")
    section = DataSection(path=str(file))
    cache = tmp_path / answer
    return load_rows(section, tokenizer, seq_len=64, seed=0, cache_dir=cache)  # type: ignore[arg-type]


def test_a_token_more_is_no_obstacle_until_a_row_has_it(tmp_path: Path) -> None:
    """A model was loaded before its embedding was found to be smaller (#41)."""
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens(["<image>"])
    require_known_rows(load_vocabulary(tmp_path, tokenizer, "a b"), tokenizer, NUM)
    rows = load_vocabulary(tmp_path, tokenizer, "a <image>")
    words = rf"<image> has the number {NUM}, and the model has {NUM} tokens, from 0 \(.*rows\.jsonl"
    with pytest.raises(DataError, match=words):
        require_known_rows(rows, tokenizer, NUM)
    require_known_rows(rows, tokenizer, NUM + 1)


def test_the_token_that_pads_must_be_known(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    rows = load_vocabulary(tmp_path, tokenizer, "a b")
    tokenizer.add_special_tokens({"pad_token": "<pad>"})
    with pytest.raises(DataError, match=r"<pad> has the number \d+, .*\(what pads rows\)"):
        require_known_rows(rows, tokenizer, NUM)


def test_of_no_tokens_none_is_unknown() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens(["<image>"])
    require_known_ids([[], [1, 2]], tokenizer, NUM, where="a prompt")
    with pytest.raises(DataError, match=r"\(a prompt\)"):
        require_known_ids([[], [1, NUM]], tokenizer, NUM, where="a prompt")
