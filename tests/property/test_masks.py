"""Loss masks of random conversations, against rows put together piece by piece.

Each template is written twice: in Jinja, and as a Python function that says of each piece of the
row whether the model must generate it. The function knows what is an answer because it puts it
there; nothing is searched for. Texts are made of what the templates themselves write.
"""

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
from transformers import PreTrainedTokenizerBase

from finetune.data.rows import Conversation, LossOn
from finetune.data.tokenize import IGNORE_INDEX, encode, render_prompt
from finetune.data.turns import Message
from finetune.errors import DataError
from tests.doubles import tiny_tokenizer

SPECIAL = (
    *("<s>", "</s>", "[INST]", "[/INST]", "<|user|>", "<|assistant|>", "<|end|>", "<|eot|>"),
    *("<|start|>", "<|channel|>", "<|message|>", "<|return|>", "<turn>", "</turn>"),
)
WORDS = (
    *("a", "an", "A", "final", "assistant", "user", "model", "analysis", "7", "FINAL ANSWER"),
    *(
        "think",
        "<think>",
        "<|im_end|>",
        "</s>",
        "<|end|>",
        "[INST]",
        "{{ x }}",
        "<b>&",
        "ASSISTANT:",
    ),
    *("\n", "\n\n", " ", "  two", "yes\n\nno", "the answer is 7", "system", "channel", "%}"),
)


@dataclass(frozen=True)
class Turn:
    """A turn; of an answer with reasoning, both parts."""

    role: str
    text: str
    thought: str | None = None

    @property
    def content(self) -> str:
        if self.thought is None:
            return self.text
        return f"<think>\n{self.thought}\n</think>\n\n{self.text}"


@dataclass(frozen=True)
class Answer:
    """A piece that is learned, and the token that ends it."""

    text: str
    end: str


Pieces = list[str | Answer]
Assemble = Callable[[Sequence[Turn]], Pieces | None]
"""Put a row together; None if it must be refused."""

TEMPLATES: dict[str, str] = {}
ASSEMBLE: dict[str, Assemble] = {}


def template(text: str) -> Callable[[Assemble], Assemble]:
    """Register a template with the function that does by hand what it does."""

    def register(assemble: Assemble) -> Assemble:
        TEMPLATES[assemble.__name__] = text
        ASSEMBLE[assemble.__name__] = assemble
        return assemble

    return register


def headed(turns: Sequence[Turn], head: str, end: str, *, is_stripped: bool = False) -> Pieces:
    """Put together what most templates write: a header, the text, an end."""
    pieces: Pieces = []
    for turn in turns:
        text = turn.content.strip() if is_stripped else turn.content
        pieces.append(head.replace("ROLE", turn.role))
        pieces += [Answer(text, end)] if turn.role == "assistant" else [text, end]
    return pieces


@template(
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
def chatml(turns: Sequence[Turn]) -> Pieces | None:
    pieces: Pieces = []
    for turn in turns:
        pieces += headed([turn], "<|im_start|>ROLE\n", "<|im_end|>")
        pieces.append("\n")
    return pieces


@template(
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content + '<|im_end|>\n' }}{% endgeneration %}{% else %}"
    "{{ m.content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
def chatml_with_generation_marks(turns: Sequence[Turn]) -> Pieces | None:
    return chatml(turns)


@template(
    "{{ '<s>' }}{% for m in messages %}{{ '<|start|>' + m.role + '\n\n' + m.content|trim"
    " + '<|eot|>' }}{% endfor %}{% if add_generation_prompt %}{{ '<|start|>assistant\n\n' }}"
    "{% endif %}"
)
def trims(turns: Sequence[Turn]) -> Pieces | None:
    return ["<s>", *headed(turns, "<|start|>ROLE\n\n", "<|eot|>", is_stripped=True)]


@template(
    "{{ '<s>' }}{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    "{% for m in messages %}{% set role = 'model' if m.role == 'assistant' else m.role %}"
    "{{ '<turn>' + role + '\n' + m.content|trim + '</turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<turn>model\n' }}{% endif %}"
)
def renames_the_role_and_refuses_system(turns: Sequence[Turn]) -> Pieces | None:
    if turns[0].role == "system":
        return None
    pieces: Pieces = ["<s>"]
    for turn in turns:
        head = f"<turn>{'model' if turn.role == 'assistant' else turn.role}\n"
        pieces += [*headed([turn], head, "</turn>", is_stripped=True), "\n"]
    return pieces


