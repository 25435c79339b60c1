"""Benches that stand alone, run as programs; their rows are taken over."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.bench.gpu.journal import Journal
from tests.bench.gpu.settings import Settings
from tests.bench.record import ROOT

Command = tuple[str, ...]
SHARES = {"experts": 0.6}  # of what is left, where another command follows
LAST_LINES = 20


def commands(case: str, settings: Settings) -> dict[str, Command]:
    """Return what a case runs, by part, without the file that rows go to."""
    device = ("--device", settings.device)
    if case == "codecs":
        rounds = ("--rounds", "2") if settings.is_rehearsal else ()
        return {"codecs": ("bench_codecs", *device, *rounds)}
    if case == "predict":
        draws = ("--draws", "1" if settings.is_rehearsal else "12")
        return {"predictions": ("bench_predict", *device, *draws)}
    if settings.is_rehearsal:
        return {"experts": ("bench_grouped", "--rehearse", "--rounds", "2")}
    return {"experts": ("bench_grouped",), "tiles": ("bench_grouped", "--sweep")}


def run(settings: Settings, journal: Journal) -> None:
    """Run a case's programs, each within what is left."""
    work = commands(journal.case, settings)
    journal.expect(list(work))
    for part, command in work.items():
        if journal.has(part) or settings.left_s < 0:
            continue
        limit_s = settings.left_s * SHARES.get(part, 1.0) if len(work) > 1 else settings.left_s
        timed = ("--minutes", f"{0.9 * limit_s / 60:.2f}") if "bench_grouped" in command else ()
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "rows.jsonl"
            program = [sys.executable, "-m", f"tests.bench.{command[0]}", *command[1:], *timed]
            status, said = _ran([*program, "--out", str(out)], limit_s)
            lines = out.read_text().splitlines() if out.exists() else []
        for number, line in enumerate(lines):
            journal.add(f"{part} {number}", found=json.loads(line))
        if status:
            journal.fail(part, f"exit status {status}: " + " / ".join(said[-3:]))
        else:
            journal.add(part, num_rows=len(lines), last_lines=said)


def _ran(program: list[str], limit_s: float) -> tuple[int, list[str]]:
    try:
        done = subprocess.run(
            program,
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=limit_s,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        said = (error.stdout or b"").decode(errors="replace").splitlines()
        return -1, [*said[-LAST_LINES:], f"stopped after {limit_s:.0f} s"]
    return done.returncode, done.stdout.strip().splitlines()[-LAST_LINES:]
