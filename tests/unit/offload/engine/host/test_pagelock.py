import ctypes
import mmap
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from offload.engine.host.cudart import CudaRuntime
from offload.engine.host.pagelock import (
    CudaLocker,
    LockMode,
    largest_lockable,
    lock_ring,
    open_locker,
    page_lock,
)
from offload.errors import TransferError
from offload.plan.machine.machine import GIB
from offload.plan.schedule.schedule import NUM_STAGING, PIECE_BYTES
from tests.doubles import FakeLocker
from tests.unit.offload.engine.host.conftest import MOST_BYTES

PAGE = mmap.PAGESIZE
RING_BYTES = NUM_STAGING * PIECE_BYTES
ADDRESS = 16 * PAGE


def test_what_is_locked_after_the_slab_is_left_room() -> None:
    for limit, mode in ((25 * GIB, LockMode.PINNED), (25 * GIB - 1, LockMode.STAGED)):
        lock = page_lock(ADDRESS, 24 * GIB, GIB, FakeLocker(limit), others_bytes=GIB)
        assert lock.mode is mode
        assert lock.num_bytes == (24 * GIB if mode is LockMode.PINNED else RING_BYTES)


def test_all_of_the_slab_is_locked_where_that_is_allowed() -> None:
    locker = FakeLocker(100 * GIB)
    lock = page_lock(ADDRESS, 24 * GIB, GIB, locker)
    assert (lock.mode, lock.num_bytes, lock.buffers) == (LockMode.PINNED, 24 * GIB, ())
    assert lock.reason == (
        "all 24.00 GiB of layers are page-locked: copies are asynchronous and run at the link's"
        " rate"
    )
    assert (locker.rehearsed, locker.locked) == ([24 * GIB], {ADDRESS: 24 * GIB})
    lock.release()
    assert locker.locked == {}


