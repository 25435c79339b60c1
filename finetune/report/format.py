"""Figures and tables as people read them."""

from rich import box
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from offload.plan.machine.machine import GIB
from offload.plan.schedule.schedule import Residency
from offload.plan.step import FREE_FRAC, MOST_TOKENS


class Titled(Table):
    """A table below its title: a long title neither widens the table nor is truncated."""

    heading = ""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield the title, then the table."""
        yield Text(self.heading, style="italic")
        yield from super().__rich_console__(console, options)


def table_of(title: str, *columns: str) -> Table:
    """Return an empty table; all columns but the first hold figures, two unnamed ones do not."""
    table = Titled(box=box.SIMPLE, show_header=any(columns), pad_edge=False, collapse_padding=True)
    return _with_columns(table, title, columns)


def compact_table(title: str, *columns: str) -> Table:
    """Return the same without rules and blank lines."""
    table = Titled(box=None, show_header=any(columns), padding=(0, 1))
    return _with_columns(table, title, columns)


def _with_columns(table: Titled, title: str, columns: tuple[str, ...]) -> Table:
    table.heading = title
    for number, column in enumerate(columns or ("", "")):
        is_figure = bool(columns) and number > 0 and column not in ("wanted", "got")
        table.add_column(column, justify="right" if is_figure else "left", overflow="fold")
    return table


def shown_time(seconds: float) -> str:
    """Write a time in its natural unit."""
    if seconds >= 7200:
        return f"{seconds / 3600:,.1f} h"
    if seconds >= 100:
        return f"{seconds:,.0f} s"
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.2f} ms"


def shown_gib(num_bytes: float) -> str:
    """Write bytes in GiB, or in MiB where that would be nearly 0."""
    return f"{num_bytes / GIB:.2f} GiB" if num_bytes >= GIB / 10 else shown_mib(num_bytes)


def shown_mib(num_bytes: float) -> str:
    """Write bytes in MiB."""
    return f"{num_bytes / 2**20:,.1f} MiB"


def shown_gigabits(bytes_per_s: float) -> str:
    """Return the rate of a network, in the unit that networks are sold by."""
    gigabits = bytes_per_s * 8 / 1e9
    return f"{gigabits:,.3g} Gb/s" if gigabits >= 0.1 else f"{gigabits * 1e3:,.3g} Mb/s"


def shown_count(number: int) -> str:
    """Write a count in millions or billions."""
    if number >= 1e9:
        return f"{number / 1e9:.2f} B"
    return f"{number / 1e6:.2f} M" if number >= 1e6 else f"{number:,}"


def shown_break_even(num_tokens: int | None) -> str:
    """Write N* in tokens; None is more than any step should have."""
    return f"more than {MOST_TOKENS:,}" if num_tokens is None else f"{num_tokens:,}"


def free_streaming(num_tokens: int | None, *, is_in_rounds: bool = False) -> str:
    """Return from how many tokens streaming is free; the words follow "streaming".

    Args:
        num_tokens: N*.
        is_in_rounds: Whether each micro-batch passes all layers by itself: more tokens in a step
            then have as many more loads.
    """
    if is_in_rounds:
        than = "more" if num_tokens is None else "less"
        return f"adds {than} than {FREE_FRAC:.0%}, whatever their number"
    return f"adds less than {FREE_FRAC:.0%} from N* = {shown_break_even(num_tokens)}"


def shown_outputs(residency: Residency) -> str:
    """Return how many layers' attention is not computed again."""
    if not residency.has_outputs:
        return "no kept outputs"
    return f"{residency.num_kept_outputs} kept and {residency.num_sent_outputs} sent outputs"


def shown_sent_graphs(residency: Residency) -> str:
    """Return how many layers send their graphs, in words."""
    num = residency.num_sent_graphs
    return f"{num} sent graph{'' if num == 1 else 's'}"


def shown_graphs(num_kept_graphs: int) -> str:
    """Return how many layers keep their graphs, in words."""
    return f"{num_kept_graphs} kept graph{'' if num_kept_graphs == 1 else 's'}"
