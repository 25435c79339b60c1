"""What is measured of a machine: its card, its host and its energy."""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from offload.engine.host.limits import free_host_bytes, others_host_bytes, resident_bytes
from offload.errors import MachineError
from offload.plan.machine.machine import Machine, Rate, named_machine
from offload.probe import machine as host_probe
from offload.probe.energy import (
    Counter,
    Counters,
    Meter,
    Part,
    Taken,
    by_part,
    find_counters,
    processor_counters,
)
from offload.probe.machine import (
    disk_rate,
    half_dtype_of,
    has_grouped_gemm,
    probe,
    steady_bytes,
    with_host,
)

GIB, MIB = 2**30, 2**20


@pytest.fixture(scope="module")
def machine() -> Machine:
    return probe(device="cpu", dtype="float32", seconds=0.5)


def rates(machine: Machine) -> dict[str, Rate]:
    values = {name: getattr(machine, name) for name in Machine.__dataclass_fields__}
    return {name: value for name, value in values.items() if isinstance(value, Rate)}


@pytest.mark.thorough
def test_every_rate_is_measured_and_above_zero(machine: Machine) -> None:
    assert machine.is_measured
    assert len(rates(machine)) == 12
    assert all(rate.value > 0 for rate in rates(machine).values())


@pytest.mark.thorough
def test_rates_are_of_a_size_that_a_cpu_can_have(machine: Machine) -> None:
    assert 1e8 < machine.gemm_flops_per_s.value < 1e14
    assert 1e8 < machine.attention_flops_per_s.value < 1e14
    assert 1e8 < machine.tall_fp32_flops_per_s.value < 1e14
    assert 1e7 < machine.h2d_bytes_per_s.value < 1e12
    assert 1e7 < machine.host_memory_bytes_per_s.value < 1e12
    assert 1e-7 < machine.launch_s.value < 1e-3


def test_the_probe_names_the_machine_and_its_dtype(machine: Machine) -> None:
    assert (machine.device, machine.dtype, machine.has_grouped_gemm) == ("cpu", "float32", False)
    assert machine.experts_implementation.value == "eager"
    num = torch.get_num_threads()
    assert machine.name.endswith(", 1 thread" if num == 1 else f", {num} threads")


def test_the_context_of_a_cpu_is_this_process(machine: Machine) -> None:
    assert machine.context_bytes == pytest.approx(resident_bytes(), rel=0.5)
    assert machine.context_bytes < machine.ram_bytes == machine.vram_bytes


def test_a_probed_machine_survives_json_exactly(machine: Machine) -> None:
    assert Machine.from_json(machine.to_json()) == machine


@pytest.mark.slow
def test_the_time_given_is_about_the_time_taken() -> None:
    start_s = time.perf_counter()
    probe(device="cpu", dtype="bfloat16", seconds=1.0)
    assert 0.8 < time.perf_counter() - start_s < 10


@pytest.mark.slow
def test_the_probe_leaves_random_state_threads_and_grad_mode_as_they_were() -> None:
    state, num_threads = torch.get_rng_state(), torch.get_num_threads()
    probe(device="cpu", dtype="float32", seconds=0.1)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.get_num_threads() == num_threads
    assert torch.is_grad_enabled()
    assert not [thread for thread in threading.enumerate() if thread.name == "sluice-probe"]


def test_importing_the_probe_imports_no_torch() -> None:
    code = "import sys, offload.probe.machine; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("dtype", ["int8", "float64"])
def test_a_dtype_that_no_recipe_has_is_refused(dtype: str) -> None:
    message = rf"dtype '{dtype}' cannot be measured; it must be bfloat16 or float16 or float32"
    with pytest.raises(MachineError, match=message):
        probe(device="cpu", dtype=dtype, seconds=1.0)


@pytest.mark.parametrize(
    ("capability", "is_grouped"),
    [((8, 9), False), ((9, 0), True), ((10, 0), True), ((12, 0), False)],
)
def test_experts_are_one_kernel_where_torch_has_it(
    capability: tuple[int, int], *, is_grouped: bool
) -> None:
    assert has_grouped_gemm(capability, "bfloat16") is is_grouped
    assert not has_grouped_gemm(capability, "float32")


def test_an_unknown_device_is_refused() -> None:
    with pytest.raises(MachineError, match=r"device 'tpu' cannot be measured; .*cuda or cpu"):
        probe(device="tpu", dtype="float32", seconds=1.0)


