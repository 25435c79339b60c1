"""Whether two programs did the same work, and what is said of those that did not."""

import json
import math
import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.bench.gpu.journal import Journal
from tests.bench.gpu.peers import case, watched
from tests.bench.gpu.peers.equal import differences
from tests.bench.gpu.settings import Settings
from tests.bench.gpu.table import others

pytestmark = pytest.mark.bench

SLUICE: dict[str, Any] = {
    "num_tokens": 1536,
    "num_trained": 40,
    "losses": [6.0, 5.0],
    "grad_norms": [1.0, 0.5],
    "steps_s": [0.1, 0.1],
    "first_step_s": 9.0,
    "peak_host_bytes": 2**30,
}


def said_of(**other: Any) -> list[str]:
    return differences({**SLUICE, **other}, SLUICE, loss_tolerance=1e-3, norm_tolerance=1e-2)


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"num_tokens": 1535}, "tokens: 1,535 for 1,536"),
        ({"num_trained": 20}, "trained: 20 for 40"),
        ({"losses": [6.0, 5.01]}, "losses differ by up to 0.20%, more than 0.10%"),
        ({"losses": [math.nan, 5.0]}, "losses differ by up to inf%, more than 0.10%"),
        ({"losses": [6.0]}, "losses of 1 steps for 2"),
        ({"grad_norms": [1.0, 0.6]}, "grad_norms differ by up to 20.00%, more than 1.00%"),
    ],
)
def test_other_work_is_told_from_equal_work(other: dict[str, Any], said: str) -> None:
    assert said_of(**other) == [said]


def test_equal_work_may_differ_within_the_tolerances() -> None:
    assert not said_of(losses=[6.003, 5.0], grad_norms=[None, 0.504])


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(out=tmp_path, is_rehearsal=True, vram_gib=None, num_layers=None, limit_s=60.0)


def noted(settings: Settings, results: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return the rows that these results make, by peer."""
    job = replace(case.jobs(settings)[0], peers=tuple(results))
    journal = Journal(settings, "peers")
    for peer, result in results.items():
        case.note(journal, job, peer, dict(result), free_bytes=None)
    case.compare(journal, job)
    return {name: case.own_row(journal, job, name) for name in (*results, "all")}


def test_peers_that_did_equal_work_are_compared(settings: Settings) -> None:
    slow = SLUICE | {"steps_s": [0.3, 0.3]}
    rows = noted(settings, {"sluice": SLUICE, "hf": slow, "fsdp2": SLUICE | {"steps_s": [0.05]}})
    assert rows["hf"]["of_ours"] == pytest.approx(1 / 3)
    assert rows["hf"]["note"].endswith("equal work, 0.33 of Sluice's tokens/s")
    assert rows["all"]["is_compared"]
    assert rows["all"]["note"] == "compared with 2 of 2 peers at equal work; slower than fsdp2"


def test_without_the_needed_peers_nothing_is_compared(settings: Settings) -> None:
    results = {
        "sluice": SLUICE,
        "hf": {"error": "OutOfMemoryError: of 12 GiB"},
        "fsdp2": SLUICE | {"losses": [6.0, 4.0]},
        "device_map": SLUICE,
    }
    rows = noted(settings, results)
    assert rows["hf"]["error"].startswith("OutOfMemoryError")
    assert "of_ours" not in rows["fsdp2"]
    assert rows["fsdp2"]["note"].endswith(
        "not compared, losses differ by up to 20.00%, more than 0.00%"
    )
    assert not rows["all"]["is_compared"]
    said = "no comparison: hf and fsdp2 did not do this work"
    assert rows["all"]["note"] == said
    assert said in others([rows["all"]])


def test_nothing_is_compared_with_a_sluice_that_failed(settings: Settings) -> None:
    rows = noted(settings, {"sluice": {"error": "exit status 3"}, "hf": SLUICE, "fsdp2": SLUICE})
    assert not rows["hf"]["is_equal_work"]
    assert not rows["all"]["is_compared"]


def test_a_peer_is_run_by_the_python_that_was_given(tmp_path: Path) -> None:
    case.write_pythons(tmp_path, [f"zero3={sys.executable}"])
    case.write_pythons(tmp_path, [f"hf={sys.executable}"])
    assert case.pythons(tmp_path) == dict.fromkeys(("zero3", "hf"), sys.executable)
    for wrong in ("nobody=/bin/sh", "hf=/no/such/python", "hf"):
        with pytest.raises(SystemExit, match="peer-python"):
            case.write_pythons(tmp_path, [wrong])


def test_a_peer_that_is_not_installed_is_a_row(settings: Settings) -> None:
    case.write_pythons(settings.out, [f"unsloth={sys.executable}"])
    job_file = settings.out / "job.json"
    job_file.write_text(json.dumps({"device": "cpu"}))
    result = case.ask("unsloth", job_file, settings)
    assert result is not None
    assert result["error"] == "not installed: no module named unsloth"


def test_a_program_is_ended_with_all_that_it_started(tmp_path: Path) -> None:
    log = tmp_path / "log"
    shell = "sleep 60 & echo $!; wait"
    ended = watched.run(["sh", "-c", shell], cwd=tmp_path, log=log, limit_s=0.5)
    assert ended.status is None
    assert ended.peak_host_bytes > 0
    status = Path(f"/proc/{int(log.read_text())}/status")
    deadline_s = time.perf_counter() + 5
    while status.exists() and "(zombie)" not in status.read_text():
        assert time.perf_counter() < deadline_s


def test_the_memory_of_a_process_counts_what_it_holds() -> None:
    before = watched.host_bytes(os.getpid())
    held = bytearray(b"x") * 60_000_000
    assert watched.host_bytes(os.getpid()) > before + 0.9 * len(held)
