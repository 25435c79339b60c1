"""The rows of a run as Markdown: measured, failed, not run; and the goals."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tests.bench.gpu.cases import CASES, Case
from tests.bench.gpu.goals import Row, value_of, verdicts
from tests.bench.gpu.journal import CASE, PARTS, RATES

NO_ROWS = "Nothing has been measured.\n"
REHEARSED = "A rehearsal, tiny and on a CPU: it reaches no goal and misses none."
STEPS = ("case", "part", "tokens/s", "step, s", "of R3", "of resident", "exposed", "predicted")
COLUMNS = (*STEPS, "peak memory", "of ceiling", "note")


def text_of(rows: Sequence[Row], cases: Sequence[Case] = CASES) -> str:
    """Return all of it.

    Args:
        rows: Of one run.
        cases: Those that were asked for.
    """
    measured = [row for row in rows if row["part"] not in (PARTS, CASE)]
    if not measured:
        return NO_ROWS
    parts = [head(measured), rates(measured), steps(measured), others(measured)]
    parts += [bullets("Failed", failures(measured)), bullets("Not run", left_over(rows, cases))]
    parts.append(REHEARSED + "\n" if measured[0]["rehearsal"] else goals(measured))
    return "\n".join(filter(None, parts))


def head(rows: Sequence[Row]) -> str:
    """Say where and with what it was measured."""
    row = rows[-1]
    cap = (
        "not capped by --vram" if row["vram_gib"] is None else f"capped at {row['vram_gib']:g} GiB"
    )
    versions = ", ".join(f"{name} {found}" for name, found in row["versions"].items() if found)
    code = (row["git_sha"] or "")[:9] + (" and changes" if row["dirty"] else "")
    host = f"{row['cpu']}, {row['host_bytes'] / 2**30:.0f} GiB"
    return (
        f"## {row['gpu'] or row['cpu']}\n\n"
        f"{row['date'][:10]}; driver {row['driver']}, {cap}; {host};"
        f" code {code}, {row['code_sha256'][:12]}; {versions}\n"
    )


def rates(rows: Sequence[Row]) -> str:
    """Return what the machine does."""
    found = [row for row in rows if (row["case"], row["part"]) == ("probe", "machine")]
    if not found or "error" in found[-1]:
        return ""
    lines = [f"| {name} | {found[-1][name]:.3g} |" for name in RATES]
    return "\n".join(["| rate | measured |", "|---|---|", *lines, ""])


def steps(rows: Sequence[Row]) -> str:
    """Return a line for each row that has tokens per second."""
    timed = [row for row in rows if value_of(row, "tokens_per_s") is not None]
    if not timed:
        return ""
    lines = [f"| {' | '.join(cells_of(row))} |" for row in timed]
    rule = "|---" * len(COLUMNS) + "|"
    return "\n".join([f"| {' | '.join(COLUMNS)} |", rule, *lines, ""])


def cells_of(row: Row) -> list[str]:
    """Return the cells of one such line; empty where a row does not have it."""
    step: Any = row.get("step_s")
    shown = "" if step is None else " / ".join(f"{step[p]:.3g}" for p in ("p20", "p50", "p80"))
    peak = row.get("peak_bytes")
    memory = (
        "" if peak is None else f"{peak / 2**30:.2f} GiB {_signed(row, 'memory_error')}".strip()
    )
    return [
        row["case"],
        row["part"],
        f"{value_of(row, 'tokens_per_s'):,.0f}",
        shown,
        _percent(row, "r3_share"),
        _percent(row, "resident_share"),
        _percent(row, "exposed_frac"),
        _signed(row, "calibrated_error"),
        memory,
        _percent(row, "ceiling_share"),
        str(row.get("note", "")),
    ]


def _percent(row: Row, name: str) -> str:
    value = value_of(row, name)
    return "" if value is None else f"{value:.1%}"


def _signed(row: Row, name: str) -> str:
    value = value_of(row, name)
    return "" if value is None else f"{value:+.1%}"


def others(rows: Sequence[Row]) -> str:
    """Return the rows without tokens per second, in a few words each."""
    lines = list(_words(rows))
    return bullets("Beside these", lines)


def _words(rows: Sequence[Row]) -> Iterator[str]:
    for row in rows:
        name = f"{row['case']}, {row['part']}"
        if "is_equal" in row:
            equal = "equal to the bit" if row["is_equal"] else f"NOT EQUAL: {row['unequal']}"
            ratio = f"loads take {row['loads_of_visits']:.2g} of the visits"
            counts = f"{row['num_tensors']} gradients, {row['num_ways']} ways"
            yield f"{name}: {equal}, {counts}; {ratio}"
        elif "exit_status" in row:
            told = [f"{row[key]} {key}" for key in ("tests", "failures", "skipped")]
            yield f"{name}: {', '.join([*told, *row['failed']])}"
        elif "lock_bytes_per_s" in row:
            made, locked = row["fill_bytes_per_s"] / 1e9, row["lock_bytes_per_s"] / 1e9
            lock = "" if row["lock_mode"] == "not needed" else f", locked at {locked:.2f}"
            yield f"{name}: weights made at {made:.2f} GB/s{lock}; {row['lock_reason']}"
        elif "flops_per_s" in row:
            ways = [f"{way} {rate / 1e12:.3g}" for way, rate in row["flops_per_s"].items()]
            yield f"{name}: {', '.join(ways)} TFLOP/s"
        elif "top" in row:
            top = [f"{one['frac']:.1%} {one['name'][:60]}" for one in row["top"][:8]]
            share = _percent(row, "ceiling_share")
            yield f"{name}: {share} of the GEMM ceiling in the layers; {'; '.join(top)}"
        elif "num_packed_rows" in row:
            steps = f"{row['joined_step_s']:.3g} s in one call, {row['rows_step_s']:.3g} s by rows"
            counts = f"{row['num_packed_rows']} rows, {row['joined_num_joined_layers']} layers"
            yield f"{name}: {counts}; {steps}; gradients {row['gradients_apart']:.2g} apart"
        elif "is_compared" in row or "down_s" in row:
            yield f"{name}: {row['note']}"
        elif "num_rows" in row:
            said = [line for line in row["last_lines"] if any(map(str.isalnum, line))]
            yield f"{name}: {row['num_rows']} rows; {' '.join(said[-1:])}"


def failures(rows: Sequence[Row]) -> list[str]:
    """Return the parts that could not be measured, and why."""
    return [f"{row['case']}, {row['part']}: {row['error']}" for row in rows if "error" in row]


def left_over(rows: Sequence[Row], cases: Sequence[Case]) -> list[str]:
    """Return the cases and parts without a row, and how a case ended that is not complete."""
    found = []
    for case in cases:
        own = [row for row in rows if row["case"] == case.name]
        done = {row["part"] for row in own}
        parts: list[str] = next((r["parts"] for r in reversed(own) if r["part"] == PARTS), [])
        left = [part for part in parts if part not in done]
        ends: list[Mapping[str, Any]] = [row for row in own if row["part"] == CASE]
        why = ends[-1].get("error", "") if ends else "not begun"
        if left or why:
            found.append(": ".join(filter(None, (case.name, "; ".join(left), why))))
    return found


def goals(rows: Sequence[Row]) -> str:
    """Return each goal, with what misses it."""
    lines = []
    for verdict in verdicts(rows):
        reached = f"{verdict.num_reached} of {verdict.num}" if verdict.num else "not measured"
        misses = [f"{case} {part} {value:.3g}" for case, part, value in verdict.misses]
        lines.append(f"{verdict.goal.text}: {reached}" + "".join(f"; {miss}" for miss in misses))
    return bullets("Goals", lines)


def bullets(title: str, lines: Sequence[str]) -> str:
    """Return a list under a title; nothing where it is empty."""
    return "\n".join([f"{title}:\n", *(f"- {line}" for line in lines), ""]) if lines else ""
