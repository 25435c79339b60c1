"""The rows that are scored: those that a recipe could train on, documents, or questions to answer.

A question has `prompt`, `choices` and `answer`, which is the number of the right choice, from 0, or
its text. Each choice is scored as the answer to the prompt, as in a row of prompt and completion.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from finetune.data.dataset import source_rows
from finetune.data.encode_source import SourceRows
from finetune.data.pictures.picture import COLUMNS
from finetune.data.row_images import images_of
from finetune.data.rows import Conversation, Document, bad_rows
from finetune.data.sources import decoded
from finetune.data.tokenize import IGNORE_INDEX, Encoder, Fate
from finetune.data.turns import Message
from finetune.errors import DataError, RowError
from finetune.recipe.extensions import repeated_formats
from finetune.recipe.sections import DataSection, MixSource

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from finetune.images.live import LiveImages

QUESTION = ("prompt", "choices", "answer")
_MAX_SHOWN = 10


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """A sequence that is scored by itself."""

    ids: tuple[int, ...]  # its tokens
    labels: tuple[int, ...]  # the tokens, not shifted, or -100 for those that are not scored

    @property
    def num_labels(self) -> int:
        """Tokens that are scored; the first of a line never is."""
        return sum(label != IGNORE_INDEX for label in self.labels[1:])


@dataclass(frozen=True, kw_only=True, slots=True)
class LineScore:
    """What a contender gives a line."""

    logp: float  # the sum of the log-probabilities of its labels, in nats
    num_tokens: int  # how many there are
    is_greedy: bool  # whether each is the most probable token


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoredRow:
    """A row of a file."""

    source: str  # where it is: `path:line`
    # The lines of each choice; of a row that is no question the only one.
    choices: tuple[tuple[Line, ...], ...]
    answer: int | None = None  # which choice is right; None if it is no question
    choice_bytes: tuple[int, ...] = ()  # length of each choice in UTF-8; empty if it is no question

    @property
    def lines(self) -> tuple[Line, ...]:
        """All lines of the row."""
        return tuple(line for choice in self.choices for line in choice)


@dataclass(frozen=True, kw_only=True, slots=True)
class RowsToScore:
    """The rows of a file, and what a user should know about them."""

    rows: tuple[ScoredRow, ...]
    notes: tuple[str, ...]

    @property
    def lines(self) -> tuple[Line, ...]:
        """All lines of all rows."""
        return tuple(line for row in self.rows for line in row.lines)

    @property
    def are_questions(self) -> bool:
        """Whether rows have choices."""
        return self.rows[0].answer is not None


def read_rows(
    path: str,
    data: DataSection,
    tokenizer: "PreTrainedTokenizerBase",
    *,
    seq_len: int,
    images: "LiveImages | None" = None,
) -> RowsToScore:
    """Read and tokenise the rows of a file.

    Args:
        path: What `data.path` of a recipe takes.
        data: How rows are read; its own sources are not.
        tokenizer: Of the model.
        seq_len: Most tokens of a line; longer documents are scored in several.
        images: Looks at the images of rows; None where the model sees none.

    Raises:
        DataError: The file is missing or empty, or rows are bad; each is named by file and line.
    """
    if data.format not in ("auto", *repeated_formats()):  # of a recipe that trains on preferences
        data = data.model_copy(update={"format": "auto"})
    rows = source_rows(data, MixSource(path=path), max_rows=data.max_rows)
    encoder = Encoder(
        tokenizer=tokenizer,
        seq_len=seq_len,
        loss_on=data.loss_on,
        too_long=data.too_long,
        empty_think=data.empty_think,
        imaging=None if images is None else images.imaging,
    )
    first = next(iter(rows.named()), None)
    found = None if first is None else decoded(first[2])
    if isinstance(found, Mapping) and "choices" in found:
        return _questions(rows, encoder, system=data.system)
    return _plain_rows(rows, encoder, images)


def _plain_rows(rows: SourceRows, encoder: Encoder, images: "LiveImages | None") -> RowsToScore:
    form, named = rows.opened()
    found, problems, num_rows = list[ScoredRow](), list[str](), 0
    fates = dict.fromkeys(Fate, 0)
    for _, name, raw in named:
        num_rows += 1
        try:
            row = form.read(name, raw)
            assert isinstance(row, Conversation | Document)
            fate, lines = _lines(row, encoder, images)
        except RowError as error:
            problems.append(f"{name}: {error}")
            continue
        fates[fate] += 1
        if fate is Fate.TOO_LONG and encoder.too_long == "error":
            problems.append(f"{name}: it has more than {encoder.seq_len} tokens")
        if lines:
            found.append(ScoredRow(source=name, choices=(lines,)))
    if len(problems) > rows.skip_bad:
        raise bad_rows(problems, num_rows, form=form, num_allowed=rows.skip_bad)
    seen = {
        Fate.CUT: f"were cut to {encoder.seq_len} tokens",
        Fate.TOO_LONG: f"have more than {encoder.seq_len} tokens, and are left out",
        Fate.CUT_IMAGE: f"have an image after {encoder.seq_len} tokens, and are left out",
        Fate.NOTHING_LEFT: f"have no answer within {encoder.seq_len} tokens, and are left out",
        Fate.NOT_TRAINED: "have nothing that is scored, and are left out",
    }
    notes = [f"{fates[fate]:,} of {num_rows:,} rows {what}" for fate, what in seen.items()]
    notes = [note for note, fate in zip(notes, seen, strict=True) if fates[fate]]
    if problems:
        notes.append(f"{len(problems)} bad rows were skipped, such as {problems[0]}")
    if not found:
        raise DataError(
            f"no row of {rows.source.path} has a token to score",
            limit="; ".join(notes),
            hint="a larger `train.seq_len=...`, or other rows",
        )
    return RowsToScore(rows=tuple(found), notes=tuple(notes))


def _lines(
    row: Conversation | Document, encoder: Encoder, images: "LiveImages | None" = None
) -> tuple[Fate, tuple[Line, ...]]:
    if isinstance(row, Document):
        ids = tuple(encoder.document_ids(row).tolist())
        lines = tuple(windows(ids, max_tokens=encoder.seq_len))
        return Fate.WHOLE if lines else Fate.NOT_TRAINED, lines
    fate, examples = encoder.encode(row)
    every = [
        one.input_ids if images is None else images.tokens(one, row.images) for one in examples
    ]
    return fate, tuple(
        Line(ids=tuple(ids.tolist()), labels=tuple(one.labels.tolist()))
        for ids, one in zip(every, examples, strict=True)
    )


def windows(ids: Sequence[int], *, max_tokens: int) -> Iterator[Line]:
    """Divide a document into lines; each begins with the last token of the one before it.

    So every token but the first is scored once, at least from the one before it.
    """
    for start in range(0, len(ids) - 1, max_tokens - 1):
        part = tuple(ids[start : start + max_tokens])
        yield Line(ids=part, labels=part)


# ---------------------------------------------------------------------------------------------
# Questions


def _questions(rows: SourceRows, encoder: Encoder, *, system: str | None) -> RowsToScore:
    whole = replace(encoder, too_long="error")  # a choice that is cut could not be compared
    found, problems, num_rows, unused = list[ScoredRow](), list[str](), 0, dict[str, None]()
    for _, name, raw in rows.named():
        num_rows += 1
        try:
            row = _object(decoded(raw))
            unused |= dict.fromkeys(key for key in row if key not in QUESTION)
            found.append(_question(row, name, whole, system))
        except RowError as error:
            problems.append(f"{name}: {error}")
    if len(problems) > rows.skip_bad:
        shown = "\n  ".join(problems[:_MAX_SHOWN])
        more = f"\n  and {len(problems) - _MAX_SHOWN} more" if len(problems) > _MAX_SHOWN else ""
        raise DataError(
            f"{len(problems)} of {num_rows} rows in {rows.source.path} cannot be used:"
            f"\n  {shown}{more}\n",
            limit="a question has a text `prompt`, a list of two or more texts `choices`, and an"
            " `answer`: the number of a choice, from 0, or its text",
            hint="fix or remove these rows",
        )
    notes = [f"Columns that are not used: {', '.join(unused)}"] if unused else []
    if problems:
        notes.append(f"{len(problems)} bad rows were skipped, such as {problems[0]}")
    return RowsToScore(rows=tuple(found), notes=tuple(notes))


def _object(row: object) -> Mapping[str, object]:
    if isinstance(row, RowError):
        raise row
    if not isinstance(row, Mapping):
        raise RowError("not an object")
    return row


def _question(
    row: Mapping[str, object], source: str, encoder: Encoder, system: str | None
) -> ScoredRow:
    """Read a question.

    Raises:
        RowError: It is none, or a choice is too long.
    """
    if images_of(row, COLUMNS):
        raise RowError("it has images and 'choices', and questions with choices are asked in text")
    prompt, choices = row.get("prompt"), row.get("choices")
    if not isinstance(prompt, str) or not prompt.strip():
        raise RowError("no text 'prompt'")
    if not isinstance(choices, list) or len(choices) < 2:
        raise RowError("'choices' is no list of two or more")
    texts = [choice for choice in choices if isinstance(choice, str) and choice.strip()]
    if len(texts) < len(choices) or len(set(texts)) < len(texts):
        raise RowError("'choices' holds something empty, twice, or no text")
    answer = _answer(row.get("answer"), texts)
    before = [Message(role="system", content=system)] if system else []
    before.append(Message(role="user", content=prompt))
    lines = []
    for text in texts:
        turns = (*before, Message(role="assistant", content=text))
        fate, own = _lines(Conversation(messages=turns, source=source), encoder)
        if fate is Fate.TOO_LONG:
            raise RowError(f"it has more than {encoder.seq_len} tokens (`train.seq_len`)")
        lines.append(own)
    return ScoredRow(
        source=source,
        choices=tuple(lines),
        answer=answer,
        choice_bytes=tuple(len(text.encode()) for text in texts),
    )


def _answer(answer: object, choices: Sequence[str]) -> int:
    if isinstance(answer, str) and answer in choices:
        return choices.index(answer)
    if isinstance(answer, int) and not isinstance(answer, bool) and 0 <= answer < len(choices):
        return answer
    raise RowError(f"'answer' is {str(answer)[:40]!r}, which is no choice")
