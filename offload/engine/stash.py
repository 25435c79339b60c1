"""Layer inputs kept in host memory for their backward visit, and buffers to fetch them into."""

from collections.abc import Callable, Sequence
from itertools import accumulate

import torch

from offload.engine.memory_meter import Arena
from offload.plan.memory.memory import STASH

Allocate = Callable[[int], torch.Tensor]


class Stash:
    """A host block with a place per layer and micro-batch, and buffers on the device.

    Both grow to the largest step seen and are kept, so that later steps do not allocate.
    """

    def __init__(
        self,
        *,
        allocate_host: Allocate,
        free_host: Callable[[torch.Tensor], None],
        torch_device: torch.device,
    ) -> None:
        """Allocate nothing yet.

        Args:
            allocate_host: Returns uint8 host memory of a size, for copies to and from the device.
            free_host: Frees it after the copies that still use it.
            torch_device: Where layers compute.
        """
        self._allocate_host, self._free_host = allocate_host, free_host
        self._torch_device = torch_device
        self._host = torch.empty(0, dtype=torch.uint8)
        self._fetched: list[torch.Tensor] = []
        self._places: list[int] = [0]

    @property
    def host_bytes(self) -> int:
        """Host memory allocated."""
        return self._host.numel()

    @property
    def arena(self) -> Arena:
        """The host block; the plan counts the device buffers with the inputs there."""
        return Arena(name=STASH, blocks=[self._host])

    def prepare(
        self, input_bytes: Sequence[int], *, num_layers: int, num_fetch_buffers: int
    ) -> None:
        """Make room for a step; must not be called while one runs.

        Args:
            input_bytes: Of a layer's input, by micro-batch.
            num_layers: Layers whose inputs are stashed.
            num_fetch_buffers: Device buffers that the schedule uses.
        """
        self._places = [0, *accumulate(input_bytes)]
        needed = num_layers * self._places[-1]
        if needed > self._host.numel():
            self._free_host(self._host)  # free the old one before allocating the new one
            self._host = torch.empty(0, dtype=torch.uint8)
            self._host = self._allocate_host(needed)
        largest = max(input_bytes)
        if len(self._fetched) < num_fetch_buffers or self._fetched[0].numel() < largest:
            self._fetched = []
            self._fetched = [
                torch.empty(largest, dtype=torch.uint8, device=self._torch_device)
                for _ in range(num_fetch_buffers)
            ]

    def place(self, layer: int, micro_batch: int) -> torch.Tensor:
        """Return the host memory of one input, uint8."""
        start = layer * self._places[-1]
        return self._host[start + self._places[micro_batch] : start + self._places[micro_batch + 1]]

    def fetched(self, buffer: int, num_bytes: int) -> torch.Tensor:
        """Return the device memory that an input is fetched into, uint8."""
        return self._fetched[buffer][:num_bytes]
