"""The tests that need a card, all in one run: with REQUIRE_GPU=1 one that is skipped fails."""

import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.bench.gpu.journal import Journal
from tests.bench.gpu.settings import Settings
from tests.bench.record import ROOT

MARK = re.compile(r"pytest\.mark\.gpu\b|mark\.gpu\b")
REHEARSED = ("tests/unit/test_house.py",)
PART, NUM_PROCESSES = "tests", 6
OUTCOME = re.compile(r"^\[gw\d+\] \[ *\d+%\] (PASSED|FAILED|ERROR|SKIPPED) (.*\S)")
LAST_LINES, MAX_NAMES, END_S = 3, 40, 15.0


def files() -> list[str]:
    """Return the test files with tests for a card."""
    found = (ROOT / "tests").rglob("test_*.py")
    return sorted(str(f.relative_to(ROOT)) for f in found if MARK.search(f.read_text()))


def run(settings: Settings, journal: Journal) -> None:
    """Run them, or the files that are named; their output is in the run's directory."""
    journal.expect([PART])
    names = list(REHEARSED) if settings.is_rehearsal else list(settings.parts or files())
    if not journal.has(PART) and settings.left_s > 0:
        journal.add(PART, **outcome(names, settings))


def outcome(names: list[str], settings: Settings) -> dict[str, Any]:
    """Run the tests of files that are marked; in a rehearsal those that are not.

    At the limit pytest is interrupted, so that what failed until then is told, with its reasons.
    """
    marked = [] if settings.is_rehearsal else ["-m", "gpu"]
    setting = f"REQUIRE_GPU={int(not settings.is_rehearsal)}"
    options = ["-v", f"-n{NUM_PROCESSES}", "--tb=short", "--no-showlocals", "--color=no"]
    command = ["env", setting, sys.executable, "-m", "pytest", *options, *marked, *names]
    log = settings.out / "tests.txt"
    with log.open("w") as out:
        child = subprocess.Popen(command, cwd=ROOT, stdout=out, stderr=subprocess.STDOUT)
        try:
            child.wait(max(1.0, settings.left_s - END_S))
        except subprocess.TimeoutExpired:
            child.send_signal(signal.SIGINT)
            try:
                child.wait(END_S - 3)
            except subprocess.TimeoutExpired:  # a worker waits for the card
                child.kill()
                child.wait()
    return {"exit_status": child.returncode, **counted(log)}


def counted(log: Path) -> dict[str, Any]:
    """Return how many tests passed, failed and were skipped, which failed, and the last lines."""
    lines = log.read_text(errors="replace").strip().splitlines()
    found = [(match[1], match[2]) for line in lines if (match := OUTCOME.search(line))]
    of_test = {name: word for word, name in found}
    failed = sorted(name for name, word in of_test.items() if word in ("FAILED", "ERROR"))
    return {
        "tests": len(of_test),
        "failures": len(failed),
        "skipped": sum(word == "SKIPPED" for word in of_test.values()),
        "failed": failed[:MAX_NAMES],
        "last_lines": lines[-LAST_LINES:],
    }
