import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from offload.engine.host.limits import free_host_bytes, resident_bytes
from offload.errors import MachineError
from offload.plan.machine.machine import Machine, Rate
from offload.probe.machine import RUN_LIBRARIES_BYTES, has_grouped_gemm, probe, steady_bytes

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
    to_come = 0 if "peft" in sys.modules else RUN_LIBRARIES_BYTES
    assert machine.context_bytes == pytest.approx(resident_bytes() + to_come, rel=0.5)
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