def test_a_limit_below_the_slab_leaves_a_ring_of_locked_buffers() -> None:
    locker = FakeLocker(2 * GIB)
    lock = page_lock(ADDRESS, 24 * GIB, GIB, locker)
    assert (lock.mode, lock.num_bytes) == (LockMode.STAGED, RING_BYTES)
    assert locker.rehearsed == [24 * GIB, 12 * GIB, 6 * GIB, 3 * GIB, 3 * GIB // 2]
    assert lock.reason == (
        f"page-locking 24.00 GiB of layers was refused (no {24 * GIB}), of 1.50 GiB not:"
        " a thread puts them through 4 page-locked buffers of 64.00 MiB, which reads and writes"
        " each byte once more in host memory; to lock all, raise the limit: `ulimit -l unlimited`,"
        " in Docker `--ulimit memlock=-1`; on WSL2 Windows sets it"
    )
    assert [buffer.numel() for buffer in lock.buffers] == [PIECE_BYTES] * NUM_STAGING
    assert locker.locked == {lock.buffers[0].data_ptr(): RING_BYTES}
    lock.release()
    assert locker.locked == {}


def test_staging_buffers_are_no_larger_than_the_largest_layer_in_whole_pages() -> None:
    lock = page_lock(ADDRESS, GIB, 5 * PAGE + 1, FakeLocker(100 * PAGE))
    assert [buffer.numel() for buffer in lock.buffers] == [6 * PAGE] * NUM_STAGING
    assert all(buffer.data_ptr() % PAGE == 0 for buffer in lock.buffers)


def test_the_last_rung_is_just_the_ring() -> None:
    locker = FakeLocker(RING_BYTES)
    assert page_lock(ADDRESS, 2 * GIB, GIB, locker).mode is LockMode.STAGED
    assert locker.rehearsed == [2 * GIB, GIB, GIB // 2, RING_BYTES]


def test_where_not_even_a_ring_can_be_locked_copies_are_pageable() -> None:
    locker = FakeLocker(0)
    lock = page_lock(ADDRESS, 24 * GIB, GIB, locker)
    assert (lock.mode, lock.num_bytes, lock.buffers) == (LockMode.PAGEABLE, 0, ())
    assert lock.reason.startswith(
        f"page-locking 24.00 GiB of layers was refused (no {24 * GIB}):"
        " the driver copies them in small pieces, well below the link's rate"
    )
    lock.release()


def test_a_lock_that_fails_after_its_rehearsal_is_no_end_but_the_next_rung() -> None:
    locker = FakeLocker(2 * GIB, most_rehearsed_bytes=100 * GIB)
    lock = page_lock(ADDRESS, 24 * GIB, GIB, locker)
    assert lock.mode is LockMode.STAGED
    assert f"was refused (not {24 * GIB}): a thread puts" in lock.reason


def test_a_ring_that_fails_after_its_rehearsal_leaves_pageable_copies() -> None:
    locker = FakeLocker(0, most_rehearsed_bytes=2 * GIB)
    lock = page_lock(ADDRESS, 24 * GIB, GIB, locker)
    assert lock.mode is LockMode.PAGEABLE
    assert f"of 1.50 GiB not; 0.25 GiB to stage through was refused (not {RING_BYTES})" in (
        lock.reason
    )


def test_a_slab_smaller_than_a_ring_is_locked_or_pageable() -> None:
    assert page_lock(ADDRESS, PAGE, PAGE, FakeLocker(PAGE)).mode is LockMode.PINNED
    assert page_lock(ADDRESS, PAGE, PAGE, FakeLocker(0)).mode is LockMode.PAGEABLE


def test_layers_on_disk_need_a_ring_alone() -> None:
    locker = FakeLocker(GIB)
    lock = lock_ring(3 * GIB, "layers lie on disk", locker)
    assert (lock.mode, lock.num_bytes) == (LockMode.STAGED, RING_BYTES)
    assert lock.reason == (
        "layers lie on disk: a thread puts them through 4 page-locked buffers of 64.00 MiB"
    )
    assert locker.rehearsed == [RING_BYTES]
    lock.release()
    assert locker.locked == {}


@pytest.mark.parametrize("most_rehearsed_bytes", [0, GIB])
def test_layers_on_disk_whose_ring_is_refused_are_copied_from_pageable_buffers(
    most_rehearsed_bytes: int,
) -> None:
    locker = FakeLocker(0, most_rehearsed_bytes=most_rehearsed_bytes)
    lock = lock_ring(GIB, "layers lie on disk", locker)
    assert (lock.mode, lock.buffers) == (LockMode.PAGEABLE, ())
    assert lock.reason.startswith("layers lie on disk; 0.25 GiB to stage through was refused (no")


def test_a_ring_for_a_cpu_is_not_needed() -> None:
    assert lock_ring(GIB, "layers lie on disk", None).mode is LockMode.NOT_NEEDED


def test_memory_that_does_not_unlock_is_an_error_with_its_reason() -> None:
    lock = page_lock(ADDRESS, GIB, GIB, FakeLocker(GIB))
    lock.release()
    with pytest.raises(TransferError, match="could not be unlocked: not registered; it must be"):
        lock.release()


def test_a_cpu_needs_no_lock_and_says_so() -> None:
    locker = open_locker(torch.device("cpu"), fd=None)
    lock = page_lock(ADDRESS, GIB, GIB, locker)
    assert (lock.mode, lock.num_bytes) == (LockMode.NOT_NEEDED, 0)
    assert not lock.reason
    lock.release()


@pytest.mark.parametrize("most_bytes", [0, 3, 4, 7, 8, 100])
def test_the_largest_size_that_works_is_found(most_bytes: int) -> None:
    sizes = [64, 32, 16, 8, 4, 3]
    worked_bytes, refusal = largest_lockable(64, 3, FakeLocker(most_bytes))
    assert worked_bytes == next((size for size in sizes if size <= most_bytes), 0)
    assert refusal == ("" if most_bytes >= 64 else "no 64")


@pytest.fixture
def cuda_locker(fake_runtime: Path) -> Callable[[int | None], CudaLocker]:
    """A real child and a made-up runtime; -1 stands for no device, in torch too."""
    return lambda fd: CudaLocker(
        runtime=CudaRuntime(ctypes.CDLL(str(fake_runtime))),
        path=fake_runtime,
        device_index=-1,
        fd=fd,
    )


def test_a_slab_is_rehearsed_in_a_child_and_then_locked_here(
    cuda_locker: Callable[[int | None], CudaLocker],
) -> None:
    fd = os.memfd_create("slab")
    os.ftruncate(fd, MOST_BYTES)
    memory = mmap.mmap(fd, MOST_BYTES)
    slab = torch.frombuffer(memory, dtype=torch.uint8)
    lock = page_lock(slab.data_ptr(), MOST_BYTES, PAGE, cuda_locker(fd))
    assert lock.mode is LockMode.PINNED
    assert slab[0] == 2  # once by the child, whose lock ended with it, and once here
    lock.release()
    assert slab[0] == 1
    os.close(fd)


@pytest.mark.thorough
def test_a_slab_over_the_limit_is_staged_for_real(
    cuda_locker: Callable[[int | None], CudaLocker],
) -> None:
    slab = torch.zeros(4 * MOST_BYTES, dtype=torch.uint8)
    lock = page_lock(slab.data_ptr(), slab.numel(), PAGE, cuda_locker(None))
    assert lock.mode is LockMode.STAGED
    assert "was refused (out of memory, CUDA error 2), of 1.00 MiB not" in lock.reason
    assert lock.buffers[0][0] == 1
    lock.release()
