"""What is known of an attached model: its weights, where they are, and how it is computed."""

from collections import Counter
from warnings import warn

from torch import nn

from offload.engine.bound import Bound
from offload.engine.host.weights import HostWeights
from offload.engine.memory_meter import Arena
from offload.engine.model.inventory import inventory_of
from offload.engine.model.layers import LayeredModel
from offload.engine.recompute.tiled import names_left_out
from offload.engine.streams import Device
from offload.plan.facts.weights import WeightInventory


class Attached:
    """A model, its host memory and its slots, of which an engine tells what it is made of."""

    _model: nn.Module
    _layered: LayeredModel
    _host: HostWeights
    _bound: Bound
    _device: Device

    @property
    def resident_parameters(self) -> dict[str, nn.Parameter]:
        """Parameters that are not streamed, by name."""
        streamed = {id(field.parameter) for record in self._host.records for field in record.fields}
        named = self._model.named_parameters()
        return {name: p for name, p in named if id(p) not in streamed}

    @property
    def own_layers(self) -> dict[int, int]:
        """The layer of each parameter that one layer has alone, by the parameter's id."""
        layers = self._layered.layers
        within = [name for name, one in self._layered.whole.named_modules() if one is layers]
        found: dict[int, set[str]] = {}
        for path, parameter in self._layered.whole.named_parameters(remove_duplicate=False):
            number = next(
                (
                    path.removeprefix(f"{x}.").split(".")[0]
                    for x in within
                    if path.startswith(f"{x}.")
                ),
                "",
            )
            found.setdefault(id(parameter), set()).add(number)
        return {one: int(*of) for one, of in found.items() if len(of) == 1 and "" not in of}

    @property
    def arenas(self) -> tuple[Arena, ...]:
        """The memory held from step to step, without parameters that were not moved."""
        head = self._bound.head
        return (
            *self._host.arenas,
            *(() if head is None else (head.arena,)),
            *self._bound.slot_arenas,
            *self._bound.host_gradients.arenas,
            self._bound.stash.arena,
            self._bound.sent.arena,
        )

    @property
    def num_issued(self) -> int:
        """The ops that were issued so far, of all passes: it grows as long as there is progress."""
        return self._bound.executor.num_issued

    @property
    def fused(self) -> tuple[Counter[str], ...]:
        """Of each layer, how many norms, rotations and gates are fused; empty if none is to be."""
        fused = self._layered.fused
        return () if fused is None else tuple(map(fused.counts, range(len(self._layered.layers))))

    @property
    def fuses_loss(self) -> bool:
        """Whether the loss is fused."""
        return self._layered.fuses_loss

    @property
    def unread(self) -> tuple[frozenset[str], ...]:
        """By layer, the linears whose products its recomputes leave out, as nothing reads them.

        They are found before the first step in the model's current mode.
        """
        found = self._bound.executor.found().unread
        layers = enumerate(self._layered.layers)
        return tuple(names_left_out(layer, found.get(index, ())) for index, layer in layers)

    @property
    def rows_together(self) -> frozenset[int]:
        """Layers that compute packed rows together; the others compute each row by itself.

        They are found before the first step with packed rows.
        """
        return frozenset(self._layered.together)

    @property
    def rows_joined(self) -> frozenset[int]:
        """Layers of `rows_together` whose attention takes all packed rows in one call."""
        return frozenset(self._layered.joined & self._layered.together)

    @property
    def weights(self) -> WeightInventory:
        """The model's weights by class, and the form in which each is stored."""
        return inventory_of(self._layered, self._host.records)

    @property
    def stock(self) -> WeightInventory:
        """The same as `weights`, by its earlier name."""
        warn("`Engine.stock` is now `Engine.weights`", DeprecationWarning, stacklevel=2)
        return self.weights
