"""Rows that compare answers: pairs, rankings, answers with a label, and sampled answers.

A prompt is text or turns, and so is an answer. Where a pair has no prompt of its own, both of its
sides are whole conversations, and the turns that both begin with are the prompt: as turns
(UltraFeedback), or as text with "Human:" and "Assistant:" (HH). A text is a turn: a prompt the
user's, an answer the assistant's; unless it is written as a conversation, as in HH, or as the JSON
of turns, which a column of a .csv file is.
"""

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from finetune.data.sources import Filled, RowError, decoded
from finetune.data.teacher import TopTokens
from finetune.data.turns import Message, keys_read, mapping, read_turn, text
from finetune.data.unread import find_unread_in_turns

_SPEAKERS = {"Human": "user", "Assistant": "assistant"}
_SPEAKER = re.compile(r"\n\n(Human|Assistant):")
_WRITTEN_TURNS = re.compile(r"\s*\[\s*\{\s*['\"](role|content|from|value)['\"]\s*:")
_LABELS = {"true": 1.0, "false": 0.0, "1": 1.0, "0": 0.0, "1.0": 1.0, "0.0": 0.0}
RATINGS = (
    ("score_chosen", "score_rejected"),
    ("chosen_score", "rejected_score"),
    ("rating_chosen", "rating_rejected"),
    ("chosen_rating", "rejected_rating"),
    ("chosen-rating", "rejected-rating"),
)
"""Columns in which sets of pairs have how good each answer is; no loss reads them."""
Column = Callable[[str], str]


@dataclass(frozen=True, kw_only=True, slots=True)
class Answers:
    """The answers of a row to its prompt.

    Attributes:
        prompt: Its turns.
        answers: Turns of each answer; only what the assistant says in them is learned.
        values: Of each answer: 1 for chosen or desired, or 1 more than the margin of a pair, 0 for
            rejected or not desired; its score, or its rank below 0; or its reward.
        references: Of each answer, the sum of the reference's log-probabilities, in nats; empty
            where the row does not have them.
        logprobs: Of each answer, the log-probability that each token was sampled with, its end
            included; empty where the row does not have them.
        teacher: Of each answer, a teacher's likeliest tokens at each of its tokens, its end
            included; empty where the row does not have them.
        contradiction: Ratings of a pair, by which the rejected answer is the better one; None
            without.
    """

    prompt: tuple[Message, ...]
    answers: tuple[tuple[Message, ...], ...]
    values: tuple[float, ...]
    references: tuple[float, ...] = ()
    logprobs: tuple[tuple[float, ...], ...] = ()
    teacher: tuple[TopTokens, ...] = ()
    contradiction: str | None = None


def read_answers(
    row: Mapping[str, object], data_format: str, *, column: Column, ignored: Sequence[str]
) -> Answers:
    """Read a row that compares answers.

    Args:
        row: With the columns of its format.
        data_format: `preference`, `ranking`, `labelled`, `sampled`, `distilled` or `rated`.
        column: Gives the file's name of a column.
        ignored: Columns, and keys of turns, that are left out on purpose.

    Raises:
        RowError: A column is missing or of another kind, an answer is empty, or none is better.
    """
    found = _READERS[data_format](row, column, ignored)
    _require_prompt(found.prompt)
    names = _names(data_format, len(found.answers), column)
    for name, answer in zip(names, found.answers, strict=True):
        _require_answer(answer, name)
    return replace(
        found,
        prompt=tuple(_asked(turn) for turn in found.prompt),
        answers=tuple(tuple(_learned(turn) for turn in answer) for answer in found.answers),
    )


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
        _turns(row, name, role, ignored)
        for name, role in zip(names, ("user", "assistant"), strict=True)
    )
    _require_prompt(prompt)
    _require_answer(completion, names[1])
    return [*map(_asked, prompt), *completion]


