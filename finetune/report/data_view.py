"""What the model will see of the data: figures of sources, lengths, and rows with their loss."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from html import escape

from rich.console import Group, RenderableType
from rich.text import Text

from finetune.report.format import table_of

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
    """A token that is learned, and what a teacher would have said in its place.

    Attributes:
        token: As text.
        top: The teacher's likeliest tokens, and their probabilities.
    """

    token: str
    top: tuple[tuple[str, float], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class SeenRow:
    """A row as the model will see it.

    Attributes:
        source: Where it is.
        pieces: Its tokens, as text.
        taught: The first tokens that are learned from a teacher; none without one.
    """

    source: str
    pieces: tuple[Piece, ...]
    taught: tuple[Taught, ...] = ()

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
    """A source of the recipe.

    Attributes:
        path: As the recipe names it.
        num_rows: Good rows that it has, those that are held out or dropped among them.
        num_used: Different rows that are trained on; parts of a row count each.
        epoch_rows: Rows of an epoch.
        epoch_tokens: Their tokens.
        epoch_loss_tokens: Those with a loss.
        rows: The first ones, as the model sees them.
    """

    path: str
    num_rows: int
    num_used: int
    epoch_rows: int
    epoch_tokens: int
    epoch_loss_tokens: int
    rows: tuple[SeenRow, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Bin:
    """Rows of similar length: of `first` to `last` tokens."""

    first: int
    last: int
    num_rows: int


@dataclass(frozen=True, kw_only=True, slots=True)
class DataView:
    """What the model will see.

    Attributes:
        recipe: Its name.
        seq_len: Most tokens of a row.
        sources: Those of the training rows.
        held_out_rows: Rows that are held out.
        lengths: A histogram of the rows of an epoch.
        longest: Tokens of the longest row.
        packed_fill: Part of a sequence that the rows of the first steps fill where they share it;
            None where each has its own.
        notes: What was dropped, cut and left out, and why.
        data_hash: Of the training rows.
    """

    recipe: str
    seq_len: int
    sources: tuple[SeenSource, ...]
    held_out_rows: int
    lengths: tuple[Bin, ...]
    longest: int
    packed_fill: float | None
    notes: tuple[str, ...]
    data_hash: str

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
    return json.dumps({**asdict(view), **figures}, indent=2)


def data_tables(view: DataView, *, has_colour: bool) -> RenderableType:
    """Return the view as people read it.

    Args:
        view: What to show.
        has_colour: Whether loss is shown by colour; else between marks.
    """
    parts: list[RenderableType] = [_sources(view), _lengths(view), Text()]
    if view.notes:
        parts += [Text(note) for note in view.notes] + [Text()]
    how = "in green" if has_colour else f"between {_MARKS[0]} and {_MARKS[1]}"
    parts.append(Text(f"Rows as the model sees them; tokens with a loss {how}", style="italic"))
    for row in (row for source in view.sources for row in source.rows):
        parts += [Text(), _row(row, has_colour=has_colour)]
    return Group(*parts)


def figures(view: DataView) -> list[tuple[str, str]]:
    """Return the figures of an epoch, by name, as they are shown."""
    share = view.epoch_loss_tokens / max(view.epoch_tokens, 1)
    return [
        ("rows per epoch", f"{view.epoch_rows:,}"),
        ("tokens per epoch", f"{view.epoch_tokens:,}"),
        ("with a loss", f"{view.epoch_loss_tokens:,} ({share:.1%})"),
        ("mean row", f"{view.epoch_tokens / view.epoch_rows:,.1f} tokens"),
        ("longest row", f"{view.longest:,} tokens"),
        ("fill of seq_len", _shown_fill(view)),
        ("held-out rows", f"{view.held_out_rows:,}"),
        ("data hash", view.data_hash[:16]),
    ]


def _shown_fill(view: DataView) -> str:
    alone = f"{view.fill:.1%} of {view.seq_len:,}"
    return alone if view.packed_fill is None else f"{alone}; {view.packed_fill:.1%} packed"


def _sources(view: DataView) -> RenderableType:
    table = table_of(f"Data of {view.recipe}", "source", "rows", "per epoch", "tokens", "with loss")
    for one in view.sources:
        table.add_row(
            Text(one.path),
            f"{one.num_rows:,}",
            f"{one.epoch_rows:,}",
            f"{one.epoch_tokens:,}",
            f"{one.epoch_loss_tokens:,}",
        )
    totals = table_of("An epoch")
    for name, value in figures(view):
        totals.add_row(name, value)
    return Group(table, totals)


def _lengths(view: DataView) -> RenderableType:
    table = table_of("Rows by length, in tokens")
    most = max((one.num_rows for one in view.lengths), default=1)
    width = max((len(f"{one.num_rows:,}") for one in view.lengths), default=1)
    for one in view.lengths:
        bar = "#" * -(-_BAR * one.num_rows // most)
        table.add_row(f"{one.first:,} - {one.last:,}", f"{one.num_rows:>{width},} {bar}")
    return table


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
    return shown


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


_STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --paper: #fff; --soft: #59636e; --line: #d1d9e0;
  --loss: #0a5c2b; --wash: #d9f2e1; --bar: #2f7d4f; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6edf3; --paper: #0d1117; --soft: #9198a1;
  --line: #3d444d; --loss: #9be9b4; --wash: #12321f; --bar: #3fb968; } }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem;
  color: var(--ink); background: var(--paper); }
table { border-collapse: collapse; margin: 1rem 0; }
th, td { text-align: left; padding: .2rem 1rem .2rem 0; border-bottom: 1px solid var(--line); }
td.figure, th.figure { text-align: right; font-variant-numeric: tabular-nums; }
.bar { background: var(--bar); height: .8rem; min-width: 1px; }
.wide { width: 20rem; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; border: 1px solid var(--line);
  border-radius: 6px; padding: .8rem; }
mark { background: var(--wash); color: var(--loss); font-weight: 600; }
h3 { font-size: 1rem; color: var(--soft); margin-bottom: 0; overflow-wrap: anywhere; }
"""


