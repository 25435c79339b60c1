"""What `doctor` says of a machine."""

import json
import platform
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from finetune.commands.doctor import can_train, findings_json
from offload.engine.host.nvml import Driver, Gpu, Link, find_driver
from offload.plan.machine.machine import Rate
from offload.probe import doctor
from offload.probe.doctor import (
    NEEDED,
    Finding,
    TorchBuild,
    card_findings,
    check_up,
    driver_finding,
    fits,
    link_findings,
    torch_build,
    torch_finding,
    versions,
    without_paths,
)
from offload.probe.machine import installed_version
from tests.doubles import A_DRIVER

ROOT = Path(__file__).parents[4]


@pytest.fixture
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "DISK_S", 0.0)
    monkeypatch.setattr(doctor, "DISK_BYTES", 64 * 2**20)


def by_name(findings: tuple[Finding, ...]) -> dict[str, Finding]:
    found = {one.name: one for one in findings}
    assert len(found) == len(findings)
    return found


@pytest.mark.usefixtures("_small")
def test_this_machine_has_a_line_for_each_and_nothing_private(tmp_path: Path) -> None:
    findings = check_up(tmp_path / "sluice" / "stores")
    found = by_name(findings)
    names = {"system", "versions", "torch", "GPU", "page locks", "processor", "memory", "swap"}
    assert names | {"cache disk"} <= set(found)
    assert all(one.hint for one in findings if one.status != "ok")
    assert not any(one.hint for one in findings if one.status == "ok")
    words = json.loads(findings_json(findings))
    assert [row["name"] for row in words["findings"]] == [one.name for one in findings]
    shown = json.dumps(words)
    assert str(Path.home()) not in shown
    assert str(tmp_path) not in shown
    assert not list(tmp_path.rglob("*.tmp"))


@pytest.mark.usefixtures("_small")
def test_every_card_is_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    found = by_name(check_up(tmp_path, find=lambda: A_DRIVER))
    assert found["GPU"].value == "driver 570.86.10, for CUDA up to 12.8"
    assert found["GPU 1"].value == (
        "NVIDIA GeForce RTX 4060 Ti, sm_89, 15.0 GiB free of 16.0 GiB,"
        " 2 other processes compute on it"
    )
    assert found["GPU 0 link"].value.startswith("PCIe 3.0 x8 of 4.0 x16, at most 7.9 GB/s")
    assert found["torch"].status == "warning"  # a card, and a build that does not see it


@pytest.mark.usefixtures("_small")
def test_on_another_system_there_is_nothing_more_to_look_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("platform.system", lambda: "Darwin")
    (found,) = check_up(tmp_path)
    assert (found.name, found.status) == ("system", "error")


@pytest.mark.usefixtures("_small")
def test_a_driver_without_cards_has_no_line_of_a_card(tmp_path: Path) -> None:
    driver = Driver(version="570.86.10", cuda=(12, 8), gpus=())
    found = by_name(check_up(tmp_path, find=lambda: driver))
    assert not [name for name in found if name.startswith("GPU ")]


@pytest.mark.usefixtures("_small")
@pytest.mark.gpu
def test_a_card_s_link_is_read_while_it_copies(tmp_path: Path) -> None:
    driver = find_driver()
    assert driver is not None
    found = by_name(check_up(tmp_path))
    links = [one.value for name, one in found.items() if name.endswith(" link")]
    assert len(links) == sum(gpu.link is not None for gpu in driver.gpus)  # some VMs hide it
    assert not any("while idle" in link for link in links)
    assert "it matters with a GPU only" not in found["page locks"].value
    assert found["torch"].status == "ok"


@pytest.mark.usefixtures("_small")
def test_without_torch_the_doctor_reports_that_training_is_impossible() -> None:
    code = (
        "import sys\nfrom finetune.app import main\n"
        "sys.modules['torch'] = None\n"
        "main(['doctor', '--json'])\n"
    )
    words = [sys.executable, "-c", code]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1, done.stderr
    found = {row["name"]: row for row in json.loads(done.stdout)["findings"]}
    assert found["torch"]["status"] == "error"
    assert found["torch"]["value"].startswith("cannot be imported: ModuleNotFoundError")
    assert found["memory"]["value"]


@pytest.mark.usefixtures("_small")
def test_a_warning_is_no_obstacle_and_an_error_is() -> None:
    slow = Finding(name="disk", value="slow", status="warning", hint="another")
    broken = Finding(name="torch", value="missing", status="error", hint="install it")
    assert can_train([slow])
    assert not can_train([slow, broken])


# ---------------------------------------------------------------------------------------------- gpu


FULL = Link(generation=4, width=16, max_generation=4, max_width=16)
GPU = Gpu(
    name="RTX 4090",
    capability=(8, 9),
    memory_bytes=24 * 2**30,
    used_bytes=2**30,
    num_processes=0,
    link=FULL,
)
DRIVER = Driver(version="570.86.10", cuda=(12, 8), gpus=(GPU,))


