"""Rows that compare answers: what of them is read in all formats.

A prompt is text or turns, and so is an answer. Where a pair has no prompt of its own, both of its
sides are whole conversations, and the turns that both begin with are the prompt: as turns
(UltraFeedback), or as text with "Human:" and "Assistant:" (HH). A text is a turn: a prompt the
user's, an answer the assistant's; unless it is written as a conversation, as in HH, or as the
JSON of turns, which a column of a .csv file is.
"""

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from finetune.data.rows import Compared, RowForm, find_unread_in_turns
from finetune.data.sources import Filled, decoded
from finetune.data.turns import Message, is_turns, keys_read, mapping, read_turn, text
from finetune.errors import RowError

if TYPE_CHECKING:
    from finetune.data.top_tokens import TopTokens

_SPEAKERS = {"Human": "user", "Assistant": "assistant"}
_SPEAKER = re.compile(r"\n\n(Human|Assistant):")
Column = Callable[[str], str]


@dataclass(frozen=True, kw_only=True, slots=True)
class Answers:
    """The answers of a row to its prompt."""

    prompt: tuple[Message, ...]  # its turns
    # Turns of each answer; only what the assistant says in them is learned.
    answers: tuple[tuple[Message, ...], ...]
    # Each answer's value: 1 for chosen or desired, or 1 more than the margin of a pair, 0 for
    # rejected or not desired; its score, or its rank below 0; or its reward.
    values: tuple[float, ...]
    names: tuple[str, ...]  # what the file calls each answer, for errors
    # Each answer's sum of the reference's log-probabilities, in nats; empty where the row does not
    # have them.
    references: tuple[float, ...] = ()
    # The log-probability that each token of each answer was sampled with, its end included; empty
    # where the row does not have them.
    logprobs: tuple[tuple[float, ...], ...] = ()
    # A teacher's likeliest tokens at each token of each answer, its end included; empty where the
    # row does not have them.
    teacher: "tuple[TopTokens, ...]" = ()
    is_rated: bool = False  # whether one number is learned of each, at its last token
    # Ratings of a pair, by which the rejected answer is the better one; None without.
    contradiction: str | None = None


def compared(
    found: Answers,
    row: Mapping[str, object],
    form: RowForm,
    source: str,
    unused: tuple[str, ...],
) -> Compared:
    """Return a row that compares answers.

    Args:
        found: The answers that the format has read from a row.
        row: With the columns of its format.
        form: How rows are read.
        source: Where the row is.
        unused: Keys of the row that are not read.

    Raises:
        RowError: An answer is empty.
    """
    _require_prompt(found.prompt)
    for name, answer in zip(found.names, found.answers, strict=True):
        _require_answer(answer, name)
    prompt = _trained(found.prompt, is_trained=False)
    return Compared(
        conversations=tuple(
            form.conversation((*prompt, *_trained(answer, is_trained=True)), row, source)
            for answer in found.answers
        ),
        values=found.values,
        references=found.references,
        logprobs=found.logprobs,
        teacher=found.teacher,
        source=source,
        is_rated=found.is_rated,
        unused=unused,
        contradiction=found.contradiction,
    )


def reading(
    read: Callable[[Mapping[str, object], RowForm], Answers],
) -> Callable[[Mapping[str, object], RowForm, str, tuple[str, ...]], Compared]:
    """Return what reads a row of a format, from what reads its answers."""
    return lambda row, form, source, unused: compared(read(row, form), row, form, source, unused)


def listed_names(form: RowForm, num: int) -> tuple[str, ...]:
    """Return what a file with a list of answers calls each."""
    return tuple(f"{form.column('completions')}[{index}]" for index in range(num))


def read_completion(
    row: Mapping[str, object], names: tuple[str, str], ignored: Sequence[str]
) -> list[Message]:
    """Read a prompt and its completion, of which one at least is turns; the prompt is not learned.

    Args:
        row: With both columns.
        names: The file's names of them.
        ignored: Keys of turns that are left out on purpose.

    Raises:
        RowError: One is missing or of another kind, or says nothing.
    """
    prompt, completion = (
        turns_of_column(row, name, role, ignored)
        for name, role in zip(names, ("user", "assistant"), strict=True)
    )
    _require_prompt(prompt)
    _require_answer(completion, names[1])
    return [*_trained(prompt, is_trained=False), *completion]


def recast_pair(row: Mapping[str, object], column: Column) -> Mapping[str, object]:
    """Return a row with the columns of a pair, where it has them as LLaMA-Factory names them.

    A pair is there a prompt in `conversations` or `messages`, or in `instruction` and `input`, with
    one turn or text for each answer. Any other row is returned as it is.

    Source: LLaMA-Factory's data/README.md, read in 2026.
    """
    pair = column("chosen"), column("rejected")
    if not all(_is_one(row, name) for name in pair):
        return row
    fields, _ = with_prompt(row, column, num_answers=0)
    for name in pair if fields is not row else ():
        if isinstance(fields[name], Mapping):
            fields = {**fields, name: [fields[name]]}
    return Filled(fields) if isinstance(row, Filled) else fields


