"""One line of the doctor's report."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """Something about this machine, and what to do about it.

    Attributes:
        name: What was inspected.
        value: What was found, in words that may be shown to anyone.
        status: "error" is what makes training impossible; a "warning" may make it slow.
        hint: The fix; empty if there is nothing to fix.
    """

    name: str
    value: str
    status: Literal["ok", "warning", "error"] = "ok"
    hint: str = ""


def finding(name: str, value: str, *, warning: str | None = None) -> Finding:
    """Return a finding, which is a warning if it has a fix."""
    if warning is None:
        return Finding(name=name, value=value)
    return Finding(name=name, value=value, status="warning", hint=warning)