def put_card(root: Path, *, vendor: str, kind: str) -> Path:
    device = root / "sys/bus/pci/devices/0000:01:00.0"
    device.mkdir(parents=True)
    (device / "vendor").write_text(f"{vendor}\n")
    (device / "class").write_text(f"{kind}\n")
    return root


def test_a_machine_without_a_driver_is_described_in_plain_words(tmp_path: Path) -> None:
    found = driver_finding(None, root=put_card(tmp_path, vendor="0x1002", kind="0x030000"))
    assert found.status == "warning"
    assert found.value.startswith("no CUDA device: there is no NVIDIA driver here, so training")
    assert "--machine rtx4090" in found.hint


def test_a_card_without_a_driver_is_seen_on_the_bus(tmp_path: Path) -> None:
    found = driver_finding(None, root=put_card(tmp_path, vendor="0x10de", kind="0x030200"))
    assert found.value.startswith("no CUDA device: an NVIDIA card is there, and no driver answers")
    assert "install NVIDIA's driver" in found.hint


def test_a_sound_device_of_nvidia_is_no_card(tmp_path: Path) -> None:
    root = put_card(tmp_path, vendor="0x10de", kind="0x040300")
    assert "there is no NVIDIA driver" in driver_finding(None, root=root).value


def test_a_driver_without_a_card_is_a_warning(tmp_path: Path) -> None:
    assert driver_finding(DRIVER, root=tmp_path).value == "driver 570.86.10, for CUDA up to 12.8"
    found = driver_finding(replace(DRIVER, gpus=()), root=tmp_path)
    assert found.status == "warning"
    assert "no CUDA device: driver 570.86.10" in found.value


@pytest.mark.parametrize(
    ("changes", "status"),
    [
        ({}, "ok"),
        ({"num_processes": None}, "ok"),
        ({"num_processes": 2}, "warning"),
        ({"used_bytes": 7 * 2**30}, "warning"),  # a desktop that is hidden from a container
    ],
)
def test_a_card_that_others_use_is_a_warning(changes, status: str) -> None:
    (found,) = card_findings([replace(GPU, **changes)])
    assert found.status == status
    assert found.value.startswith("RTX 4090, sm_89, ")
    assert ("other processes compute on it" in found.value) == (changes.get("num_processes") == 2)


def link(are_busy: bool = True, **changes: int) -> tuple[str, str, str]:
    (found,) = link_findings([replace(GPU, link=replace(FULL, **changes))], are_busy=are_busy)
    return found.status, found.value, found.hint


def test_a_whole_link_is_well() -> None:
    status, value, _ = link()
    assert status == "ok"
    assert value == "PCIe 4.0 x16, all that card and slot can, at most 31.5 GB/s each way"


@pytest.mark.parametrize("are_busy", [False, True])
def test_a_link_with_fewer_lanes_is_a_warning_also_while_idle(are_busy: bool) -> None:
    status, value, hint = link(are_busy=are_busy, width=4)
    assert status == "warning"
    assert value.startswith("PCIe 4.0 x4 of 4.0 x16, at most 7.9 GB/s each way")
    assert "slot next to the processor" in hint


def test_a_link_of_a_lower_generation_is_a_warning_under_load_and_not_while_idle() -> None:
    status, value, hint = link(generation=1)
    assert status == "warning"
    assert value.startswith("PCIe 1.0 x16 of 4.0 x16, at most 4.0 GB/s")
    assert "BIOS" in hint
    status, value, _ = link(are_busy=False, generation=1)
    assert status == "ok"
    assert value.startswith("PCIe 1.0 x16 while idle, of 4.0 x16: a card raises it")


def test_a_card_whose_link_is_not_reported_has_no_line() -> None:
    gpus = [replace(GPU, link=None), GPU]
    assert [found.name for found in link_findings(gpus, are_busy=True)] == ["GPU 1 link"]


# ----------------------------------------------------------------------------------------- software


BUILD = TorchBuild(
    version="2.13.0+cu130",
    cuda="13.0",
    sees_cuda=True,
    architectures=("sm_75", "sm_86", "sm_90", "compute_120"),
)


def a_driver(capability: tuple[int, int]) -> Driver:
    gpu = Gpu(
        name="RTX 4090",
        capability=capability,
        memory_bytes=24 * 2**30,
        used_bytes=0,
        num_processes=0,
        link=None,
    )
    return Driver(version="570.86.10", cuda=(12, 8), gpus=(gpu,))


@pytest.mark.parametrize(
    ("capability", "architectures", "is_fit"),
    [
        ((8, 6), ("sm_86",), True),
        ((8, 9), ("sm_86",), True),  # a later card of the same major version
        ((8, 0), ("sm_86",), False),
        ((9, 0), ("sm_86",), False),
        ((9, 0), ("compute_86",), True),  # compiled when it is loaded
        ((7, 5), ("compute_86",), False),
        ((12, 0), ("sm_90", "sm_120"), True),
        ((12, 0), ("sm_90a",), False),
        ((9, 0), ("sm_90a",), True),
        ((10, 3), ("sm_100f",), True),
        ((8, 6), ("gfx1100", ""), False),
        ((8, 6), (), False),
    ],
)
def test_kernels_run_on_the_cards_that_cuda_says(capability, architectures, is_fit) -> None:
    assert fits(capability, architectures) is is_fit


