"""The benchmark of experts, rehearsed: every arm and table runs where there is no GPU."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.bench.grouped import Case
from tests.mixtures import QWEN

pytestmark = pytest.mark.bench

REHEARSE = [sys.executable, "-m", "tests.bench.bench_grouped", "--rehearse", "--rounds", "5"]


def test_flops_are_those_of_the_products() -> None:
    case = Case(mixture=QWEN, num_tokens=1, is_skewed=False, is_step=False)
    up, down = 2 * 2048 * 1536, 2 * 768 * 2048
    beside = 2 * 16 * (2048 + 1536) + 2 * 16 * (768 + 2048)
    assert case.flops("triton", None) == 8 * (up + down)
    assert case.flops("triton", 16) == 8 * (up + down + beside)
    step = Case(mixture=QWEN, num_tokens=1, is_skewed=False, is_step=True)
    assert step.flops("triton", 16) == 8 * (2 * (up + down) + 3 * beside)
    assert step.flops("liger", None) == 8 * 3 * (up + down)


@pytest.mark.exhaustive
def test_a_rehearsal_measures_every_arm_and_goes_on_where_it_stopped(tmp_path: Path) -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    command = [*REHEARSE, "--out", f"{tmp_path / 'rows.jsonl'}"]
    subprocess.run(command, check=True, capture_output=True)
    lines = (tmp_path / "rows.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    assert len(rows) == 6 * 4 * 2
    for row in rows:
        assert row["rehearsal"]
        assert row["machine"]
        if row["arm"] == "liger":
            assert "failed" in row  # has no CPU path
        else:
            assert row["error"] < 1e-6
            assert row["ms"]["p20"] <= row["ms"]["p50"] <= row["ms"]["p80"]
    again = subprocess.run(command, check=True, capture_output=True, text=True)
    assert (tmp_path / "rows.jsonl").read_text().splitlines() == lines
    assert "REHEARSAL" in again.stdout
