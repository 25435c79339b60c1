"""From a serial program to ops on lanes: what each op must wait for, and no wait more.

Problem. Copies and visits run on several lanes at once and share slots and buffers. A forgotten
wait reads a layer before it has arrived, or overwrites one in use; a needless one costs time and
hides the forgotten ones.

Idea. A step is first written down as a program that would be right if it ran line by line, each
line naming the resources that it reads and writes. Two lines must keep their order if they touch
the same resource and one of them writes it: read after write, write after read, write after
write. These hazards are the waits, less those that lanes and other waits imply: lanes are FIFO,
and waiting is transitive.

Layout. The ops come out in an order in which they can be issued: an op stands behind every op that
it waits for, and a transfer stands as early as that allows, so that it is queued in time.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from offload.plan.op import Lane, Op

Resource = tuple[str, int, int]
"""A kind of memory and two numbers, such as ("slot", 2, 0): what ops contend for."""

Clock = tuple[int, ...]
"""By lane, how many of its ops have ended for certain."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """One op of the serial program, and what it touches."""

    op: Op
    reads: tuple[Resource, ...] = ()
    writes: tuple[Resource, ...] = ()


def parallel(program: Sequence[Line]) -> tuple[Op, ...]:
    """Return the program's ops in issue order, each with its waits.

    Each lane keeps the order of the program. `waits` holds the fewest positions that, together
    with the order of the lanes, keep every two lines in order that contend for a resource.
    """
    index = {lane: number for number, lane in enumerate(Lane)}
    lanes = [index[line.op.lane] for line in program]
    hazards = _hazards(program)
    issued = _issue_order(lanes, hazards)
    position = {line: place for place, line in enumerate(issued)}
    issued_lanes = [lanes[line] for line in issued]
    clocks: list[Clock] = []
    lane_clocks: list[Clock] = [(0,) * len(index)] * len(index)
    ops: list[Op] = []
    for line, own in zip(issued, issued_lanes, strict=True):
        clock = lane_clocks[own]
        waits = [position[other] for other in hazards[line]]
        needed = _reduced(waits, own, clock, issued_lanes, clocks)
        num_on_lane = clock[own] + 1
        if needed:
            clock = _latest(clock, *(clocks[wait] for wait in needed))
        lane_clocks[own] = (*clock[:own], num_on_lane, *clock[own + 1 :])
        clocks.append(lane_clocks[own])
        op = program[line].op
        ops.append(op.behind(tuple(sorted(needed))) if needed else op)
    return tuple(ops)


def _hazards(program: Sequence[Line]) -> list[set[int]]:
    """Return for each line the earlier ones that it contends with."""
    writer: dict[Resource, int] = {}
    readers: dict[Resource, list[int]] = {}
    hazards: list[set[int]] = []
    for number, line in enumerate(program):
        found = {writer[resource] for resource in line.reads if resource in writer}
        for resource in line.writes:
            if resource in writer:
                found.add(writer[resource])
            found.update(readers.get(resource, ()))
        for resource in line.reads:
            readers.setdefault(resource, []).append(number)
        for resource in line.writes:
            writer[resource], readers[resource] = number, []
        hazards.append(found)
    return hazards


def _issue_order(lanes: Sequence[int], hazards: Sequence[set[int]]) -> list[int]:
    """Merge the lanes: transfers as soon as what they wait for is issued, then one compute op."""
    queues: list[list[int]] = [[] for _ in Lane]
    for line, lane in enumerate(lanes):
        queues[lane].append(line)
    heads = [0] * len(queues)
    issued: list[int] = []
    is_issued = [False] * len(lanes)

    def issue(lane: int) -> bool:
        if heads[lane] == len(queues[lane]):
            return False
        line = queues[lane][heads[lane]]
        if not all(is_issued[other] for other in hazards[line]):
            return False
        heads[lane] += 1
        is_issued[line] = True
        issued.append(line)
        return True

    compute = list(Lane).index(Lane.COMPUTE)
    transfers = [lane for lane in range(len(queues)) if lane != compute]
    while len(issued) < len(lanes):
        while any(issue(lane) for lane in transfers):
            pass
        issue(compute)
    return issued


def _reduced(
    waits: Sequence[int],
    own: int,
    lane_clock: Clock,
    lanes: Sequence[int],
    clocks: Sequence[Clock],
) -> list[int]:
    """Leave out waits that the lane's earlier ops or another wait imply."""
    newest: dict[int, int] = {}
    for wait in waits:
        lane = lanes[wait]
        if lane != own and wait > newest.get(lane, -1):
            newest[lane] = wait
    needed = []
    for lane, wait in newest.items():
        others = (clocks[other] for other in newest.values() if other != wait)
        if clocks[wait][lane] > _latest(lane_clock, *others)[lane]:
            needed.append(wait)
    return needed


def _latest(*clocks: Clock) -> Clock:
    return tuple(map(max, zip(*clocks, strict=True)))
