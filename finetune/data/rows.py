"""Read the rows of a data set into one form: conversations that know where they came from.

A row may be a chat (`messages` with role and content, or ShareGPT's `conversations` with from and
value), an Alpaca instruction, a prompt with its completion, or a document. A document stays text;
all others become a `Conversation`: messages, and a source such as `train.jsonl:17`. A row that
compares answers (`finetune.data.rows`) becomes several of them.

A row that cannot be used is not skipped unless the recipe says how many may be: the reader goes
through the whole file and then raises one error that names the bad rows. A run that silently trains
on 97 % of its rows has a bug that nobody finds.
"""

import json
import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, Literal, Self

import numpy as np

from finetune.data.sources import Filled, Raw, RowError, decoded
from finetune.data.turns import (
    Message,
    has_nulls_in_tools,
    keys_read,
    mapping,
    read_tools,
    read_turn,
    text,
)
from finetune.errors import DataError
from finetune.recipe.sections import COMPARED, FORMAT_COLUMNS, SUPERVISED, DataSection

if TYPE_CHECKING:
    from numpy.typing import NDArray


# ---------------------------------------------------------------------------------------------
# Fields of a row that training would not read: refused if they change its meaning, else listed.
#
# A weight of 0, an undesired answer, a system prompt in its own column: without them the row means
# something else. Other columns (ids, sources, languages) change nothing and are listed once.
# `data.ignored_columns` names what is left out on purpose.

_TOOLS = "tools and their calls are read in chats only (`messages`, `sharegpt`)"
_REASONING = "write it into the answer, between <think> and </think>"
_PAIRS = "pairs of answers are learned by `objective.method: dpo` and others, or `reward`"
_FOR_KTO = "desired and undesired answers are learned by `objective.method: kto`"
_SYSTEM = "make it the first turn of `messages`, or set `data.system` for all rows"
_MEDIA = "only text is trained"

MEANINGS: Mapping[str, str] = {
    "tools": _TOOLS,
    "functions": _TOOLS,
    "tool_calls": _TOOLS,
    "tool_call_id": _TOOLS,
    "function_call": _TOOLS,
    "reasoning_content": _REASONING,
    "reasoning": _REASONING,
    "thinking": _REASONING,
    "weight": "every answer counts alike",
    "train": "every answer is trained",
    "label": _FOR_KTO,
    "kto_tag": _FOR_KTO,
    "chosen": _PAIRS,
    "rejected": _PAIRS,
    "system": _SYSTEM,
    "system_prompt": _SYSTEM,
    "history": "make it turns of `messages`",
    "documents": "make it part of the question",
    "chat_template_kwargs": "the template has the same settings for all rows",
    "image": _MEDIA,
    "images": _MEDIA,
    "audio": _MEDIA,
    "audios": _MEDIA,
    "video": _MEDIA,
    "videos": _MEDIA,
}
"""Columns that change what a row means -> the problem, or what to do about it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Unread:
    """The keys of a row that are not read.

    Attributes:
        lost: Keys that mean something -> the problem to report.
        unused: All keys that hold something.
    """

    lost: Mapping[str, str]
    unused: tuple[str, ...]


def find_unread(
    row: Mapping[str, object], *, read: Collection[str], ignored: Collection[str]
) -> Unread:
    """Return the columns of a row that are not read.

    Args:
        row: The row.
        read: Columns that are read.
        ignored: Columns that are left out on purpose.
    """
    unused = tuple(key for key, value in row.items() if key not in read and not _is_absent(value))
    lost = {
        key: f"{key!r} would be dropped: {MEANINGS[key]}"
        for key in unused
        if key in MEANINGS and key not in ignored and not _is_same_as_none(key, row[key])
    }
    return Unread(lost=lost, unused=unused)


def find_unread_in_turns(
    turns: Sequence[object],
    *,
    read: Sequence[str],
    also_read: Callable[[object, Mapping[str, object]], Collection[str]],
    ignored: Collection[str],
    unlearned_roles: Collection[str],
) -> Unread:
    """Return the keys of a chat's turns that are not read; any of them may mean something.

    Args:
        turns: The turns; values that are not objects are skipped.
        read: The keys of role and text.
        also_read: Gives the other keys that are read in a turn of this role.
        ignored: Keys that are left out on purpose.
        unlearned_roles: Roles whose turns have no loss, so that a weight of 0 changes nothing.
    """
    lost: dict[str, str] = {}
    unused: dict[str, None] = {}
    for number, turn in enumerate(turns, start=1):
        if not isinstance(turn, Mapping):
            continue
        is_learned = turn.get(read[0]) not in unlearned_roles
        known = {*read, *(key for key in also_read(turn.get(read[0]), turn) if key not in ignored)}
        for key, value in turn.items():
            if key in known or _is_absent(value):
                continue
            unused[str(key)] = None
            is_harmless = _is_same_as_none(key, value) or (
                not is_learned and key in ("weight", "train") and value in (0, 1)
            )
            if key not in ignored and not is_harmless:
                means = MEANINGS.get(key, "its meaning is not known")
                lost.setdefault(key, f"{key!r} of turn {number} would be dropped: {means}")
    return Unread(lost=lost, unused=tuple(unused))


def _is_absent(value: object) -> bool:
    """Return whether a value is null or empty."""
    if isinstance(value, str):
        return not value.strip()
    return value is None or (isinstance(value, list | tuple | Mapping) and not value)


def _is_same_as_none(key: str, value: object) -> bool:
    """Return whether a value asks for the default behaviour."""
    if key == "weight":
        return isinstance(value, int | float) and value == 1
    return key in ("train", "label") and value is True


NO_CLASS = -100
"""Of a word that has no class, as in transformers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Tagged:
    """Words with the number of the class of each, or -100 for none; some word has one."""

    words: tuple[str, ...]
    labels: tuple[int, ...]
    source: str
    unused: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """The words, with a space between them."""
        return " ".join(self.words)


