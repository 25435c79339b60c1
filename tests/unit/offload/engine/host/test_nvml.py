"""What NVML says of a driver and its GPUs, by a library that says what it is told to."""

import ctypes
from typing import Any

import pytest

from offload.engine.host.nvml import Driver, Gpu, find_driver
from tests.doubles import A_DRIVER, A_GPU, FakeDriver


def test_a_driver_and_its_gpus_are_read() -> None:
    library = FakeDriver(A_DRIVER)
    assert find_driver(library) == A_DRIVER
    assert library.num_open == 0


def test_a_driver_may_have_no_gpu() -> None:
    driver = Driver(version="570.86.10", cuda=(12, 8), gpus=())
    assert find_driver(FakeDriver(driver)) == driver


@pytest.mark.parametrize("library", [FakeDriver(A_DRIVER, init_status=9), ctypes.CDLL(None)])
def test_a_library_that_does_not_answer_is_no_driver(library: Any) -> None:
    assert find_driver(library) is None


def test_what_a_gpu_does_not_report_is_left_open() -> None:
    unsupported = (
        "nvmlDeviceGetCurrPcieLinkWidth",
        "nvmlDeviceGetComputeRunningProcesses_v3",
    )
    found = find_driver(FakeDriver(A_DRIVER, unsupported=unsupported))
    assert found is not None
    gpu = found.gpus[0]
    assert (gpu.link, gpu.num_processes) == (None, None)
    assert gpu.name == A_GPU.name


def test_a_gpu_without_processes_has_none() -> None:
    idle = Gpu(
        name="A100",
        capability=(8, 0),
        memory_bytes=1,
        used_bytes=0,
        num_processes=0,
        link=None,
    )
    driver = Driver(version="1", cuda=(12, 4), gpus=(idle,))
    assert find_driver(FakeDriver(driver)) == driver
