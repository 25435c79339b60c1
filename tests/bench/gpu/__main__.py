"""The command: each case in a child process with a limit, then the table and the goals."""

import argparse
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import IO

import torch
from rich.console import Console

from tests.bench.gpu.cases import CASES, Case, named
from tests.bench.gpu.journal import Journal
from tests.bench.gpu.peers.case import write_pythons
from tests.bench.gpu.settings import Settings
from tests.bench.gpu.table import text_of

LOG, TABLE = "log.txt", "table.md"
MINUTES = 9.0
LEAST_S = 10.0  # a case is not begun for less
GRACE_S = 5.0
LAST_LINES = 3
COMPLETE, STOPPED, FAILED = "complete", "stopped", "failed"


def run_case(case: Case, settings: Settings, program: tuple[str, ...] = ()) -> str:
    """Run a case to its end or its limit, note how it ended, and return a word on it.

    Args:
        case: Which.
        settings: Of the run, with this case's limit.
        program: What to run; empty for the case itself.
    """
    command = program or (sys.executable, "-m", "tests.bench.gpu.child", case.name)
    env = [case.setting] if case.setting else []
    env += ["OMP_NUM_THREADS=1", "MKL_NUM_THREADS=1"] if settings.is_rehearsal else []
    log = settings.out / LOG
    start_s, start_byte = time.perf_counter(), log.stat().st_size if log.exists() else 0
    with log.open("ab") as out:
        status = _within_limit(["env", *env, *command, settings.to_json()], settings.limit_s, out)
    took_s = round(time.perf_counter() - start_s, 1)
    journal = Journal(settings, case.name)
    with log.open("rb") as written:
        written.seek(start_byte)
        said = written.read().decode(errors="replace").strip().splitlines()[-LAST_LINES:]
    if status == 0 and journal.is_complete():
        state, error = COMPLETE, ""
    elif status == 0:
        state, error = STOPPED, "no time was left for all parts"
    elif status is None:
        state, error = STOPPED, f"its {round(settings.limit_s, 1):g} s were over"
    else:
        state, error = FAILED, " / ".join([f"exit status {status}", *said])
    journal.end(
        state, limit_s=settings.limit_s, took_s=took_s, **({"error": error} if error else {})
    )
    return f"{case.name}: {state} after {took_s:.0f} s" + (f": {error}" if error else "")


def _within_limit(command: list[str], limit_s: float, out: IO[bytes]) -> int | None:
    """Run a program and all that it starts; return its exit status, None if it was ended."""
    with subprocess.Popen(
        command, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
    ) as child:
        try:
            return child.wait(limit_s)
        except subprocess.TimeoutExpired:
            return None
        finally:
            end_group(child)


def end_group(child: subprocess.Popen[bytes]) -> None:
    """End a session's leader and what it has started, which may outlive it."""
    for number, wait_s in ((signal.SIGTERM, GRACE_S), (signal.SIGKILL, None)):
        try:
            os.killpg(child.pid, number)
        except ProcessLookupError:
            return
        try:
            child.wait(wait_s)
        except subprocess.TimeoutExpired:
            continue


def is_done(case: Case, settings: Settings) -> bool:
    """Tell whether a case of this run is complete."""
    states = [r for r in Journal(settings, case.name).rows if r["case"] == case.name]
    return any(row.get("state") == COMPLETE for row in states)


def main() -> None:
    """Run the cases that are left, and show what all of them found."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="directory of the run")
    parser.add_argument("--cases", help=", ".join(f"{case.name}" for case in CASES))
    parser.add_argument("--vram", type=float, help="GiB that the card is to have: 12, 16, 24, 32")
    parser.add_argument("--layers", type=int, help="of the models; else as many as time allows")
    parser.add_argument(
        "--minutes",
        type=float,
        default=MINUTES,
        help="for everything; more than 9 give each case more",
    )
    parser.add_argument("--rehearse", action="store_true", help="on a CPU, tiny")
    parser.add_argument(
        "--peer-python", action="append", default=[], metavar="NAME=PATH", help="runs that peer"
    )
    options = parser.parse_args()
    if not options.rehearse and not torch.cuda.is_available():
        parser.error("torch sees no CUDA device; --rehearse runs everything on a CPU")
    options.out.mkdir(parents=True, exist_ok=True)
    write_pythons(options.out, options.peer_python)
    end_s, say = time.perf_counter() + 60 * options.minutes, Console(width=180).print
    cases = named(options.cases)
    settings = Settings(
        out=options.out,
        is_rehearsal=options.rehearse,
        vram_gib=options.vram,
        num_layers=options.layers,
        limit_s=0.0,
    )
    for case in cases:
        longer = max(1.0, options.minutes / MINUTES)
        own_s = case.rehearsal_s if options.rehearse else longer * case.limit_s
        limit_s = min(own_s, end_s - time.perf_counter())
        if is_done(case, settings):
            say(f"{case.name}: complete before", markup=False)
        elif limit_s < LEAST_S:
            say(f"{case.name}: not run, no time is left", markup=False)
        else:
            say(run_case(case, settings.within(limit_s)), markup=False, highlight=False)
    rows = Journal(settings, "").rows
    text = text_of(rows, cases)
    (options.out / TABLE).write_text(text)
    say(text, markup=False, highlight=False, soft_wrap=True)


if __name__ == "__main__":
    main()