def recast(row: Mapping[str, object], data_format: str, *, column: Column) -> Mapping[str, object]:
    """Return a row with the columns of a format, where it has them as LLaMA-Factory names them.

    A pair is there a prompt in `conversations` or `messages`, or in `instruction` and `input`, with
    one turn or text for each answer. An answer with a label is the end of a conversation, or an
    `output`, and its label is `kto_tag`. Any other row is returned as it is.

    Source: LLaMA-Factory's data/README.md, read in 2026.

    Args:
        row: As it was read.
        data_format: The format.
        column: Gives the file's name of a column.
    """
    pair, label = (column("chosen"), column("rejected")), "kto_tag"
    is_pair = data_format in ("preference", "rated") and all(_is_one(row, name) for name in pair)
    is_labelled = data_format == "labelled" and label in row
    if not (is_pair or is_labelled) or row.get(column("prompt")) is not None:
        return row
    fields = dict(row)
    name = next((name for name in ("conversations", "messages") if row.get(name)), "")
    turns = row.get(name)
    if isinstance(turns, list):
        del fields[name]
        num_asked = len(turns) - is_labelled
        fields[column("prompt")] = turns[:num_asked]
        if is_labelled:
            fields[column("completion")] = turns[num_asked:]
    elif isinstance(row.get("instruction"), str) and isinstance(row.get("input") or "", str):
        asked, extra = fields.pop("instruction"), fields.pop("input", None)
        fields[column("prompt")] = f"{asked}\n\n{extra}" if extra else asked
        if is_labelled and "output" in row:
            fields[column("completion")] = fields.pop("output")
    else:
        return row
    if is_labelled:
        fields[column("label")] = fields.pop(label)
    for name in pair if is_pair else ():
        if isinstance(fields[name], Mapping):
            fields[name] = [fields[name]]
    return Filled(fields) if isinstance(row, Filled) else fields


def is_turns(value: object) -> bool:
    """Return whether a value is the JSON text of turns, which a column of a .csv file may be."""
    return isinstance(value, str) and _WRITTEN_TURNS.match(value) is not None


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


def _names(data_format: str, num: int, column: Column) -> list[str]:
    if data_format in ("preference", "rated"):
        return [column("chosen"), column("rejected")]
    if data_format in ("labelled", "distilled"):
        return [column("completion")]
    return [f"{column('completions')}[{index}]" for index in range(num)]


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


def _asked(turn: Message) -> Message:
    return replace(turn, is_trained=False) if turn.role == "assistant" else turn


def _learned(turn: Message) -> Message:
    return replace(turn, is_trained=True) if turn.role == "assistant" else turn


# --------------------------------------------------------------------------------------------------
# Formats


def _read_preference(row: Mapping[str, object], column: Column, ignored: Sequence[str]) -> Answers:
    """Read a pair: prompt, chosen and rejected, or two conversations that begin alike."""
    names = column("chosen"), column("rejected")
    sides = [_turns(row, name, "assistant", ignored) for name in names]
    prompt_name = column("prompt")
    has_prompt = row.get(prompt_name) is not None and prompt_name not in ignored
    are_answers = all(not side or side[0].role == "assistant" for side in sides)
    if has_prompt and are_answers:
        prompt, *sides = _asked_and_said(row, prompt_name, sides, ignored)
    else:
        if are_answers:
            raise RowError(
                f"it has no prompt, and {names[0]!r} is no conversation that begins with 'Human:'"
            )
        num = _num_common(*sides)
        prompt, sides = sides[0][:num], [side[num:] for side in sides]
        if any(side and side[0].role != "assistant" for side in sides):
            raise RowError(f"{names[0]!r} and {names[1]!r} do not begin with the same prompt")
        if has_prompt:
            _require_asked(_turns(row, prompt_name, "user", ignored), prompt, prompt_name)
    if sides[0] == sides[1]:
        raise RowError(f"{names[0]!r} and {names[1]!r} are the same")
    return Answers(
        prompt=tuple(prompt),
        answers=tuple(map(tuple, sides)),
        values=(1.0, 0.0),
        references=_references(row, ("ref_chosen_logps", "ref_rejected_logps"), column, ignored),
        contradiction=_contradiction(row, ignored),
    )


def _read_rated(row: Mapping[str, object], column: Column, ignored: Sequence[str]) -> Answers:
    """Read a pair, and by how much the reward of the chosen answer is to be larger."""
    pair, name = _read_preference(row, column, ignored), column("margin")
    if name in ignored or row.get(name) is None:
        return pair
    margin = _number(row[name], name)
    if margin < 0:
        raise RowError(
            f"{name!r} is {margin:g}, and the chosen answer is the better one: at least 0"
        )
    return replace(pair, values=(1 + margin, 0.0))


