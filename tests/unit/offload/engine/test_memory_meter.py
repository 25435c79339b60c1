import ctypes
import mmap
import os
from pathlib import Path

import pytest
import torch

from offload.engine.host.pagelock import aligned_empty, map_file
from offload.engine.memory_meter import (
    Arena,
    held_bytes,
    resident_bytes,
    torch_pinned_bytes,
)

MIB = 2**20
SLACK_BYTES = 4 * MIB  # what else the process does, and counters that the kernel sums lazily


def fill(area: mmap.mmap) -> None:
    """Touch all pages, by small pieces: a large one may come from memory that was freed before."""
    for _ in range(len(area) // MIB):
        area.write(bytes(MIB))


@pytest.mark.parametrize("flags", [mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, mmap.MAP_SHARED])
def test_pages_are_held_from_their_first_touch_and_shared_ones_too(flags: int) -> None:
    before = held_bytes()
    anonymous = flags | mmap.MAP_ANONYMOUS
    with mmap.mmap(-1, 64 * MIB, flags=anonymous) as area:
        assert held_bytes() - before < SLACK_BYTES
        fill(area)
        assert held_bytes() - before == pytest.approx(64 * MIB, abs=SLACK_BYTES)


@pytest.mark.disk
def test_pages_of_a_mapped_file_are_not_held(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    path.write_bytes(b"x" * (32 * MIB))
    before = held_bytes()
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as area:
        assert area[:: mmap.PAGESIZE].count(b"x") == 32 * MIB // mmap.PAGESIZE
        assert held_bytes() - before < SLACK_BYTES


@pytest.mark.skipif(torch.cuda.is_initialized(), reason="there is a CUDA device in use")
def test_without_a_gpu_torch_has_locked_nothing() -> None:
    assert torch_pinned_bytes() == 0


def unaligned_empty(num_bytes: int) -> torch.Tensor:
    """Return untouched memory that begins within a page; `torch.empty` may reuse touched memory."""
    return torch.frombuffer(mmap.mmap(-1, num_bytes + 64), dtype=torch.uint8)[64:]


@pytest.mark.parametrize("make", [aligned_empty, unaligned_empty])
def test_what_is_resident_of_a_tensor_is_what_was_touched(make) -> None:
    block = make(64 * MIB)
    assert (resident_bytes(block) or 0) < SLACK_BYTES
    block[: 16 * MIB].fill_(1)
    assert resident_bytes(block) == pytest.approx(16 * MIB, abs=SLACK_BYTES)
    assert (resident_bytes(block[16 * MIB :]) or 0) < SLACK_BYTES
    block.fill_(1)
    assert resident_bytes(block) == block.nbytes
    assert resident_bytes(block[5:7]) == 2
    assert resident_bytes(block[:0]) == 0


def test_pages_of_a_shared_file_are_counted_too() -> None:
    descriptor = os.memfd_create("pages")
    os.truncate(descriptor, 8 * MIB)
    block = map_file(descriptor, 8 * MIB, is_writable=True)
    os.close(descriptor)
    assert resident_bytes(block) == 0
    block.fill_(1)
    assert resident_bytes(block) == 8 * MIB


def test_a_kernel_that_does_not_tell_is_not_taken_for_empty_memory() -> None:
    area = aligned_empty(2 * MIB)
    beside = torch.frombuffer(
        (ctypes.c_char * MIB).from_address(1 << 46), dtype=torch.uint8
    )  # nothing is mapped there
    assert resident_bytes(beside) is None
    assert Arena(name="slab", blocks=[area, beside]).resident_bytes is None
    assert Arena(name="slab", blocks=[area, beside]).num_bytes == 3 * MIB
