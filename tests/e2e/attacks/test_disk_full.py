"""Full disks and limits on the size of files: an error names the file, and nothing is lost."""

import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.e2e.forked import Forked, Started
from tests.e2e.runs import adapter, losses

KIB = 1024
NUM_SIZES = 8


def said(process: Started, run_dir: Path) -> str:
    """Return the file that the error names."""
    shown = process.shown
    assert "Traceback" not in shown, shown
    line = next(line for line in shown.splitlines() if line.startswith("error: "))
    assert str(run_dir) in line, shown
    assert "hint: " in shown
    for reason in ("No space left on device", "File too large", "is free", "at most"):
        if reason in line:
            named = line.removeprefix("error: ").split()[0].rstrip(":")
            return f"{Path(named).name.split('-')[0]}: {reason}"
    raise AssertionError(shown)


def resume_and_compare(
    forked: Forked, words: tuple[object, ...], run_dir: Path, whole: Path
) -> None:
    """End a run, now that there is room, and compare it with one that always had it."""
    flags = ("--resume",) if (run_dir / "recipe.yaml").exists() else ()
    last = forked.start(*words, *flags)
    assert last.end() == 0, last.shown
    assert losses(run_dir) == losses(whole)
    ours, expected = adapter(run_dir), adapter(whole)
    assert all(torch.equal(ours[name], expected[name]) for name in expected)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk that can be made smaller and larger."""
    disk = tmp_path / "disk"
    disk.mkdir()
    words = ["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", str(disk)]
    if os.geteuid() != 0 or subprocess.run(words, check=False, capture_output=True).returncode:
        pytest.skip("mounting a small disk needs root")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def used_bytes(folder: Path) -> int:
    return sum(file.stat().st_blocks * 512 for file in folder.rglob("*"))


@pytest.mark.exhaustive
@pytest.mark.timeout(3600)
def test_a_full_disk_ends_a_run_with_words_and_loses_nothing(
    small_disk: Path, tmp_path, write_recipe, machine_file, capsys
) -> None:
    recipe = write_recipe(train={"steps": 8}, report={"samples": 4})
    words = ("finetune", recipe, "--machine", machine_file)
    counts: Counter[str] = Counter()
    with Forked(tmp_path) as forked:
        whole = tmp_path / "whole"
        assert forked.start(*words, f"output.dir={whole}").end() == 0
        most = used_bytes(whole)
        for number in range(NUM_SIZES):
            resize(small_disk, 16 * 1024 * KIB)
            run_dir = small_disk / "run"
            shutil.rmtree(run_dir, ignore_errors=True)
            filler = small_disk / "filler"
            filler.write_bytes(b"\1" * (16 * 1024 * KIB - most * (number + 1) // (NUM_SIZES + 1)))
            here = (*words, f"output.dir={run_dir}")
            process = forked.start(*here)
            code = process.end()
            assert code in (0, 1), process.shown
            counts["finished" if code == 0 else said(process, run_dir)] += 1
            filler.unlink()
            resume_and_compare(forked, here, run_dir, whole)
    with capsys.disabled():
        sys.stdout.write(
            f"\n{NUM_SIZES} full disks: {dict(counts)}; all ended equal to the bit, 0 tracebacks\n"
        )


def resize(disk: Path, num_bytes: int) -> None:
    subprocess.run(["mount", "-o", f"remount,size={num_bytes}", str(disk)], check=True)


@pytest.mark.exhaustive
@pytest.mark.timeout(3600)
def test_a_limit_on_the_size_of_files_ends_a_run_with_words_and_loses_nothing(
    tmp_path, write_recipe, machine_file, capsys
) -> None:
    recipe = write_recipe(train={"steps": 8}, report={"samples": 4})
    words = ("finetune", recipe, "--machine", machine_file)
    counts: Counter[str] = Counter()
    with Forked(tmp_path) as forked:
        whole = tmp_path / "whole"
        assert forked.start(*words, f"output.dir={whole}").end() == 0
        sizes = sorted(file.stat().st_size for file in whole.rglob("*") if file.is_file())
        for limit_bytes in sizes[:: len(sizes) // NUM_SIZES][-NUM_SIZES:]:
            run_dir = tmp_path / f"limit-{limit_bytes}"
            here = (*words, f"output.dir={run_dir}")
            process = forked.start(*here, limit_bytes=max(1, limit_bytes - 1))
            code = process.end()
            assert code in (0, 1), process.shown
            counts["finished" if code == 0 else said(process, run_dir)] += 1
            resume_and_compare(forked, here, run_dir, whole)
    with capsys.disabled():
        sys.stdout.write(
            f"\n{NUM_SIZES} limits: {dict(counts)}; all ended equal to the bit, 0 tracebacks\n"
        )
