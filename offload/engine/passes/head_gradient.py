"""The gradient of an output head that trains on the host: its sum in the slots, and its copy there.

The ops after the last layer compute the gradient of a whole table for each chunk of tokens. Each is
added to one sum for the step, in the slots after the weight, and let go of. The sum goes to host
memory once, after the last of these ops.

A gradient must be where its parameter is, and the parameter refers to the device only while an op
computes. So autograd never finds a sum in `.grad`: a hook adds each new gradient, in the order and
the type in which a head on the device has them added up, and clears `.grad`.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from offload.engine.host.embedding import left_over
from offload.engine.host.stash import Allocate
from offload.engine.memory_meter import Arena
from offload.engine.streams import Device
from offload.plan.memory.memory import HEAD_GRADIENT
from offload.plan.schedule.op import Op


class HeadGradient:
    """The gradient of a head's weight over a step.

    Attributes:
        weight: The parameter.
        name: Its name in the model.
        total: The newest step's gradient on the host (V, D).
        num_bytes: Of it.
        norm: Of it, an fp32 scalar that was computed on the device; None before the first step.
    """

    def __init__(
        self, weight: nn.Parameter, name: str, *, dtype: torch.dtype, allocate_host: Allocate
    ) -> None:
        """Allocate memory on the host that a device can copy to.

        Args:
            weight: The parameter (V, D).
            name: Its name in the model.
            dtype: What gradients are added up in.
            allocate_host: Returns such memory, uint8.

        Raises:
            TransferError: The system refuses to page-lock the memory.
        """
        self.weight, self.name = weight, name
        self.num_bytes = weight.numel() * dtype.itemsize
        self._on_host = allocate_host(self.num_bytes)
        self.total = self._on_host.view(dtype).view(weight.shape)
        self.norm: torch.Tensor | None = None
        self._on_device: torch.Tensor | None = None
        self._is_begun = False

    @property
    def arena(self) -> Arena:
        """The gradient on the host; on the device it is in the slots."""
        return Arena(name=HEAD_GRADIENT, blocks=[self._on_host])

    def add_up_in(self, memory: torch.Tensor) -> None:
        """Add up from now on in this memory (num_bytes,), which layers use too."""
        self._on_device = memory

    def begin_step(self) -> None:
        """Let the next gradient be the first of a step.

        Raises:
            OffloadError: The weight still has that of an earlier step.
        """
        if self.weight.grad is not None:
            raise left_over(self.name)
        self._is_begun = False

    @contextmanager
    def added_up(self) -> Iterator[None]:
        """Add each gradient of the weight to the sum in a block; the weight is on the device."""
        handle = self.weight.register_post_accumulate_grad_hook(self._add)
        try:
            yield
        finally:
            handle.remove()
            self.weight.grad = None

    @torch.no_grad()
    def _add(self, weight: torch.Tensor) -> None:
        assert weight.grad is not None
        if self._is_begun:
            self._sum.add_(weight.grad)
        else:
            self._sum.copy_(weight.grad)
        self._is_begun, weight.grad = True, None

    def send_back(self, op: Op, device: Device) -> None:
        """Copy a piece to host memory on the running lane; before the first, compute the norm."""
        assert self._on_device is not None
        if not op.offset:
            if not self._is_begun:  # no token of the step had a gradient
                self._sum.zero_()
            self.norm = torch.linalg.vector_norm(self._sum, dtype=torch.float32)
        piece = slice(op.offset, op.offset + op.num_bytes)
        device.copy(self._on_host[piece], self._on_device[piece])

    def publish(self) -> None:
        """Give the weight its gradient, unless that is of another type."""
        if self.total.dtype is self.weight.dtype:
            self.weight.grad = self.total

    @property
    def _sum(self) -> torch.Tensor:
        """The sum in the slots (V, D)."""
        assert self._on_device is not None
        return self._on_device.view(self.total.dtype).view(self.total.shape)
