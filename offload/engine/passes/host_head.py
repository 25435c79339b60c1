"""The output head in host memory, and the slots that it computes in.

Its weight stays in page-locked host memory. A step copies it once over the slots of layers that are
needed again last (`offload.plan.schedule.head`), and the ops after the last layer compute from
there. Between these ops the parameter has its values on the host, so it may be read at any time,
and it is never one of a layer's.

A backward reads what the parameter refers to when it runs, so an op that computes gradients ends
them before the parameter refers to host memory again.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from offload.engine.host.stash import Allocate
from offload.engine.memory_meter import Arena
from offload.engine.streams import Device
from offload.errors import UnsupportedModelError
from offload.plan.memory.memory import HEAD
from offload.plan.schedule.op import Kind, Op

READERS = (Kind.SCORE, Kind.TAIL)
"""Ops that compute with the head."""


class HostHead:
    """A model's output head whose weight stays in host memory.

    Attributes:
        num_bytes: Size of the weight.
        weight: The parameter.
    """

    def __init__(
        self, model: nn.Module, head: nn.Module | None, *, allocate_host: Allocate
    ) -> None:
        """Move the weight to memory that a device can copy from.

        Args:
            model: The model, which may use the weight nowhere else.
            head: Its output head, with or without an adapter; None if it has none.
            allocate_host: Returns such memory, uint8.

        Raises:
            UnsupportedModelError: The weight trains, something else uses it, or it is no plain
                linear layer's.
            TransferError: The system refuses to page-lock the memory.
        """
        self.weight = _own_weight(model, head)
        self._module = head
        values = self.weight.data
        self.num_bytes = values.nbytes
        self._on_host = allocate_host(values.nbytes)
        self._on_device: torch.Tensor | None = None
        kept = self._on_host.view(values.dtype).view(values.shape)
        self.weight.data = kept.copy_(values)

    @property
    def arena(self) -> Arena:
        """The weight on the host; on the device it is in the slots."""
        return Arena(name=HEAD, blocks=[self._on_host])

    def compute_in(self, memory: torch.Tensor) -> None:
        """Compute from now on in this memory (num_bytes,), which layers use too."""
        self._on_device = memory

    def bring(self, op: Op, device: Device) -> None:
        """Copy a piece to the device, on the running lane."""
        assert self._on_device is not None
        piece = slice(op.offset, op.offset + op.num_bytes)
        device.copy(self._on_device[piece], self._on_host[piece])

    @contextmanager
    def present(self) -> Iterator[None]:
        """Let the parameter refer to the device in a block; the weight must be there."""
        assert self._on_device is not None
        on_host = self.weight.data
        self.weight.data = self._on_device.view(on_host.dtype).view(on_host.shape)
        try:
            yield
        finally:
            self.weight.data = on_host

    @contextmanager
    def unread(self) -> Iterator[None]:
        """Return zeros from the head in a block, in which nothing reads them."""
        assert self._module is not None
        own = vars(self._module)
        before = own.get("forward")
        own["forward"] = self._zeros
        try:
            yield
        finally:
            del own["forward"]
            if before is not None:
                own["forward"] = before

    def _zeros(self, hidden_BTD: torch.Tensor) -> torch.Tensor:
        return hidden_BTD.new_zeros(*hidden_BTD.shape[:-1], len(self.weight))

    def computing(self, body: Callable[[], None]) -> None:
        """Run an op with the weight on the device."""
        with self.present():
            body()


def bytes_to_lock(model: Any) -> int:
    """Return the page-locked memory that a model's head will take.

    Raises:
        UnsupportedModelError: As for `HostHead`.
    """
    return _own_weight(model, model.get_output_embeddings()).data.nbytes


def _own_weight(model: nn.Module, head: nn.Module | None) -> nn.Parameter:
    """Return the frozen weight of a head that nothing else has.

    Raises:
        UnsupportedModelError: It has none.
    """
    if head is None:
        raise _refused(f"{type(model).__name__} has no output head", "a head's weight is moved")
    unwrap: Any = getattr(head, "get_base_layer", None)
    own = head if unwrap is None else unwrap()
    name = next((name for name, module in model.named_modules() if module is own), "it")
    if not isinstance(own, nn.Linear):
        raise _refused(f"`{name}` is {type(own).__name__}", "the head is a linear layer")
    weight = own.weight
    assert isinstance(weight, nn.Parameter)
    if weight.requires_grad:
        raise _refused(f"`{name}` trains", "a head that trains is on the device")
    users = [
        path
        for path, module in model.named_modules()
        if module is not own and any(p is weight for p in module._parameters.values())
    ]
    if users:
        raise _refused(
            f"`{users[0]}` has the same weight as `{name}`", "it is on the device for it"
        )
    if not weight.data.is_contiguous():
        raise _refused(f"`{name}` has a weight that is not contiguous", "its bytes are copied")
    return weight


def _refused(what: str, limit: str) -> UnsupportedModelError:
    return UnsupportedModelError(what, limit=limit, hint='`head="device"`')
