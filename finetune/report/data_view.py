"""What the model will see of the data: figures of sources, lengths, and rows with their loss."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from html import escape
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from finetune.report.charts import page
from finetune.report.format import shown_span
from finetune.report.images import images_html
from finetune.report.rows import Part, Row, Table, as_html, as_text, tables

_BAR = 40
_MAX_SHOWN = 400  # characters of a piece of a row, of its beginning and its end together
_LOSS = "bold green"
_MARKS = ("\u00ab", "\u00bb")


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """A part of a row whose tokens all have a loss, or none of them."""

    text: str
    has_loss: bool
    num_tokens: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Taught:
    """A token that is learned, and what a teacher would have said in its place."""

    token: str  # the token as text
    top: tuple[tuple[str, float], ...]  # the teacher's likeliest tokens, and their probabilities


@dataclass(frozen=True, kw_only=True, slots=True)
class SeenRow:
    """A row as the model will see it."""

    source: str  # where it is
    pieces: tuple[Piece, ...]  # its tokens, as text
    # The first tokens that are learned from a teacher; none without one.
    taught: tuple[Taught, ...] = ()
    # Its columns that the model does not see, and rewards of sampled answers may read, as text.
    columns: tuple[tuple[str, str], ...] = ()
    thumbnails: tuple[str, ...] = ()  # small copies of its images, `data:` URIs for a page

    @property
    def num_tokens(self) -> int:
        """Tokens of the row."""
        return sum(piece.num_tokens for piece in self.pieces)

    @property
    def num_loss_tokens(self) -> int:
        """Those with a loss."""
        return sum(piece.num_tokens for piece in self.pieces if piece.has_loss)


@dataclass(frozen=True, kw_only=True, slots=True)
class SeenSource:
    """A source of the recipe."""

    path: str  # the path in the recipe
    num_rows: int  # good rows that it has, those that are held out or dropped among them
    num_used: int  # different rows that are trained on; parts of a row count each
    epoch_rows: int  # rows of an epoch
    epoch_tokens: int  # their tokens
    epoch_loss_tokens: int  # its tokens with a loss in an epoch
    rows: tuple[SeenRow, ...]  # the first ones, as the model sees them


@dataclass(frozen=True, kw_only=True, slots=True)
class Bin:
    """Rows of similar length: of `first` to `last` tokens."""

    first: int
    last: int
    num_rows: int


@dataclass(frozen=True, kw_only=True, slots=True)
class DataView:
    """What the model will see."""

    recipe: str  # its name
    seq_len: int  # most tokens of a row
    sources: tuple[SeenSource, ...]  # the sources of the training rows
    held_out_rows: int  # rows that are held out
    lengths: tuple[Bin, ...]  # a histogram of the rows of an epoch
    longest: int  # tokens of the longest row
    # Part of a sequence that the rows of the first steps fill where they share it; None where each
    # has its own.
    packed_fill: float | None
    notes: tuple[str, ...]  # what was dropped, cut and left out, and why
    data_hash: str  # the hash of the training rows

    @property
    def epoch_rows(self) -> int:
        """Rows of an epoch."""
        return sum(source.epoch_rows for source in self.sources)

    @property
    def epoch_tokens(self) -> int:
        """Tokens of an epoch, padding left out."""
        return sum(source.epoch_tokens for source in self.sources)

    @property
    def epoch_loss_tokens(self) -> int:
        """Those with a loss."""
        return sum(source.epoch_loss_tokens for source in self.sources)

    @property
    def fill(self) -> float:
        """Part of `seq_len` that a row fills on average."""
        return self.epoch_tokens / (self.epoch_rows * self.seq_len)


def data_json(view: DataView) -> str:
    """Return the view as programs read it."""
    figures = {
        "epoch_rows": view.epoch_rows,
        "epoch_tokens": view.epoch_tokens,
        "epoch_loss_tokens": view.epoch_loss_tokens,
        "fill": view.fill,
    }
    return json.dumps({**asdict(view, dict_factory=_without_thumbnails), **figures}, indent=2)


def _without_thumbnails(fields: list[tuple[str, Any]]) -> dict[str, Any]:
    return {name: value for name, value in fields if name != "thumbnails"}


def tables_of(view: DataView) -> list[Part]:
    """Return figures of sources and of an epoch, lengths, and what was left out and why."""
    share = view.epoch_loss_tokens / max(view.epoch_tokens, 1)
    packed = "" if view.packed_fill is None else f"; {view.packed_fill:.1%} packed"
    rows = [
        Row("", "rows per epoch", view.epoch_rows),
        Row("", "tokens per epoch", view.epoch_tokens),
        Row("", "with a loss", view.epoch_loss_tokens, "", f"({share:.1%})"),
        Row("", "mean row", f"{view.epoch_tokens / view.epoch_rows:,.1f} tokens"),
        Row("", "longest row", view.longest, "", "tokens"),
        Row("", "fill of seq_len", f"{view.fill:.1%} of {view.seq_len:,}{packed}"),
        Row("", "held-out rows", view.held_out_rows),
        Row("", "data hash", view.data_hash[:16]),
    ]
    sources = [
        (one.path, one.num_rows, one.epoch_rows, one.epoch_tokens, one.epoch_loss_tokens)
        for one in view.sources
    ]
    columns = ("source", "rows", "per epoch", "tokens", "with loss")
    most = max((one.num_rows for one in view.lengths), default=1)
    lengths = [
        (shown_span(one.first, one.last), one.num_rows, "#" * -(-_BAR * one.num_rows // most))
        for one in view.lengths
    ]
    bars = ["tokens", "rows", ""]
    return [
        Table(f"Data of {view.recipe}", columns, sources, level="brief"),
        *view.notes,
        *tables("An epoch", rows),
        Table("Rows by length, in tokens", bars, lengths, level="brief"),
    ]


def data_text(view: DataView, *, has_colour: bool) -> RenderableType:
    """Return the view as people read it.

    Args:
        view: What to show.
        has_colour: Whether loss is shown by colour; else between marks.
    """
    how = "in green" if has_colour else f"between {_MARKS[0]} and {_MARKS[1]}"
    said = Text(f"Rows as the model sees them; tokens with a loss {how}", style="italic")
    rows = [row for source in view.sources for row in source.rows]
    shown = [part for row in rows for part in ("", _row(row, has_colour=has_colour))]
    return as_text([*tables_of(view), "", said, *shown])


def _row(row: SeenRow, *, has_colour: bool) -> Text:
    shown = Text()
    shown.append(
        f"{row.source}: {row.num_tokens:,} tokens, {row.num_loss_tokens:,} with a loss\n",
        style="italic",
    )
    for piece in row.pieces:
        text = shortened(printable(piece.text))
        if not piece.has_loss:
            shown.append(text)
        elif has_colour:
            shown.append(text, style=_LOSS)
        else:
            shown.append(_MARKS[0] + text + _MARKS[1])
    for one in row.taught:
        top = ", ".join(f"{printable(text)} {p:.3f}" for text, p in one.top)
        shown.append(f"\n  {printable(one.token)}: the teacher has {top}", style="italic")
    for name, text in row.columns:
        shown.append(f"\n  {_column(name, text)}", style="italic")
    return shown


def _column(name: str, text: str) -> str:
    return f"{shortened(printable(name))}: {shortened(printable(text))} (for rewards)"


def shortened(text: str) -> str:
    """Return a text without its middle, if it is long."""
    if len(text) <= _MAX_SHOWN:
        return text
    half = _MAX_SHOWN // 2
    return f"{text[:half]} [... {len(text) - 2 * half:,} characters ...] {text[-half:]}"


def printable(text: str) -> str:
    """Return a text with its control characters written out: a row may hold a terminal's codes."""
    return "".join(
        char
        if char in "\n\t" or char.isprintable() or (char.isspace() and ord(char) > 0x9F)
        else f"\\x{ord(char):02x}"
        for char in text
    )


