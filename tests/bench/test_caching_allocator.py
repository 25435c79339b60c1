"""The replay of PyTorch's CUDA caching allocator: the segments and blocks that its rules give."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offload.plan.machine.machine import MIB
from tests.bench.caching_allocator import CachingAllocator, OutOfMemoryReplayError

pytestmark = pytest.mark.bench


@pytest.mark.parametrize(
    ("num_bytes", "segment_bytes", "block_bytes"),
    [
        (1, 2 * MIB, 512),
        (513, 2 * MIB, 1024),
        (MIB, 2 * MIB, MIB),
        (MIB + 1, 20 * MIB, MIB + 512),
        (10 * MIB - 512, 20 * MIB, 10 * MIB - 512),
        (10 * MIB, 10 * MIB, 10 * MIB),
        (11 * MIB, 12 * MIB, 12 * MIB),  # a rest of 1 MiB stays with its block
        (11 * MIB - 512, 12 * MIB, 11 * MIB - 512),
    ],
)
def test_a_request_takes_a_segment_of_its_class_and_a_rounded_block(
    num_bytes: int, segment_bytes: int, block_bytes: int
) -> None:
    memory = CachingAllocator()
    memory.allocate(num_bytes)
    assert memory.reserved_bytes == segment_bytes
    assert memory.allocated_bytes == block_bytes


def test_small_and_large_requests_share_no_segment() -> None:
    memory = CachingAllocator()
    memory.free(memory.allocate(30 * MIB))
    memory.allocate(512)
    assert memory.reserved_bytes == 32 * MIB


def test_the_smallest_block_that_fits_is_taken() -> None:
    memory = CachingAllocator()
    large, small = memory.allocate(100 * MIB), memory.allocate(50 * MIB)
    memory.free(large)
    memory.free(small)
    memory.allocate(40 * MIB)
    memory.allocate(100 * MIB)  # were 40 MiB cut from these, it would not fit
    assert memory.reserved_bytes == 150 * MIB


def test_freed_neighbours_become_one_block_again() -> None:
    memory = CachingAllocator()
    memory.free(memory.allocate(60 * MIB))
    parts = [memory.allocate(20 * MIB) for _ in range(3)]
    for part in (parts[0], parts[2], parts[1]):
        memory.free(part)
    memory.allocate(60 * MIB)
    assert memory.reserved_bytes == 60 * MIB


def test_a_block_in_the_middle_keeps_its_segment_from_larger_requests() -> None:
    memory = CachingAllocator()
    memory.free(memory.allocate(60 * MIB))
    parts = [memory.allocate(20 * MIB) for _ in range(3)]
    memory.free(parts[0])
    memory.free(parts[2])
    memory.allocate(40 * MIB)
    assert (memory.reserved_bytes, memory.allocated_bytes) == (100 * MIB, 60 * MIB)


def test_only_empty_segments_are_given_back() -> None:
    memory = CachingAllocator()
    kept = memory.allocate(30 * MIB)
    memory.free(memory.allocate(50 * MIB))
    memory.free(memory.allocate(4 * MIB))
    memory.give_back_cached()
    assert memory.reserved_bytes == 30 * MIB
    memory.free(kept)
    memory.give_back_cached()
    assert memory.reserved_bytes == 0
    assert memory.peak_reserved_bytes == 80 * MIB
    memory.reset_peak()
    assert memory.peak_reserved_bytes == memory.peak_allocated_bytes == 0


def test_a_full_card_gives_back_what_is_cached_before_it_gives_up() -> None:
    memory = CachingAllocator(capacity_bytes=100 * MIB)
    memory.free(memory.allocate(60 * MIB))
    memory.allocate(80 * MIB)
    assert memory.reserved_bytes == 80 * MIB
    with pytest.raises(OutOfMemoryReplayError, match=r"41943040 bytes more than 83886080 of 1048"):
        memory.allocate(40 * MIB)


@given(st.lists(st.tuples(st.integers(1, 40 * MIB), st.integers(0, 3)), min_size=1, max_size=60))
def test_blocks_fill_their_segments_whatever_is_asked_for(
    requests: list[tuple[int, int]],
) -> None:
    memory, held = CachingAllocator(), []
    for num_bytes, num_freed in requests:
        held.append(memory.allocate(num_bytes))
        for _ in range(min(num_freed, len(held))):
            memory.free(held.pop(num_bytes % len(held)))
        free_bytes = sum(b.num_bytes for pool in memory._pools.values() for b in pool.blocks)
        assert memory.allocated_bytes + free_bytes == memory.reserved_bytes
    for handle in held:
        memory.free(handle)
    memory.give_back_cached()
    assert (memory.allocated_bytes, memory.reserved_bytes) == (0, 0)
