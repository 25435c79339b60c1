"""The vocabulary of a step: lanes, and the ops that run on them."""

from enum import StrEnum
from typing import NamedTuple


class Lane(StrEnum):
    """A FIFO queue of ops, such as a CUDA stream or a thread."""

    COMPUTE = "compute"
    H2D = "h2d"
    D2H = "d2h"
    HOST = "host"
    NETWORK = "network"


class Kind(StrEnum):
    """What an op does.

    LOOK_UP: gather the rows of a micro-batch's tokens from the input embedding in host memory, into
        a page-locked buffer (host).
    ROWS: copy these rows to the device (h2d).
    FRONT: run the modules before the layers, for one micro-batch.
    UPDATE: update a layer's trained weights by the gradients of the step before, ahead of their
        load (host).
    READ: read a piece of a layer from disk or pageable memory into a staging buffer (host).
    LOAD: copy a piece of a layer into its slot (h2d).
    DECODE: decode a layer from its slot into the buffer that it computes from, once per visit.
    FORWARD: run a layer, without a graph unless the layer is not checkpointed.
    STASH: copy a layer's input to host memory (d2h).
    SEND: copy a layer's graph, or the output of its attention, to host memory (d2h).
    REFERENCE: run a layer as the reference of an objective computes it, without a graph.
    HEAD: copy a piece of the output head from host memory over the slots of layers (h2d).
    SCORE: run norm, head and the log-probabilities of the labels, without a graph.
    OBJECTIVE: compute the loss of the whole step and its gradient by each log-probability.
    TAIL: run norm, head and loss, and compute the gradient of their input.
    FETCH: copy a layer's input back to the device (h2d).
    RETURN: copy a layer's graph, or the output of its attention, back to the device (h2d).
    BACKWARD: compute a layer's gradients, after a recompute unless its graph was kept or sent.
    GRADIENT: copy a piece of the gradients of a layer's own weights to host memory (d2h).
    FRONT_BACKWARD: compute the gradients of the modules before the layers.
    GATHER: collect a layer, or all else, from the ranks that each hold a part of it (network).
    REDUCE: add up the gradients of a layer, or of all else that trains, over the ranks (network).
    OPTIMIZER: the update after the pass. Appears in timelines, never in a schedule.
    """

    LOOK_UP = "look_up"
    ROWS = "rows"
    FRONT = "front"
    UPDATE = "update"
    READ = "read"
    LOAD = "load"
    DECODE = "decode"
    FORWARD = "forward"
    STASH = "stash"
    SEND = "send"
    REFERENCE = "reference"
    HEAD = "head"
    SCORE = "score"
    OBJECTIVE = "objective"
    TAIL = "tail"
    FETCH = "fetch"
    RETURN = "return"
    BACKWARD = "backward"
    GRADIENT = "gradient"
    FRONT_BACKWARD = "front_backward"
    GATHER = "gather"
    REDUCE = "reduce"
    OPTIMIZER = "optimizer"


OVER_NETWORK = (Kind.GATHER, Kind.REDUCE)


class Op(NamedTuple):
    """One piece of work on one lane; a tuple, since a search makes tens of thousands.

    Attributes:
        lane: Where it runs, after the lane's earlier ops.
        kind: What it does.
        layer: The layer, counted from 0; for GATHER and REDUCE none if it is of what no layer has
            alone.
        micro_batch: The micro-batch of the step; with an objective, one of its passes.
        slot: The slot that a load or a piece of the head fills, and that a visit or the decoding
            before it reads.
        buffer: For READ and LOAD the staging buffer, for FETCH and BACKWARD the buffer of the
            fetched layer input, for GRADIENT the buffer that is copied to the host, for LOOK_UP,
            ROWS and FRONT that of the embedding's rows.
        offset: First byte of a piece within its layer or the head.
        num_bytes: Bytes that are moved; for DECODE, bytes that are written; for GATHER and
            REDUCE, bytes that this rank sends.
        has_graph: For FORWARD, whether the graph is kept, or sent if there is a carrier; for
            BACKWARD, whether one was.
        has_output: For FORWARD, whether the attention's output is recorded for the backward; for
            BACKWARD, whether the recompute is given it.
        carrier: The device buffer that a sent graph or output leaves from and comes back to.
        run: For OBJECTIVE and REDUCE, the run whose loss or gradients they are, counted from 0.
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
    has_output: bool = False
    carrier: int | None = None
    run: int | None = None
    waits: tuple[int, ...] = ()

    def pieces(self, total: int, piece_bytes: int) -> tuple["Op", ...]:
        """Split a copy of so many bytes into pieces; an empty copy is one piece."""
        return tuple(
            self._replace(offset=offset, num_bytes=min(piece_bytes, total - offset))
            for offset in range(0, max(1, total), piece_bytes)
        )

    @property
    def layer_index(self) -> int:
        """The layer of an op that has one."""
        assert self.layer is not None
        return self.layer

    @property
    def micro_batch_index(self) -> int:
        """The micro-batch of an op that has one."""
        assert self.micro_batch is not None
        return self.micro_batch

    @property
    def slot_index(self) -> int:
        """The slot of an op that has one."""
        assert self.slot is not None
        return self.slot

    @property
    def buffer_index(self) -> int:
        """The buffer of an op that has one."""
        assert self.buffer is not None
        return self.buffer

    @property
    def run_index(self) -> int:
        """The run of an op that has one."""
        assert self.run is not None
        return self.run

    @property
    def carrier_index(self) -> int:
        """The buffer of an op that moves a graph or an attention output."""
        assert self.carrier is not None
        return self.carrier
