"""What waits in host memory for its backward visit, and the device buffers that it passes."""

from collections.abc import Callable, Sequence
from itertools import accumulate

import torch

from offload.engine.memory_meter import Arena
from offload.plan.memory.memory import SENT_OUTPUTS, STASH
from offload.plan.schedule.residency import AttentionOutputs

Allocate = Callable[[int], torch.Tensor]


class SentOutputs:
    """Host memory of attention outputs, a block per layer and micro-batch, and their buffers.

    Both grow to the largest step seen and are kept.
    """

    def __init__(
        self,
        *,
        allocate_host: Allocate,
        free_host: Callable[[torch.Tensor], None],
        torch_device: torch.device,
    ) -> None:
        """Allocate nothing yet; arguments as of `Stash`."""
        self._allocate_host, self._free_host = allocate_host, free_host
        self._torch_device = torch_device
        self._host = torch.empty(0, dtype=torch.uint8)
        self._buffers: list[torch.Tensor] = []
        self._places: dict[tuple[int, int], tuple[int, int]] = {}

    @property
    def arena(self) -> Arena:
        """The host block."""
        return Arena(name=SENT_OUTPUTS, blocks=[self._host])

    def prepare(self, outputs: AttentionOutputs, *, num_carriers: int) -> None:
        """Make room for a step; must not be called while one runs."""
        self._places, end = {}, 0
        for layer in sorted(outputs.sent):
            for m, num_bytes in enumerate(outputs.num_bytes[layer]):
                self._places[layer, m] = (end, end + num_bytes)
                end += num_bytes
        if end > self._host.numel():
            self._free_host(self._host)  # free the old one before allocating the new one
            self._host = torch.empty(0, dtype=torch.uint8)
            self._host = self._allocate_host(end)
        largest = max((stop - start for start, stop in self._places.values()), default=0)
        if len(self._buffers) < num_carriers or (largest and self._buffers[0].numel() < largest):
            self._buffers = []
            self._buffers = [
                torch.empty(largest, dtype=torch.uint8, device=self._torch_device)
                for _ in range(num_carriers)
            ]

    def place(self, layer: int, micro_batch: int) -> torch.Tensor:
        """Return the host memory of one output, uint8."""
        start, stop = self._places[layer, micro_batch]
        return self._host[start:stop]

    def carrier(self, number: int) -> torch.Tensor:
        """Return a device buffer, uint8."""
        return self._buffers[number]


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
