"""Figures as people read them."""

import re
from collections.abc import Callable

from offload.plan.machine.machine import GIB
from offload.plan.step import FREE_FRAC, MOST_TOKENS


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


def gib_in(text: str) -> float | None:
    """Read a number of GiB, with the unit or without it; None where it is none."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?) *(?:gib|gb|g)?", text.strip().lower())
    return float(found[1]) if found else None


def shown_mib(num_bytes: float) -> str:
    """Write bytes in MiB."""
    return f"{num_bytes / 2**20:,.1f} MiB"


def shown_gigabits(bytes_per_s: float) -> str:
    """Return the rate of a network, in the unit that networks are sold by."""
    gigabits = bytes_per_s * 8 / 1e9
    return f"{gigabits:,.3g} Gb/s" if gigabits >= 0.1 else f"{gigabits * 1e3:,.3g} Mb/s"


def shown_kwh(kwh: float) -> str:
    """Write energy in kWh, or in Wh where that would be nearly 0."""
    return f"{kwh:,.3g} kWh" if kwh >= 0.1 else f"{kwh * 1e3:.3g} Wh"


def shown_count(number: int) -> str:
    """Write a count in millions or billions."""
    if number >= 1e9:
        return f"{number / 1e9:.2f} B"
    return f"{number / 1e6:.2f} M" if number >= 1e6 else f"{number:,}"


def shown_span(low: int, high: int) -> str:
    """Write the lowest and the highest of some counts, which may be one."""
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


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


def shown_graphs(num_kept_graphs: int) -> str:
    """Return how many layers keep their graphs, in words."""
    return f"{num_kept_graphs} kept graph{'' if num_kept_graphs == 1 else 's'}"


def signed(figure: float, shown: Callable[[float], str]) -> str:
    """Write a difference with its sign; one that is shown as nothing is an equals sign."""
    size = shown(abs(figure))
    if float(size.split()[0].replace(",", "")) == 0:
        return "="
    return f"{'+' if figure > 0 else '-'}{size}"
