"""Which tokens carry loss, per template and kind of row, against texts written by hand.

In an expectation, what is learned stands between « and »; everything else has no loss.
"""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from finetune.data.dataset import load_rows
from finetune.data.tokenize import IGNORE_INDEX, Example
from finetune.errors import DataError
from finetune.recipe.sections import DataSection
from tests.chat_templates import SPECIAL, TEMPLATES
from tests.doubles import tiny_tokenizer


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
    with pytest.raises(DataError, match=r"rows\.jsonl:1 has tools or reasoning, and the tokenizer"):
        load_rows(
            DataSection(path=str(file)),
            tiny_tokenizer(chat_template=None),
            seq_len=200,
            seed=0,
            cache_dir=tmp_path / "cache",
        )
