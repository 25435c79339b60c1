import threading

import pytest
import torch

from offload.engine.streams import CpuDevice
from offload.errors import TransferError
from offload.plan.schedule.op import Lane


@pytest.fixture
def device():
    device = CpuDevice()
    yield device
    device.close()


def test_a_copy_leaves_later_threads_all_their_cores(device: CpuDevice) -> None:
    source, target = torch.arange(4096).to(torch.uint8), torch.zeros(4096, dtype=torch.uint8)
    device.submit(Lane.H2D, [], lambda: device.copy(target, source))
    device.finish()
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    assert torch.equal(source, target)
    assert found == [torch.get_num_threads()]


def test_a_copy_waits_for_what_it_was_told_to(device: CpuDevice) -> None:
    order: list[str] = []
    gate = threading.Event()

    def load() -> None:
        gate.wait()
        order.append("load")

    first = device.submit(Lane.H2D, [], load)
    device.submit(Lane.H2D, [first], lambda: order.append("next load"))
    gate.set()
    device.submit(Lane.COMPUTE, [first], lambda: order.append("visit"))
    device.finish()
    assert order.index("load") < order.index("visit")
    assert order.index("load") < order.index("next load")


def test_what_fails_on_the_copy_lane_is_raised_and_can_be_aborted(device: CpuDevice) -> None:
    def fail() -> None:
        raise OSError("no such page")

    failed = device.submit(Lane.H2D, [], fail)
    device.submit(Lane.COMPUTE, [failed], lambda: None)
    with pytest.raises(TransferError, match="no such page"):
        device.settle()
    device.abort()
    device.submit(Lane.H2D, [], lambda: None)
    device.finish()


def test_what_fails_last_on_a_lane_is_raised_too(device: CpuDevice) -> None:
    def fail() -> None:
        raise OSError("the network is down")

    device.begin()
    device.submit(Lane.NETWORK, [], fail)
    with pytest.raises(TransferError, match=r"the network lane failed: .*the network is down"):
        device.settle()
    device.abort()
    device.settle()


def test_the_lanes_end_when_the_device_is_closed() -> None:
    before = threading.active_count()
    device = CpuDevice()
    assert threading.active_count() == before + 4
    device.close()
    assert threading.active_count() == before
