"""What is read of NVIDIA's library, by a fake of its bindings with the GPUs of a driver."""

from collections.abc import Collection, Iterable
from dataclasses import replace
from types import SimpleNamespace

import pynvml
import pytest

from offload.engine.host.nvml import Driver, energy_meter, find_driver, nearest_node
from offload.probe.energy import gpu_counter
from tests.doubles import A_DRIVER, A_GPU, A_LINK

BUS_ID = "0000:81:00.0"


class FakeNvml(SimpleNamespace):
    """pynvml on a machine with these GPUs, of which the first is at `BUS_ID`."""

    def __init__(
        self,
        driver: Driver = A_DRIVER,
        *,
        nodes: Iterable[int] = (),
        millijoules: int = 0,
        refused: Collection[str] = (),
    ) -> None:
        self.num_open = 0
        gpus, (major, minor) = driver.gpus, driver.cuda
        answers = {
            "Init": lambda: self.opens(1),
            "Shutdown": lambda: self.opens(-1),
            "SystemGetDriverVersion": lambda: driver.version,
            "SystemGetCudaDriverVersion_v2": lambda: 1000 * major + 10 * minor,
            "DeviceGetCount": lambda: len(gpus),
            "DeviceGetHandleByIndex": gpus.__getitem__,
            "DeviceGetHandleByPciBusId": {BUS_ID.encode(): gpus and gpus[0]}.__getitem__,
            "DeviceGetName": lambda gpu: gpu.name,
            "DeviceGetMemoryInfo": lambda gpu: SimpleNamespace(
                total=gpu.memory_bytes, used=gpu.used_bytes
            ),
            "DeviceGetCudaComputeCapability": lambda gpu: gpu.capability,
            "DeviceGetComputeRunningProcesses": lambda gpu: [None] * gpu.num_processes,
            "DeviceGetCurrPcieLinkGeneration": lambda gpu: gpu.link.generation,
            "DeviceGetCurrPcieLinkWidth": lambda gpu: gpu.link.width,
            "DeviceGetMaxPcieLinkGeneration": lambda gpu: gpu.link.max_generation,
            "DeviceGetMaxPcieLinkWidth": lambda gpu: gpu.link.max_width,
            "DeviceGetMemoryAffinity": lambda _, num_words, scope: [
                sum(1 << node % 64 for node in nodes if node // 64 == word + scope)
                for word in range(num_words)
            ],
            "DeviceGetTotalEnergyConsumption": lambda _: millijoules,
        }
        for name, answer in answers.items():
            setattr(self, f"nvml{name}", refuse if name in refused else answer)

    def opens(self, number: int) -> None:
        self.num_open += number


def refuse(*_: object) -> None:
    raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)


@pytest.mark.parametrize("node", [0, 1, 63, 64])
def test_nvml_names_the_node(node: int) -> None:
    nvml = FakeNvml(nodes={node})
    assert nearest_node(BUS_ID, nvml) == node
    assert nvml.num_open == 0


@pytest.mark.parametrize(
    ("nodes", "refused"),
    [
        ({0, 1}, ()),
        ((), ()),
        ({1}, ("Init",)),
        ({1}, ("DeviceGetMemoryAffinity",)),
        ({1}, ("DeviceGetHandleByPciBusId",)),
    ],
)
def test_several_nodes_or_none_or_a_failed_call_name_no_node(
    nodes: Collection[int], refused: Collection[str]
) -> None:
    nvml = FakeNvml(nodes=nodes, refused=refused)
    assert nearest_node(BUS_ID, nvml) is None
    assert nvml.num_open == 0


IDLE = replace(A_GPU, num_processes=0, link=replace(A_LINK, generation=1))


@pytest.mark.parametrize("gpus", [A_DRIVER.gpus, (IDLE,), ()])
def test_a_driver_and_its_gpus_are_read(gpus: tuple) -> None:
    nvml = FakeNvml(driver := replace(A_DRIVER, gpus=gpus))
    assert find_driver(nvml) == driver
    assert nvml.num_open == 0


@pytest.mark.parametrize(
    ("refused", "found"),
    [
        ("Init", None),
        ("SystemGetDriverVersion", None),
        ("SystemGetCudaDriverVersion_v2", replace(A_DRIVER, cuda=(0, 0))),
        ("DeviceGetName", replace(A_DRIVER, gpus=())),
        (
            "DeviceGetCurrPcieLinkWidth",
            replace(A_DRIVER, gpus=(replace(A_GPU, link=None),) * 2),
        ),
        (
            "DeviceGetComputeRunningProcesses",
            replace(A_DRIVER, gpus=(replace(A_GPU, num_processes=None),) * 2),
        ),
    ],
)
def test_what_a_driver_does_not_report_is_left_open(refused: str, found: Driver | None) -> None:
    nvml = FakeNvml(refused=(refused,))
    assert find_driver(nvml) == found
    assert nvml.num_open == 0


def test_a_machine_without_a_driver_has_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pynvml, "nvmlLib", None)
    monkeypatch.setattr(pynvml, "CDLL", lambda name: (_ for _ in ()).throw(OSError(name)))
    assert find_driver() is None
    assert nearest_node(BUS_ID) is None
    with pytest.raises(OSError, match="NVML does not respond"):
        energy_meter(BUS_ID)


def test_a_gpu_counts_millijoules() -> None:
    found = gpu_counter("h", energy_meter(BUS_ID, FakeNvml(millijoules=7000)))
    assert (found.part, found.name, found.range_j, found.read_j()) == ("GPU", "h", None, 7)


@pytest.mark.parametrize(
    ("refused", "words"),
    [("DeviceGetTotalEnergyConsumption", "Not Supported|code 3"), ("", "is 0")],
)
def test_a_gpu_without_a_counter_is_refused_in_words(refused: str, words: str) -> None:
    with pytest.raises(OSError, match=words):
        gpu_counter("h", energy_meter(BUS_ID, FakeNvml(refused=(refused,))))
