"""The peers' case on a CPU: Sluice streams, the Trainer does not, and both do the same work."""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.bench.gpu.journal import Journal
from tests.bench.gpu.peers import case
from tests.bench.gpu.settings import Settings

pytestmark = pytest.mark.bench


@pytest.mark.long
@pytest.mark.slow
def test_sluice_and_the_trainer_do_equal_work(tmp_path: Path) -> None:
    settings = Settings(
        out=tmp_path, is_rehearsal=True, vram_gib=None, num_layers=None, limit_s=240.0
    )
    journal = Journal(settings, "peers")
    job = replace(case.jobs(settings)[0], peers=("sluice", "hf"))
    case.give(job, settings, journal)
    ours, theirs = (case.own_row(journal, job, peer) for peer in job.peers)
    assert ours is not None
    assert theirs is not None
    assert "error" not in ours, ours
    assert "error" not in theirs, theirs
    assert ours["placed"]["num_slots"] == 2
    assert ours["placed"]["num_loads"] == 2 * (4 - 2)
    assert theirs["is_equal_work"], theirs["differences"]
    assert theirs["of_ours"] > 0
    assert ours["losses"] == pytest.approx(theirs["losses"], rel=1e-6)
    assert ours["losses"][-1] < 0.95 * ours["losses"][0]  # it learns: adapters are not idle
    for row in (ours, theirs):
        assert row["num_tokens"] == 6 * row["tokens_per_step"]
        assert row["n"] == 5
        assert row["first_step_s"] > row["step_s"]["p50"]
        assert row["peak_host_bytes"] > 100 * 2**20
    assert not list((tmp_path / "peers" / job.name / "model").glob("*.safetensors"))
