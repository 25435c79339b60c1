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

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from offload.plan.op import Lane, Op

Resource = tuple[str, int, int]
"""A kind of memory and two numbers, such as ("slot", 2, 0): what ops contend for."""

Clock = tuple[int, ...]
"""By lane, how many of its lines have ended for certain."""


class Line(NamedTuple):
    """Ops of the serial program that follow each other on one lane, and what all of them touch."""

    ops: tuple[Op, ...]
    reads: tuple[Resource, ...] = ()
    writes: tuple[Resource, ...] = ()


def parallel(program: Sequence[Line]) -> tuple[Op, ...]:
    """Return the program's ops in issue order, each with its waits.

    Each lane keeps the order of the program. `waits` holds the fewest positions that, together
    with the order of the lanes, keep every two lines in order that contend for a resource.
    """
    index = {lane: number for number, lane in enumerate(Lane)}
    lanes = [index[line.ops[0].lane] for line in program]
    hazards = _hazards(program)
    clocks: dict[int, Clock] = {}
    lane_clocks: list[Clock] = [(0,) * len(index)] * len(index)
    last: dict[int, int] = {}
    ops: list[Op] = []
    for line in _issue_order(lanes, hazards):
        own = lanes[line]
        clock = lane_clocks[own]
        needed = _reduced(hazards[line], own, clock, lanes, clocks)
        num_on_lane = clock[own] + 1
        if needed:
            clock = tuple(map(max, clock, *(clocks[other] for other in needed)))
        clocks[line] = lane_clocks[own] = (*clock[:own], num_on_lane, *clock[own + 1 :])
        first, *others = program[line].ops
        waits = tuple(sorted(last[other] for other in needed))
        ops += [first._replace(waits=waits) if waits else first, *others]
        last[line] = len(ops) - 1
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


def _issue_order(lanes: Sequence[int], hazards: Sequence[set[int]]) -> Iterable[int]:
    """Merge the lanes: transfers as soon as what they wait for is issued, then one compute op."""
    queues: list[deque[int]] = [deque() for _ in Lane]
    for line, lane in enumerate(lanes):
        queues[lane].append(line)
    compute = list(Lane).index(Lane.COMPUTE)
    queues.append(queues.pop(compute))
    issued: dict[int, None] = {}
    while len(issued) < len(lanes):
        for queue in queues:
            if queue and hazards[queue[0]] <= issued.keys():
                issued[queue.popleft()] = None
                break
    return issued


def _reduced(
    hazards: Iterable[int],
    own: int,
    lane_clock: Clock,
    lanes: Sequence[int],
    clocks: Mapping[int, Clock],
) -> list[int]:
    """Leave out lines that the lane's earlier ops or another wait imply."""
    newest: dict[int, int] = {}
    for line in hazards:
        lane = lanes[line]
        if lane != own and line > newest.get(lane, -1):
            newest[lane] = line
    needed = []
    for lane, line in newest.items():
        others = [clocks[other][lane] for other in newest.values() if other != line]
        if clocks[line][lane] > max([lane_clock[lane], *others]):
            needed.append(line)
    return needed
