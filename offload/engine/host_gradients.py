"""Trained weights that are streamed: they are kept and updated on the host.

A parameter of a streamed layer aliases a slot, so neither its values nor its gradient can stay
there. Each trained parameter has a *master*, a parameter over the layer's record in host memory.
The optimizer gets the master, and a step fills the master's `.grad`.

On the device, one of a few buffers accumulates a layer's gradients over the micro-batches; it is
copied to the host when the visit is over.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from offload.engine.host.layer_layout import Record, lay_out
from offload.engine.stash import Allocate
from offload.errors import OffloadError
from offload.plan.schedule.schedule import NUM_GRADIENT_BUFFERS


class HostGradients:
    """The masters of all layers, and the memory of their gradients on both sides."""

    def __init__(
        self,
        records: Sequence[Record],
        layers: Sequence[torch.Tensor],
        *,
        names: Mapping[int, str],
        allocate_host: Allocate,
        allocate_device: Allocate,
    ) -> None:
        """Make a master for each streamed parameter that trains.

        Args:
            records: One per layer.
            layers: The layers' records in host memory, uint8; none if no streamed weight trains.
            names: id of a parameter -> its name in the model.
            allocate_host: Returns uint8 host memory for device-to-host copies.
            allocate_device: Returns uint8 memory on the compute device.
        """
        self.parameters: dict[str, nn.Parameter] = {}
        for record, layer in zip(records, layers, strict=False):
            for field in record.fields:
                if field.parameter.requires_grad:
                    master = nn.Parameter(field.view(layer))
                    self.parameters[names[id(field.parameter)]] = master
        self._names = names
        self._gradients = [
            lay_out([f.parameter for f in record.fields if f.parameter.requires_grad])
            for record in records
        ]
        self.gradient_bytes = tuple(record.num_bytes for record in self._gradients)
        self._sinks = allocate_host(sum(self.gradient_bytes)).split(list(self.gradient_bytes))
        self._buffers = [
            allocate_device(max(self.gradient_bytes)) for _ in range(NUM_GRADIENT_BUFFERS)
        ]

    def gather(self, layer: int) -> None:
        """Accumulate a layer's gradients in its buffer, from zero at the start of the visit."""
        for field in self._gradients[layer].fields:
            if field.parameter.grad is None:
                field.parameter.grad = field.view(self._buffers[layer % NUM_GRADIENT_BUFFERS])
                field.parameter.grad.zero_()

    def leaving(
        self, layer: int, buffer: int, offset: int, num_bytes: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the host memory and the device memory of a piece of a layer's gradients."""
        end = offset + num_bytes
        return self._sinks[layer][offset:end], self._buffers[buffer][offset:end]

    def require_clear(self) -> None:
        """Check that no gradient of an earlier step is left.

        Raises:
            OffloadError: A master has one, which the step would overwrite; or a parameter has one
                from before the model was attached, so the step's would bypass the buffer.
        """
        for field in (field for record in self._gradients for field in record.fields):
            name = self._names[id(field.parameter)]
            with torch._C.DisableTorchFunctionSubclass():  # it is sealed between passes
                is_left = field.parameter.grad is not None
            if is_left or self.parameters[name].grad is not None:
                raise OffloadError(
                    f"{name} still has the gradient of an earlier step",
                    limit="gradients of weights on the host are written anew, not added",
                    hint="`optimizer.zero_grad(set_to_none=True)` after `optimizer.step()`, of an"
                    " optimizer over `engine.trained_parameters`; `model.zero_grad()` before"
                    " `offload.attach`",
                )

    def let_go(self) -> None:
        """Detach the buffers from the layers' parameters."""
        for record in self._gradients:
            for field in record.fields:
                field.parameter.grad = None

    def publish(self) -> None:
        """Give the masters the gradients that have arrived."""
        for record, sink in zip(self._gradients, self._sinks, strict=True):
            for field in record.fields:
                self.parameters[self._names[id(field.parameter)]].grad = field.view(sink)
