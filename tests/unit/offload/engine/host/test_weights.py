from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from offload.engine.codecs.codec import NATIVE
from offload.engine.host import numa, pagelock
from offload.engine.host.numa import HostPlace
from offload.engine.host.slab import HostBlocks, Stash
from offload.engine.host.weights import HostWeights
from offload.engine.memory_meter import held_bytes
from offload.errors import TransferError
from offload.plan.machine.machine import GIB, Tier
from tests.doubles import FakeLocker

CPU = torch.device("cpu")
LAYER_BYTES = 2**20


def layers(num: int = 6) -> list[list[nn.Parameter]]:
    return [
        [nn.Parameter(torch.full((LAYER_BYTES // 4,), float(n)), requires_grad=False)]
        for n in range(num)
    ]


Open = Callable[..., HostWeights]


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Open:
    """Return what settles layers as for a device whose memory a made-up locker locks."""

    def open_with(
        locker: FakeLocker | None, *, tier: Tier = "ram", groups: list[list[nn.Parameter]]
    ) -> HostWeights:
        monkeypatch.setattr(pagelock, "open_locker", lambda _device, _descriptor: locker)
        store_dir = tmp_path if tier == "disk" else None
        codecs = [[NATIVE] * len(group) for group in groups]
        return HostWeights(
            groups,
            codecs,
            backing=None,
            tier=tier,
            store_dir=store_dir,
            torch_device=CPU,
            others_bytes=0,
        )

    return open_with


def test_a_slab_that_is_locked_needs_no_thread_to_issue_its_loads(opened: Open) -> None:
    locker = FakeLocker(GIB)
    host = opened(locker, groups=layers())
    assert (host.is_staged, host.staging, host.pinned_bytes) == (False, (), 6 * LAYER_BYTES)
    assert "all 6.00 MiB of layers are page-locked" in host.notes[0]
    host.close()
    assert locker.locked == {}


def test_memory_that_layers_leave_for_a_slab_goes_back_to_the_system(opened: Open) -> None:
    """Glibc keeps freed blocks once one of almost 32 MiB was freed, if memory above is in use."""
    torch.ones(31 * 2**20, dtype=torch.uint8)
    groups = layers(96)
    above = torch.ones(LAYER_BYTES)
    before = held_bytes()
    host = opened(None, groups=groups)
    assert held_bytes() - before < 24 * LAYER_BYTES
    assert above.all()
    host.close()


def test_a_slab_over_the_limit_is_staged_by_a_thread(opened: Open) -> None:
    host = opened(FakeLocker(5 * LAYER_BYTES), groups=layers())
    assert host.is_staged
    assert (len(host.staging), host.piece_bytes) == (4, LAYER_BYTES)
    host.close()


def test_pageable_loads_are_issued_by_a_thread_without_buffers(opened: Open) -> None:
    """By the caller's thread they would hold up the visits: the driver makes it wait for each."""
    host = opened(FakeLocker(0), groups=layers())
    assert (host.is_staged, host.staging) == (True, ())
    host.close()


def test_a_first_layer_of_which_all_trains_does_not_hide_where_the_slab_starts(
    opened: Open,
) -> None:
    locker = FakeLocker(GIB)
    host = opened(locker, groups=[[], *layers()])
    assert 0 not in locker.locked
    assert list(locker.locked.values()) == [6 * LAYER_BYTES]
    host.close()


def test_what_became_of_the_memory_policy_is_told(
    opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = HostPlace(node=1, cpus=frozenset(), reason="near node 1")
    monkeypatch.setattr(numa, "place_near", lambda _device: place)
    monkeypatch.setattr(numa, "_LinuxCalls", RefusedCalls)
    host = opened(FakeLocker(GIB), groups=layers())
    assert host.notes[-2] == "near node 1"
    assert host.notes[-1].startswith("memory could not be bound to NUMA node 1 (Operation not")
    host.close()


class RefusedCalls:
    """A container in which no policy may be set."""

    def __init__(self, _libnuma: object) -> None:
        pass

    def inherited_mode(self) -> int:
        raise PermissionError(1, "Operation not permitted")


# ------------------------------------------------------------------------------------ blocks


def blocks_of(locker: FakeLocker | None, *, is_anywhere: bool = True) -> HostBlocks:
    return HostBlocks(
        locker=locker, before_touch=lambda _address, _num_bytes: "", is_anywhere=is_anywhere
    )


def test_a_tensor_that_is_alone_in_its_memory_is_locked_where_it_is() -> None:
    values, locker = torch.randn(300, 40), FakeLocker(GIB)
    blocks = blocks_of(locker)
    held = blocks.hold(values)
    assert held.data_ptr() == values.data_ptr()
    assert locker.locked == {values.data_ptr(): values.nbytes}
    blocks.close()
    assert locker.locked == {}
    assert blocks_of(None).hold(values).data_ptr() == values.data_ptr()


@pytest.mark.parametrize("why", ["not alone", "a node is nearer", "not lockable there"])
def test_a_tensor_that_cannot_stay_where_it_is_is_copied_once(why: str) -> None:
    values, locker = torch.randn(300, 40), FakeLocker(GIB)
    if why == "not alone":
        values = torch.randn(9000, 40)[:300]
    if why == "not lockable there":
        own, register = values.data_ptr(), locker.register

        def refuse(address: int, num_bytes: int) -> str | None:
            return "of a file" if address == own else register(address, num_bytes)

        locker.register = refuse  # type: ignore[method-assign]
    blocks = blocks_of(locker, is_anywhere=why != "a node is nearer")
    held = blocks.hold(values)
    assert held.data_ptr() != values.data_ptr()
    assert torch.equal(held.view(torch.float32).view(300, 40), values)
    assert locker.locked == {held.data_ptr(): values.nbytes}
    blocks.close()
    assert locker.locked == {}


def test_a_stash_that_grows_unlocks_the_memory_that_it_leaves() -> None:
    """CUDA takes memory that was unmapped and mapped anew for locked still, and refuses it."""
    locker = FakeLocker(GIB)
    blocks = blocks_of(locker)
    stash = Stash("inputs", allocate_host=blocks.allocate, free_host=blocks.free, torch_device=CPU)
    for size in (10_000, 20_000, 5_000, 40_000):
        stash.prepare({(0, 0): size, (1, 0): size}, num_buffers=1)
    assert list(locker.locked.values()) == [80_000]
    blocks.close()
    assert locker.locked == {}


def test_a_block_that_cannot_be_locked_is_an_error_with_the_reason() -> None:
    with pytest.raises(
        TransferError, match=r"page-locking 1\.00 GiB of host memory failed: not 1073741824; what"
    ):
        blocks_of(FakeLocker(0)).allocate(GIB)
