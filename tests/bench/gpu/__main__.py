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

from tests.bench.gpu.cases import CASES, START_S, WINDOW_S, WINDOWS, Case, Turn, named
from tests.bench.gpu.journal import Journal
from tests.bench.gpu.peers.case import write_pythons
from tests.bench.gpu.settings import Settings
from tests.bench.gpu.table import text_of
from tests.bench.record import ROOT

LOG, TABLE = "log.txt", "table.md"
OUT = ROOT / "runs/gpu"
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
    failed = {"error": error} if error else {}
    journal.end(state, limit_s=settings.limit_s, took_s=took_s, only=settings.parts, **failed)
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
    """Tell whether a case of this run is complete: all of it, or the parts that are wanted."""
    for row in Journal(settings, case.name).rows:
        if row["case"] != case.name or row.get("state") != COMPLETE:
            continue
        only = row.get("only")
        if only is None or (settings.parts is not None and set(settings.parts) <= set(only)):
            return True
    return False


def turns_of(options: argparse.Namespace) -> tuple[tuple[Turn, ...], float]:
    """Return the cases that are asked for, each with its limit, and how long all may take."""
    minutes = options.minutes or MINUTES
    if options.window:
        return WINDOWS[options.window], WINDOW_S - START_S
    longer = max(1.0, minutes / MINUTES)
    cases = named(options.cases)
    turns = (Turn(case=c.name, limit_s=longer * c.limit_s, decides="") for c in cases)
    return tuple(turns), 60 * minutes


def options_of() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=OUT, help=f"of the run; {OUT}")
    parser.add_argument(
        "--window",
        choices=WINDOWS,
        help=f"the cases of one loan of a card, {WINDOW_S:.0f} s in all",
    )
    parser.add_argument("--cases", help=", ".join(f"{case.name}" for case in CASES))
    parser.add_argument("--vram", type=float, help="GiB that the card is to have: 12, 16, 24, 32")
    parser.add_argument("--layers", type=int, help="of the models; else as many as time allows")
    parser.add_argument(
        "--minutes",
        type=float,
        help=f"for everything, {MINUTES:g}; more give each case more",
    )
    parser.add_argument("--rehearse", action="store_true", help="on a CPU, tiny")
    parser.add_argument(
        "--peer-python", action="append", default=[], metavar="NAME=PATH", help="runs that peer"
    )
    options = parser.parse_args()
    if options.window and (options.cases or options.minutes or options.vram):
        parser.error("a window has its own cases, time and cards: no --cases, --minutes or --vram")
    if not options.rehearse and not torch.cuda.is_available():
        parser.error("torch sees no CUDA device; --rehearse runs everything on a CPU")
    return options


def main() -> None:
    """Run the cases that are left, and show what all of them found."""
    options = options_of()
    options.out = options.out.resolve()
    options.out.mkdir(parents=True, exist_ok=True)
    write_pythons(options.out, options.peer_python)
    start_s, say = time.perf_counter(), Console(width=180).print
    turns, most_s = turns_of(options)
    settings = Settings(
        out=options.out,
        is_rehearsal=options.rehearse,
        vram_gib=options.vram,
        num_layers=options.layers,
        limit_s=0.0,
    )
    cases, text = {case.name: case for case in CASES}, ""
    for turn in turns:
        case = cases[turn.case]
        left_s = start_s + most_s - time.perf_counter() - GRACE_S
        own = settings.within(
            min(case.rehearsal_s if options.rehearse else turn.limit_s, left_s),
            None if options.rehearse else turn.parts,
        )
        if is_done(case, own):
            told = "complete before"
        elif own.limit_s < LEAST_S:
            told = "not run, no time is left"
        else:
            told = run_case(case, own).removeprefix(f"{case.name}: ")
        say(f"{case.name}: {told}", markup=False, highlight=False)
        if turn.decides:
            say(f"    decides {turn.decides}", markup=False, highlight=False)
        text = text_of(Journal(settings, "").rows, [cases[turn.case] for turn in turns])
        (options.out / TABLE).write_text(text)  # each time: the command may be cut off
    say(text, markup=False, highlight=False, soft_wrap=True)
    say(f"{time.perf_counter() - start_s:.0f} s", highlight=False)


if __name__ == "__main__":
    main()
