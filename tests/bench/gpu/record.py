"""Keeps the rows of a run for good, and writes what README and docs say of speed from all of them.

    python -m tests.bench.gpu.record DIR      the rows in DIR, measured by the code that is here
    python -m tests.bench.gpu.record          README and docs alone

Only from a clean tree with the digest that the rows have: so they were measured by the commit that
they name, even where untracked files made that tree dirty. Files are never changed.
"""

import argparse
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.bench.gpu.goals import TWICE, Row, verdicts
from tests.bench.gpu.journal import CASE, PARTS, ROWS, read
from tests.bench.gpu.table import head, others, rates, steps
from tests.bench.record import RESULTS, ROOT, code_digest, git

README = ROOT / "README.md"
PAGE = ROOT / "docs/development/benchmarks.md"
BEGIN, END = "<!-- performance -->\n", "<!-- end of performance -->\n"
NOTHING = """\
Nothing has been measured on a GPU yet: every figure for a card in this file is a prediction.
"""
RAN = "docs/development/benchmarks.md#what-has-run-on-a-card"
MISSES = "docs/development/benchmarks.md#on-a-gpu"
COMMAND = "`python -m tests.bench.gpu --window A` measures one.\n"
OLDER = """\
branches in fp32 by peft, the models' own norms, rotations, gates and loss; experts by Triton for
speed, by a loop for exactness"""
"""The code path of rows that do not say theirs: those of 2026-11-26."""
DEFAULT = "branches in the base's dtype, fused norms, rotations, gates and loss"
OF_A_PATH = ("exact", "moe30b", "dense", "profile", "flagship")
"""Cases whose figures depend on it."""


class RefusedError(Exception):
    """Rows that are not to be kept, and why."""


def keep(run: Path, results: Path = RESULTS) -> Path:
    """Copy the rows of a run to a file of their own.

    Raises:
        RefusedError: The tree is not clean, the rows are another code's or a rehearsal's, or a case
            did not end.
    """
    rows = read(run / ROWS)
    require_worth(rows, digest=code_digest(), changes=git("status", "--porcelain"))
    first, sha = rows[0], git("rev-parse", "HEAD")
    name = re.sub(r"[^a-z0-9]+", "-", str(first["gpu"]).lower()).strip("-")
    cap = "" if first["vram_gib"] is None else f"-{first['vram_gib']:g}gib"
    file = results / f"{first['date'][:10]}-{name}{cap}-{first['code_sha256'][:8]}.jsonl"
    if file.exists():
        raise RefusedError(f"{file} exists, and results are never changed")
    results.mkdir(exist_ok=True)
    known = {"git_sha": sha, "dirty": False}  # by the digest
    file.write_text("".join(json.dumps(row | known) + "\n" for row in rows))
    return file


def require_worth(rows: Sequence[Row], *, digest: str, changes: str) -> None:
    """Refuse what a reader could not trust or repeat.

    Args:
        rows: Of a run.
        digest: Of the code that is here.
        changes: What git says of the tree; empty where it is clean.
    """
    if changes:
        raise RefusedError(f"the tree here is not clean: {changes.splitlines()[0].strip()}")
    if not rows:
        raise RefusedError("there are no rows")
    if any(row["rehearsal"] for row in rows):
        raise RefusedError("these are rows of a rehearsal")
    if any(row["code_sha256"] != digest for row in rows):
        raise RefusedError("rows were measured by other code than is here; check that commit out")
    if len({(row["gpu"], row["vram_gib"]) for row in rows}) > 1:
        raise RefusedError("rows are of several cards or caps")
    begun = {row["case"] for row in rows}
    ended = {row["case"] for row in rows if row["part"] == CASE}
    if begun - ended:
        raise RefusedError(f"{min(begun - ended)} was interrupted; run it again")


def brief(results: Path = RESULTS) -> str:
    """Return what README says of speed on a GPU: steps of twice M*, and the errors of all."""
    rows = [row for file in sorted(results.glob("*.jsonl")) for row in _rows(file)]
    if not rows:
        return NOTHING + COMMAND
    lines = "".join(_line(row) for row in rows if _is_shown(row))
    if any(is_default(row) for row in rows):
        said = f"[Which code path each figure is of]({RAN}).\n"
    else:
        said = f"Today's default path has [run on no card]({RAN}).\n"
    return f"{lines}{_errors(rows)}\n{said}{COMMAND}"


