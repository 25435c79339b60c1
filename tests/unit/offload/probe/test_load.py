"""What other programs take of the processors."""

import os
from pathlib import Path

import pytest

from offload.probe import load
from offload.probe.load import Watch, shown_load

TICKS = os.sysconf("SC_CLK_TCK")


@pytest.fixture(autouse=True)
def _limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "MAX_OTHERS_FRAC", 0.25)  # which other tests are without


def write(root: Path, *, busy_s: float, idle_s: float) -> None:
    """Write what the kernel counts of each processor, of which one is not allowed."""
    (root / "proc").mkdir(exist_ok=True)
    busy, idle = int(busy_s * TICKS), int(idle_s * TICKS)
    lines = [f"cpu{one} {busy} 0 0 {idle} 0 0 0 0 0 0" for one in os.sched_getaffinity(0)]
    text = "\n".join(["cpu 9 9 9 9 9 9 9 9 9 9", *lines, "cpu9999 9 9 9 9 9 9 9 9 9 9", "intr 5"])
    (root / "proc/stat").write_text(text)


@pytest.mark.parametrize(
    ("busy_s", "idle_s", "frac"), [(300, 700, 0.3), (1000, 0, 1.0), (200, 800, None), (0, 0, None)]
)
def test_what_others_take_is_known_where_it_is_much(
    busy_s: float, idle_s: float, frac: float | None, tmp_path: Path
) -> None:
    write(tmp_path, busy_s=5e5, idle_s=9e5)
    watch = Watch(tmp_path)
    write(tmp_path, busy_s=5e5 + busy_s, idle_s=9e5 + idle_s)
    found = watch.others_frac()
    assert found == (frac if frac is None else pytest.approx(frac, abs=0.01))


def test_what_this_process_takes_is_not_of_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    num = len(os.sched_getaffinity(0))
    write(tmp_path, busy_s=0, idle_s=0)
    watch, own = Watch(tmp_path), os.times()
    write(tmp_path, busy_s=900, idle_s=100)
    taken = os.times_result((own.user + 500 * num, *own[1:]))
    monkeypatch.setattr(os, "times", lambda: taken)
    assert watch.others_frac() == pytest.approx(0.4, abs=0.01)


def test_nothing_is_known_where_the_kernel_does_not_count(tmp_path: Path) -> None:
    assert Watch(tmp_path).others_frac() is None


def test_a_note_names_the_share() -> None:
    note = shown_load("Steps were timed", 0.634)
    assert note.startswith("Steps were timed while other programs took 63% of the processors")
