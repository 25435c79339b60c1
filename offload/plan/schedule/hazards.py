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
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from offload.plan.schedule.op import Lane, Op

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
