"""The vocabulary of a step: lanes, and the ops that run on them."""

from collections import deque
from collections.abc import Mapping, Sequence
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
    """One piece of work on one lane; a tuple, since a search makes tens of thousands."""

    lane: Lane  # where it runs, after the lane's earlier ops
    kind: Kind  # what it does
    # The layer, counted from 0; for GATHER and REDUCE none if it is of what no layer has alone.
    layer: int | None = None
    # The micro-batch of the step; with an objective, one of its passes.
    micro_batch: int | None = None
    # The slot that a load or a piece of the head fills, and that a visit or the decoding before it
    # reads.
    slot: int | None = None
    # The buffer: for READ and LOAD the staging buffer, for FETCH and BACKWARD that of the fetched
    # layer input, for GRADIENT the one that is copied to the host, for LOOK_UP, ROWS and FRONT that
    # of the embedding's rows.
    buffer: int | None = None
    offset: int = 0  # first byte of a piece within its layer or the head
    # Bytes that are moved; for DECODE, bytes that are written; for GATHER and REDUCE, bytes that
    # this rank sends.
    num_bytes: int = 0
    # Whether the graph is kept by a FORWARD, or sent if there is a carrier; whether it was, for a
    # BACKWARD.
    has_graph: bool = False
    # Whether the attention's output is recorded for the backward by a FORWARD; whether a BACKWARD's
    # recompute is given it.
    has_output: bool = False
    # The device buffer that a sent graph or output leaves from and comes back to.
    carrier: int | None = None
    # The run whose loss or gradients an OBJECTIVE or REDUCE has, counted from 0.
    run: int | None = None
    waits: tuple[int, ...] = ()  # positions in the op list, always smaller than the op's own

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


# ---------------------------------------------------------------------------------------------
# From a serial program to ops on lanes, each with the waits that it needs and no others.
#
# Problem. Copies and visits run on several lanes at once and share slots and buffers. If a wait is
# missing, a layer is read before it has arrived, or overwritten while in use. A needless wait costs
# time and hides missing ones.
#
# Idea. A step is first written as a program that would be correct if it ran line by line. Each line
# names the resources that it reads and writes. Two lines must keep their order if they touch the
# same resource and one of them writes it: read after write, write after read, write after write.
# These hazards are the waits, minus those that lanes and other waits imply: lanes are FIFO, and
# waiting is transitive.
#
# Layout. The ops are returned in an order in which they can be issued: an op comes after every op
# that it waits for, and a transfer as early as that allows, so that it is queued in time.

Resource = tuple[str, int, int]
"""What ops contend for: a kind of memory and two numbers, such as ("slot", 2, 0)."""

Clock = list[int]
"""For each lane, how many of its lines are known to have ended."""

Newest = dict[int, int]
"""By lane, the last of its lines to wait for; lanes are FIFO, so all earlier ones end before it."""


class Line(NamedTuple):
    """Consecutive ops of the serial program on one lane, and the resources that they touch."""

    ops: tuple[Op, ...]
    reads: tuple[Resource, ...] = ()
    writes: tuple[Resource, ...] = ()


def parallel(program: Sequence[Line]) -> tuple[Op, ...]:
    """Return the program's ops in issue order, each with its waits.

    Each lane keeps the order of the program. `waits` holds the fewest positions that, together
    with the order of the lanes, keep any two lines that contend for a resource in order.
    """
    index = {lane: number for number, lane in enumerate(Lane)}
    lanes = [index[line.ops[0].lane] for line in program]
    hazards = _hazards(program, lanes)
    clocks: dict[int, Clock] = {}
    lane_clocks: list[Clock] = [[0] * len(index)] * len(index)
    last: dict[int, int] = {}
    ops: list[Op] = []
    for line in _issue_order(lanes, hazards):
        own = lanes[line]
        clock = lane_clocks[own].copy()
        clock[own] += 1
        first, *others = program[line].ops
        if hazards[line] and (needed := _reduced(hazards[line], clock, clocks)):
            for other in needed:
                clock = list(map(max, clock, clocks[other]))
            first = first._replace(waits=tuple(sorted([last[other] for other in needed])))
        clocks[line] = lane_clocks[own] = clock
        ops += [first, *others]
        last[line] = len(ops) - 1
    return tuple(ops)


def _hazards(program: Sequence[Line], lanes: Sequence[int]) -> list[Newest]:
    """Return for each line the earlier ones of other lanes that it contends with."""
    writer: dict[Resource, int] = {}
    readers: dict[Resource, Newest] = {}
    hazards: list[Newest] = []
    for number, (_, reads, writes) in enumerate(program):
        found = [writer[resource] for resource in reads if resource in writer]
        for resource in writes:
            if resource in writer:
                found.append(writer[resource])
            if resource in readers:
                found += readers[resource].values()
        own = lanes[number]
        newest: Newest = {}
        for line in found:
            lane = lanes[line]
            if lane != own and line > newest.get(lane, -1):
                newest[lane] = line
        for resource in reads:
            readers.setdefault(resource, {})[own] = number
        for resource in writes:
            writer[resource] = number
            readers.pop(resource, None)
        hazards.append(newest)
    return hazards


def _issue_order(lanes: Sequence[int], hazards: Sequence[Newest]) -> list[int]:
    """Merge the lanes: first all transfers whose waits are issued, then one compute op."""
    queues: list[deque[int]] = [deque() for _ in Lane]
    for line, lane in enumerate(lanes):
        queues[lane].append(line)
    compute = list(Lane).index(Lane.COMPUTE)
    queues.append(queues.pop(compute))
    is_issued = [False] * len(lanes)
    issued: list[int] = []
    while len(issued) < len(lanes):
        for queue in queues:
            if queue and all(map(is_issued.__getitem__, hazards[queue[0]].values())):
                line = queue.popleft()
                is_issued[line] = True
                issued.append(line)
                break
    return issued


def _reduced(hazards: Newest, clock: Clock, clocks: Mapping[int, Clock]) -> list[int]:
    """Drop waits that are implied by the lane's earlier ops or by another wait."""
    new = {lane: line for lane, line in hazards.items() if clocks[line][lane] > clock[lane]}
    if len(new) < 2:
        return list(new.values())
    return [
        line
        for lane, line in new.items()
        if all(clocks[line][lane] > clocks[other][lane] for other in new.values() if other != line)
    ]
