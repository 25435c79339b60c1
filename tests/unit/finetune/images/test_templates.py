"""Images in chat templates that write them as those of published models do."""

from collections.abc import Mapping
from dataclasses import dataclass

import pytest

from finetune.data.chat_template import render
from finetune.data.pictures.picture import PLACE, Picture
from finetune.data.rows import Conversation
from finetune.data.spans import Shapes, render_answers
from finetune.data.tokenize import encode
from finetune.data.turns import Message
from finetune.errors import DataError
from tests.chat_templates import CHATML, PARTS
from tests.doubles import tiny_tokenizer

A, B, C = (Picture(name=name, path=f"/{name}.png") for name in "abc")


@dataclass(frozen=True, kw_only=True)
class Written:
    """A template, what it writes of `ROW`, and what is learned of that."""

    template: str
    text: str
    learned: tuple[str, ...]
    tokens: tuple[str, ...]


# Texts as they are, or parts of which images are three tokens.
QWEN = Written(
    template=(
        "{% for m in messages %}<|im_start|>{{ m.role }}\n"
        "{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}"
        "{% if part.type == 'image' or 'image_url' in part %}"
        "<|vision_start|><|image_pad|><|vision_end|>"
        "{% elif 'text' in part %}{{ part.text }}{% endif %}"
        "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    ),
    text=(
        "<|im_start|>system\nLook.<|im_end|>\n"
        "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>or"
        "<|vision_start|><|image_pad|><|vision_end|>?<|im_end|>\n"
        "<|im_start|>assistant\nThe cat.<|im_end|>\n"
        "<|im_start|>user\n And <|vision_start|><|image_pad|><|vision_end|><|im_end|>\n"
        "<|im_start|>assistant\nor?<|im_end|>"
    ),
    learned=("The cat.<|im_end|>", "or?<|im_end|>"),
    tokens=("<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|image_pad|>", "<|vision_end|>"),
)
# The system prompt is in the first question; texts are trimmed; an answer is of the `model`.
GEMMA = Written(
    template=(
        "{% set turns = messages %}{% set first = '' %}"
        "{% if messages[0].role == 'system' %}{% set turns = messages[1:] %}"
        "{% set first = (messages[0].content if messages[0].content is string"
        " else messages[0].content[0].text) + '\n\n' %}{% endif %}"
        "<bos>{% for m in turns %}"
        "<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n"
        "{{ first if loop.first else '' }}"
        "{% if m.content is string %}{{ m.content | trim }}{% else %}{% for part in m.content %}"
        "{% if part.type == 'image' %}<start_of_image>"
        "{% elif part.type == 'text' %}{{ part.text | trim }}{% endif %}"
        "{% endfor %}{% endif %}<end_of_turn>\n{% endfor %}"
        "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
    ),
    text=(
        "<bos><start_of_turn>user\nLook.\n\n<start_of_image>or<start_of_image>?<end_of_turn>\n"
        "<start_of_turn>model\nThe cat.<end_of_turn>\n"
        "<start_of_turn>user\nAnd<start_of_image><end_of_turn>\n"
        "<start_of_turn>model\nor?<end_of_turn>"
    ),
    learned=("The cat.<end_of_turn>", "or?<end_of_turn>"),
    tokens=("<bos>", "<start_of_turn>", "<end_of_turn>", "<start_of_image>"),
)
# No generation prompt: an answer follows the question.
MISTRAL = Written(
    template=(
        "<s>{% for m in messages %}"
        "{% if m.role == 'system' %}[SYSTEM_PROMPT]{{ m.content }}[/SYSTEM_PROMPT]"
        "{% elif m.role == 'user' %}[INST]"
        "{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}"
        "{% if part.type == 'text' %}{{ part.text }}"
        "{% elif part.type in ['image', 'image_url'] %}[IMG]{% endif %}"
        "{% endfor %}{% endif %}[/INST]"
        "{% else %}{{ m.content }}</s>{% endif %}{% endfor %}"
    ),
    text=(
        "<s>[SYSTEM_PROMPT]Look.[/SYSTEM_PROMPT][INST][IMG]or[IMG]?[/INST]The cat.</s>"
        "[INST] And [IMG][/INST]or?</s>"
    ),
    learned=("The cat.</s>", "or?</s>"),
    tokens=("<s>", "</s>", "[INST]", "[/INST]", "[IMG]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"),
)
# Parts in every turn, and a blank after the speaker that hangs on what comes first.
SMOL = Written(
    template=(
        "<|im_start|>{% for m in messages %}{{ m.role | capitalize }}"
        "{% if m.content[0]['type'] == 'image' %}:{% else %}: {% endif %}"
        "{% for part in m.content %}{% if part['type'] == 'text' %}{{ part['text'] }}"
        "{% elif part['type'] == 'image' %}<image>{% endif %}{% endfor %}"
        "<end_of_utterance>\n{% endfor %}{% if add_generation_prompt %}Assistant:{% endif %}"
    ),
    text=(
        "<|im_start|>System: Look.<end_of_utterance>\nUser:<image>or<image>?<end_of_utterance>\n"
        "Assistant: The cat.<end_of_utterance>\nUser:  And <image><end_of_utterance>\n"
        "Assistant: or?<end_of_utterance>"
    ),
    learned=(" The cat.<end_of_utterance>", " or?<end_of_utterance>"),
    tokens=("<|im_start|>", "<end_of_utterance>", "<image>"),
)
# All images of a turn before its texts.
LLAVA = Written(
    template=(
        "{% for m in messages %}{{ m.role | upper }}: "
        "{% for part in m.content | selectattr('type', 'equalto', 'image') %}<image>\n{% endfor %}"
        "{% for part in m.content | selectattr('type', 'equalto', 'text') %}{{ part.text }}"
        "{% endfor %}</s>{% endfor %}{% if add_generation_prompt %}ASSISTANT: {% endif %}"
    ),
    text=(
        "SYSTEM: Look.</s>USER: <image>\n<image>\nor?</s>ASSISTANT: The cat.</s>"
        "USER: <image>\n And </s>ASSISTANT: or?</s>"
    ),
    learned=("The cat.</s>", "or?</s>"),
    tokens=("</s>", "<image>"),
)
EVERY: Mapping[str, Written] = {
    "Qwen": QWEN,
    "Gemma": GEMMA,
    "Mistral": MISTRAL,
    "SmolVLM": SMOL,
    "LLaVA": LLAVA,
}
ROW = Conversation(
    messages=(
        Message(role="system", content="Look."),
        Message(role="user", content=f"{PLACE}or{PLACE}?", images=(A, B)),
        Message(role="assistant", content="The cat."),
        Message(role="user", content=f" And {PLACE}", images=(C,)),
        Message(role="assistant", content="or?"),  # the texts of a question too
    ),
    source="rows.jsonl:1",
)


def shapes(written: Written) -> Shapes:
    tokenizer = tiny_tokenizer(chat_template=written.template)
    tokenizer.add_special_tokens({"additional_special_tokens": list(written.tokens)})
    return Shapes(tokenizer=tokenizer, empty_think="prompt")


@pytest.mark.parametrize("written", EVERY.values(), ids=[*EVERY])
def test_a_template_writes_images_and_answers_are_found(written: Written) -> None:
    known = shapes(written)
    for _ in range(2):  # the second time the marks are not rendered again
        (rendering,) = render_answers(ROW, known)
        assert rendering.text == written.text
        learned = tuple(rendering.text[span.start : span.end] for span in rendering.spans)
        assert learned == written.learned


@pytest.mark.parametrize("written", EVERY.values(), ids=[*EVERY])
def test_an_answer_follows_the_prompt_that_a_server_renders(written: Written) -> None:
    known = shapes(written)
    (rendering,) = render_answers(ROW, known)
    for span in rendering.spans:
        prompt = render(
            ROW.messages[: span.turn], known.tokenizer, source=ROW.source, is_prompt=True
        )
        assert rendering.text[: span.start] == prompt


def test_marks_know_the_number_of_images_and_not_which() -> None:
    """The rendering of marks is kept for rows of one shape, of which each has its own images."""
    known = shapes(QWEN)
    first, asked, answer, *_ = ROW.messages
    counts = []
    for images in ((A, B), (B, C), (A, A)):
        turn = Message(role="user", content=asked.content, images=images)
        render_answers(Conversation(messages=(first, turn, answer), source="x"), known)
        counts.append(len(known.known))
    assert counts == [1, 1, 1]
    turn = Message(role="user", content=f"{PLACE}?", images=(A,))
    render_answers(Conversation(messages=(first, turn, answer), source="x"), known)
    assert len(known.known) == 2


def test_a_template_of_texts_writes_no_images() -> None:
    written = Written(template=CHATML, text="", learned=(), tokens=("<|im_start|>", "<|im_end|>"))
    with pytest.raises(DataError, match="the chat template cannot render the row"):
        render_answers(ROW, shapes(written))


def test_a_template_of_parts_without_images_leaves_them_out() -> None:
    """What counts the places of images in the text finds none."""
    written = Written(template=PARTS, text="", learned=(), tokens=("<|im_start|>", "<|im_end|>"))
    (rendering,) = render_answers(ROW, shapes(written))
    assert "or?<|im_end|>" in rendering.text


def test_without_a_template_no_place_of_an_image_is_taken_for_a_text() -> None:
    row = Conversation(messages=ROW.messages[1:3], source="rows.jsonl:1")
    with pytest.raises(DataError, match=r"rows\.jsonl:1 has tools, reasoning or images, and"):
        encode(row, tiny_tokenizer(chat_template=None), seq_len=100, loss_on="last")


def test_a_turn_whose_text_is_left_out_is_refused() -> None:
    written = Written(
        template=QWEN.template.replace("{{ part.text }}", ""),
        text="",
        learned=(),
        tokens=QWEN.tokens,
    )
    with pytest.raises(DataError, match="leaves out turn 2, of the role user"):
        render_answers(ROW, shapes(written))
