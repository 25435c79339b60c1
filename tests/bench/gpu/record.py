"""Keeps the rows of a run for good, and writes what README says of speed from all that are kept.

    python -m tests.bench.gpu.record DIR      the rows in DIR, measured by the code that is here
    python -m tests.bench.gpu.record          README alone

Only from a clean tree: what is kept was measured by the commit that it names. A machine without git
names its code by a digest, which must be that of the tree here. Files are never changed.
"""

import argparse
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.bench.gpu.goals import Row, verdicts
from tests.bench.gpu.journal import CASE, PARTS, ROWS, read
from tests.bench.gpu.table import head, steps
from tests.bench.record import ROOT, UNKNOWN, code_digest, git

RESULTS, README = ROOT / "tests/bench/results", ROOT / "README.md"
BEGIN, END = "<!-- performance -->\n", "<!-- end of performance -->\n"
NOTHING = """\
Nothing has been measured on a GPU yet: every figure for a card in this file is a prediction.
With a card at hand, `python -m tests.bench.gpu --out DIR` measures in nine minutes what there is
time for, those cases first that tell most, and goes on where it stopped when it is run again;
`--rehearse` runs it on a CPU, tiny.
"""


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
    file.write_text("".join(json.dumps({**row, "git_sha": sha}) + "\n" for row in rows))
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
    if any(row["dirty"] and row["git_sha"] != UNKNOWN for row in rows):
        raise RefusedError("rows were measured in a tree that was not clean")
    if len({(row["gpu"], row["vram_gib"]) for row in rows}) > 1:
        raise RefusedError("rows are of several cards or caps")
    begun = {row["case"] for row in rows}
    ended = {row["case"] for row in rows if row["part"] == CASE}
    if begun - ended:
        raise RefusedError(f"{min(begun - ended)} was interrupted; run it again")


def section(results: Path = RESULTS) -> str:
    """Return what README says of speed on a GPU."""
    files = sorted(results.glob("*.jsonl"))
    return "\n".join(map(_said, files)) if files else NOTHING


def _said(file: Path) -> str:
    rows = [row for row in read(file) if row["part"] not in (PARTS, CASE)]
    of_training = [row for row in rows if "r3_share" in row]
    lines = [
        f"- {verdict.goal.text}: {verdict.num_reached} of {verdict.num}"
        for verdict in verdicts(rows)
        if verdict.num
    ]
    text = head(rows).replace("## ", "### ", 1)
    return "\n".join(filter(None, (text, steps(of_training), "\n".join(lines) + "\n")))


def with_section(readme: str, text: str) -> str:
    """Return README with another section."""
    before, _, rest = readme.partition(BEGIN)
    _, mark, after = rest.partition(END)
    assert mark, f"README has no {BEGIN.strip()} and {END.strip()}"
    return before + BEGIN + text + END + after


def main() -> int:
    """Keep the rows of a run, if one is named, and write README's section."""
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
    README.write_text(with_section(README.read_text(), section()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
