"""What of the layers stays in device memory during a step."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Residency:
    """How many layers' weights, and how many layers' graphs, are on the device at a time.

    Attributes:
        num_slots: Layers whose weights are on the device at a time.
        num_kept_graphs: How many layers, the last ones, are not checkpointed.
    """

    num_slots: int
    num_kept_graphs: int = 0
