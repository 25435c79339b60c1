"""The rows of a run as Markdown: measured, failed, not run; and the goals."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from tests.bench.gpu.cases import CASES, Case
from tests.bench.gpu.goals import Row, value_of, verdicts
from tests.bench.gpu.journal import CASE, PARTS, RATES

NO_ROWS = "Nothing has been measured.\n"
REHEARSED = "A rehearsal, tiny and on a CPU: it reaches no goal and misses none."
STEPS = ("case", "part", "tokens/s", "step, s", "of R3", "of resident", "exposed", "predicted")
COLUMNS = (*STEPS, "peak memory", "of the probe's rate", "of the best product", "once", "note")


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
    """Return a line for each row that has tokens per second; columns that none fills are left out.

    Layers' FLOP/s count a recompute, and are a share of the probe's rate in older rows and of the
    best product of the layers' own shapes since. `once` is the whole step's TFLOP/s, each product
    counted once.
    """
    timed = [row for row in rows if value_of(row, "tokens_per_s") is not None]
    if not timed:
        return ""
    cells = [COLUMNS, *map(cells_of, timed)]
    shown = [n for n in range(len(COLUMNS)) if any(row[n] for row in cells[1:])]
    head, *lines = [f"| {' | '.join(row[n] for n in shown)} |" for row in cells]
    return "\n".join([head, "|---" * len(shown) + "|", *lines, ""])


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
        _percent(row, "lane_share"),
        _tera(row, "once_flops_per_s"),
        str(row.get("note", "")),
    ]


def _percent(row: Row, name: str) -> str:
    value = value_of(row, name)
    return "" if value is None else f"{value:.1%}"


def _tera(row: Row, name: str) -> str:
    value = value_of(row, name)
    return "" if value is None else f"{value / 1e12:.0f}"


def _signed(row: Row, name: str) -> str:
    value = value_of(row, name)
    return "" if value is None else f"{value:+.1%}"


def others(rows: Sequence[Row]) -> str:
    """Return the rows without tokens per second, in a few words each."""
    lines = list(_words(rows))
    return bullets("Beside these", lines)


def _words(rows: Sequence[Row]) -> Iterator[str]:
    for row in rows:
        if "tokens_per_s" in row or "error" in row:
            continue
        words = next((said for key, said in WORDS if key in row), None)
        for text in () if words is None else words(row):
            yield f"{row['case']}, {row['part']}: {text}"


def _of_equality(row: Row) -> Iterator[str]:
    equal = "equal to the bit" if row["is_equal"] else f"NOT EQUAL: {row['unequal']}"
    ratio = f"loads take {row['loads_of_visits']:.2g} of the visits"
    counts = f"{row['num_tensors']} gradients, {row['num_ways']} ways"
    path = f"; {row['path']}" if "path" in row else ""
    yield f"{equal}, {counts}; {ratio}{path}"


def _of_tests(row: Row) -> Iterator[str]:
    told = [f"{row[key]} {key}" for key in ("tests", "failures", "skipped")]
    yield ", ".join([*told, *row["failed"]])


def _of_host(row: Row) -> Iterator[str]:
    made, locked = row["fill_bytes_per_s"] / 1e9, row["lock_bytes_per_s"] / 1e9
    lock = "" if row["lock_mode"] == "not needed" else f", locked at {locked:.2f}"
    yield f"weights made at {made:.2f} GB/s{lock}; {row['lock_reason']}"


def _of_ways(row: Row) -> Iterator[str]:
    ways = [f"{way} {rate / 1e12:.3g}" for way, rate in row["flops_per_s"].items()]
    yield f"{', '.join(ways)} TFLOP/s"


def _of_timers(row: Row) -> Iterator[str]:
    for what, idle in row["idle_flops_per_s"].items():
        busy, probe = (row[f"{way}_flops_per_s"][what] for way in ("busy", "probe"))
        rates = f"idle {idle / 1e12:.3g}, busy {busy / 1e12:.3g}, probe {probe / 1e12:.3g}"
        yield f"{what} {rates} TFLOP/s"
    yield f"a launch {row['launch_s'] * 1e6:.3g} us, probe {row['probe_launch_s'] * 1e6:.3g} us"


def _of_products(row: Row) -> Iterator[str]:
    rate = row["best_product_flops_per_s"] / 1e12
    yield f"best product {row['best_product']}, {rate:.3g} TFLOP/s"


def _of_profile(row: Row) -> Iterator[str]:
    shares = {"ceiling_share": "the probe's rate", "lane_share": "the best product"}
    told = [
        f"{_percent(row, key)} of {of} in the layers" for key, of in shares.items() if key in row
    ]
    yield "; ".join([*told, *(f"{one['frac']:.1%} {one['name'][:60]}" for one in row["top"][:8])])


def _of_packing(row: Row) -> Iterator[str]:
    steps = f"{row['joined_step_s']:.3g} s in one call, {row['rows_step_s']:.3g} s by rows"
    counts = f"{row['num_packed_rows']} rows, {row['joined_num_joined_layers']} layers"
    yield f"{counts}; {steps}; gradients {row['gradients_apart']:.2g} apart"


def _of_rows(row: Row) -> Iterator[str]:
    said = [line for line in row["last_lines"] if any(map(str.isalnum, line))]
    yield f"{row['num_rows']} rows; {' '.join(said[-1:])}"


def _of_note(row: Row) -> Iterator[str]:
    yield str(row["note"])


WORDS: tuple[tuple[str, Callable[[Row], Iterator[str]]], ...] = (
    ("is_equal", _of_equality),
    ("exit_status", _of_tests),
    ("lock_bytes_per_s", _of_host),
    ("flops_per_s", _of_ways),
    ("idle_flops_per_s", _of_timers),
    ("up_s", _of_note),
    ("num_packed_rows", _of_packing),
    ("top", _of_profile),
    ("products_flops_per_s", _of_products),
    ("num_rows", _of_rows),
    ("note", _of_note),
)
"""What tells a kind of row, and what is said of it."""


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
