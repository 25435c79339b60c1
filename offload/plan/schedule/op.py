"""The vocabulary of a step: lanes, and the ops that run on them."""

from collections import deque
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Literal, NamedTuple


class Lane(StrEnum):
    """A FIFO queue of ops, such as a CUDA stream or a thread."""

    COMPUTE = "compute"
    H2D = "h2d"
    D2H = "d2h"
    HOST = "host"
    NETWORK = "network"


class Route(StrEnum):
    """Where a copy comes from and goes to, by which it has a speed of its own."""

    LOOK_UP = "look up"  # from rows of a table in host memory to a page-locked buffer
    READ = "read"  # from disk or pageable memory to a page-locked buffer
    LOAD = "load"  # of weights, from host memory to the device
    FETCH = "fetch"  # of all else, from host memory to the device
    LEAVE = "leave"  # from the device to host memory
    NETWORK = "network"  # between ranks


LINK = (Route.LOAD, Route.FETCH, Route.LEAVE)
"""The routes over the link between host and device."""


PHASES = {
    "forward": "compute",
    "decode": "decode",
    "head and loss": "head and loss",
    "backward": "compute",
    "h2d": "copy",
    "d2h": "copy",
    "reads": "copy",
    "updates": "optimizer",
    "network": "network",
    "optimizer": "optimizer",
}
"""Lines of the report on a step -> the term of a comparison that their time belongs to."""


class Kind(StrEnum):
    """What an op does: a row with its lane, its phase, and the route of a copy."""

    lane: Lane  # where it runs
    phase: str  # the line of the report that its time counts in
    route: Route | None  # whose speed it has; None if it computes

    def __new__(
        cls,
        value: str,
        lane: Lane = Lane.COMPUTE,
        phase: str = "forward",
        route: Route | None = None,
    ) -> "Kind":
        """Return the member of a row, which of a lookup by value is given the value alone."""
        kind = str.__new__(cls, value)
        kind._value_, kind.lane, kind.phase, kind.route = value, lane, phase, route
        return kind

    # Gather the rows of a micro-batch's tokens from the input embedding in host memory, into a
    # page-locked buffer.
    LOOK_UP = "look_up", Lane.HOST, "reads", Route.LOOK_UP
    # Copy these rows to the device.
    ROWS = "rows", Lane.H2D, "h2d", Route.FETCH
    # Run the modules before the layers, for one micro-batch.
    FRONT = "front", Lane.COMPUTE, "forward"
    # Update a layer's trained weights by the gradients of the step before, ahead of their load.
    UPDATE = "update", Lane.HOST, "updates"
    # Read a piece of a layer from disk or pageable memory into a staging buffer.
    READ = "read", Lane.HOST, "reads", Route.READ
    # Copy a piece of a layer into its slot.
    LOAD = "load", Lane.H2D, "h2d", Route.LOAD
    # Decode a layer from its slot into the buffer that it computes from, once per visit.
    DECODE = "decode", Lane.COMPUTE, "decode"
    # Run a layer, without a graph unless the layer is not checkpointed.
    FORWARD = "forward", Lane.COMPUTE, "forward"
    # Copy a layer's input to host memory.
    STASH = "stash", Lane.D2H, "d2h", Route.LEAVE
    # Copy a layer's graph, or the output of its attention, to host memory.
    SEND = "send", Lane.D2H, "d2h", Route.LEAVE
    # Run a layer as the reference of an objective computes it, without a graph.
    REFERENCE = "reference", Lane.COMPUTE, "forward"
    # Copy a piece of the output head from host memory over the slots of layers.
    HEAD = "head", Lane.H2D, "h2d", Route.FETCH
    # Run norm, head and the log-probabilities of the labels, without a graph.
    SCORE = "score", Lane.COMPUTE, "head and loss"
    # Compute the loss of the whole step and its gradient by each log-probability.
    OBJECTIVE = "objective", Lane.COMPUTE, "head and loss"
    # Run norm, head and loss, and compute the gradient of their input.
    TAIL = "tail", Lane.COMPUTE, "head and loss"
    # Copy a layer's input back to the device.
    FETCH = "fetch", Lane.H2D, "h2d", Route.FETCH
    # Copy a layer's graph, or the output of its attention, back to the device.
    RETURN = "return", Lane.H2D, "h2d", Route.FETCH
    # Compute a layer's gradients, after a recompute unless its graph was kept or sent.
    BACKWARD = "backward", Lane.COMPUTE, "backward"
    # Copy a piece of the gradients of a layer's own weights to host memory.
    GRADIENT = "gradient", Lane.D2H, "d2h", Route.LEAVE
    # Compute the gradients of the modules before the layers.
    FRONT_BACKWARD = "front_backward", Lane.COMPUTE, "backward"
    # Collect a layer, or all else, from the ranks that each hold a part of it.
    GATHER = "gather", Lane.NETWORK, "network", Route.NETWORK
    # Add up the gradients of a layer, or of all else that trains, over the ranks.
    REDUCE = "reduce", Lane.NETWORK, "network", Route.NETWORK
    # The update after the pass: in timelines, never in a schedule.
    OPTIMIZER = "optimizer", Lane.COMPUTE, "optimizer"


OVER_NETWORK = tuple([kind for kind in Kind if kind.lane is Lane.NETWORK])


class Save(NamedTuple):
    """What a forward visit saves of a layer besides its input, so that less is computed again.

    The graph is all that autograd saved, the output that of attention with its log-sum-exp. It
    stays on the device, or is sent: it leaves for host memory and comes back.
    """

    what: Literal["nothing", "output", "graph"] = "nothing"
    is_sent: bool = False


RECOMPUTE, KEPT_OUTPUT, KEPT_GRAPH = Save(), Save("output"), Save("graph")
SENT_OUTPUT, SENT_GRAPH = Save("output", is_sent=True), Save("graph", is_sent=True)
SAVES = (KEPT_OUTPUT, SENT_OUTPUT, KEPT_GRAPH, SENT_GRAPH)


class Op(NamedTuple):
    """One piece of work on one lane; a tuple, since a search makes tens of thousands."""

    kind: Kind  # what it does, and on which lane, after the lane's earlier ops
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
    save: Save = RECOMPUTE  # what a FORWARD saves, and a BACKWARD is given
    # The device buffer that a sent graph or output leaves from and comes back to.
    carrier: int | None = None
    # The run whose loss or gradients an OBJECTIVE or REDUCE has, counted from 0.
    run: int | None = None
    waits: tuple[int, ...] = ()  # positions in the op list, always smaller than the op's own

    @property
    def lane(self) -> Lane:
        """The lane of its kind."""
        return self.kind.lane

    def pieces(self, total: int, piece_bytes: int) -> tuple["Op", ...]:
        """Split a copy of so many bytes into pieces; an empty copy is one piece."""
        return tuple(
            self._replace(offset=offset, num_bytes=min(piece_bytes, total - offset))
            for offset in range(0, max(1, total), piece_bytes)
        )

    @property
    def has_graph(self) -> bool:
        """Whether a FORWARD saves its graph, and a BACKWARD computes nothing again."""
        return self.save.what == "graph"

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
    lanes = [index[line.ops[0].kind.lane] for line in program]
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
