"""The output head in host memory, and the slots that it computes in.

Its weight stays in page-locked host memory. A step copies it once over the slots of layers that are
needed again last (`offload.plan.schedule.head`), and the ops after the last layer compute from
there. Between these ops the parameter has its values on the host, so it may be read at any time,
and it is never one of a layer's. A weight that is the input embedding's too is here as well, once
for both: see `offload.engine.host.embedding`.

A backward reads what the parameter refers to when it runs, so an op that computes gradients ends
them before the parameter refers to host memory again.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from offload.engine.host.embedding import PLACES, on_device, require_alone
from offload.engine.host.pinned_blocks import HostBlocks
from offload.engine.memory_meter import Arena
from offload.engine.streams import Device
from offload.errors import OffloadError, UnsupportedModelError
from offload.plan.facts.workload import WeightPlace
from offload.plan.memory.memory import HEAD
from offload.plan.schedule.op import Kind, Op

if TYPE_CHECKING:
    from transformers import PreTrainedModel

READERS = (Kind.SCORE, Kind.TAIL)
"""Ops that compute with the head."""


class HostHead:
    """A model's output head whose weight stays in host memory.

    Attributes:
        num_bytes: Size of the weight.
        weight: The parameter.
    """

    def __init__(
        self,
        model: "PreTrainedModel",
        head: nn.Module | None,
        *,
        blocks: HostBlocks,
        embeddings: WeightPlace,
    ) -> None:
        """Let the weight be in memory that a device can copy from.

        Args:
            model: The model, which may use the weight nowhere else than in an input embedding on
                the host.
            head: Its output head, with or without an adapter; None if it has none.
            blocks: Such memory.
            embeddings: Where its input embedding's weight is to be.

        Raises:
            UnsupportedModelError: The weight trains, something else uses it, or it is
                no plain linear layer's.
            TransferError: The system refuses to page-lock the memory.
        """
        self.weight = _own_weight(model, head, embeddings=embeddings)
        self._name = next(name for name, p in model.named_parameters() if p is self.weight)
        self._module = head
        values = self.weight.data
        self.num_bytes = values.nbytes
        self._on_host = blocks.hold(values)
        self._on_device: torch.Tensor | None = None
        self.weight.data = self._on_host.view(values.dtype).view(values.shape)

    @property
    def arena(self) -> Arena:
        """The weight on the host; on the device it is in the slots."""
        return Arena(name=HEAD, blocks=[self._on_host])

    def compute_in(self, memory: torch.Tensor) -> None:
        """Compute from now on in this memory, which layers use too."""
        self._on_device = memory

    def bring(self, op: Op, device: Device) -> None:
        """Copy a piece to the device, on the running lane."""
        assert self._on_device is not None
        piece = slice(op.offset, op.offset + op.num_bytes)
        device.copy(self._on_device[piece], self._on_host[piece])

    @contextmanager
    def present(self) -> Iterator[None]:
        """Let the parameter refer to the device in a block; the weight must be there.

        Raises:
            OffloadError: The parameter refers to other memory than what is copied to the device.
        """
        assert self._on_device is not None
        on_host = self.weight.data
        if on_host.data_ptr() != self._on_host.data_ptr():
            raise OffloadError(
                f"`{self._name}` was given other memory since the model was attached",
                limit="a head in host memory is copied from where `offload.attach` has put it",
                hint="write to it, `weight.copy_(...)`; or `engine.detach()`, and attach again",
            )
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


def bytes_to_lock(model: "PreTrainedModel", head: WeightPlace, embeddings: WeightPlace) -> int:
    """Return the page-locked memory that a model's head will take; 0 if the device has it.

    Args:
        model: The model.
        head: Where its output head's weight is to be.
        embeddings: Where its input embedding's weight is to be.

    Raises:
        UnsupportedModelError: As for `HostHead`.
    """
    if head == "device":
        return 0
    return _own_weight(model, model.get_output_embeddings(), embeddings=embeddings).data.nbytes


def without_adapter(head: nn.Module | None) -> nn.Module | None:
    """Return the head that an adapter is put on, or the head itself."""
    unwrap: Any = getattr(head, "get_base_layer", None)
    return head if unwrap is None else unwrap()


def _own_weight(
    model: "PreTrainedModel", head: nn.Module | None, *, embeddings: WeightPlace
) -> nn.Parameter:
    """Return the weight of a head that nothing else has but an embedding on the host.

    Raises:
        UnsupportedModelError: It has none.
    """
    own = without_adapter(head)
    if own is None:
        raise _refused(f"{type(model).__name__} has no output head", "a head's weight is moved")
    name = next((name for name, module in model.named_modules() if module is own), "it")
    embedding, settings = model.get_input_embeddings(), PLACES[::-1]
    is_embedding_on_host = embeddings == "host"
    hint = on_device(own, embedding, settings, is_other_on_host=is_embedding_on_host)
    if not isinstance(own, nn.Linear):
        raise _refused(f"`{name}` is {type(own).__name__}", "the head is a linear layer", hint)
    weight = own.weight
    assert isinstance(weight, nn.Parameter)
    require_alone(model, weight, own, embedding, settings, is_other_on_host=is_embedding_on_host)
    if weight.requires_grad:
        raise _refused(f"`{name}` trains", "a head in host memory is frozen", hint)
    if not weight.data.is_contiguous():
        raise _refused(f"`{name}` has a weight that is not contiguous", "its bytes are copied")
    return weight


def _refused(what: str, limit: str, hint: str = '`head="device"`') -> UnsupportedModelError:
    return UnsupportedModelError(what, limit=limit, hint=hint)
