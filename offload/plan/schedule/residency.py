"""What of the layers stays in device memory during a step, or leaves it and comes back."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Residency:
    """How many layers' weights, graphs and attention outputs are on the device at a time.

    Attributes:
        num_slots: Layers whose weights are on the device at a time.
        num_kept_graphs: How many layers, the last ones, are not checkpointed.
        num_kept_outputs: How many layers, the last checkpointed ones, keep the output of their
            attention on the device, so that it is not computed again.
        num_sent_outputs: How many of the layers below send theirs to host memory and get it back.
    """

    num_slots: int
    num_kept_graphs: int = 0
    num_kept_outputs: int = 0
    num_sent_outputs: int = 0

    @property
    def has_outputs(self) -> bool:
        """Whether any attention is kept or sent."""
        return bool(self.num_kept_outputs or self.num_sent_outputs)

    def outputs(self, num_bytes: Sequence[Sequence[int]]) -> "AttentionOutputs":
        """Return which layers keep and which send the output of their attention.

        Layers that send are spread evenly, so that each copy has the time of several visits.

        Args:
            num_bytes: By layer and micro-batch; none for a layer whose attention is not fused.
        """
        first_graph = len(num_bytes) - self.num_kept_graphs
        able = [layer for layer in range(first_graph) if num_bytes[layer]]
        num_below = max(0, len(able) - self.num_kept_outputs)
        num_sent = min(self.num_sent_outputs, num_below)
        return AttentionOutputs(
            kept=frozenset(able[num_below:]),
            sent=frozenset(
                layer
                for place, layer in enumerate(able[:num_below])
                if (place + 1) * num_sent // num_below > place * num_sent // num_below
            ),
            num_bytes=tuple(map(tuple, num_bytes)),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionOutputs:
    """The layers whose attention is not computed again in a step.

    Attributes:
        kept: Layers whose outputs stay on the device.
        sent: Layers whose outputs leave for host memory and come back.
        num_bytes: Of output and log-sum-exp, by layer and micro-batch.
    """

    kept: frozenset[int] = frozenset()
    sent: frozenset[int] = frozenset()
    num_bytes: tuple[tuple[int, ...], ...] = ()


NO_OUTPUTS = AttentionOutputs()
