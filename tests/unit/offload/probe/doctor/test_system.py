"""What the doctor reads of the host, from a /proc and a /sys that a test writes."""

from pathlib import Path

import pytest

from offload.plan.machine.machine import Rate
from offload.probe import doctor

GIB = 2**30


def write(root: Path, **texts: str) -> Path:
    """Write files below a root: proc__meminfo is /proc/meminfo."""
    for name, text in texts.items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def meminfo(*, total: int, available: int, swap: int = 0, swap_free: int = 0) -> str:
    sizes = {"MemTotal": total, "MemAvailable": available, "SwapTotal": swap, "SwapFree": swap_free}
    return "".join(f"{name}:       {size // 1024} kB\n" for name, size in sizes.items())


# ------------------------------------------------------------------------------------------ kernel


def test_linux_is_well_and_its_own_suffix_is_not_shown(tmp_path: Path) -> None:
    write(tmp_path, proc__sys__kernel__osrelease="6.8.0-41-alices-laptop\n")
    found = doctor.system(tmp_path, kernel="Linux", processor="x86_64")
    assert (found.status, found.value) == ("ok", "Linux 6.8.0 on x86_64")


def test_another_system_cannot_train(tmp_path: Path) -> None:
    found = doctor.system(tmp_path, kernel="Darwin", processor="arm64")
    assert found.status == "error"
    assert "WSL2" in found.hint


def test_wsl2_is_recognised_and_its_memory_limit_shown_without_the_user(tmp_path: Path) -> None:
    write(tmp_path, proc__sys__kernel__osrelease="5.15.167.4-microsoft-standard-WSL2\n")
    write(tmp_path, proc__meminfo=meminfo(total=16 * GIB, available=15 * GIB))
    named = doctor.system(tmp_path, kernel="Linux", processor="x86_64")
    assert named.value == "Linux 5.15.167.4 on x86_64, WSL2"
    found = doctor.wsl_memory(tmp_path)
    assert found is not None
    assert found.status == "warning"
    assert found.value.startswith("16.0 GiB; no .wslconfig sets a limit")
    assert ".wslconfig" in found.hint
    write(tmp_path, **{"mnt__c__Users__Alice__.wslconfig": "[wsl2]\nMemory = 24GB\n"})
    found = doctor.wsl_memory(tmp_path)
    assert found is not None
    assert (found.status, found.value) == ("ok", "16.0 GiB; .wslconfig sets memory=24GB")


def test_linux_outside_windows_has_no_limit_of_windows(tmp_path: Path) -> None:
    write(tmp_path, proc__sys__kernel__osrelease="6.8.0\n")
    assert doctor.wsl_memory(tmp_path) is None


# --------------------------------------------------------------------------------------- processor


@pytest.mark.parametrize(("load", "status"), [("0.98", "ok"), ("2.10", "warning")])
def test_a_processor_that_others_use_is_a_warning(load: str, status: str, tmp_path: Path) -> None:
    info = "processor\t: 0\nmodel name\t: AMD Ryzen 9 7950X\nprocessor\t: 1\n"
    write(tmp_path, proc__cpuinfo=info, proc__loadavg=f"{load} 0.5 0.5 1/200 999\n")
    found = doctor.processor(tmp_path, num_allowed=4)
    assert found.value == f"AMD Ryzen 9 7950X, 4 CPUs, load {load} in the last minute"
    assert found.status == status


def test_a_processor_that_is_hidden_is_still_counted(tmp_path: Path) -> None:
    assert doctor.processor(tmp_path, num_allowed=4).value == "unknown, 4 CPUs"


@pytest.mark.parametrize(
    ("name", "driver", "status"),
    [
        ("powersave", "intel_pstate", "ok"),
        ("powersave", "amd-pstate-epp", "ok"),
        ("powersave", "intel_cpufreq", "warning"),
        ("powersave", "acpi-cpufreq", "warning"),
        ("schedutil", "acpi-cpufreq", "ok"),
    ],
)
def test_powersave_is_slow_where_it_keeps_the_lowest_clock(
    name: str, driver: str, status: str, tmp_path: Path
) -> None:
    policy = tmp_path / "sys/devices/system/cpu/cpu0/cpufreq"
    policy.mkdir(parents=True)
    (policy / "scaling_governor").write_text(f"{name}\n")
    (policy / "scaling_driver").write_text(f"{driver}\n")
    found = doctor.governor(tmp_path)
    assert found is not None
    assert (found.value, found.status) == (f"{name} ({driver})", status)