def read_tagged(
    row: Mapping[str, object], column: Callable[[str], str], source: str, unused: tuple[str, ...]
) -> Tagged:
    """Read words and the number of the class of each.

    Args:
        row: With the columns `tokens` and `labels`.
        column: Gives the file's name of a column.
        source: Where the row is.
        unused: Keys of the row that are not read.

    Raises:
        RowError: There are none, they differ in number, or one is no word or no number of a class.
    """
    names = column("tokens"), column("labels")
    words, labels = row[names[0]], row[names[1]]
    if not isinstance(words, list) or not words:
        raise RowError(f"{names[0]!r} is no list, or an empty one")
    if not isinstance(labels, list) or len(words) != len(labels):
        num = len(labels) if isinstance(labels, list) else "no list of"
        raise RowError(f"{names[0]!r} has {len(words)} words, {names[1]!r} {num} classes")
    for word in words:
        if not isinstance(word, str) or not word.strip():
            raise RowError(f"{names[0]!r} has {json.dumps(word, default=repr)}, and no word")
    for label in labels:
        is_number = isinstance(label, int) and not isinstance(label, bool)
        if not is_number or (label < 0 and label != NO_CLASS):
            raise RowError(
                f"{names[1]!r} has {json.dumps(label, default=repr)}, and classes are numbered from"
                f" 0; {NO_CLASS} is none"
            )
    if all(label == NO_CLASS for label in labels):
        raise RowError(f"{names[1]!r} has no class")
    return Tagged(words=tuple(words), labels=tuple(labels), source=source, unused=unused)


# ---------------------------------------------------------------------------------------------
# A teacher's likeliest tokens at each token of an answer, and their log-probabilities.
#
# A row has them as two lists of lists, `top_ids` and `top_logprobs`, with one list for each token
# of the answer, its end included: what the teacher would have said in its place, the token itself
# or another. Lists may differ in length, and in the order of tokens.