def _contradiction(row: Mapping[str, object], ignored: Sequence[str]) -> str | None:
    """Return the ratings of a pair that say the opposite of it; equal ones say nothing."""
    for names in RATINGS:
        try:
            better, worse = (_number(row.get(name), name) for name in names)
        except RowError:
            continue  # no ratings: no loss reads these columns
        if better < worse and not {*names} & {*ignored}:
            return f"{names[0]} {better:g}, {names[1]} {worse:g}"
    return None


def _read_ranking(row: Mapping[str, object], column: Column, ignored: Sequence[str]) -> Answers:
    """Read answers with scores, the higher the better, or ranks, of which 1 is the best."""
    prompt, answers = _prompt_and_answers(row, column, ignored)
    given = [name for name in ("scores", "ranks") if row.get(column(name)) is not None]
    if len(given) != 1:
        both = f"{column('scores')!r} and {column('ranks')!r}"
        raise RowError(f"it has both {both}" if given else f"it has neither {both}")
    sign = 1.0 if given[0] == "scores" else -1.0
    values = [sign * value for value in _numbers(row, column(given[0]), len(answers))]
    if len(answers) < 2:
        raise RowError(f"{column('completions')!r} has one answer, and nothing to compare it with")
    if len(set(values)) == 1:
        raise RowError(f"{column(given[0])!r} are all the same: no answer is better")
    for index, answer in enumerate(answers):
        if answer in answers[:index]:
            first = answers.index(answer)
            raise RowError(f"{column('completions')}[{first}] and [{index}] are the same")
    return Answers(
        prompt=prompt,
        answers=answers,
        values=tuple(values),
        references=_listed_references(row, column, ignored, len(answers)),
    )


def _read_labelled(row: Mapping[str, object], column: Column, ignored: Sequence[str]) -> Answers:
    """Read an answer that is desired, or not: true and false, 1 and 0, or the texts of these."""
    name = column("label")
    label = row.get(name)
    value = float(label) if isinstance(label, int | float) and label in (0, 1) else None
    if isinstance(label, str):
        value = _LABELS.get(label.strip().lower())
    if value is None:
        raise RowError(f"{name!r} is {json.dumps(label, default=repr)}, neither true nor false")
    answer = _turns(row, column("completion"), "assistant", ignored)
    prompt, *answers = _asked_and_said(row, column("prompt"), [answer], ignored)
    return Answers(
        prompt=prompt,
        answers=tuple(answers),
        values=(value,),
        references=_references(row, ("ref_logps",), column, ignored),
    )


def _read_sampled(row: Mapping[str, object], column: Column, ignored: Sequence[str]) -> Answers:
    """Read answers that a model has sampled, with their rewards; some may be alike."""
    prompt, answers = _prompt_and_answers(row, column, ignored)
    if len(answers) < 2:
        raise RowError(f"{column('completions')!r} has one answer: an advantage is over others")
    return Answers(
        prompt=prompt,
        answers=answers,
        values=tuple(_numbers(row, column("rewards"), len(answers))),
        references=_listed_references(row, column, ignored, len(answers)),
        logprobs=_logprobs(row, column("logprobs"), ignored, len(answers)),
    )


def _read_distilled(row: Mapping[str, object], column: Column, ignored: Sequence[str]) -> Answers:
    """Read an answer with a teacher's likeliest tokens at each of its tokens."""
    answer = _turns(row, column("completion"), "assistant", ignored)
    prompt, *answers = _asked_and_said(row, column("prompt"), [answer], ignored)
    names = column("top_ids"), column("top_logprobs")
    ids, logprobs = (_list(row, name) for name in names)
    return Answers(
        prompt=prompt,
        answers=tuple(answers),
        values=(1.0,),
        teacher=(TopTokens.read(ids, logprobs, names),),
    )


_READERS = {
    "preference": _read_preference,
    "ranking": _read_ranking,
    "labelled": _read_labelled,
    "sampled": _read_sampled,
    "distilled": _read_distilled,
    "rated": _read_rated,
}


