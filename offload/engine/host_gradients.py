"""Trained weights that are streamed: they are kept and updated on the host.

A parameter of a streamed layer aliases a slot, so neither its values nor its gradient can stay
there. Each trained parameter has a *master*, a parameter over the layer's record in host memory.
The optimizer gets the master, and a step fills the master's `.grad`.

On the device, one of a few buffers accumulates a layer's gradients over the micro-batches; it is
copied to the host when the visit is over, and measured on the way, for clipping.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from offload.engine.host.slab import Allocate, Field, Record, lay_out
from offload.engine.memory_meter import Arena
from offload.errors import OffloadError
from offload.plan.facts.optimizer import HOST_GRADIENTS
from offload.plan.memory.memory import LAYER_GRADIENTS
from offload.plan.schedule.schedule import NUM_GRADIENT_BUFFERS


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LayerUpdate:
    """What the update of a layer reads and writes in host memory.

    Attributes:
        layer: Which layer.
        weights: Name -> weight, to be changed in place.
        gradients: Name -> gradient of the step that has ended; it may be overwritten.
    """

    layer: int
    weights: Mapping[str, torch.Tensor]
    gradients: Mapping[str, torch.Tensor]


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
        self.norms: dict[str, torch.Tensor] = {}
        self._weights: list[dict[str, Field]] = [{} for _ in records]
        for record, layer, weights in zip(records, layers, self._weights, strict=False):
            for field in record.fields:
                if field.parameter.requires_grad:
                    name = names[id(field.parameter)]
                    self.parameters[name] = nn.Parameter(field.view(layer))
                    weights[name] = field
        self._names, self._layers = names, list(layers)
        self._gradients = [
            lay_out([f.parameter for f in record.fields if f.parameter.requires_grad])
            for record in records
        ]
        self.gradient_bytes = tuple(record.num_bytes for record in self._gradients)
        on_host = allocate_host(sum(self.gradient_bytes))
        self._sinks = on_host.split(list(self.gradient_bytes))
        self._buffers = [
            allocate_device(max(self.gradient_bytes)) for _ in range(NUM_GRADIENT_BUFFERS)
        ]
        self.arenas: tuple[Arena, ...] = (
            Arena(name=HOST_GRADIENTS, blocks=[on_host]),
            Arena(name=LAYER_GRADIENTS, blocks=self._buffers),
        )

    def on_host(self, layer: int) -> LayerUpdate:
        """Return what an update of a layer changes."""
        weights = {name: self.parameters[name].detach() for name in self._weights[layer]}
        gradients = {
            self._names[id(field.parameter)]: field.view(self._sinks[layer])
            for field in self._gradients[layer].fields
        }
        return LayerUpdate(layer=layer, weights=weights, gradients=gradients)

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

    def measure(self, layer: int, buffer: int) -> None:
        """Compute the norm of each of a layer's gradients, in fp32, where they are."""
        for field in self._gradients[layer].fields:
            gradient = field.view(self._buffers[buffer])
            norm = torch.linalg.vector_norm(gradient, dtype=torch.float32)
            self.norms[self._names[id(field.parameter)]] = norm

    def layer_of(self) -> dict[str, int]:
        """Return the layer of each master, by its name."""
        return {
            self._names[id(field.parameter)]: layer
            for layer, record in enumerate(self._gradients)
            for field in record.fields
        }

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
            for field in record.fields if sink.numel() else ():
                self.parameters[self._names[id(field.parameter)]].grad = field.view(sink)


class LateUpdates:
    """Updates of layers that are made in the next step, each where its layer is first loaded.

    Clipping needs the norm of all gradients, which is known once a step's backward has ended. Then
    an update of all weights would take its time with the device idle. The first layers of the next
    forward need few of them, so each layer's update waits until its own load: a line of the
    schedule. It is made on the host before the load. Whoever reads weights before that calls
    `flush`.

    Attributes:
        layer_of: The layer of each master, by its name.
        norms: Norms of the newest step's gradients, fp32 scalars by name.
    """

    def __init__(self, gradients: HostGradients) -> None:
        """Nothing is to be made."""
        self.layer_of, self.norms = gradients.layer_of(), gradients.norms
        self._gradients = gradients
        self._update: Callable[[LayerUpdate], None] | None = None
        self._layers: set[int] = set()

    @property
    def layers(self) -> frozenset[int]:
        """The layers that are still to be updated."""
        return frozenset(self._layers)

    def defer(self, update: Callable[[LayerUpdate], None]) -> None:
        """Let the layers be updated late; those of the step before are updated now.

        Gradients stay where the step has put them until then; `.grad` may be let go of.

        Args:
            update: Updates a layer. It is called once per layer, on another thread, and depends on
                nothing that changes later.
        """
        self.flush()
        self._update, self._layers = update, set(self.layer_of.values())

    def run(self, layer: int) -> None:
        """Update a layer on the host."""
        assert self._update is not None
        self._update(self._gradients.on_host(layer))
        self._layers.remove(layer)

    def flush(self) -> None:
        """Update all layers that are left, in order."""
        for layer in sorted(self._layers):
            self.run(layer)
