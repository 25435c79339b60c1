"""What waits in host memory for its backward visit: layer inputs, and outputs of attention."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate, pairwise

import torch

from offload.engine.memory_meter import Arena

Allocate = Callable[[int], torch.Tensor]


def by_place(
    layers: Iterable[int], sizes_of: Callable[[int], Sequence[int]]
) -> dict[tuple[int, int], int]:
    """Return sizes by layer and micro-batch from those of each layer by micro-batch."""
    return {(layer, m): size for layer in layers for m, size in enumerate(sizes_of(layer))}


class Stash:
    """A host block with a place per layer and micro-batch, and buffers on the device.

    Both grow to the largest step seen and are kept, so that later steps do not allocate.
    """

    def __init__(
        self,
        name: str,
        *,
        allocate_host: Allocate,
        free_host: Callable[[torch.Tensor], None],
        torch_device: torch.device,
    ) -> None:
        """Allocate nothing yet.

        Args:
            name: The plan's term for the host block.
            allocate_host: Returns uint8 host memory of a size, for copies to and from the device.
            free_host: Frees it after the copies that still use it.
            torch_device: Where layers compute.
        """
        self._name = name
        self._allocate_host, self._free_host = allocate_host, free_host
        self._torch_device = torch_device
        self._host = torch.empty(0, dtype=torch.uint8)
        self._buffers: list[torch.Tensor] = []
        self._places: dict[tuple[int, int], tuple[int, int]] = {}

    @property
    def host_bytes(self) -> int:
        """Host memory allocated."""
        return self._host.numel()

    @property
    def arena(self) -> Arena:
        """The host block; the plan counts the device buffers with what is on the device."""
        return Arena(name=self._name, blocks=[self._host])

    def prepare(self, sizes: Mapping[tuple[int, int], int], *, num_buffers: int) -> None:
        """Make room for a step; must not be called while one runs.

        Args:
            sizes: Bytes by layer and micro-batch.
            num_buffers: Device buffers that the schedule uses.
        """
        ends = [0, *accumulate(sizes.values())]
        self._places = dict(zip(sizes, pairwise(ends), strict=True))
        if ends[-1] > self._host.numel():
            self._free_host(self._host)  # free the old one before allocating the new one
            self._host = torch.empty(0, dtype=torch.uint8)
            self._host = self._allocate_host(ends[-1])
        largest = max(sizes.values(), default=0)
        if len(self._buffers) < num_buffers or any(x.numel() < largest for x in self._buffers):
            self._buffers = []
            self._buffers = [
                torch.empty(largest, dtype=torch.uint8, device=self._torch_device)
                for _ in range(num_buffers)
            ]

    def place(self, layer: int, micro_batch: int) -> torch.Tensor:
        """Return the host memory of one tensor, uint8."""
        start, stop = self._places[layer, micro_batch]
        return self._host[start:stop]

    def buffer(self, number: int, num_bytes: int) -> torch.Tensor:
        """Return the device memory that a tensor leaves from or comes back to, uint8."""
        return self._buffers[number][:num_bytes]