# --------------------------------------------------------------------------------------------------
# Turns


def _turns(
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


def _asked_and_said(
    row: Mapping[str, object],
    prompt_name: str,
    answers: Sequence[tuple[Message, ...]],
    ignored: Sequence[str],
) -> list[tuple[Message, ...]]:
    """Read a prompt; after "Assistant:" the blanks that answers begin with are none of theirs."""
    prompt = _turns(row, prompt_name, "user", ignored)
    if not _is_transcript(row[prompt_name]):
        return [prompt, *answers]
    stripped = (
        tuple(replace(turn, content=turn.content.strip()) for turn in answer) for answer in answers
    )
    return [prompt, *stripped]


def _num_common(chosen: Sequence[Message], rejected: Sequence[Message]) -> int:
    """Count the turns that both begin with; at least one is left of each."""
    most = min(len(chosen), len(rejected)) - 1
    return next((n for n in range(most) if chosen[n] != rejected[n]), max(most, 0))


def _require_asked(asked: Sequence[Message], prompt: Sequence[Message], name: str) -> None:
    """Check that conversations begin with what the column of the prompt says."""
    said = [turn.content.strip() for turn in prompt]
    if any(turn.content.strip() not in said for turn in asked):
        raise RowError(f"{name!r} is not among the turns that both conversations begin with")


def _prompt_and_answers(
    row: Mapping[str, object], column: Column, ignored: Sequence[str]
) -> tuple[tuple[Message, ...], tuple[tuple[Message, ...], ...]]:
    name = column("completions")
    given = [
        _as_turns(one, f"{name}[{index}]", "assistant", ignored)
        for index, one in enumerate(_list(row, name))
    ]
    prompt, *answers = _asked_and_said(row, column("prompt"), given, ignored)
    return prompt, tuple(answers)


# --------------------------------------------------------------------------------------------------
# Numbers


def _list(row: Mapping[str, object], name: str) -> list[object]:
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


def _numbers(row: Mapping[str, object], name: str, num: int) -> list[float]:
    values = _list(row, name)
    if len(values) != num:
        raise RowError(f"{name!r} has {len(values)} numbers for {num} answers")
    return [_number(value, f"{name}[{index}]") for index, value in enumerate(values)]


def _number(value: object, name: str) -> float:
    if isinstance(value, str):
        try:
            value = float(value)
        except ValueError:
            raise RowError(f"{name!r} is {value!r}, not a number") from None
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise RowError(f"{name!r} is {json.dumps(value, default=repr)}, not a finite number")
    return float(value)


def _references(
    row: Mapping[str, object], names: Sequence[str], column: Column, ignored: Sequence[str]
) -> tuple[float, ...]:
    """Return the reference's log-probabilities where a row has them for all its answers."""
    columns = [column(name) for name in names if column(name) not in ignored]
    given = [name for name in columns if row.get(name) is not None]
    if given and len(given) < len(names):
        raise RowError(f"it has {given[0]!r} alone: every answer needs the reference's")
    return tuple(_logp(_number(row[name], name), name) for name in given)


def _listed_references(
    row: Mapping[str, object], column: Column, ignored: Sequence[str], num: int
) -> tuple[float, ...]:
    name = column("ref_logps")
    if name in ignored or row.get(name) is None:
        return ()
    values = _numbers(row, name, num)
    return tuple(_logp(value, f"{name}[{index}]") for index, value in enumerate(values))


def _logp(value: float, name: str) -> float:
    """Return the log-probability of an answer, if it can be one."""
    if value > 0:
        raise RowError(f"{name!r} is {value:g}, and the logarithm of a probability is 0 at most")
    return value


def _logprobs(
    row: Mapping[str, object], name: str, ignored: Sequence[str], num: int
) -> tuple[tuple[float, ...], ...]:
    if name in ignored or row.get(name) is None:
        return ()
    lists = _list(row, name)
    if len(lists) != num or not all(isinstance(one, list) for one in lists):
        raise RowError(f"{name!r} must be a list of {num} lists, one for each answer")
    return tuple(
        tuple(_number(value, f"{name}[{index}]") for value in one)
        for index, one in enumerate(lists)
        if isinstance(one, list)
    )
