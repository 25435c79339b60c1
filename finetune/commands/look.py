"""A look at rows before there is a recipe: their format, their number, and how long they are."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING, Any

from finetune.data.rows import Row, RowForm, bad_rows, no_rows
from finetune.data.sources import Raw, open_source
from finetune.data.tokenize import Encoder
from finetune.errors import ConfigError, DataError, ModelError, RowError
from finetune.model.tokenizer import load_tokenizer
from finetune.recipe.extensions import FORMATS, ObjectiveSection
from finetune.recipe.sections import ModelSection

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

NUM_LOOKED, MOST_COUNTED = 1_000, 1_000_000
CHARS_PER_TOKEN = 3
"""Where there is no tokenizer: few, so that lengths are rather too long than too short."""
LONGEST = 2**24
LENGTH_STEP = 1_024


@dataclass(frozen=True, kw_only=True, slots=True)
class Look:
    """What rows are."""

    path: str  # the path, as it was given
    data_format: str  # the value of `data.format`
    num_rows: int  # how many there are, counted up to `MOST_COUNTED`
    num_looked: int  # the number of first rows whose lengths were taken
    lengths: tuple[int, ...]  # tokens of each of their conversations, in ascending order
    # Whether lengths are of the model's tokenizer, and not taken from characters.
    is_tokenised: bool

    def quantile(self, frac: float) -> int:
        """Return the length that this share of the rows does not exceed, in tokens."""
        return self.lengths[min(len(self.lengths) - 1, int(frac * len(self.lengths)))]

    def num_tokens(self, seq_len: int) -> int:
        """Return the tokens of all rows in sequences, by the mean of those that were looked at."""
        kept = sum(self.lengths) - sum(one - seq_len for one in self.cut_at(seq_len))
        return round(self.num_rows * kept / self.num_looked)

    def cut_at(self, seq_len: int) -> tuple[int, ...]:
        """Return the lengths of what is cut: documents go on in the next sequence."""
        is_whole = FORMATS[self.data_format].is_document
        return () if is_whole else tuple(one for one in self.lengths if one > seq_len)

    @property
    def objective(self) -> dict[str, Any]:
        """The section `objective` for such rows; empty where they are to be repeated."""
        return dict(FORMATS[self.data_format].suggests or {})

    def lines(self) -> Iterator[str]:
        """Yield what was found, for people."""
        number = f"{self.num_rows:,}" + (" or more" if self.num_rows == MOST_COUNTED else "")
        learned = self.objective.get("method", ObjectiveSection.default)
        yield f"{self.path}: {number} rows of the format {self.data_format}, learned by {learned}"
        shares = ", ".join(f"{self.quantile(q):,} (p{q * 100:g})" for q in (0.5, 0.9, 0.99))
        how = (
            "by the model's tokenizer"
            if self.is_tokenised
            else f"assumed at {CHARS_PER_TOKEN} characters a token: its tokenizer is not here"
        )
        yield f"tokens of a row, {how}: {shares}, {self.lengths[-1]:,} at most"


def look_at(path: str, *, tokenizer: str | None, note: Callable[[str], None]) -> Look:
    """Read the first rows of a source, and count all.

    Args:
        path: As `data.path` of a recipe.
        tokenizer: Where the model's tokenizer is; lengths are taken from characters without one.
        note: Reports what takes time.

    Raises:
        DataError: There is nothing at the path, or a row cannot be used.
    """
    source = open_source(path)
    places = source.rows()
    first = [(source.name(place), raw) for place, raw in islice(places, NUM_LOOKED)]
    if not first:
        raise no_rows(path)
    num_rows = len(first) + sum(1 for _ in islice(places, MOST_COUNTED - len(first)))
    form = _form(path, first)
    rows = list(_read(form, first))
    note(f"Looking at {len(rows):,} of {num_rows:,} rows ...")
    found = _tokenizer(tokenizer)
    lengths = sorted(_lengths(rows, found))
    if not lengths:
        raise DataError(
            f"no row of {path} holds anything to learn", hint="`data.loss_on: all`, or other rows"
        )
    return Look(
        path=path,
        data_format=form.data_format,
        num_rows=num_rows,
        num_looked=len(rows),
        lengths=tuple(lengths),
        is_tokenised=found is not None,
    )


def seq_len_for(look: Look, *, least: int) -> int:
    """Return a length that 99 of 100 rows fit into, of multiples of 1,024 tokens."""
    return max(least, -(-look.quantile(0.99) // LENGTH_STEP) * LENGTH_STEP)


def _form(path: str, rows: Sequence[tuple[str, Raw]]) -> RowForm:
    """Return how the rows are read: as answers that are compared, if they have their columns."""
    supervised = RowForm(
        path=path,
        data_format="auto",
        columns={},
        system=None,
        ignored=(),
        loss_on="assistant",
    )
    suggesting = [name for name, one in FORMATS.items() if one.suggests]
    most_first = sorted(suggesting, key=lambda name: -len(FORMATS[name].columns))
    compared = [replace(supervised, formats=(name,)) for name in most_first]
    for form in compared:
        try:
            return form.detected(rows)
        except DataError:
            continue  # it has other columns
    return supervised.detected(rows)


def _read(form: RowForm, rows: Sequence[tuple[str, Raw]]) -> Iterator[Row]:
    problems, lost = [], dict[str, None]()
    for name, raw in rows:
        try:
            yield form.read(name, raw)
        except RowError as error:
            problems.append(f"{name}: {error}")
            lost |= dict.fromkeys(error.lost)
    if problems:
        raise bad_rows(problems, len(rows), form=form, lost=tuple(lost))


def _tokenizer(source: str | None) -> "PreTrainedTokenizerBase | None":
    try:
        return load_tokenizer(ModelSection(tokenizer=source))
    except (ModelError, ConfigError):
        return None  # which the look says


def _lengths(
    rows: Sequence[Row],
    tokenizer: "PreTrainedTokenizerBase | None",
) -> Iterator[int]:
    """Yield the tokens of each conversation or document."""
    encoder = None
    if tokenizer is not None:
        encoder = Encoder(
            tokenizer=tokenizer,
            seq_len=LONGEST,
            loss_on="assistant",
            too_long="truncate",
            empty_think="prompt",
        )
    for row in rows:
        for part in row.parts:
            if encoder is None:
                yield -(-sum(map(len, part.texts())) // CHARS_PER_TOKEN)
            else:
                yield from (len(example.input_ids) for example in part.encode(encoder)[1])
