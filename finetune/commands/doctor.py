"""What `doctor` shows: a line for each finding, with its fix below it."""

import json
from collections.abc import Sequence

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from finetune.env import stores_dir
from offload.probe.doctor import PACKAGE, Finding, check_up
from offload.probe.machine import installed_version

_STYLES = {"ok": "green", "warning": "yellow", "error": "red"}


def versions() -> str:
    """Return the versions of this program and of what it runs on."""
    own = installed_version(PACKAGE) or "(a checkout)"
    others = (
        f"{name} {installed_version(name) or 'missing'}" for name in ("torch", "transformers")
    )
    return ", ".join((f"sluice {own}", *others))


def examined() -> tuple[Finding, ...]:
    """Look at this machine."""
    return check_up(stores_dir())


def findings_table(findings: Sequence[Finding]) -> RenderableType:
    """Return the findings as people read them."""
    table = Table.grid(padding=(0, 2))
    for one in findings:
        value = Text(one.value)
        if one.hint:
            value.append(f"\nfix: {one.hint}", style="italic")
        table.add_row(Text(one.status, style=_STYLES[one.status]), one.name, value)
    return table


def findings_json(findings: Sequence[Finding]) -> str:
    """Return the findings as programs read them."""
    rows = [
        {"name": one.name, "status": one.status, "value": one.value, "hint": one.hint}
        for one in findings
    ]
    return json.dumps({"findings": rows}, indent=2)


def can_train(findings: Sequence[Finding]) -> bool:
    """Return whether nothing makes training impossible."""
    return all(one.status != "error" for one in findings)
