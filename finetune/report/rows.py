"""What is reported, as rows and tables, and the four forms in which it is read.

A row is a fact with the name that programs know it by and the one that people read. Text, HTML
and Markdown are drawn from the same tables, so that a figure has the same words in all of them,
and JSON from the same rows. Nothing here knows of plans or runs.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from itertools import groupby
from typing import Any, Literal, NamedTuple

from rich import box
from rich import table as rich_table
from rich.console import Group, RenderableType
from rich.text import Text

from finetune.report.format import (
    shown_count,
    shown_gib,
    shown_gigabits,
    shown_kwh,
    shown_mib,
    shown_time,
)

Level = Literal["brief", "verbose"]
BRIEF: Level = "brief"
VERBOSE: Level = "verbose"
SHOWN: Mapping[str, Any] = {
    "s": shown_time,
    "bytes": shown_gib,
    "MiB": shown_mib,
    "parameters": lambda number: f"{shown_count(number)} parameters",
    "whole": "{:,.0f}".format,
    "tokens/s": "{:,.0f} tokens/s".format,
    "loss": "{:.4f}".format,
    "error": "{:+.0%}".format,
    "gain": "{:+.1%}".format,
    "%": "{:.0%}".format,
    "share": "{:.1%}".format,
    "Gb/s": shown_gigabits,
    "kWh": shown_kwh,
}
"""How a figure is written, by its unit."""


class Row(NamedTuple):
    """A fact."""

    key: str  # its place in JSON, with dots; empty where programs have the figure elsewhere
    label: str  # its name for people; empty where they are not shown it
    value: Any  # a figure in the unit, a text, or what JSON can hold
    unit: str = ""  # how the figure is written
    note: str = ""  # a remark that is shown after the value
    level: Level = "verbose"  # whether it is always shown, or where details are asked for


class Table(NamedTuple):
    """Facts side by side."""

    title: str  # what they are
    # The name of each, and after a bar the unit of its figures; without names the table has no
    # header.
    columns: Sequence[str]
    lines: Sequence[Sequence[Any]]  # the cells of each line
    note: str = ""  # what is said below
    level: Level = "verbose"  # whether it is always shown, or where details are asked for
    best: int | None = None  # the number of the line that is marked; None for no line

    @property
    def heads(self) -> list[str]:
        """The names of the columns."""
        return [column.partition("|")[0] for column in self.columns]

    @property
    def are_figures(self) -> list[bool]:
        """Whether a column holds figures, which are aligned on the right."""
        by_column = zip(*self.lines, strict=True) if self.lines else [()] * len(self.columns)
        return [
            "|" in column or any(isinstance(cell, int | float) for cell in cells)
            for column, cells in zip(self.columns, by_column, strict=True)
        ]

    @property
    def cells(self) -> list[list[Any]]:
        """The cells as they are written."""
        units = [column.partition("|")[2] for column in self.columns]
        return [[shown(*cell) for cell in zip(line, units, strict=True)] for line in self.lines]


Part = Table | RenderableType
"""What is drawn: a table, a line of text, or what only a terminal draws."""


class Drawn(str):
    """A text that pages draw with more than its letters.

    Attributes:
        html: HTML that is drawn.
    """

    html: str


def heading(title: str) -> Row:
    """Return what begins a new table of the rows that follow."""
    return Row("", title, "")


def shown(value: Any, unit: str = "") -> Any:
    """Return a value as it is written; text stays as it is, and what there is not is a dash."""
    if value is None:
        return "-"
    if isinstance(value, str | Text):
        return value
    if unit:
        return SHOWN[unit](value)
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:,.4g}" if abs(value) < 1000 else f"{value:,.0f}"
    return f"{value:,}"


def tables(title: str, rows: Iterable[Row], level: Level = "verbose") -> list[Table]:
    """Return rows as tables of two columns, one after each heading.

    Args:
        title: Heading of the first table.
        rows: Facts and headings.
        level: Whether details are among them.
    """
    found = [Table(title, [""] * 2, [], level="brief")]
    for row in rows:
        if not row.label or (level == "brief" and row.level != "brief"):
            continue
        if row == heading(row.label):
            found.append(found[0]._replace(title=row.label, lines=[], level="verbose"))
            continue
        figure, gap = shown(row.value, row.unit), "" if row.note[:1] in ("", *",:;") else " "
        line = (row.label, f"{figure}{gap}{row.note}")
        found[-1] = found[-1]._replace(lines=[*found[-1].lines, line])
    return [table for table in found if table.lines]


def as_json(rows: Iterable[Row]) -> dict[str, Any]:
    """Return the values of rows, nested by their keys."""
    found: dict[str, Any] = {}
    for row in rows:
        *outer, name = row.key.split(".")
        place = found
        for one in outer:
            place = place.setdefault(one, {})
        if name:
            place[name] = row.value
    return found


# --------------------------------------------------------------------------------------- for people


class _Titled(rich_table.Table):
    """A table below its title: a long title neither widens the table nor is truncated."""

    heading = ""

    def __rich_console__(self, console: Any, options: Any) -> Any:
        """Yield the title, then the table."""
        yield Text(self.heading, style="italic")
        yield from super().__rich_console__(console, options)


def as_text(parts: Iterable[Part], *, is_compact: bool = False) -> RenderableType:
    """Return tables and lines for a terminal.

    Args:
        parts: What to draw.
        is_compact: Whether tables with a header are drawn without rules and blank lines.
    """
    return Group(*(one for part in parts for one in _text(part, is_compact=is_compact)))


def _text(part: Part, *, is_compact: bool) -> list[RenderableType]:
    if not isinstance(part, Table):
        return [Text(part) if isinstance(part, str) else part]
    has_header = any(part.heads)
    is_ruled = has_header and not is_compact
    drawn = _Titled(
        box=box.SIMPLE if is_ruled else None,
        show_header=has_header,
        padding=(0, 1),
        pad_edge=not is_ruled,
        collapse_padding=is_ruled,
    )
    drawn.heading = part.title
    for name, is_figure in zip(part.heads, part.are_figures, strict=True):
        drawn.add_column(name, justify="right" if is_figure else "left", overflow="fold")
    for _, same in groupby(part.cells, key=lambda line: line[0]):
        lines = list(same)
        if is_ruled and lines[1:]:
            drawn.add_section()
        for number, line in enumerate(lines):
            first = "" if number else line[0]
            drawn.add_row(*(_literal(cell) for cell in (first, *line[1:])))
        if is_ruled and lines[1:]:
            drawn.add_section()
    return [drawn, Text(part.note)] if part.note else [drawn]


def _literal(cell: Any) -> Text:
    return cell if isinstance(cell, Text) else Text(cell)


def as_markdown(parts: Iterable[Part]) -> str:
    """Return tables and lines as Markdown."""
    return "\n\n".join("\n".join(_markdown(part)) for part in parts)


def _markdown(part: Part) -> Iterator[str]:
    if not isinstance(part, Table):
        yield str(part)
        return
    if part.title:
        yield from (part.title, "")
    for line in (part.heads, ["---"] * len(part.heads), *part.cells):
        yield f"| {' | '.join(str(cell).replace('|', chr(92) + '|') for cell in line)} |"


def as_html(parts: Iterable[Part]) -> str:
    """Return tables and lines as HTML; tables of details are folded, with the lines below them."""
    found: list[str] = []
    for part in parts:
        above = found.pop() if found and not isinstance(part, Table) else ""
        fold = "</details>" if above.endswith("</details>") else ""
        found.append(f"{above.removesuffix(fold)}\n{_html(part)}{fold}")
    return "\n".join(found)


def _html(part: Part) -> str:
    if not isinstance(part, Table):
        return f"<p>{escape(str(part))}</p>"
    title, note = escape(part.title), f"<p>{escape(part.note)}</p>" if part.note else ""
    inner = html_table(part) + note
    if part.level == "verbose":
        return f"<details><summary><b>{title}</b></summary>\n{inner}</details>"
    return f"<h2>{title}</h2>\n{inner}"


def as_tiles(rows: Iterable[Row]) -> str:
    """Return a few facts as HTML, each with its figure large."""
    tiles = "".join(
        f"<div><dt>{escape(row.label)}</dt><dd><b>{escape(shown(row.value, row.unit))}</b>"
        f" {escape(row.note)}</dd></div>\n"
        for row in rows
    )
    return f'<dl class="tiles">\n{tiles}</dl>'


def html_table(table: Table) -> str:
    """Return a table alone.

    Where it is wider than the screen it is scrolled, by keys too. On a phone the lines of one of
    four columns or more are stacked: each cell is below the name of its column.
    """
    written = ("".join(map(str, column)) for column in zip(table.heads, *table.cells, strict=True))
    classes = [
        ' class="figure"' if is_figure else "" if text.strip("#") else ' class="bar"'
        for is_figure, text in zip(table.are_figures, written, strict=True)
    ]

    def cells(tag: str, line: Iterable[Any], names: Iterable[str]) -> str:
        found = zip(line, classes, names, strict=True)
        return "".join(
            f"<{tag}{kind}{name}>{cell.html if isinstance(cell, Drawn) else escape(str(cell))}"
            f"</{tag.split()[0]}>"
            for cell, kind, name in found
        )

    heads, unnamed = table.heads, [""] * len(table.heads)
    named = [f' data-name="{escape(name)}"' if name else "" for name in ("", *heads[1:])]
    head = cells('th scope="col"', heads, unnamed)
    marks = [' class="best"' if number == table.best else "" for number in range(len(table.lines))]
    lines = "".join(
        f"<tr{mark}>{cells('td', line, named if heads[3:] else unnamed)}</tr>\n"
        for mark, line in zip(marks, table.cells, strict=True)
    )
    return (
        f'<div class="wide" tabindex="0" role="group" aria-label="{escape(table.title)}"><table>\n'
        f"<tr>{head}</tr>\n{lines}</table></div>"
    )
