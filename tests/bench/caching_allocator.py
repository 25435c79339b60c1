"""A replay of PyTorch's CUDA caching allocator: what it reserves for a sequence of requests.

Problem. A GPU is full when the allocator can reserve no more, not when tensors fill it: requests
are rounded and carved out of segments, and only whole segments are freed.

Idea. The allocator is deterministic, so its rules are applied to the requests of a trace: one
stream, no expandable segments, no `max_split_size`. Ties of best fit go to the segment that was
allocated first, although the driver may have placed it at a higher address.

Source: pytorch c10/cuda/CUDACachingAllocator.cpp.
"""

import bisect
import sys
from dataclasses import dataclass, field

from offload.plan.machine.machine import MIB

ROUND_BYTES = 512
SMALL_BYTES = MIB  # requests of up to this come from the small pool
SMALL_SEGMENT_BYTES = 2 * MIB
MEDIUM_BYTES = 10 * MIB  # requests under this share segments of the next size
MEDIUM_SEGMENT_BYTES = 20 * MIB
LARGE_ROUND_BYTES = 2 * MIB


class OutOfMemoryReplayError(Exception):
    """The requests do not fit the GPU, even with all cached segments freed."""


@dataclass(eq=False, kw_only=True, slots=True)
class _Block:
    """A part of a segment; its neighbours there are linked."""

    segment: int
    offset: int
    num_bytes: int
    is_small: bool
    is_free: bool = False
    before: "_Block | None" = None
    after: "_Block | None" = None

    @property
    def order(self) -> tuple[int, int, int]:
        """How well it fits: the smallest first, then the lowest address."""
        return self.num_bytes, self.segment, self.offset


@dataclass(kw_only=True, slots=True)
class _Pool:
    """Free blocks of one kind, in the order in which they are taken."""

    blocks: list[_Block] = field(default_factory=list)

    def put(self, block: _Block) -> None:
        block.is_free = True
        bisect.insort(self.blocks, block, key=lambda b: b.order)

    def take(self, block: _Block) -> None:
        block.is_free = False
        del self.blocks[bisect.bisect_left(self.blocks, block.order, key=lambda b: b.order)]

    def best_fit(self, num_bytes: int) -> _Block | None:
        at = bisect.bisect_left(self.blocks, num_bytes, key=lambda b: b.num_bytes)
        return self.blocks[at] if at < len(self.blocks) else None


class CachingAllocator:
    """Segments of one GPU, and the blocks in them.

    Attributes:
        allocated_bytes: In blocks that are in use: `torch.cuda.memory_allocated`.
        reserved_bytes: In segments: `torch.cuda.memory_reserved`.
        peak_allocated_bytes: The most since the last `reset_peak`.
        peak_reserved_bytes: Likewise.
    """

    def __init__(self, capacity_bytes: int = sys.maxsize) -> None:
        """Start without a segment.

        Args:
            capacity_bytes: What can be reserved at most.
        """
        self.allocated_bytes = self.reserved_bytes = 0
        self.peak_allocated_bytes = self.peak_reserved_bytes = 0
        self._capacity_bytes = capacity_bytes
        self._pools = {True: _Pool(), False: _Pool()}
        self._used: dict[int, _Block] = {}
        self._num_segments = self._num_handles = 0

    def allocate(self, num_bytes: int) -> int:
        """Place a tensor: in the free block that fits best, or else in a new segment.

        Raises:
            OutOfMemoryReplayError: Neither is there, even with all cached segments given back.
        """
        needed = max(1, -(-num_bytes // ROUND_BYTES)) * ROUND_BYTES
        is_small = needed <= SMALL_BYTES
        block = self._pools[is_small].best_fit(needed)
        if block is None:
            block = self._new_segment(needed, is_small=is_small)
        else:
            self._pools[is_small].take(block)
        rest = block.num_bytes - needed
        if rest >= ROUND_BYTES if is_small else rest > SMALL_BYTES:
            self._split(block, needed)
        self.allocated_bytes += block.num_bytes
        self.peak_allocated_bytes = max(self.peak_allocated_bytes, self.allocated_bytes)
        self._num_handles += 1
        self._used[self._num_handles] = block
        return self._num_handles

    def free(self, handle: int) -> None:
        """Put a tensor's block back, joined with free neighbours."""
        block = self._used.pop(handle)
        self.allocated_bytes -= block.num_bytes
        pool = self._pools[block.is_small]
        before, after = block.before, block.after
        if before is not None and before.is_free:
            pool.take(before)
            block.offset = before.offset
            block.num_bytes += before.num_bytes
            block.before = before.before
            if block.before is not None:
                block.before.after = block
        if after is not None and after.is_free:
            pool.take(after)
            block.num_bytes += after.num_bytes
            block.after = after.after
            if block.after is not None:
                block.after.before = block
        pool.put(block)

    def give_back_cached(self) -> None:
        """Give back the segments that nothing is in, as `torch.cuda.empty_cache` does."""
        for pool in self._pools.values():
            whole = [b for b in pool.blocks if b.before is None and b.after is None]
            self.reserved_bytes -= sum(block.num_bytes for block in whole)
            pool.blocks = [b for b in pool.blocks if b.before is not None or b.after is not None]

    def reset_peak(self) -> None:
        """Forget peaks before now."""
        self.peak_allocated_bytes = self.allocated_bytes
        self.peak_reserved_bytes = self.reserved_bytes

    def _new_segment(self, needed: int, *, is_small: bool) -> _Block:
        if is_small:
            size = SMALL_SEGMENT_BYTES
        elif needed < MEDIUM_BYTES:
            size = MEDIUM_SEGMENT_BYTES
        else:
            size = -(-needed // LARGE_ROUND_BYTES) * LARGE_ROUND_BYTES
        if self.reserved_bytes + size > self._capacity_bytes:
            self.give_back_cached()
            if self.reserved_bytes + size > self._capacity_bytes:
                raise OutOfMemoryReplayError(
                    f"{size} bytes more than {self.reserved_bytes} of {self._capacity_bytes}"
                )
        self.reserved_bytes += size
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)
        self._num_segments += 1
        return _Block(segment=self._num_segments, offset=0, num_bytes=size, is_small=is_small)

    def _split(self, block: _Block, needed: int) -> None:
        rest = _Block(
            segment=block.segment,
            offset=block.offset + needed,
            num_bytes=block.num_bytes - needed,
            is_small=block.is_small,
            before=block,
            after=block.after,
        )
        if block.after is not None:
            block.after.before = rest
        block.after, block.num_bytes = rest, needed
        self._pools[block.is_small].put(rest)