def test_a_build_with_kernels_for_the_card_is_well() -> None:
    found = torch_finding(BUILD, a_driver((8, 9)))
    assert found.status == "ok"
    assert found.value == "2.13.0+cu130, built for CUDA 13.0, with kernels for sm_89"


def test_a_build_without_kernels_for_the_card_cannot_train_on_it() -> None:
    found = torch_finding(BUILD, a_driver((6, 1)))
    assert found.status == "error"
    assert "without kernels for RTX 4090 (sm_61); it has sm_75, sm_86" in found.value


def test_a_build_for_cpus_beside_a_card_is_a_warning() -> None:
    build = replace(BUILD, version="2.13.0+cpu", cuda=None, sees_cuda=False, architectures=())
    found = torch_finding(build, a_driver((8, 9)))
    assert found.status == "warning"
    assert found.value == "2.13.0+cpu, built for CPUs, so the GPU is not used"
    assert torch_finding(build, None).status == "ok"


def test_a_driver_that_is_too_old_for_the_build_is_a_warning() -> None:
    found = torch_finding(replace(BUILD, sees_cuda=False), a_driver((8, 9)))
    assert found.status == "warning"
    assert found.value.endswith("sees no CUDA device; the driver runs CUDA up to 12.8")
    assert "CUDA_VISIBLE_DEVICES" in found.hint


def test_torch_that_cannot_be_imported_makes_training_impossible() -> None:
    found = torch_finding("ImportError: libcudart.so.13: cannot open shared object file", None)
    assert found.status == "error"
    assert "libcudart.so.13" in found.value
    assert "pip install" in found.hint


def test_the_build_is_that_of_this_torch() -> None:
    build = torch_build()
    assert isinstance(build, TorchBuild)
    assert (build.version, build.cuda) == (torch.__version__, torch.version.cuda)


def test_versions_are_those_that_are_installed() -> None:
    found = versions(installed_version, python=platform.python_version(), has_gpu=False)
    assert found.status == "ok"
    assert f"python {platform.python_version()}, sluice " in found.value
    assert f"torch {torch.__version__}" in found.value


def test_a_missing_package_makes_training_impossible_and_missing_triton_does_not() -> None:
    def version_of(package: str) -> str | None:
        return None if package in ("peft", "triton", "sluice-finetune") else "1.0"

    found = versions(version_of, python="3.12.1", has_gpu=True)
    assert (found.status, found.hint) == ("error", "`pip install peft`")
    assert "sluice (a checkout)" in found.value
    assert "peft missing" in found.value
    known = dict.fromkeys(NEEDED, "1.0") | {"transformers": "5.24.1"}
    found = versions(known.get, python="3.12.1", has_gpu=True)
    assert (found.status, found.hint) == ("warning", "`pip install triton`")
    assert versions(known.get, python="3.12.1", has_gpu=False).status == "ok"


def test_a_minor_version_of_transformers_that_was_not_tested_is_a_warning() -> None:
    known = dict.fromkeys(NEEDED, "1.0") | {"transformers": "5.25.0.dev0"}
    found = versions(known.get, python="3.12.1", has_gpu=False)
    assert found.status == "warning"
    assert found.hint.startswith("transformers 5.25.0.dev0 was not tested, only 5.23 and 5.24:")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("libc10.so: cannot open", "libc10.so: cannot open"),
        ("/home/al bert/env/torch/lib/a.so: undefined", "a.so: undefined"),
        (
            "no 'x' from 'torch' (/opt/albert/torch/__init__.py)",
            "no 'x' from 'torch' (__init__.py)",
        ),
        ("~/env/b.so and /home/al bert", "b.so and ~"),
    ],
)
def test_messages_keep_no_folders(text: str, expected: str) -> None:
    assert without_paths(text, home=Path("/home/al bert")) == expected


# ------------------------------------------------------------------------------------------- system


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


@pytest.mark.parametrize(
    ("others_frac", "also", "status"),
    [(None, "", "ok"), (0.63, ", of which other programs take 63%", "warning")],
)
def test_a_processor_that_others_use_is_a_warning(
    others_frac: float | None, also: str, status: str, tmp_path: Path
) -> None:
    info = "processor\t: 0\nmodel name\t: AMD Ryzen 9 7950X\nprocessor\t: 1\n"
    write(tmp_path, proc__cpuinfo=info)
    found = doctor.processor(tmp_path, num_allowed=4, others_frac=others_frac)
    assert found.value == f"AMD Ryzen 9 7950X, 4 CPUs{also}"
    assert found.status == status


def test_a_processor_that_is_hidden_is_still_counted(tmp_path: Path) -> None:
    found = doctor.processor(tmp_path, num_allowed=4, others_frac=None)
    assert found.value == "unknown, 4 CPUs"


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