@pytest.mark.parametrize(
    ("capability", "dtype"),
    [((7, 0), "float16"), ((7, 5), "float16"), ((8, 0), "bfloat16"), ((12, 0), "bfloat16")],
)
def test_a_gpu_before_ampere_is_measured_in_float16(capability, dtype) -> None:
    assert half_dtype_of(capability) == dtype
    assert half_dtype_of(None) == "bfloat16"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_cuda_without_a_card_is_refused() -> None:
    with pytest.raises(MachineError, match="torch sees no CUDA device"):
        probe(device="cuda", dtype="bfloat16", seconds=1.0)


@pytest.mark.parametrize(
    ("trials", "num_left", "expected"),
    [
        ([(500, 501), (700, 700)], 1, 500),
        ([(-200, 500), (500, 500)], 0, 500),  # another process ended while it started
        ([(1300, 500), (500, 499)], 0, 500),  # or began
        ([(-200, 500), (1300, 500), (500, -600)], 0, 500),
        ([(0, 0), (0, 0)], 0, 0),
    ],
)
def test_the_context_of_a_card_is_measured_beside_other_processes(
    trials: list[tuple[int, int]], num_left: int, expected: int
) -> None:
    asked = iter([(taken * MIB, freed * MIB) for taken, freed in trials])
    assert steady_bytes(asked) == expected * MIB
    assert len(list(asked)) == num_left


@pytest.mark.gpu
def test_a_card_is_measured() -> None:
    machine = probe(device="cuda", dtype="bfloat16", seconds=5.0)
    assert machine.is_measured
    assert 0 < machine.context_bytes < 4 * GIB < machine.vram_bytes
    assert machine.gemm_flops_per_s.value > 1e12
    is_grouped = has_grouped_gemm(torch.cuda.get_device_capability(), "bfloat16")
    assert machine.experts_implementation.value == ("grouped_mm" if is_grouped else "triton")
    assert machine.h2d_bytes_per_s.value > 1e9


# ---------------------------------------------------------------------------------------------
# Free memory, from copies of the kernel's files


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    write(tmp_path / "proc/meminfo", f"MemTotal: 99 kB\nMemAvailable: {8 * GIB // 1024} kB\n")
    return tmp_path


def test_free_memory_without_cgroups_is_what_is_available(root: Path) -> None:
    assert free_host_bytes(root) == 8 * GIB


@pytest.mark.parametrize("limited", ["job", "job/step"])
def test_a_limit_of_any_cgroup_around_the_process_counts(root: Path, limited: str) -> None:
    write(root / "proc/self/cgroup", "0::/job/step\n")
    for name in ("job", "job/step"):
        limit = 3 * GIB if name == limited else "max"
        write(root / f"sys/fs/cgroup/{name}/memory.max", f"{limit}\n")
        write(root / f"sys/fs/cgroup/{name}/memory.current", f"{GIB}\n")
    assert free_host_bytes(root) == 2 * GIB


def test_page_cache_that_can_be_dropped_is_free(root: Path) -> None:
    write(root / "proc/self/cgroup", "0::/\n")
    write(root / "sys/fs/cgroup/memory.max", str(3 * GIB))
    write(root / "sys/fs/cgroup/memory.current", str(3 * GIB))
    write(root / "sys/fs/cgroup/memory.stat", f"anon {2 * GIB}\ninactive_file {GIB}\n")
    assert free_host_bytes(root) == GIB


def test_cgroups_of_version_1_count_too(root: Path) -> None:
    write(root / "proc/self/cgroup", "5:cpu:/box\n4:memory:/box\n0::/\n")
    write(root / "sys/fs/cgroup/memory/box/memory.limit_in_bytes", str(4 * GIB))
    write(root / "sys/fs/cgroup/memory/box/memory.usage_in_bytes", str(GIB))
    assert free_host_bytes(root) == 3 * GIB


def test_a_container_sees_its_limit_where_its_own_path_is_not_mounted(root: Path) -> None:
    write(root / "proc/self/cgroup", "0::/outside/name\n")
    write(root / "sys/fs/cgroup/memory.max", str(2 * GIB))
    write(root / "sys/fs/cgroup/memory.current", str(GIB))
    assert free_host_bytes(root) == GIB