def with_prompt(
    row: Mapping[str, object], column: Column, *, num_answers: int
) -> tuple[Mapping[str, object], list[object]]:
    """Return a row with its prompt in the format's column, and the turns after it.

    Args:
        row: The row as it was read; it is returned itself if its prompt is nowhere else.
        column: Gives the file's name of a column.
        num_answers: Turns of a conversation, from the last, that are no prompt.
    """
    if row.get(column("prompt")) is not None:
        return row, []
    fields = dict(row)
    name = next((name for name in ("conversations", "messages") if row.get(name)), "")
    turns = row.get(name)
    if isinstance(turns, list):
        del fields[name]
        num_asked = len(turns) - num_answers
        return {**fields, column("prompt"): turns[:num_asked]}, turns[num_asked:]
    if isinstance(row.get("instruction"), str) and isinstance(row.get("input") or "", str):
        asked, extra = fields.pop("instruction"), fields.pop("input", None)
        return {**fields, column("prompt"): f"{asked}\n\n{extra}" if extra else asked}, []
    return row, []


def _is_one(row: Mapping[str, object], name: str) -> bool:
    """Return whether a column holds an answer, and no conversation that begins with its prompt."""
    value = row.get(name)
    if isinstance(value, list):
        first = value[0] if value and isinstance(value[0], Mapping) else {}
        return (first.get("role") or first.get("from")) in ("assistant", "gpt")
    if isinstance(value, str):
        return not (_is_transcript(value) or is_turns(value))
    return isinstance(value, Mapping)


def _require_prompt(prompt: Sequence[Message]) -> None:
    """Check that a prompt asks something, and that it does not end with an answer."""
    roles = [turn.role for turn in prompt]
    if "user" not in roles:
        raise RowError("its prompt has no user turn")
    if not any(turn.content.strip() for turn in prompt if turn.role != "system"):
        raise RowError("empty prompt")
    if roles[-1] == "assistant":
        raise RowError("its prompt ends with an answer")


def _require_answer(answer: Sequence[Message], name: str) -> None:
    """Check that an answer says something, and that the assistant has the first and last word."""
    if not answer:
        raise RowError(f"{name!r} is empty")
    if answer[0].role != "assistant" or answer[-1].role != "assistant":
        at = "begins" if answer[0].role != "assistant" else "ends"
        turn = answer[0 if at == "begins" else -1]
        raise RowError(f"{name!r} {at} with a turn of the {turn.role}, and is no answer")
    if not all(turn.content.strip() or turn.calls for turn in answer if turn.role == "assistant"):
        raise RowError(f"{name!r} is empty")


def _trained(turns: Sequence[Message], *, is_trained: bool) -> tuple[Message, ...]:
    """Return turns of which those of the assistant are learned, or are not."""
    return tuple(
        replace(turn, is_trained=is_trained) if turn.role == "assistant" else turn for turn in turns
    )


# --------------------------------------------------------------------------------------------------
# Turns


def turns_of_column(
    row: Mapping[str, object], name: str, role: str, ignored: Sequence[str]
) -> tuple[Message, ...]:
    """Read a column of text, which is one turn of a role, or of turns."""
    return _as_turns(row[name], name, role, ignored) if name in row else _no(row, name)


def _as_turns(value: object, name: str, role: str, ignored: Sequence[str]) -> tuple[Message, ...]:
    if isinstance(value, str):
        if _is_transcript(value):
            return _transcript(value, is_prompt=role == "user")
        if not is_turns(value):
            return (Message(role=role, content=text({name: value}, name)),)
        value = decoded(value.encode(errors="surrogatepass"))
        if isinstance(value, RowError):
            raise RowError(f"{name!r}: {value}")
    if not isinstance(value, list) or not all(isinstance(turn, Mapping) for turn in value):
        raise RowError(f"{name!r} must be text or a list of turns, this is {type(value).__name__}")
    turns = [mapping(turn) for turn in value]
    keys = ("from", "value") if turns and "from" in turns[0] else ("role", "content")
    unread = find_unread_in_turns(
        turns,
        read=keys,
        also_read=partial(keys_read, is_chosen=False),
        ignored=ignored,
        unlearned_roles=(),
    )
    if unread.lost:
        raise RowError("; ".join(unread.lost.values()), lost=list(unread.lost))
    return tuple(read_turn(turn, keys=keys, ignored=ignored) for turn in turns)


def _no(row: Mapping[str, object], name: str) -> tuple[Message, ...]:
    """Raise the error for a missing column."""
    raise RowError(f"no key {name!r}; it has {', '.join(map(repr, row))}")


def _is_transcript(value: object) -> bool:
    """Return whether a text is a conversation: "Human:" first, "Assistant:" after a blank line."""
    return isinstance(value, str) and bool(
        re.match(r"\s*Human:", value) and "\n\nAssistant:" in value
    )