_MOST_MASS = 1.01
"""Probabilities that were rounded to 16 bits may add up to a little more than 1."""
_NONE = -1


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TopTokens:
    """The likeliest tokens at each of T tokens.

    Attributes:
        counts: (T,) int32: how many each has.
        ids: They, end to end, int32, at each token the likeliest first.
        logprobs: Of each, in nats, float32.
    """

    counts: "NDArray[np.int32]"
    ids: "NDArray[np.int32]"
    logprobs: "NDArray[np.float32]"

    @classmethod
    def read(cls, ids: Sequence[object], logprobs: Sequence[object], names: Sequence[str]) -> Self:
        """Read the two lists of a row.

        Args:
            ids: For each token a list of tokens.
            logprobs: For each token a list of numbers.
            names: The two columns.

        Raises:
            RowError: They do not fit each other, or are no log-probabilities of different tokens.
        """
        ids_of, logprobs_of = (_lists(x, n) for x, n in zip((ids, logprobs), names, strict=True))
        counts = np.array([len(one) for one in ids_of], dtype=np.int32)
        others = np.array([len(one) for one in logprobs_of], dtype=np.int32)
        if len(counts) != len(others):
            raise RowError(f"{names[0]!r} has {len(counts)} lists, {names[1]!r} {len(others)}")
        for at in np.flatnonzero((counts != others) | (counts == 0))[:1].tolist():
            raise RowError(
                f"{names[0]}[{at}] has {counts[at]} tokens, {names[1]}[{at}] {others[at]} numbers;"
                " each needs as many, and one or more"
            )
        flat_ids = _flat(ids_of, names[0], "iu", "tokens")
        flat_logprobs = _flat(logprobs_of, names[1], "iuf", "numbers").astype(np.float64)
        token = np.repeat(np.arange(len(counts)), counts)
        by_id = np.lexsort((flat_ids, token))
        is_twice = (np.diff(token[by_id]) == 0) & (np.diff(flat_ids[by_id]) == 0)
        for at in token[by_id][:-1][is_twice][:1].tolist():
            raise RowError(f"{names[0]}[{at}] has a token twice")
        for at in token[(flat_ids < 0) | (flat_ids >= 2**31)][:1].tolist():
            raise RowError(f"{names[0]}[{at}] has a number that is no token")
        for at in token[~np.isfinite(flat_logprobs)][:1].tolist():
            raise RowError(f"{names[1]}[{at}] has a number that is not finite")
        mass = np.bincount(token, np.exp(np.minimum(flat_logprobs, 1.0)), len(counts))
        for at in np.flatnonzero(mass > _MOST_MASS)[:1].tolist():
            raise RowError(
                f"{names[1]}[{at}] adds up to a probability of {mass[at]:.3g}: it needs natural"
                " logarithms of probabilities, at temperature 1"
            )
        order = np.lexsort((-flat_logprobs, token))
        return cls(
            counts=counts,
            ids=flat_ids[order].astype(np.int32),
            logprobs=flat_logprobs[order].astype(np.float32),
        )

    def at(self, places: "NDArray[np.int64]", num_tokens: int) -> "TopTokens":
        """Return the same at some of so many tokens, as many as there are places; others have none.

        Args:
            places: Where the first of the tokens are.
            num_tokens: Of an example.
        """
        counts = np.zeros(num_tokens, dtype=np.int32)
        counts[places] = self.counts[: len(places)]
        num = int(counts.sum())
        return TopTokens(counts=counts, ids=self.ids[:num], logprobs=self.logprobs[:num])

    def table(
        self, is_read: "NDArray[np.bool_]", width: int
    ) -> "tuple[NDArray[np.int64], NDArray[np.float32]]":
        """Return tokens and log-probabilities (N, width) of some tokens, the likeliest first.

        Where there are fewer, the rest is -1 and 0.

        Args:
            is_read: (T,): Whose.
            width: Most of each.
        """
        first = np.cumsum(self.counts) - self.counts
        rank = np.arange(len(self.ids)) - np.repeat(first, self.counts)
        row = np.repeat(np.cumsum(is_read) - 1, self.counts)
        is_taken = np.repeat(is_read, self.counts) & (rank < width)
        shape = int(np.count_nonzero(is_read)), width
        ids = np.full(shape, _NONE, dtype=np.int64)
        logprobs = np.zeros(shape, dtype=np.float32)
        ids[row[is_taken], rank[is_taken]] = self.ids[is_taken]
        logprobs[row[is_taken], rank[is_taken]] = self.logprobs[is_taken]
        return ids, logprobs