def test_a_governor_that_is_not_reported_is_left_out(tmp_path: Path) -> None:
    assert doctor.governor(tmp_path) is None


# ------------------------------------------------------------------------------------------ memory


@pytest.mark.parametrize(("free", "status"), [(40, "ok"), (20, "warning")])
def test_memory_that_others_hold_is_a_warning(free: int, status: str, tmp_path: Path) -> None:
    write(tmp_path, proc__meminfo=meminfo(total=64 * GIB, available=free * GIB))
    found = doctor.memory(tmp_path)
    assert (found.value, found.status) == (f"{free}.0 GiB free of 64.0 GiB", status)
    assert ("close other programs" in found.hint) == (status == "warning")


def test_a_container_s_limit_is_distinguished_from_other_programs(tmp_path: Path) -> None:
    write(
        tmp_path,
        proc__meminfo=meminfo(total=64 * GIB, available=60 * GIB),
        proc__self__cgroup="0::/job\n",
        **{
            "sys__fs__cgroup__job__memory.max": f"{8 * GIB}\n",
            "sys__fs__cgroup__job__memory.current": f"{GIB}\n",
        },
    )
    found = doctor.memory(tmp_path)
    assert found.status == "warning"
    assert found.value == "7.0 GiB free of 64.0 GiB, as much as the container's limit leaves"
    assert "docker run --memory" in found.hint
    (tmp_path / "sys/fs/cgroup/job/memory.max").write_text(f"{48 * GIB}\n")
    assert doctor.memory(tmp_path).status == "ok"


def test_memory_that_the_kernel_does_not_report_is_a_warning(tmp_path: Path) -> None:
    found = doctor.memory(tmp_path)
    assert (found.status, found.value) == ("warning", "the kernel does not report it")


@pytest.mark.parametrize(("used_mib", "status"), [(100, "ok"), (3000, "warning")])
def test_swap_in_use_is_a_warning(used_mib: int, status: str, tmp_path: Path) -> None:
    free = 8 * GIB - used_mib * 2**20
    text = meminfo(total=64 * GIB, available=60 * GIB, swap=8 * GIB, swap_free=free)
    found = doctor.swap(write(tmp_path, proc__meminfo=text))
    assert found.status == status
    assert found.value.endswith("in use of 8.0 GiB")


# ---------------------------------------------------------------------------------- locks and disk


def locks(limit: int | None, lockable: int | None, *, is_wsl: bool = False) -> tuple[str, str, str]:
    found = doctor.page_locks(limit, lockable_bytes=lockable, free_bytes=48 * GIB, is_wsl=is_wsl)
    return found.status, found.value, found.hint


def test_page_locks_are_judged_by_what_could_be_locked() -> None:
    assert locks(8 * 2**20, None)[:2] == (
        "ok",
        "`ulimit -l` is 8 MiB; it matters with a GPU only",
    )
    assert locks(8 * 2**20, 48 * GIB)[:2] == (
        "ok",
        "all free memory can be locked; `ulimit -l` is 8 MiB",
    )
    status, value, hint = locks(None, 2 * GIB)
    assert (status, value) == ("warning", "2.0 GiB can be locked; `ulimit -l` is unlimited")
    assert "--ulimit memlock=-1" in hint
    assert locks(None, 2 * GIB, is_wsl=True)[2].startswith("Windows sets the limit")


@pytest.mark.parametrize(("gb_per_s", "status"), [(3.2, "ok"), (0.5, "warning")])
def test_a_slow_disk_is_a_warning(gb_per_s: float, status: str) -> None:
    rate = Rate(value=gb_per_s * 1e9, source="measured")
    found = doctor.disk(rate, free_bytes=100 * GIB)
    assert found.value == f"reads at {gb_per_s:.2f} GB/s; 100.0 GiB free"
    assert found.status == status


def test_a_disk_that_was_not_measured_says_why() -> None:
    found = doctor.disk(None, free_bytes=100 * 2**20)
    assert found.status == "warning"
    assert found.value.endswith("past the page cache; 100 MiB free")
    assert "XDG_CACHE_HOME" in found.hint
