"""What a trace of the real model found that its layers and its head take.

Formulas know the code that they were made for. A trace runs the code that is there, without values:
see `offload.engine.tracing`.
"""

from dataclasses import dataclass
from typing import Literal

MemoryGrade = Literal["formula", "traced"]


@dataclass(frozen=True, kw_only=True, slots=True)
class TracedBytes:
    """What stands in device memory at most beside what stood before.

    Attributes:
        visits: Of each layer's backward visit, by one micro-batch.
        head_chunk: Of one chunk's norm, head, loss and backward.
        recorded: Of what the model passes to all layers besides their inputs, of one micro-batch.
    """

    visits: tuple[int, ...]
    head_chunk: int
    recorded: int
