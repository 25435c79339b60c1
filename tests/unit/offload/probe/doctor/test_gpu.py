"""What the doctor says of cards and their links; no card is needed."""

from dataclasses import replace
from pathlib import Path

import pytest

from offload.engine.host.nvml import Driver, Gpu, Link
from offload.probe.doctor import card_findings, driver_finding, link_findings

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