@template(
    "{% set system = messages[0].content + '\n\n' if messages[0].role == 'system' else '' %}"
    "{% for m in messages if m.role != 'system' %}{{ '<turn>' + m.role + '\n' }}"
    "{% if loop.first %}{{ system }}{% endif %}{{ m.content + '</turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<turn>assistant\n' }}{% endif %}"
)
def moves_system_into_the_first_question(turns: Sequence[Turn]) -> Pieces | None:
    system, rest = "", list(turns)
    if rest[0].role == "system":
        system = rest.pop(0).text + "\n\n"
    rest[0] = Turn(role="user", text=system + rest[0].text)
    pieces: Pieces = []
    for turn in rest:
        pieces += [*headed([turn], "<turn>ROLE\n", "</turn>"), "\n"]
    return pieces


@template(
    "{{ '<s>' }}{% for m in messages %}{% if m.role == 'user' %}"
    "{{ '[INST] ' + m.content|trim + ' [/INST]' }}{% elif m.role == 'assistant' %}"
    "{{ ' ' + m.content|trim + '</s>' }}{% endif %}{% endfor %}"
)
def has_no_prompt_and_drops_system(turns: Sequence[Turn]) -> Pieces | None:
    if turns[0].role == "system" and turns[0].text.strip():
        return None
    pieces: Pieces = ["<s>"]
    for turn in turns:
        text = turn.content.strip()
        if turn.role == "user":
            pieces += ["[INST] ", text, " [/INST]"]
        elif turn.role == "assistant":
            pieces.append(Answer(" " + text, "</s>"))
    return pieces


@template(
    "{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + '<|end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}"
)
def ends_the_text_with_another_token(turns: Sequence[Turn]) -> Pieces | None:
    pieces: Pieces = []
    for turn in turns:
        pieces += [*headed([turn], "<|ROLE|>\n", "<|end|>"), "\n"]
    return pieces


@template(
    "{% for m in messages %}{{ '<|start|>' + m.role }}{% if m.role == 'assistant' %}"
    "{{ '<|channel|>final<|message|>' + m.content + ('<|return|>' if loop.last else '<|end|>') }}"
    "{% else %}{{ '<|message|>' + m.content + '<|end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"
)
def writes_a_channel_before_the_answer(turns: Sequence[Turn]) -> Pieces | None:
    pieces: Pieces = []
    for number, turn in enumerate(turns):
        pieces.append(f"<|start|>{turn.role}")
        if turn.role == "assistant":
            end = "<|return|>" if number == len(turns) - 1 else "<|end|>"
            pieces.append(Answer("<|channel|>final<|message|>" + turn.content, end))
        else:
            pieces += ["<|message|>", turn.text, "<|end|>"]
    return pieces


@template(
    "{% set ns = namespace(asked=-1) %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set ns.asked = loop.index0 %}{% endif %}{% endfor %}{% for m in messages %}"
    "{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' %}"
    "{% set thought = '' %}{% set text = m.content %}{% if '</think>' in m.content %}"
    "{% set text = m.content.split('</think>')[-1].lstrip('\n') %}"
    "{% set thought = m.content.split('</think>')[0].split('<think>')[-1].strip('\n') %}{% endif %}"
    "{% if loop.index0 > ns.asked %}{{ '<think>\n' + thought + '\n</think>\n\n'"
    " + text.lstrip('\n') }}{% else %}{{ text }}{% endif %}"
    "{% else %}{{ m.content }}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{% if enable_thinking is defined and not enable_thinking %}{{ '<think>\n\n</think>\n\n' }}"
    "{% endif %}{% endif %}"
)
def keeps_only_the_last_reasoning(turns: Sequence[Turn]) -> Pieces | None:
    pieces: Pieces = []
    for number, turn in enumerate(turns):
        pieces.append(f"<|im_start|>{turn.role}\n")
        if turn.role != "assistant":
            pieces += [turn.text, "<|im_end|>"]
        elif number < len(turns) - 1:
            text = turn.text if turn.thought is None else turn.text.lstrip("\n")
            pieces.append(Answer(text, "<|im_end|>"))
        else:
            thought = (turn.thought or "").strip("\n")
            block = f"<think>\n{thought}\n</think>\n\n"
            text = turn.text.lstrip("\n")
            pieces += [] if thought else [block]
            pieces.append(Answer(block + text if thought else text, "<|im_end|>"))
        pieces.append("\n")
    return pieces