def test_what_others_have_is_the_rest_unless_a_cgroup_is_the_limit(root: Path) -> None:
    memory = f"MemTotal: {16 * GIB // 1024} kB\nMemAvailable: {8 * GIB // 1024} kB\n"
    write(root / "proc/meminfo", memory)
    assert others_host_bytes(root) == pytest.approx(8 * GIB - resident_bytes(), abs=2**20)
    write(root / "proc/self/cgroup", "0::/\n")
    write(root / "sys/fs/cgroup/memory.max", str(3 * GIB))
    write(root / "sys/fs/cgroup/memory.current", str(GIB))
    assert others_host_bytes(root) == 0


def test_a_system_without_meminfo_is_refused(tmp_path: Path) -> None:
    with pytest.raises(MachineError, match="does not tell the available memory; Linux or WSL2"):
        free_host_bytes(tmp_path)


@pytest.mark.thorough
def test_a_probe_leaves_later_threads_all_their_cores() -> None:
    probe(device="cpu", dtype="float32", seconds=0.2)
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    assert found == [torch.get_num_threads()]


# --------------------------------------------------------------------------------------------- host


HOST_MIB = 2**20


@pytest.fixture
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_probe, "FILE_BYTES", 64 * HOST_MIB)
    monkeypatch.setattr(host_probe, "PIECE_BYTES", 16 * HOST_MIB)
    monkeypatch.setattr(host_probe, "COPY_BYTES", 16 * HOST_MIB)


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


@pytest.mark.usefixtures("_small")
@pytest.mark.disk
def test_a_machine_gets_its_nodes_and_its_disk_and_keeps_the_rest(tmp_path: Path) -> None:
    found = with_host(a_cpu(), folder=tmp_path / "stores", seconds=0.1)
    assert replace(found, nodes=(), disk_bytes_per_s=None) == a_cpu()
    assert sum(node.num_cpus for node in found.nodes) == len(os.sched_getaffinity(0))
    for node in found.nodes:
        assert node.ram_bytes > 100 * HOST_MIB
        assert 1e8 < node.copy_bytes_per_s.value < 1e12
        assert node.copy_bytes_per_s.source == "measured"
    if found.disk_bytes_per_s is not None:
        assert 1e6 < found.disk_bytes_per_s.value < 1e11
    assert list((tmp_path / "stores").iterdir()) == []


@pytest.mark.usefixtures("_small")
def test_each_node_is_measured_by_its_own_processors(tmp_path: Path) -> None:
    before = os.sched_getaffinity(0)
    cpus = two_nodes(tmp_path)
    nodes = host_probe._nodes(a_cpu(), tmp_path, seconds=0.1)
    assert [(node.number, node.ram_bytes) for node in nodes] == [(0, 2**20), (1, 2**20 + 1024)]
    assert [node.num_cpus for node in nodes] == [1, max(1, len(cpus) - 1)]
    assert not any(node.is_near for node in nodes)  # the CPU computes: there is no device
    assert os.sched_getaffinity(0) == before


@pytest.mark.usefixtures("_small")
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
    rate = disk_rate(shared, seconds=0.01, file_bytes=64 * HOST_MIB)
    assert (rate is None) == (mode == "buffered")


