"""The tests that need a card, file by file: with REQUIRE_GPU=1 one that is skipped fails."""

import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

from tests.bench.gpu.journal import Journal
from tests.bench.gpu.settings import Settings
from tests.bench.record import ROOT

MARK = re.compile(r"pytest\.mark\.gpu\b|mark\.gpu\b")
REHEARSED = ("tests/unit/test_gpu_marker.py",)
LAST_LINES, MAX_NAMES = 3, 20


def files() -> list[str]:
    """Return the test files with tests for a card."""
    found = (ROOT / "tests").rglob("test_*.py")
    return sorted(str(f.relative_to(ROOT)) for f in found if MARK.search(f.read_text()))


def run(settings: Settings, journal: Journal) -> None:
    """Run each file's."""
    names = list(REHEARSED) if settings.is_rehearsal else files()
    journal.expect(names)
    for name in names:
        if not journal.has(name) and settings.left_s > 0:
            journal.add(name, **outcome(name, settings))


def outcome(name: str, settings: Settings) -> dict[str, Any]:
    """Run the tests of a file that are marked; in a rehearsal those that are not."""
    marked = [] if settings.is_rehearsal else ["-m", "gpu"]
    setting = f"REQUIRE_GPU={int(not settings.is_rehearsal)}"
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "junit.xml"
        command = [sys.executable, "-m", "pytest", "-q", *marked, f"--junitxml={report}", name]
        try:
            done = subprocess.run(
                ["env", setting, *command],
                cwd=ROOT,
                capture_output=True,
                text=True,
                timeout=max(1.0, settings.left_s),
                check=False,
            )
        except subprocess.TimeoutExpired:
            return {"error": "stopped: no time was left"}
        lines = done.stdout.strip().splitlines()[-LAST_LINES:]
        counts = counted(report.read_text()) if report.exists() else {}
    return {"exit_status": done.returncode, "last_lines": lines, **counts}


def counted(junit: str) -> dict[str, Any]:
    """Return how many tests passed, failed and were skipped, and which failed."""
    suites = list(ET.fromstring(junit).iter("testsuite"))
    count = {
        key: sum(int(suite.get(key, 0)) for suite in suites)
        for key in ("tests", "failures", "errors", "skipped")
    }
    failed = [
        f"{case.get('classname')}::{case.get('name')}"
        for case in ET.fromstring(junit).iter("testcase")
        if case.find("failure") is not None or case.find("error") is not None
    ]
    return count | {"failed": failed[:MAX_NAMES]}
