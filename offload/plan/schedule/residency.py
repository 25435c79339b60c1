"""What of the layers stays in device memory during a step, or leaves it and comes back."""

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple


class Residency(NamedTuple):
    """How many layers' weights, graphs and attention outputs are on the device at a time.

    A tuple, since a search makes and looks up tens of thousands.

    Attributes:
        num_slots: Layers whose weights are on the device at a time.
        num_kept_graphs: How many layers, the last ones, are not checkpointed.
        num_sent_graphs: How many of the layers below are not checkpointed either: what autograd
            saved of them goes to host memory and comes back.
        num_kept_outputs: How many layers, the last of all others, keep the output of their
            attention on the device, so that it is not computed again.
        num_sent_outputs: How many of the rest send theirs to host memory and get it back.
    """

    num_slots: int
    num_kept_graphs: int = 0
    num_sent_graphs: int = 0
    num_kept_outputs: int = 0
    num_sent_outputs: int = 0

    @property
    def has_outputs(self) -> bool:
        """Whether any attention is kept or sent."""
        return bool(self.num_kept_outputs or self.num_sent_outputs)

    @property
    def sends(self) -> bool:
        """Whether any layer's graph or output of attention leaves the device."""
        return bool(self.num_sent_graphs or self.num_sent_outputs)

    def sent_graphs(self, num_layers: int) -> frozenset[int]:
        """Return the layers that send their graphs, spread evenly below those that keep theirs."""
        return _spread(range(num_layers - self.num_kept_graphs), self.num_sent_graphs)

    def saved(
        self, output_bytes: tuple[tuple[int, ...], ...], graph_bytes: tuple[tuple[int, ...], ...]
    ) -> "Saved":
        """Return which layers keep and which send the output of their attention, or their graph.

        Layers that send are spread evenly, so that each copy has the time of several visits.

        Args:
            output_bytes: By layer and micro-batch; none for a layer whose attention is not fused.
            graph_bytes: The same of what autograd saves of a layer; none where no graph is sent.
        """
        num_layers = len(output_bytes)
        graphs = self.sent_graphs(num_layers)
        able = [
            layer
            for layer in range(num_layers - self.num_kept_graphs)
            if output_bytes[layer] and layer not in graphs
        ]
        num_below = max(0, len(able) - self.num_kept_outputs)
        return Saved(
            kept=frozenset(able[num_below:]),
            sent=_spread(tuple(able[:num_below]), self.num_sent_outputs),
            graphs=graphs,
            output_bytes=output_bytes,
            graph_bytes=graph_bytes,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Saved:
    """What checkpointed layers save on the way up, so that less is computed again.

    Attributes:
        kept: Layers whose outputs of attention stay on the device.
        sent: Layers whose outputs of attention leave for host memory and come back.
        graphs: Layers of which all that autograd saved leaves and comes back; they are not
            computed again.
        output_bytes: Of an attention's output and log-sum-exp, by layer and micro-batch.
        graph_bytes: Of what autograd saves, by layer and micro-batch.
    """

    kept: frozenset[int] = frozenset()
    sent: frozenset[int] = frozenset()
    graphs: frozenset[int] = frozenset()
    output_bytes: tuple[tuple[int, ...], ...] = ()
    graph_bytes: tuple[tuple[int, ...], ...] = ()

    @property
    def leaving(self) -> frozenset[int]:
        """The layers that send anything."""
        return self.sent | self.graphs

    def has_output(self, layer: int) -> bool:
        """Return whether a layer's attention is not computed again in its recompute."""
        return layer in self.kept or layer in self.sent

    def sent_bytes(self, layer: int) -> tuple[int, ...]:
        """Return what a layer sends, by micro-batch."""
        if layer in self.graphs:
            return self.graph_bytes[layer]
        return self.output_bytes[layer] if layer in self.sent else ()


NOTHING_SAVED = Saved()


@lru_cache(maxsize=2**14)
def _spread(layers: tuple[int, ...] | range, num: int) -> frozenset[int]:
    """Choose so many of some layers, at equal distances; all if there are fewer.

    The first is chosen before the last: what it sends comes back last.
    """
    num = min(num, len(layers))
    return frozenset(
        layer
        for place, layer in enumerate(reversed(layers))
        if (place + 1) * num // len(layers) > place * num // len(layers)
    )
