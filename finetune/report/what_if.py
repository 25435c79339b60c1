"""A what-if table, for people and for programs."""

from dataclasses import asdict
from typing import Any

from rich.table import Table

from finetune.report.format import shown_gib, shown_time, table_of
from offload.plan.machine.machine import Machine
from offload.plan.what_if import Figures, Option, OtherWays, Standing

SECTIONS: dict[Standing, str] = {
    "in the plan": "without what this plan does:",
    "a setting": "with a setting:",
    "not done here": "only priced here:",
}


def what_if_table(ways: OtherWays, *, machine: Machine) -> Table:
    """Return a row for each option: what it would change in the plan's own figures."""
    table = table_of(
        "What if: changes to this plan, all else as it is (slots too)",
        *("", "step", "VRAM", "RAM", "link per step", "by"),
    )
    table.columns[-1].justify = "left"
    now = ways.plan
    sizes = (shown_gib(size) for size in (now.vram_bytes, now.ram_bytes, now.link_bytes))
    table.add_row("this plan", shown_time(now.step_s), *sizes)
    for standing, title in SECTIONS.items():
        options = [option for option in ways.options if option.standing == standing]
        if options:
            table.add_section()
            table.add_row(title, style="bold")
        for option in options:
            is_short = option.figures is not None and not option.fits
            name = f"  {option.name}{' *' if is_short else ''}"
            table.add_row(name, *_changes(option, now), option.how.replace("`", ""))
    table.caption = f"* more than {machine.name} has."
    if machine.device == "cuda":
        link = machine.h2d_duplex_bytes_per_s
        rate = f"{link.value / 1e9:.1f} GB/s ({link.source})"
        table.caption += f" Each card has a link of {rate} to all others."
    table.caption_justify = "left"
    return table


def what_if_json(ways: OtherWays) -> dict[str, Any]:
    """Return the figures of a plan, and of each option for comparison."""
    return {"other_ways": asdict(ways)}


def _changes(option: Option, now: Figures) -> list[str]:
    then = option.figures
    if then is None:
        return [""] * 4
    sizes = (
        (then.vram_bytes, now.vram_bytes),
        (then.ram_bytes, now.ram_bytes),
        (then.link_bytes, now.link_bytes),
    )
    changes = [_signed(after - before, shown_gib(abs(after - before))) for after, before in sizes]
    step_s = then.step_s - now.step_s
    return [_signed(step_s, shown_time(abs(step_s))), *changes]


def _signed(change: float, shown: str) -> str:
    if float(shown.split()[0].replace(",", "")) == 0:
        return "="
    return f"{'+' if change > 0 else '-'}{shown}"
