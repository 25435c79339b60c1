"""The vocabulary of a step: lanes, and the ops that run on them."""

from enum import StrEnum
from typing import NamedTuple


class Lane(StrEnum):
    """A FIFO queue of ops, such as a CUDA stream or a thread."""

    COMPUTE = "compute"
    H2D = "h2d"
    D2H = "d2h"
    HOST = "host"


class Kind(StrEnum):
    """What an op does.

    FRONT: what comes before the layers, for one micro-batch.
    READ: a piece of a layer, from disk or pageable memory, into a staging buffer (host).
    LOAD: a piece of a layer, into its slot (h2d).
    DECODE: a layer, from its slot to where it computes, once per visit.
    FORWARD: a layer, without a graph unless its backward visit is to find one.
    STASH: a layer's input, to host memory (d2h).
    TAIL: norm, head and loss, and the gradient that leaves them.
    FETCH: a layer's input, back to the device (h2d).
    BACKWARD: a layer's gradients, through a graph built anew unless one was kept.
    GRADIENT: a piece of the gradients of a layer's own weights, to host memory (d2h).
    FRONT_BACKWARD: gradients of what comes before the layers.
    OPTIMIZER: the update, behind the pass; in timelines that show it, in no schedule.
    """

    FRONT = "front"
    READ = "read"
    LOAD = "load"
    DECODE = "decode"
    FORWARD = "forward"
    STASH = "stash"
    TAIL = "tail"
    FETCH = "fetch"
    BACKWARD = "backward"
    GRADIENT = "gradient"
    FRONT_BACKWARD = "front_backward"
    OPTIMIZER = "optimizer"


class Op(NamedTuple):
    """One piece of work on one lane; a tuple, since a search makes tens of thousands.

    Attributes:
        lane: Where it runs, behind the lane's earlier ops.
        kind: What it does.
        layer: Which layer, counted from 0.
        micro_batch: Which micro-batch of the step.
        slot: The slot that a load fills, and a visit or the decoding before it reads.
        buffer: Of READ and LOAD the staging buffer, of FETCH and BACKWARD the one that the
            layer's input is fetched to, of GRADIENT the one that it leaves.
        offset: First byte of a piece within its layer.
        num_bytes: Bytes that move; of DECODE those that are written.
        has_graph: Of FORWARD that it keeps its graph, of BACKWARD that it finds one.
        waits: Positions in the op list, always smaller than the op's own.
    """

    lane: Lane
    kind: Kind
    layer: int | None = None
    micro_batch: int | None = None
    slot: int | None = None
    buffer: int | None = None
    offset: int = 0
    num_bytes: int = 0
    has_graph: bool = False
    waits: tuple[int, ...] = ()
