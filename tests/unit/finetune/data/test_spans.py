import pytest
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerBase

from finetune.data.rows import Conversation
from finetune.data.tokenize import IGNORE_INDEX, encode
from finetune.data.turns import Message
from finetune.errors import DataError
from tests.doubles import CHAT_TEMPLATE, tiny_tokenizer

CHATML = (
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


def learned(conversation: Conversation, tokenizer: PreTrainedTokenizerBase) -> str:
    example = encode(conversation, tokenizer, seq_len=10_000, loss_on="assistant")
    ids = example.input_ids[example.labels != IGNORE_INDEX].tolist()
    return str(tokenizer.decode(ids))


@pytest.mark.parametrize("answer", ["A", "a", "an", "final", "channel", "l", ""])
def test_an_answer_that_the_template_writes_before_it_is_learned(answer: str) -> None:
    special = ("<|start|>", "<|channel|>", "<|message|>", "<|return|>", "<|end|>")
    tokenizer = tokenizer_with(CHANNELS, *special)
    head = "<|channel|>final<|message|>"
    assert learned(row("Which?", answer), tokenizer) == f"{head}{answer}<|return|>"
    assert (
        learned(row("Which?", answer, "And?", answer), tokenizer)
        == f"{head}{answer}<|end|>{head}{answer}<|return|>"
    )


def test_an_answer_that_its_reasoning_names_is_learned_where_think_tokens_are_special() -> None:
    answer = "<think>\nthe answer is 7\n</think>\n\n7"
    for template in (CHATML, CHAT_TEMPLATE):
        tokenizer = tokenizer_with(template, "<think>", "</think>")
        assert learned(row("q", answer), tokenizer) == f"{answer}<|im_end|>"


def test_an_end_of_turn_that_takes_the_newline_after_it_is_learned() -> None:
    tokenizer = tokenizer_with(CHATML.replace("<|im_end|>", "<|end|>"))
    tokenizer.add_tokens([AddedToken("<|end|>", rstrip=True, special=True)], special_tokens=True)
    assert tokenizer.tokenize("<|end|>\nx") == ["<|end|>\n", "x"]
    assert learned(row("q", "a", "q", "b"), tokenizer) == "a<|end|>b<|end|>"


LOSSY = [
    (
        CHATML.replace("for m in messages", "for m in messages if m.role != 'system'"),
        row("q", "a", system="Be brief."),
        "leaves out turn 1, of the role system",
    ),
    (
        CHATML.replace("m.content +", "m.content.split('</think>')[-1] +"),
        row("q", "<think>\nhm\n</think>\n\nb"),
        "leaves out the reasoning before the last answer",
    ),
    (
        CHATML.replace("m.content +", "m.content|replace('hm', 'mh') +"),
        row("q", "<think>\nhm\n</think>\n\nb"),
        "does not show the reasoning 'hm' as it is",
    ),
    (
        CHATML.replace("m.content +", "m.content + m.content +"),
        row("q", "a"),
        "writes the answer of turn 2 2 times",
    ),
    (
        CHATML.replace("m.content +", "(m.content if m.content != 'a' else '') +"),
        row("q", "a"),
        "does not show the answer 'a' as it is",
    ),
    (
        CHATML.replace("m.role +", "m.content|length|string +"),
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
        learned(lossy, tokenizer_with(template))


def test_a_template_that_cuts_the_reasoning_of_earlier_answers_is_not_refused() -> None:
    cuts = CHATML.replace(
        "m.content +", "(m.content if loop.last else m.content.split('</think>')[-1]) +"
    )
    answer = "<think>hm</think>b"
    assert (
        learned(row("q", answer, "q", answer), tokenizer_with(cuts))
        == f"b<|im_end|>{answer}<|im_end|>"
    )


def test_an_end_that_is_no_single_token_is_refused() -> None:
    tokenizer = tokenizer_with(CHATML)
    tokenizer.split_special_tokens = True
    with pytest.raises(DataError, match=r"ends an answer with <\|im_end\|>, no single token"):
        learned(row("q", "a"), tokenizer)