def data_html(view: DataView) -> str:
    """Return the view as a page; every text of the rows is escaped."""
    title = escape(f"Data of {view.recipe}")
    heads = ("rows", "per epoch", "tokens", "with loss")
    head = "".join(f'<th class="figure">{name}</th>' for name in heads)
    sources = "".join(
        f"<tr><td>{escape(one.path)}</td>"
        + "".join(
            f'<td class="figure">{number:,}</td>'
            for number in (one.num_rows, one.epoch_rows, one.epoch_tokens, one.epoch_loss_tokens)
        )
        + "</tr>\n"
        for one in view.sources
    )
    totals = "".join(
        f"<tr><td>{escape(name)}</td><td>{escape(value)}</td></tr>\n"
        for name, value in figures(view)
    )
    notes = "".join(f"<li>{escape(printable(note))}</li>\n" for note in view.notes)
    rows = "\n".join(_html_row(row) for source in view.sources for row in source.rows)
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>{title}</title>
<style>{_STYLE}</style>
</head>
<body>
<h1>{title}</h1>
<table>
<tr><th>source</th>{head}</tr>
{sources}</table>
<h2>An epoch</h2>
<table>
{totals}</table>
<h2>Rows by length, in tokens</h2>
<table>
{_html_lengths(view)}</table>
{f"<h2>Left out, cut, and noted</h2><ul>{notes}</ul>" if notes else ""}
<h2>Rows as the model sees them</h2>
<p>Tokens with a loss are <mark>marked</mark>.</p>
{rows}
</body>
</html>
"""


def _html_lengths(view: DataView) -> str:
    most = max((one.num_rows for one in view.lengths), default=1)
    return "".join(
        f'<tr><td class="figure">{one.first:,} - {one.last:,}</td>'
        f'<td class="figure">{one.num_rows:,}</td><td class="wide">'
        f'<div class="bar" style="width: {100 * one.num_rows / most:.1f}%"></div></td></tr>\n'
        for one in view.lengths
    )


def _html_row(row: SeenRow) -> str:
    pieces = "".join(
        f"<mark>{escape(printable(piece.text))}</mark>"
        if piece.has_loss
        else escape(printable(piece.text))
        for piece in row.pieces
    )
    counts = f"{row.num_tokens:,} tokens, {row.num_loss_tokens:,} with a loss"
    return f"<h3>{escape(row.source)}: {counts}</h3>\n<pre>{pieces}</pre>"