def histogram(lengths: Sequence[int], *, num_bins: int = 10) -> tuple[Bin, ...]:
    """Count rows by length, in bins of equal width from 1 to the longest."""
    longest = max(lengths, default=1)
    width = max(1, -(-longest // num_bins))
    counts = [0] * -(-longest // width)
    for length in lengths:
        counts[(length - 1) // width] += 1
    return tuple(
        Bin(first=n * width + 1, last=min((n + 1) * width, longest), num_rows=count)
        for n, count in enumerate(counts)
    )


def data_html(view: DataView) -> str:
    """Return the view as a page; every text of the rows is escaped."""
    sources, *others = tables_of(view)
    assert isinstance(sources, Table)
    named = [sources._replace(title="Sources"), *others]  # the page's heading is above it
    parts = [printable(one) if isinstance(one, str) else one for one in named]
    rows = "\n".join(_html_row(row) for source in view.sources for row in source.rows)
    return page(
        f"Data of {view.recipe}",
        f"{as_html(parts)}\n<h2>Rows as the model sees them</h2>\n"
        f"<p>Tokens with a loss are <mark>marked</mark>.</p>\n{rows}",
    )


def _html_row(row: SeenRow) -> str:
    pieces = "".join(
        f"<mark>{escape(printable(piece.text))}</mark>"
        if piece.has_loss
        else escape(printable(piece.text))
        for piece in row.pieces
    )
    counts = f"{row.num_tokens:,} tokens, {row.num_loss_tokens:,} with a loss"
    columns = "".join(f"<p>{escape(_column(*one))}</p>" for one in row.columns)
    shown = f"{images_html(row.thumbnails)}<pre>{pieces}</pre>{columns}"
    return f"<h3>{escape(row.source)}: {counts}</h3>\n{shown}"