def _lists(values: Sequence[object], name: str) -> list[Sequence[object]]:
    for at, one in enumerate(values):
        if not isinstance(one, list):
            raise RowError(f"{name}[{at}] must be a list, this is {type(one).__name__}")
    return [one for one in values if isinstance(one, list)]


def _flat(lists: Sequence[Sequence[object]], name: str, kinds: str, what: str) -> "NDArray[Any]":
    try:
        found = np.array(list(chain.from_iterable(lists)))
    except (ValueError, OverflowError):
        found = np.empty(0, dtype=object)
    if found.dtype.kind not in kinds or found.ndim != 1:
        raise RowError(f"{name!r} must be lists of {what}")
    return found


# ---------------------------------------------------------------------------------------------
# Rows that compare answers: pairs, rankings, answers with a label, and sampled answers.
#
# A prompt is text or turns, and so is an answer. Where a pair has no prompt of its own, both of its
# sides are whole conversations, and the turns that both begin with are the prompt: as turns
# (UltraFeedback), or as text with "Human:" and "Assistant:" (HH). A text is a turn: a prompt the
# user's, an answer the assistant's; unless it is written as a conversation, as in HH, or as the
# JSON of turns, which a column of a .csv file is.

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
        prompt=_trained(found.prompt, is_trained=False),
        answers=tuple(_trained(answer, is_trained=True) for answer in found.answers),
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
        _turns_of_column(row, name, role, ignored)
        for name, role in zip(names, ("user", "assistant"), strict=True)
    )
    _require_prompt(prompt)
    _require_answer(completion, names[1])
    return [*_trained(prompt, is_trained=False), *completion]


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


def _trained(turns: Sequence[Message], *, is_trained: bool) -> tuple[Message, ...]:
    """Return turns of which those of the assistant are learned, or are not."""
    return tuple(
        replace(turn, is_trained=is_trained) if turn.role == "assistant" else turn for turn in turns
    )


# --------------------------------------------------------------------------------------------------
# Formats


def _read_preference(row: Mapping[str, object], column: Column, ignored: Sequence[str]) -> Answers:
    """Read a pair: prompt, chosen and rejected, or two conversations that begin alike."""
    names = column("chosen"), column("rejected")
    sides = [_turns_of_column(row, name, "assistant", ignored) for name in names]
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
            _require_asked(_turns_of_column(row, prompt_name, "user", ignored), prompt, prompt_name)
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
    answer = _turns_of_column(row, column("completion"), "assistant", ignored)
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
    answer = _turns_of_column(row, column("completion"), "assistant", ignored)
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


