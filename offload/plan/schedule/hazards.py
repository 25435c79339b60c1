"""From a serial program to ops on lanes, each with the waits that it needs and no others.

Problem. Copies and visits run on several lanes at once and share slots and buffers. If a wait is
missing, a layer is read before it has arrived, or overwritten while in use. A needless wait costs
time and hides missing ones.

Idea. A step is first written as a program that would be correct if it ran line by line. Each line
names the resources that it reads and writes. Two lines must keep their order if they touch the
same resource and one of them writes it: read after write, write after read, write after write.
These hazards are the waits, minus those that lanes and other waits imply: lanes are FIFO, and
waiting is transitive.

Layout. The ops are returned in an order in which they can be issued: an op comes after every op
that it waits for, and a transfer as early as that allows, so that it is queued in time.
"""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from offload.plan.schedule.op import Lane, Op

Resource = tuple[str, int, int]
"""What ops contend for: a kind of memory and two numbers, such as ("slot", 2, 0)."""

Clock = tuple[int, ...]
"""For each lane, how many of its lines are known to have ended."""


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
    """Merge the lanes: first all transfers whose waits are issued, then one compute op."""
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
    """Drop waits that are implied by the lane's earlier ops or by another wait."""
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