def _errors(rows: Sequence[Row]) -> str:
    """Return the range of the errors of predictions, over all steps that were timed."""
    timed = [row for row in rows if "calibrated_error" in row and not row["rehearsal"]]
    if not timed:
        return ""
    times = [row["calibrated_error"] for row in timed]
    peaks = [row["predicted_peak_bytes"] / row["peak_bytes"] - 1 for row in timed]
    return (
        f"- predictions of all {len(timed)} steps that were timed: time {_range(times)}, memory"
        f" {_range(peaks)} of what was measured ([misses]({MISSES}),"
        " [all rows](docs/measured.md))\n"
    )


def _range(errors: Sequence[float]) -> str:
    return f"{min(errors):+.1%} to {max(errors):+.1%}"


def _is_shown(row: Row) -> bool:
    return (row.get("of_m_star") or 0.0) >= TWICE and "resident_step_s" in row


def _line(row: Row) -> str:
    path = "" if is_default(row) else "; by code since replaced"
    return (
        f"- {row['gpu']}, {row['date'][:10]}, {row['part']} ({row['note']}):"
        f" {row['tokens_per_s']['p50']:,.0f} tokens/s,"
        f" {row['r3_share']['p50']:.0%} of what is possible,"
        f" {row['resident_share']:.0%} of the speed with all layers on the card,"
        f" predicted {row['calibrated_error']:+.1%}{path}\n"
    )


def section(results: Path = RESULTS) -> str:
    """Return what the docs say of speed on a GPU: what has run, then all rows that are kept."""
    files = sorted(results.glob("*.jsonl"))
    if not files:
        return NOTHING
    return "\n".join([what_has_run(files), *map(_said, files)])


def is_default(row: Row) -> bool:
    """Tell whether a row was measured by what a run does by default."""
    return str(row.get("path", OLDER)).startswith(DEFAULT)


def what_has_run(files: Sequence[Path]) -> str:
    """Return which code paths a card has run, and what of them; the one home of that statement."""
    seen: dict[str, dict[str, None]] = {}
    for row in (row for file in files for row in _rows(file)):
        if row["case"] in OF_A_PATH and "error" not in row:
            what = "exactness" if row["case"] == "exact" else "speed"
            named = f"{what} on {row['gpu']}, {row['date'][:10]}"
            seen.setdefault(row.get("path", OLDER), {})[named] = None
    lines = [f"- {path}: {'; '.join(found)}" for path, found in seen.items()]
    if not any(path.startswith(DEFAULT) for path in seen):
        lines.append(
            f"- {DEFAULT}, experts by Triton: **nothing**, neither speed nor bits. This is what a"
            " run on a card does by default today"
        )
    return (
        "### What has run on a card\n\n"
        "Every other figure of a card, on these pages and in what `plan` and `fit` print, is a"
        " prediction.\nBy code path:\n\n"
        + "\n".join(line.replace("\n", " ") for line in lines)
        + "\n"
    )


def _rows(file: Path) -> list[Row]:
    return [row for row in read(file) if row["part"] not in (PARTS, CASE)]


def _said(file: Path) -> str:
    rows = _rows(file)
    of_training = [row for row in rows if "r3_share" in row]
    lines = [
        f"- {verdict.goal.text}: {verdict.num_reached} of {verdict.num}"
        for verdict in verdicts(rows)
        if verdict.num
    ]
    text = head(rows).replace("## ", "### ", 1)
    by_path = {row.get("path", OLDER): None for row in rows if row["case"] in OF_A_PATH}
    told = "; or: ".join(path.replace("\n", " ") for path in by_path)
    path = f"Code path: {told}.\n" if told else ""
    reached = "Goals:\n\n" + "\n".join(lines) + "\n" if lines else ""
    return "\n".join(
        filter(None, (text, path, rates(rows), steps(of_training), others(rows), reached))
    )


def with_section(page: str, text: str) -> str:
    """Return a page with another section between the marks."""
    before, _, rest = page.partition(BEGIN)
    _, mark, after = rest.partition(END)
    assert mark, f"there is no {BEGIN.strip()} and {END.strip()}"
    return before + BEGIN + text + END + after


def main() -> int:
    """Keep the rows of a run, if one is named, and write the sections on speed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("run", type=Path, nargs="?", help="directory of the run")
    options = parser.parse_args()
    if options.run is not None:
        try:
            sys.stdout.write(f"{keep(options.run)}\n")
        except RefusedError as refusal:
            sys.stderr.write(f"error: not kept: {refusal}\n")
            return 1
    for page, text in ((README, brief()), (PAGE, section())):
        page.write_text(with_section(page.read_text(), text))
    return 0


if __name__ == "__main__":
    sys.exit(main())