def _turns_of_column(
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
    prompt = _turns_of_column(row, prompt_name, "user", ignored)
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


LossOn = Literal["assistant", "last", "all"]

FORMATS = SUPERVISED
"""Formats that are read where nothing else is asked for."""

_MAX_SHOWN = 10
_OF_FORMAT = "; it is a row of the format "
_TURN_KEYS = {
    "messages": (("role", "content"), ("system", "developer", "user", "tool")),
    "sharegpt": (("from", "value"), ("system", "human", "user", "observation", "tool")),
}
"""Format -> the keys of a turn's role and text, and the roles that are not learned."""
_COLUMNS = {name: columns for name, (columns, _) in FORMAT_COLUMNS.items()}


@dataclass(frozen=True, kw_only=True, slots=True)
class Conversation:
    """One row of the data.

    Attributes:
        messages: Its turns.
        source: Where it is: `path:line` or `path[index]`.
        unused: Keys of the row and of its turns that hold something that is not read.
        tools: Definitions of the tools that its answers may call.
    """

    messages: tuple[Message, ...]
    source: str
    unused: tuple[str, ...] = ()
    tools: tuple[Mapping[str, Any], ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Document:
    """A text to continue pretraining on, all of it learned."""

    text: str
    source: str
    unused: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Classified:
    """A text with the number of its class."""

    text: str
    label: int
    source: str
    unused: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Compared:
    """Answers to one prompt.

    Attributes:
        conversations: The prompt with each answer, which alone is learned.
        values: What is known of each; see `finetune.data.rows.Answers`.
        references: The reference's log-probability of each; empty where the row has none.
        logprobs: Of each token of each, that by which it was sampled; empty where there is none.
        teacher: Of each, a teacher's likeliest tokens; empty where there are none.
        source: Where the row is.
        is_rated: Whether one number is learned of each, at its last token.
        unused: Keys of the row that hold something that is not read.
        contradiction: As `finetune.data.rows.Answers.contradiction`.
    """

    conversations: tuple[Conversation, ...]
    values: tuple[float, ...]
    references: tuple[float, ...]
    logprobs: tuple[tuple[float, ...], ...]
    teacher: tuple[TopTokens, ...]
    source: str
    is_rated: bool = False
    unused: tuple[str, ...] = ()
    contradiction: str | None = None

    @property
    def best(self) -> Conversation:
        """The first of those with the highest value."""
        return self.conversations[self.values.index(max(self.values))]


Row = Conversation | Document | Classified | Tagged | Compared


@dataclass(frozen=True, kw_only=True, slots=True)
class RowForm:
    """How a source's rows are read.

    Attributes:
        path: Of the source, for errors.
        data_format: One of `formats`, or `auto` to detect it from the keys of the first row.
        columns: A format's column name -> the name in the file, where that is another.
        system: System prompt for conversations that have none of their own.
        ignored: Columns, and keys of turns, that are left out on purpose.
        loss_on: What is learned; a turn without a loss may have a weight of 0.
        formats: Those that may be read.
    """

    path: str
    data_format: str
    columns: Mapping[str, str]
    system: str | None
    ignored: tuple[str, ...]
    loss_on: LossOn
    formats: tuple[str, ...] = FORMATS

    def detected(self, rows: "Iterable[tuple[str, Raw]]") -> "RowForm":
        """Return the form with the format of the first readable row.

        Raises:
            DataError: No row can be read, or its format is not clear.
        """
        if self.data_format != "auto":
            return self._checked_columns()
        problems = []
        for source, raw in rows:
            row = decoded(raw)
            if isinstance(row, Mapping):
                found = replace(self, data_format=self._detect(source, row))
                return found._checked_columns()
            problems.append(f"{source}: {row if isinstance(row, RowError) else 'not an object'}")
        raise bad_rows(problems, len(problems), form=self)

    def _checked_columns(self) -> "RowForm":
        """Return the form, if it reads no column as two.

        Raises:
            DataError: It does, as if an answer were its own question.
        """
        columns = [name for part in FORMAT_COLUMNS[self.data_format] for name in part]
        by_column = dict[str, str]()
        for name in columns:
            other = by_column.setdefault(self.column(name), name)
            if other != name and name in {*self.columns, *_COLUMNS[self.data_format]}:
                raise DataError(
                    f"data.columns reads {self.column(name)} as {name} and as {other}",
                    limit="a column of a file is one of the format's",
                    hint=f"leave {name} or {other} out of `data.columns`",
                )
        return self

    def read(self, source: str, raw: Raw) -> Row:
        """Read one row.

        Raises:
            RowError: It cannot be used.
        """
        row = mapping(decoded(raw))
        try:
            if isinstance(row, Filled):
                self._require_no_fills(row)
            row = self._with_turns(recast(row, self.data_format, column=self.column))
            unused = self._unused(row)
            if self.data_format == "text":
                return _document(text(row, self.column("text")), source, unused)
            if self.data_format == "classified":
                return self._classified(row, source, unused)
            if self.data_format == "tagged":
                return read_tagged(row, self.column, source, unused)
            tools_column = self.column("tools")
            tools = row.get(tools_column) if tools_column in self._optional() else None
            read = read_tools(tools) if tools else ()
            if self.data_format in COMPARED:
                return self._compared(row, source, tools=read, unused=unused)
            messages = _PARSERS[self.data_format](row, self)
            return Conversation(
                messages=self._with_system(_checked(messages), row),
                source=source,
                unused=unused,
                tools=read,
            )
        except RowError as error:
            others = [name for name in self.formats if self._fits(row, name)]
            if others and self.data_format not in others:
                problem = f"{error}{_OF_FORMAT}{others[0]}"
                raise RowError(problem, error.lost) from None
            raise

    def column(self, name: str) -> str:
        """Return the file's name of a column."""
        return self.columns.get(name, name)

    def _classified(
        self, row: Mapping[str, object], source: str, unused: tuple[str, ...]
    ) -> Classified:
        """Read a text and the number of its class."""
        document, name = _document(text(row, self.column("text")), source, unused), "label"
        label = row[self.column(name)]
        if not isinstance(label, int) or label < 0:
            raise RowError(
                f"{self.column(name)!r} is {json.dumps(label, default=repr)}, and classes are"
                " numbered from 0"
            )
        return Classified(text=document.text, label=int(label), source=source, unused=unused)

    def _compared(
        self,
        row: Mapping[str, object],
        source: str,
        *,
        tools: tuple[Mapping[str, Any], ...],
        unused: tuple[str, ...],
    ) -> Compared:
        """Read a row that compares answers."""
        found = read_answers(row, self.data_format, column=self.column, ignored=self.ignored)
        prompt = self._with_system(list(found.prompt), row)
        return Compared(
            conversations=tuple(
                Conversation(messages=(*prompt, *answer), source=source, tools=tools)
                for answer in found.answers
            ),
            values=found.values,
            references=found.references,
            logprobs=found.logprobs,
            teacher=found.teacher,
            source=source,
            is_rated=self.data_format == "rated",
            unused=unused,
            contradiction=found.contradiction,
        )

    def _detect(self, source: str, row: Mapping[str, object]) -> str:
        """Return the one format whose columns a row has."""
        found = [name for name in self.formats if self._fits(row, name)]
        if len(found) > 1 and "text" in found:
            found.remove("text")
        if len(found) == 1:
            return found[0]
        wanted = "; ".join(f"{name} ({', '.join(self._shown(name))})" for name in self.formats)
        reason = f"fit several formats: {', '.join(found)}" if found else "fit no format"
        raise DataError(
            f"{source} has the keys {', '.join(map(str, row))}, which {reason}",
            limit=f"the formats and their columns are: {wanted}",
            hint=f"`data.format: {found[0]}`" if found else _hint_for_columns(row),
        )

    def _shown(self, data_format: str) -> tuple[str, ...]:
        return tuple(self.column(name) for name in _COLUMNS[data_format])

    def _fits(self, row: Mapping[str, object], data_format: str) -> bool:
        """Return whether a row has a format's columns.

        Two chat formats that share a column differ in their turns.
        """
        keys, row = self._shown(data_format), recast(row, data_format, column=self.column)
        if not all(key in row for key in keys):
            return False
        turns = row[keys[0]]
        first = turns[0] if isinstance(turns, list) and turns else None
        foreign = {"messages": "from", "sharegpt": "role"}.get(data_format)
        return not (isinstance(first, Mapping) and foreign in first)

    def _unused(self, row: Mapping[str, object]) -> tuple[str, ...]:
        """Return the keys of a row and its turns that are not read, if that loses nothing."""
        ignored = self.ignored
        columns = self._shown(self.data_format)
        read = columns + self._optional()
        found = [find_unread(row, read=read, ignored=ignored)]
        turns = row.get(columns[0])
        if self.data_format in _TURN_KEYS and isinstance(turns, list):
            keys, asks = _TURN_KEYS[self.data_format]
            found.append(
                find_unread_in_turns(
                    turns,
                    read=keys,
                    also_read=partial(keys_read, is_chosen=self.loss_on != "all"),
                    ignored=ignored,
                    unlearned_roles=asks if self.loss_on != "all" else (),
                )
            )
        lost = {key: problem for part in found for key, problem in part.lost.items()}
        if lost:
            raise RowError("; ".join(lost.values()), lost=list(lost))
        return tuple(dict.fromkeys(key for part in found for key in part.unused))

    def _optional(self) -> tuple[str, ...]:
        """Return the columns that are read where a row has them."""
        known: tuple[str, ...] = FORMAT_COLUMNS[self.data_format][1]
        names = [name for name in known if name != "system" or "system" in self.columns]
        return tuple(name for name in map(self.column, names) if name not in self.ignored)

    def _require_no_fills(self, row: Filled) -> None:
        """Refuse calls and definitions of tools with nulls, which other rows' keys may have made.

        Raises:
            RowError: There are some.
        """
        read = {*self._shown(self.data_format), *self._optional()} - {*self.ignored}
        if any(has_nulls_in_tools(row[key], ignored=self.ignored) for key in read & {*row}):
            raise RowError(
                "a tool's arguments or parameters hold nulls, and a table has them for the keys of"
                " other rows too: write `arguments` and `parameters` as JSON texts"
            )

    def _with_turns(self, row: Mapping[str, object]) -> Mapping[str, object]:
        """Return a row whose turns are a list, where they were the JSON text of one."""
        key = self._shown(self.data_format)[0]
        turns = row.get(key) if self.data_format in _TURN_KEYS else None
        if not isinstance(turns, str) or not turns.lstrip().startswith("["):
            return row
        read = decoded(turns.encode(errors="surrogatepass"))
        if isinstance(read, RowError):
            raise RowError(f"{key!r}: {read}")
        return {**row, key: read}

    def _with_system(
        self, messages: list[Message], row: Mapping[str, object]
    ) -> tuple[Message, ...]:
        """Put the row's own or the recipe's system prompt first, unless a turn is one."""
        system = self.system
        if "system" in self.columns and row.get(self.column("system")):
            system = text(row, self.column("system"))
        if system and not any(message.role == "system" for message in messages):
            return (Message(role="system", content=system), *messages)
        return tuple(messages)


def no_rows(path: str) -> DataError:
    """Return the error for a source without rows."""
    return DataError(
        f"{path} holds no rows",
        limit="there must be at least one",
        hint="name a file with rows: `data.path`, or `data.eval_path` for held-out ones",
    )


def bad_rows(
    problems: Sequence[str],
    num_rows: int,
    *,
    form: RowForm,
    lost: Sequence[str] = (),
    num_allowed: int = 0,
) -> DataError:
    """Return the one error that names the bad rows, and columns that could be ignored.

    Args:
        problems: `source: problem` of each, or of the first ones with what is left of them.
        num_rows: Rows that were read.
        form: How.
        lost: Columns whose meaning would be lost.
        num_allowed: How many may be skipped.
    """
    hint = "fix or remove these rows, or set `data.format` and its columns to what they hold"
    others = [problem.partition(_OF_FORMAT)[2] for problem in problems]
    if len(problems) == num_rows and others[0] and len(set(others)) == 1:
        hint = f"`data.format: {others[0]}`, or leave `data.format` and the columns out"
    elif any(others):
        hint = "one format in a file: split it, and name the parts in `data.mix`"
    if lost:
        names = ", ".join([*form.ignored, *lost])
        hint = f"`data.ignored_columns: [{names}]` leaves them out on purpose"
    shown = "\n  ".join(problems[:_MAX_SHOWN])
    more = len(problems) - _MAX_SHOWN
    rest = f"\n  and {more} more" if more > 0 else ""
    allowed = f", and `data.skip_bad` allows {num_allowed}" if num_allowed else ""
    return DataError(
        f"{len(problems)} of {num_rows} rows in {form.path} cannot be used:\n  {shown}{rest}\n",
        limit=f"every row must be a complete row of the format {form.data_format}{allowed}",
        hint=hint,
    )


def _hint_for_columns(row: Mapping[str, object]) -> str:
    """Return what to do with a row of no known format."""
    known = next((key for key in row if key in MEANINGS), None)
    named = "for other columns set `data.columns: {prompt: ..., completion: ...}`"
    return named if known is None else f"{named}; {known!r}: {MEANINGS[known]}"


def _document(content: str, source: str, unused: tuple[str, ...]) -> Document:
    if not content.strip():
        raise RowError("empty text")
    return Document(text=content, source=source, unused=unused)


def _parse_chat(row: Mapping[str, object], form: RowForm) -> list[Message]:
    """Read the formats messages and sharegpt."""
    key = form.column(_COLUMNS[form.data_format][0])
    turns = row.get(key)
    if key not in row:
        text(row, key)
    if not isinstance(turns, list) or not all(isinstance(turn, Mapping) for turn in turns):
        raise RowError(f"{key!r} must be a list of objects, this is {type(turns).__name__}")
    keys = _TURN_KEYS[form.data_format][0]
    return [read_turn(mapping(turn), keys=keys, ignored=form.ignored) for turn in turns]


def _parse_alpaca(row: Mapping[str, object], form: RowForm) -> list[Message]:
    """Read the format alpaca: an input follows the instruction after a blank line."""
    instruction, output = (text(row, form.column(name)) for name in _COLUMNS["alpaca"])
    extra_column = form.column("input")
    extra = text(row, extra_column) if row.get(extra_column) is not None else ""
    prompt = f"{instruction}\n\n{extra}" if extra else instruction
    return [Message(role="user", content=prompt), Message(role="assistant", content=output)]


def _parse_prompt_completion(row: Mapping[str, object], form: RowForm) -> list[Message]:
    """Read the format prompt_completion."""
    names = form.column("prompt"), form.column("completion")
    if any(isinstance(row.get(name), list) for name in names) or is_turns(row.get(names[0])):
        return read_completion(row, names, form.ignored)
    prompt, completion = (text(row, name) for name in names)
    return [Message(role="user", content=prompt), Message(role="assistant", content=completion)]


_PARSERS: dict[str, "Callable[[Mapping[str, object], RowForm], list[Message]]"] = {
    "messages": _parse_chat,
    "sharegpt": _parse_chat,
    "alpaca": _parse_alpaca,
    "prompt_completion": _parse_prompt_completion,
}


def _checked(messages: list[Message]) -> list[Message]:
    """Return the messages if there is something to learn from each answer."""
    roles = [message.role for message in messages]
    answers = [message for message in messages if message.role == "assistant"]
    if not answers:
        raise RowError("no assistant turn")
    if "user" not in roles[: roles.index("assistant")]:
        raise RowError("it begins with an answer, before any user turn")
    asked = messages[: roles.index("assistant")]
    if not any(message.content.strip() for message in asked if message.role != "system"):
        raise RowError("empty prompt")
    if not all(answer.content.strip() or answer.calls for answer in answers):
        raise RowError("empty answer")
    return messages


def require_nothing_for_turns(data: DataSection) -> None:
    """Check the settings of rows that have turned out to be documents, all of them.

    Raises:
        DataError: A setting is about turns.
    """
    if data.set_for_turns:
        names = " and ".join(f"data.{name}" for name in data.set_for_turns)
        raise DataError(
            f"all rows are documents, and {names} say how turns are learned",
            limit="documents have no turns, are joined and cut, and all of them is learned",
            hint=f"leave out {names}, or name the columns of turns by `data.columns`",
        )
