"""Memory in which the tensors of a trace are placed, without those tensors."""

from typing import Protocol


class Memory(Protocol):
    """Memory in which a trace's tensors are placed."""

    def allocate(self, num_bytes: int) -> int:
        """Place a tensor; return a handle."""

    def free(self, handle: int) -> None:
        """Let a tensor go."""


class LiveBytes:
    """Counts live bytes, like a device without a caching allocator.

    Attributes:
        live_bytes: Of the tensors that are there.
        peak_bytes: The most since the last `reset_peak`.
        largest_bytes: Of the largest tensor that ever was.
    """

    def __init__(self) -> None:
        """Start empty."""
        self.live_bytes = self.peak_bytes = self.largest_bytes = 0
        self._sizes: dict[int, int] = {}
        self._next = 0

    def allocate(self, num_bytes: int) -> int:
        """Count a tensor."""
        self._next += 1
        self._sizes[self._next] = num_bytes
        self.live_bytes += num_bytes
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        self.largest_bytes = max(self.largest_bytes, num_bytes)
        return self._next

    def free(self, handle: int) -> None:
        """Stop counting a tensor."""
        self.live_bytes -= self._sizes.pop(handle)

    def reset_peak(self) -> None:
        """Forget peaks before now."""
        self.peak_bytes = self.live_bytes