def _transcript(content: str, *, is_prompt: bool) -> tuple[Message, ...]:
    """Read a text with "Human:" and "Assistant:"; a prompt may end where the answer begins."""
    pieces = _SPEAKER.split("\n\n" + content.lstrip())
    pairs = zip(pieces[1::2], pieces[2::2], strict=True)
    turns = [Message(role=_SPEAKERS[who], content=said.strip()) for who, said in pairs]
    if is_prompt and not turns[-1].content:
        turns.pop()
    return tuple(turns)


def asked_and_said(
    row: Mapping[str, object],
    prompt_name: str,
    answers: Sequence[tuple[Message, ...]],
    ignored: Sequence[str],
) -> list[tuple[Message, ...]]:
    """Read a prompt; after "Assistant:" the blanks that answers begin with are none of theirs."""
    prompt = turns_of_column(row, prompt_name, "user", ignored)
    if not _is_transcript(row[prompt_name]):
        return [prompt, *answers]
    stripped = (
        tuple(replace(turn, content=turn.content.strip()) for turn in answer) for answer in answers
    )
    return [prompt, *stripped]


def num_common(chosen: Sequence[Message], rejected: Sequence[Message]) -> int:
    """Count the turns that both begin with; at least one is left of each."""
    most = min(len(chosen), len(rejected)) - 1
    return next((n for n in range(most) if chosen[n] != rejected[n]), max(most, 0))


def require_asked(asked: Sequence[Message], prompt: Sequence[Message], name: str) -> None:
    """Check that conversations begin with what the column of the prompt says."""
    said = [turn.content.strip() for turn in prompt]
    if any(turn.content.strip() not in said for turn in asked):
        raise RowError(f"{name!r} is not among the turns that both conversations begin with")


def prompt_and_answers(
    row: Mapping[str, object], column: Column, ignored: Sequence[str]
) -> tuple[tuple[Message, ...], tuple[tuple[Message, ...], ...]]:
    """Read a prompt and a list of answers to it."""
    name = column("completions")
    given = [
        _as_turns(one, f"{name}[{index}]", "assistant", ignored)
        for index, one in enumerate(listed(row, name))
    ]
    prompt, *answers = asked_and_said(row, column("prompt"), given, ignored)
    return prompt, tuple(answers)


# --------------------------------------------------------------------------------------------------
# Numbers


def listed(row: Mapping[str, object], name: str) -> list[object]:
    """Return a list, which may be a JSON text: a column of a .csv file holds no lists."""
    if name not in row:
        _no(row, name)
    value = row[name]
    if isinstance(value, str) and value.lstrip().startswith("["):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise RowError(f"broken JSON in {name!r}: {error}") from None
    if not isinstance(value, list):
        raise RowError(f"{name!r} must be a list, this is {type(value).__name__}")
    return value


def numbers(row: Mapping[str, object], name: str, num: int) -> list[float]:
    """Read a list of so many numbers."""
    values = listed(row, name)
    if len(values) != num:
        raise RowError(f"{name!r} has {len(values)} numbers for {num} answers")
    return [number(value, f"{name}[{index}]") for index, value in enumerate(values)]


def number(value: object, name: str) -> float:
    """Read a finite number, which may be a text."""
    if isinstance(value, str):
        try:
            value = float(value)
        except ValueError:
            raise RowError(f"{name!r} is {value!r}, not a number") from None
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise RowError(f"{name!r} is {json.dumps(value, default=repr)}, not a finite number")
    return float(value)


def references_of(
    row: Mapping[str, object], names: Sequence[str], column: Column, ignored: Sequence[str]
) -> tuple[float, ...]:
    """Return the reference's log-probabilities where a row has them for all its answers."""
    columns = [column(name) for name in names if column(name) not in ignored]
    given = [name for name in columns if row.get(name) is not None]
    if given and len(given) < len(names):
        raise RowError(f"it has {given[0]!r} alone: every answer needs the reference's")
    return tuple(_logp(number(row[name], name), name) for name in given)


def listed_references(
    row: Mapping[str, object], column: Column, ignored: Sequence[str], num: int
) -> tuple[float, ...]:
    """Return the reference's log-probabilities where a row has a list of them."""
    name = column("ref_logps")
    if name in ignored or row.get(name) is None:
        return ()
    values = numbers(row, name, num)
    return tuple(_logp(value, f"{name}[{index}]") for index, value in enumerate(values))


def _logp(value: float, name: str) -> float:
    """Return the log-probability of an answer, if it can be one."""
    if value > 0:
        raise RowError(f"{name!r} is {value:g}, and the logarithm of a probability is 0 at most")
    return value


def logprobs_of(
    row: Mapping[str, object], name: str, ignored: Sequence[str], num: int
) -> tuple[tuple[float, ...], ...]:
    """Return the sampler's log-probabilities of each answer's tokens where a row has them."""
    if name in ignored or row.get(name) is None:
        return ()
    lists = listed(row, name)
    if len(lists) != num or not all(isinstance(one, list) for one in lists):
        raise RowError(f"{name!r} must be a list of {num} lists, one for each answer")
    return tuple(
        tuple(number(value, f"{name}[{index}]") for value in one)
        for index, one in enumerate(lists)
        if isinstance(one, list)
    )
