"""The memory of the real model's layers and head, as measured by a trace.

Formulas hold for the code that they were derived from. A trace runs the installed code, without
values: see `offload.engine.tracing`.
"""

from dataclasses import dataclass
from typing import Literal

MemoryGrade = Literal["formula", "traced"]


@dataclass(frozen=True, kw_only=True, slots=True)
class TracedBytes:
    """Peak device memory of each part, in addition to what was allocated before it.

    Attributes:
        visits: Of each layer's backward visit, for one micro-batch.
        head_chunk: Of one chunk's norm, head, loss and backward.
        recorded: Of what the model passes to all layers besides their inputs, for one micro-batch.
    """

    visits: tuple[int, ...]
    head_chunk: int
    recorded: int
