"""Predicted and measured memory, term by term where the terms can be measured separately."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from offload.plan.memory.memory import (
    CONTEXT,
    DATA_WORKERS,
    FRAGMENTATION,
    OTHER_RANKS,
    MemoryGrade,
)

PEAKS = ("peak allocated VRAM", "peak host memory", "peak memory")
VISITS = "layer inputs, one visit, head chunk"
PROCESS = "process, libraries, loading"
HEAP = "libraries, layer inputs, one visit, head chunk"
COUNTED: MemoryGrade = "formula"
# No meter of this process measures these.
UNSEEN = {
    CONTEXT: "the driver's, outside torch",
    DATA_WORKERS: "other processes",
    OTHER_RANKS: "other processes",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryRow:
    """One term, in bytes."""

    name: str  # the name of the term
    grade: str  # how it was predicted: `formula` or `traced`; empty where nothing was
    predicted: int | None  # None where it was not
    measured: int | None  # None where it cannot be
    how: str  # how it was measured, or why it was not
    # The size of the memory, at the total of all terms; None elsewhere, or if no plan says it.
    limit: int | None = None

    @property
    def error(self) -> float | None:
        """Relative error of the prediction; None where there is nothing to compare."""
        if self.predicted is None or not self.measured:
            return None
        return (self.predicted - self.measured) / self.measured


def memory_rows(
    plan: Mapping[str, Any], grade: str, measured: Mapping[str, Any]
) -> tuple[MemoryRow, ...]:
    """Compare the terms of a plan with the measured ones.

    In a traced plan only peaks and the rest of them are traced: memory that is held throughout is
    counted.

    Args:
        plan: As `plan_json` wrote it.
        grade: How its memory was predicted.
        measured: As `write_measured` wrote it.
    """
    device, host = plan["predicted"]["device_memory"], plan["predicted"]["host_memory"]
    limits = plan["predicted"].get("limit_bytes", {})  # runs of older versions have none
    is_cuda = measured["device"] == "cuda"
    others = {DATA_WORKERS, OTHER_RANKS}
    if not is_cuda:  # there is one memory, and one meter for all of this process
        terms = {name: n for name, n in (*device.items(), *host.items()) if name not in others}
        group = _group(terms, grade, measured, HEAP, peak=(PEAKS[2], "resident set"))
        return (*_within(limits.get("RAM"), group), *_unseen({**device, **host}, others))
    on_device = {n: size for n, size in device.items() if n not in (CONTEXT, FRAGMENTATION)}
    on_host = {n: size for n, size in host.items() if n not in others}
    torch_peak, process_peak = (
        (PEAKS[0], "torch"),
        (PEAKS[1], "resident set"),
    )
    apart = measured["peak_reserved_bytes"] - measured["peak_bytes"]
    spare = _row(FRAGMENTATION, COUNTED, device.get(FRAGMENTATION), apart, "torch: not allocated")
    device_rows = _group(
        on_device, grade, _part(measured, is_on_host=False), VISITS, peak=torch_peak
    )
    host_rows = _group(
        on_host, COUNTED, _part(measured, is_on_host=True), PROCESS, peak=process_peak
    )
    return (
        *_within(limits.get("VRAM"), device_rows),
        spare,
        *_within(limits.get("RAM"), host_rows),
        *_unseen({**device, **host}, {CONTEXT, *others}),
    )


def _part(measured: Mapping[str, Any], *, is_on_host: bool) -> dict[str, Any]:
    """Return what was measured in one of the two memories of a machine with a GPU."""
    return {
        "memory": [term for term in measured["memory"] if term["is_on_host"] is is_on_host],
        "peak_bytes": measured["peak_host_bytes" if is_on_host else "peak_bytes"],
    }


def _group(
    terms: Mapping[str, int],
    grade: str,
    measured: Mapping[str, Any],
    rest: str,
    *,
    peak: tuple[str, str],
) -> list[MemoryRow]:
    """Compare a meter's total, the memory that is held throughout by term, and the rest."""
    name, meter = peak
    found = {term["name"]: term for term in measured["memory"] if term["num_bytes"]}
    rows = [_row(name, grade, sum(terms.values()), measured["peak_bytes"], meter)]
    for term, num_bytes in terms.items():
        if term in found:
            num_found, how = found[term]["num_bytes"], found[term]["how"]
            rows.append(_row(term, COUNTED, num_bytes, num_found, how))
    expected = sum(num_bytes for term, num_bytes in terms.items() if term not in found)
    left = measured["peak_bytes"] - sum(term["num_bytes"] for term in found.values())
    rows.append(_row(rest, grade, expected, left, f"{meter}: peak less the others"))
    rows += [
        _row(term, "", None, found[term]["num_bytes"], f"{found[term]['how']}; not in the plan")
        for term in found
        if term not in terms
    ]
    return rows


def _within(limit: int | None, group: Sequence[MemoryRow]) -> list[MemoryRow]:
    """Return the rows of a memory with its limit at their total, which is the first."""
    total, *others = group
    return [replace(total, limit=limit), *others]


def _unseen(terms: Mapping[str, int], names: Iterable[str]) -> list[MemoryRow]:
    return [
        _row(name, COUNTED, terms[name], None, f"not measured: {UNSEEN[name]}")
        for name in UNSEEN
        if name in names and name in terms
    ]


def _row(name: str, grade: str, predicted: int | None, measured: int | None, how: str) -> MemoryRow:
    return MemoryRow(name=name, grade=grade, predicted=predicted, measured=measured, how=how)
