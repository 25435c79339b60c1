import os
from dataclasses import replace
from pathlib import Path

import pytest

from offload.plan.machine.machine import Machine, named_machine
from offload.probe import machine as host_probe
from offload.probe.machine import disk_rate, with_host

MIB = 2**20


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_probe, "FILE_BYTES", 64 * MIB)
    monkeypatch.setattr(host_probe, "PIECE_BYTES", 16 * MIB)
    monkeypatch.setattr(host_probe, "COPY_BYTES", 16 * MIB)


def a_cpu() -> Machine:
    return replace(named_machine("rtx3060"), device="cpu", disk_bytes_per_s=None)


def two_nodes(root: Path) -> list[int]:
    """Write a /sys of two nodes that share the processors of this process."""
    cpus = sorted(os.sched_getaffinity(0))
    for number, share in enumerate((cpus[:1], cpus[1:] or cpus[:1])):
        folder = root / f"sys/devices/system/node/node{number}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(",".join(map(str, share)) + "\n")
        (folder / "meminfo").write_text(f"Node {number} MemTotal:       {1024 + number} kB\n")
    return cpus


@pytest.mark.disk
def test_a_machine_gets_its_nodes_and_its_disk_and_keeps_the_rest(tmp_path: Path) -> None:
    found = with_host(a_cpu(), folder=tmp_path / "stores", seconds=0.1)
    assert replace(found, nodes=(), disk_bytes_per_s=None) == a_cpu()
    assert sum(node.num_cpus for node in found.nodes) == len(os.sched_getaffinity(0))
    for node in found.nodes:
        assert node.ram_bytes > 100 * MIB
        assert 1e8 < node.copy_bytes_per_s.value < 1e12
        assert node.copy_bytes_per_s.source == "measured"
    if found.disk_bytes_per_s is not None:
        assert 1e6 < found.disk_bytes_per_s.value < 1e11
    assert list((tmp_path / "stores").iterdir()) == []


def test_each_node_is_measured_by_its_own_processors(tmp_path: Path) -> None:
    before = os.sched_getaffinity(0)
    cpus = two_nodes(tmp_path)
    nodes = host_probe._nodes(a_cpu(), tmp_path, seconds=0.1)
    assert [(node.number, node.ram_bytes) for node in nodes] == [(0, 2**20), (1, 2**20 + 1024)]
    assert [node.num_cpus for node in nodes] == [1, max(1, len(cpus) - 1)]
    assert not any(node.is_near for node in nodes)  # the CPU computes: there is no device
    assert os.sched_getaffinity(0) == before


def test_a_file_system_in_memory_is_not_taken_for_a_disk() -> None:
    shared = Path("/dev/shm")
    if not shared.is_dir() or not os.access(shared, os.W_OK):
        pytest.skip("no file system in memory")
    from offload.engine.host.store import FileReader

    probe = shared / "sluice-probe-test"
    probe.write_bytes(b"\0" * 4096)
    reader = FileReader(probe)
    mode = reader.mode
    reader.close()
    probe.unlink()
    rate = disk_rate(shared, seconds=0.01, file_bytes=64 * MIB)
    assert (rate is None) == (mode == "buffered")


@pytest.mark.disk
def test_a_full_disk_is_not_measured(tmp_path: Path) -> None:
    assert disk_rate(tmp_path, seconds=0.01, file_bytes=2**60) is None
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_made_is_not_measured(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert disk_rate(tmp_path / "file", seconds=0.01, file_bytes=64 * MIB) is None
