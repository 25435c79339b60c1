"""A what-if table, for people and for programs."""

from dataclasses import asdict
from typing import Any

from finetune.report.format import shown_gib, shown_time, signed
from finetune.report.rows import Table
from offload.plan.machine.machine import Machine
from offload.plan.what_if import Figures, Option, OtherWays, Standing

SECTIONS: dict[Standing, str] = {
    "in the plan": "without",
    "a setting": "with a setting",
    "not done here": "only priced here",
}


def what_if_table(ways: OtherWays, *, machine: Machine) -> Table:
    """Return a line for each option: what it would change in the plan's own figures."""
    now = ways.plan
    sizes = map(shown_gib, (now.vram_bytes, now.ram_bytes, now.link_bytes))
    lines = [
        (
            SECTIONS[standing],
            option.name + (" *" if option.figures is not None and not option.fits else ""),
            *_changes(option, now),
            option.how.replace("`", ""),
        )
        for standing in SECTIONS
        for option in ways.options
        if option.standing == standing
    ]
    link = machine.h2d_duplex_bytes_per_s
    rate = f" Each card has a link of {link.value / 1e9:.1f} GB/s ({link.source}) to all others."
    return Table(
        "What if: changes to this plan, all else as it is (slots too)",
        ("", "", "step|s", "VRAM|s", "RAM|s", "link per step|s", "by"),
        [("this plan", "", shown_time(now.step_s), *sizes, ""), *lines],
        f"* more than {machine.name} has.{rate if machine.device == 'cuda' else ''}",
    )


def what_if_json(ways: OtherWays) -> dict[str, Any]:
    """Return the figures of a plan, and of each option for comparison."""
    return {"other_ways": asdict(ways)}


def _changes(option: Option, now: Figures) -> list[str]:
    then = option.figures
    if then is None:
        return [""] * 4
    names = ("vram_bytes", "ram_bytes", "link_bytes")
    sizes = [signed(getattr(then, name) - getattr(now, name), shown_gib) for name in names]
    return [signed(then.step_s - now.step_s, shown_time), *sizes]