@template(
    "{{ '<s>' }}{% for m in messages %}{% if m.role == 'assistant' %}{{ '<|assistant|>'"
    " + m.content.split('</think>')[-1] + '</s>' }}{% else %}{{ '<|user|>' + m.content }}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
def cuts_all_reasoning(turns: Sequence[Turn]) -> Pieces | None:
    if (turns[-1].thought or "").strip():
        return None
    pieces: Pieces = ["<s>"]
    for turn in turns:
        if turn.role == "assistant":
            text = turn.text if turn.thought is None else "\n\n" + turn.text
            pieces += ["<|assistant|>", Answer(text, "</s>")]
        else:
            pieces += ["<|user|>", turn.text]
    return pieces


@template(
    "{% for m in messages %}{{ '<|' + m.role + '|>' + m.content + '</s>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|><think>\n' }}{% endif %}"
)
def opens_the_reasoning_in_the_prompt(turns: Sequence[Turn]) -> Pieces | None:
    pieces: Pieces = []
    for number, turn in enumerate(turns):
        pieces.append(f"<|{turn.role}|>")
        if turn.role == "assistant" and turn.thought is None and turn.text.startswith("<think>\n"):
            return None  # an answer that begins with a tag which nothing closes
        if turn.role == "assistant" and turn.thought is not None:
            text = turn.content.removeprefix("<think>\n")
            pieces += ["<think>\n", Answer(text, "</s>")]
        elif turn.role == "assistant" and number == len(turns) - 1:
            empty = "\n</think>\n\n" + turn.text.lstrip("\n")
            pieces += ["<think>\n", Answer(empty, "</s>")]
        else:  # an answer without reasoning is learned in a text that ends with it
            pieces += [turn.text, "</s>"]
    return pieces


@template(
    "{{ '<s>' }}{% for m in messages %}{% if m.role == 'assistant' %}{{ '<|assistant|>'"
    " + m.content.split('</think>')[-1] + '</s>' }}{% else %}{{ '<|user|>' + m.content }}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|><think>\n' }}"
    "{% endif %}"
)
def cuts_all_reasoning_and_opens_it_in_the_prompt(turns: Sequence[Turn]) -> Pieces | None:
    pieces: Pieces = ["<s>"]
    for number, turn in enumerate(turns):
        if turn.role == "assistant" and turn.thought is None and turn.text.startswith("<think>\n"):
            return None
        if turn.role != "assistant":
            pieces += ["<|user|>", turn.text]
        elif number < len(turns) - 1:
            text = turn.text if turn.thought is None else "\n\n" + turn.text
            pieces += ["<|assistant|>", text, "</s>"]
        elif turn.thought is None:
            empty = "\n</think>\n\n" + turn.text.lstrip("\n")
            pieces += ["<|assistant|>", "<think>\n", Answer(empty, "</s>")]
        else:
            text = turn.content.removeprefix("<think>\n")
            pieces += ["<|assistant|>", "<think>\n", Answer(text, "</s>")]
    return pieces


@template(
    "{% for m in messages %}{% if m.role == 'assistant' %}{{ 'ASSISTANT: ' + m.content }}"
    "{% if loop.last %}{{ '</s>' }}{% endif %}{% else %}{{ 'USER: ' + m.content + ' ' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"
)
def ends_only_the_last_turn(turns: Sequence[Turn]) -> Pieces | None:
    pieces: Pieces = []
    for number, turn in enumerate(turns):
        if turn.role != "assistant":
            pieces += ["USER: ", turn.text, " "]
        elif number < len(turns) - 1:
            return None
        else:
            pieces += ["ASSISTANT:", Answer(" " + turn.content, "</s>")]
    return pieces


@template(
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content|upper + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
def writes_capitals(turns: Sequence[Turn]) -> Pieces | None:
    answers = [turn for turn in turns if turn.role == "assistant"]
    if any(turn.content != turn.content.upper() for turn in answers):
        return None
    upper = [Turn(role=turn.role, text=turn.content.upper()) for turn in turns]
    return chatml(upper)


@template(
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{{ m.content|replace('&', '&amp;')"
    "|replace('<', '&lt;') }}{{ '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
def escapes(turns: Sequence[Turn]) -> Pieces | None:
    def escaped(turn: Turn) -> Turn:
        return Turn(role=turn.role, text=turn.content.replace("&", "&amp;").replace("<", "&lt;"))

    if any(escaped(t).text != t.content for t in turns if t.role == "assistant"):
        return None
    return chatml([escaped(turn) for turn in turns])


@template(
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
    "{% if m.role == 'assistant' %}{{ m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
def writes_answers_twice(_turns: Sequence[Turn]) -> Pieces | None:
    return None


@template(
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.content|length < 9 %}"
    "{{ 'a' }}{% endif %}{{ m.content + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
def writes_more_for_short_texts(turns: Sequence[Turn]) -> Pieces | None:
    answers = [turn for turn in turns if turn.role == "assistant"]
    if any(turn.thought is None and len(turn.text) >= 9 for turn in answers):
        return None
    return chatml(
        [Turn(role=t.role, text=("a" if len(t.content) < 9 else "") + t.content) for t in turns]
    )


def random_text(random_: random.Random, *, may_be_empty: bool) -> str:
    while True:
        words = random_.choices(WORDS, k=random_.randint(0 if may_be_empty else 1, 4))
        text = "".join(word + random_.choice(["", " ", "\n"]) for word in words)
        if may_be_empty or text.strip():
            return text


def random_turns(random_: random.Random) -> list[Turn]:
    turns = []
    if random_.random() < 0.3:
        turns.append(Turn(role="system", text=random_text(random_, may_be_empty=False)))
    for _ in range(random_.choice([1, 1, 2, 3])):
        turns.append(Turn(role="user", text=random_text(random_, may_be_empty=False)))
        thought = None
        if random_.random() < 0.3:
            thought = random_text(random_, may_be_empty=True).replace("<think>", "hm")
        text = random_text(random_, may_be_empty=True)
        if random_.random() < 0.2:  # the reasoning, or the question, names the answer
            text = (thought or turns[-1].text).strip()
        turns.append(Turn(role="assistant", text=text, thought=thought))
    return turns


def ids_and_labels(
    pieces: Pieces, tokenizer: PreTrainedTokenizerBase
) -> tuple[list[int], list[int], list[int]]:
    """Tokenise piece by piece, up to the last answer's end."""
    last = max(n for n, piece in enumerate(pieces) if isinstance(piece, Answer))
    ids: list[int] = []
    labels: list[int] = []
    ends: list[int] = []
    for piece in pieces[: last + 1]:
        text = piece.text + piece.end if isinstance(piece, Answer) else piece
        tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
        ids += tokens
        labels += tokens if isinstance(piece, Answer) else [IGNORE_INDEX] * len(tokens)
        ends += tokens[-1:] if isinstance(piece, Answer) else []
    return ids, labels, ends


def outcome(name: str, seed: int, tokenizer: PreTrainedTokenizerBase) -> str:
    """Encode one random row and compare it: equal, or refused as it must be."""
    random_ = random.Random(f"{name} {seed}")
    turns = random_turns(random_)
    loss_on: LossOn = "all" if random_.random() < 0.1 else "assistant"
    messages = tuple(Message(role=turn.role, content=turn.content) for turn in turns)
    row = Conversation(messages=messages, source=f"rows.jsonl:{seed}")
    pieces = ASSEMBLE[name](turns)
    if pieces is None:
        with pytest.raises(DataError, match=rf"\(rows\.jsonl:{seed}\)"):
            encode(row, tokenizer, seq_len=10**6, loss_on=loss_on)
        return "refused"
    example = encode(row, tokenizer, seq_len=10**6, loss_on=loss_on)
    ids, labels, ends = ids_and_labels(pieces, tokenizer)
    assert example.input_ids.tolist() == ids, (name, seed)
    assert example.labels.tolist() == (ids if loss_on == "all" else labels), (name, seed)
    assert list(example.end_ids) == ends, (name, seed)
    prompt, _, _ = render_prompt(row, tokenizer, empty_think="prompt")
    learned = [n for n, label in enumerate(labels) if label == IGNORE_INDEX]
    assert list(prompt) == ids[: learned[-1] + 1], (name, seed)
    return "equal"


def outcomes(name: str, num_rows: int) -> Counter[str]:
    tokenizer = tiny_tokenizer(chat_template=TEMPLATES[name])
    tokenizer.add_special_tokens({"additional_special_tokens": list(SPECIAL)})
    return Counter(outcome(name, seed, tokenizer) for seed in range(num_rows))


@pytest.mark.parametrize("name", TEMPLATES)
def test_random_rows_learn_their_answers_or_are_refused(name: str) -> None:
    assert sum(outcomes(name, 12).values()) == 12


@pytest.mark.slow
@pytest.mark.parametrize("name", TEMPLATES)
def test_many_random_rows_learn_their_answers_or_are_refused(name: str) -> None:
    found = outcomes(name, 400)
    assert sum(found.values()) == 400
    assert found["equal"] > 20 or name == "writes_answers_twice"
