"""The output head in host memory, and the slots that it computes in.

Its weight stays in page-locked host memory. A step copies it once over the slots of layers that are
needed again last (`offload.plan.schedule.head`), and the ops after the last layer compute from
there. Between these ops the parameter has its values on the host, so it may be read at any time,
and it is never one of a layer's. A weight that is the input embedding's too is here as well, once
for both: see `offload.engine.host.embedding`.

A backward reads what the parameter refers to when it runs, so an op that computes gradients ends
them before the parameter refers to host memory again. If the weight trains, it is updated on the
host, between steps, and its gradient is added up in the slots: see `head_gradient`.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from offload.engine.host.embedding import PLACES, on_device, require_alone
from offload.engine.host.pinned_blocks import HostBlocks
from offload.engine.memory_meter import Arena
from offload.engine.passes.head_gradient import HeadGradient
from offload.engine.slots import HeadMemory
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
        gradient: Of it; None if it is frozen.
    """

    def __init__(
        self,
        model: "PreTrainedModel",
        head: nn.Module | None,
        *,
        blocks: HostBlocks,
        embeddings: WeightPlace,
        may_train: bool,
        sums_in_fp32: bool,
    ) -> None:
        """Let the weight be in memory that a device can copy from.

        Args:
            model: The model, which may use the weight nowhere else than in an input embedding on
                the host.
            head: Its output head, with or without an adapter; None if it has none.
            blocks: Such memory.
            embeddings: Where its input embedding's weight is to be.
            may_train: Whether weights that train are on the host.
            sums_in_fp32: Whether gradients are added up in fp32, and not in the weight's type.

        Raises:
            UnsupportedModelError: The weight trains and may not, something else uses it, or it is
                no plain linear layer's.
            TransferError: The system refuses to page-lock the memory.
        """
        self.weight = _own_weight(model, head, embeddings=embeddings, may_train=may_train)
        self._name = next(name for name, p in model.named_parameters() if p is self.weight)
        self._module = head
        values = self.weight.data
        self.num_bytes = values.nbytes
        self._on_host = blocks.hold(values)
        self._on_device: torch.Tensor | None = None
        self.weight.data = self._on_host.view(values.dtype).view(values.shape)
        self.gradient: HeadGradient | None = None
        if self.weight.requires_grad:
            dtype = torch.float32 if sums_in_fp32 else self.weight.dtype
            self.gradient = HeadGradient(
                self.weight, self._name, dtype=dtype, allocate_host=blocks.allocate
            )

    @property
    def gradient_bytes(self) -> int:
        """Size of the gradient; 0 if the weight is frozen."""
        return 0 if self.gradient is None else self.gradient.num_bytes

    @property
    def arenas(self) -> tuple[Arena, ...]:
        """The weight on the host, and its gradient; on the device they are in the slots."""
        gradient = () if self.gradient is None else (self.gradient.arena,)
        return (Arena(name=HEAD, blocks=[self._on_host]), *gradient)

    def compute_in(self, memory: HeadMemory) -> None:
        """Compute from now on in this memory, which layers use too."""
        self._on_device = memory.weight
        if self.gradient is not None:
            self.gradient.add_up_in(memory.gradient)

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
        """Run an op with the weight on the device; gradients of it are added up."""
        gradient = self.gradient if torch.is_grad_enabled() else None
        with self.present(), nullcontext() if gradient is None else gradient.added_up():
            body()


def bytes_to_lock(
    model: "PreTrainedModel",
    head: WeightPlace,
    embeddings: WeightPlace,
    *,
    may_train: bool,
    sums_in_fp32: bool,
) -> int:
    """Return the page-locked memory that a model's head will take; 0 if the device has it.

    Args:
        model: The model.
        head: Where its output head's weight is to be.
        embeddings: Where its input embedding's weight is to be.
        may_train: As for `HostHead`.
        sums_in_fp32: As for `HostHead`.

    Raises:
        UnsupportedModelError: As for `HostHead`.
    """
    if head == "device":
        return 0
    own = model.get_output_embeddings()
    weight = _own_weight(model, own, embeddings=embeddings, may_train=may_train)
    itemsize = torch.float32.itemsize if sums_in_fp32 else weight.dtype.itemsize
    return weight.data.nbytes + (itemsize * weight.numel() if weight.requires_grad else 0)


def without_adapter(head: nn.Module | None) -> nn.Module | None:
    """Return the head that an adapter is put on, or the head itself."""
    unwrap: Any = getattr(head, "get_base_layer", None)
    return head if unwrap is None else unwrap()


def _own_weight(
    model: "PreTrainedModel", head: nn.Module | None, *, embeddings: WeightPlace, may_train: bool
) -> nn.Parameter:
    """Return the weight of a head that nothing else has but, frozen, an embedding on the host.

    Raises:
        UnsupportedModelError: It has none.
    """
    own = without_adapter(head)
    if own is None:
        raise _refused(f"{type(model).__name__} has no output head", "a head's weight is moved")
    name = next((name for name, module in model.named_modules() if module is own), "it")
    embedding, settings = model.get_input_embeddings(), PLACES[::-1]
    is_embedding_on_host = embeddings == "host"
    if not isinstance(own, nn.Linear):
        hint = on_device(own, embedding, settings, is_other_on_host=is_embedding_on_host)
        raise _refused(f"`{name}` is {type(own).__name__}", "the head is a linear layer", hint)
    weight = own.weight
    assert isinstance(weight, nn.Parameter)
    require_alone(model, weight, own, embedding, settings, is_other_on_host=is_embedding_on_host)
    if weight.requires_grad and not may_train:
        raise _refused(f"`{name}` trains", 'it may if `trained_weights` is "host" too')
    if not weight.data.is_contiguous():
        raise _refused(f"`{name}` has a weight that is not contiguous", "its bytes are copied")
    return weight


def _refused(what: str, limit: str, hint: str = '`head="device"`') -> UnsupportedModelError:
    return UnsupportedModelError(what, limit=limit, hint=hint)