@pytest.mark.usefixtures("_small")
@pytest.mark.disk
def test_a_full_disk_is_not_measured(tmp_path: Path) -> None:
    assert disk_rate(tmp_path, seconds=0.01, file_bytes=2**60) is None
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("_small")
def test_a_folder_that_cannot_be_made_is_not_measured(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert disk_rate(tmp_path / "file", seconds=0.01, file_bytes=64 * HOST_MIB) is None


# ------------------------------------------------------------------------------------------- energy


def says(*values: float) -> Callable[[], float]:
    left = iter(values)
    return lambda: next(left)


def meter(*found: Counter, missing: dict[Part, str] | None = None, poll_s: float = 60) -> Meter:
    return Meter(Counters(found=found, missing=missing or {}), poll_s=poll_s)


def counter(part: Part, *values: float, name: str = "a", range_j: float | None = None) -> Counter:
    return Counter(part=part, name=name, read_j=says(*values), range_j=range_j)


def test_what_a_window_takes_is_what_its_counters_rose_by() -> None:
    with meter(counter("GPU", 1000, 1250, 1300), counter("GPU", 5, 6, 8, name="b")) as opened:
        assert opened.taken().joules == {("GPU", "a"): 250, ("GPU", "b"): 1}
        assert opened.taken().joules == {("GPU", "a"): 50, ("GPU", "b"): 2}


def test_a_counter_that_begins_again_has_counted_to_its_range() -> None:
    with meter(counter("CPU", 90, 15, 20, range_j=100)) as opened:
        assert opened.taken().joules == {("CPU", "a"): 25}
        assert opened.taken().joules == {("CPU", "a"): 5}


def test_a_counter_that_begins_again_twice_in_a_window_is_read_in_between() -> None:
    values, read = [90.0, 50.0, 10.0], threading.Semaphore(0)
    left = iter(values)

    def read_j() -> float:
        value = next(left, last_j)
        read.release()
        return value

    last_j = 10.0
    one = Counter(part="CPU", name="a", read_j=read_j, range_j=100)
    with meter(one, poll_s=0.01) as opened:
        for _ in range(3):  # on opening, and twice by the meter itself
            assert read.acquire(timeout=30)
        last_j = 60.0
        total = opened.taken().joules["CPU", "a"]
    assert total == pytest.approx(60 + 60 + 50)


def test_a_counter_that_goes_back_or_falls_silent_is_given_up_in_words() -> None:
    with meter(counter("GPU", 10, 9), counter("CPU", 1, 3)) as opened:
        taken = opened.taken()
    assert taken.joules == {("CPU", "a"): 2}
    assert "went back" in taken.missing["GPU"]

    def silent() -> float:
        raise OSError("gone")

    with meter(Counter(part="GPU", name="a", read_j=silent)) as opened:
        taken = opened.taken()
    assert not taken.joules
    assert "gone" in taken.missing["GPU"]


def test_ranks_are_summed_and_a_counter_that_they_share_counts_once() -> None:
    ranks = [
        Taken(window_s=1, joules={("GPU", f"h {rank}"): 10.0 + rank, ("CPU", "h p"): 4.0})
        for rank in (0, 1)
    ]
    assert by_part(ranks) == {"GPU": 21, "CPU": 4}


def test_a_part_that_one_rank_cannot_measure_has_no_sum() -> None:
    ranks = [
        Taken(window_s=1, joules={("GPU", "a"): 10, ("CPU", "p"): 4}),
        Taken(window_s=1, joules={("CPU", "q"): 3}, missing={"GPU": "none"}),
    ]
    assert by_part(ranks) == {"CPU": 7}


def zone(root: Path, name: str, what: str, microjoules: int) -> Path:
    folder = root / name
    folder.mkdir()
    (folder / "name").write_text(f"{what}\n")
    (folder / "energy_uj").write_text(f"{microjoules}\n")
    (folder / "max_energy_range_uj").write_text("262143328850\n")
    return folder


def test_processors_count_packages_and_memory_but_no_part_twice(tmp_path: Path) -> None:
    zone(tmp_path, "intel-rapl:0", "package-0", 2_500_000)
    zone(tmp_path, "intel-rapl:0:0", "core", 1_000_000)
    zone(tmp_path, "intel-rapl:0:1", "dram", 500_000)
    zone(tmp_path, "intel-rapl:1", "psys", 9_000_000)
    found = processor_counters(tmp_path, host="h")
    assert [(one.name, one.read_j()) for one in found] == [
        ("h intel-rapl:0", 2.5),
        ("h intel-rapl:0:1", 0.5),
    ]
    assert found[0].range_j == pytest.approx(262143.32885)


def test_processors_without_a_counter_are_refused_in_words(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="has no counter"):
        processor_counters(tmp_path, host="h")


def test_a_counter_that_only_root_may_read_is_refused_in_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    zone(tmp_path, "intel-rapl:0", "package-0", 1)
    read = Path.read_text

    def refused(self: Path, *args: str, **kwargs: str) -> str:
        if self.name == "energy_uj":
            raise PermissionError(13, "Permission denied")
        return read(self, *args, **kwargs)

    monkeypatch.setattr(Path, "read_text", refused)
    with pytest.raises(OSError, match="only root may read it"):
        processor_counters(tmp_path, host="h")


def test_what_is_missing_is_said_for_each_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("offload.probe.energy.RAPL", tmp_path)
    found = find_counters("0000:81:00.0", host="h")
    assert not found.found
    assert "NVML does not respond" in found.missing["GPU"]
    assert "has no counter" in found.missing["CPU"]
    assert set(find_counters(None, host="h").missing) == {"CPU"}
