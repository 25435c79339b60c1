"""What each op of a schedule does to memory, and whether the order of all of them is safe."""

from offload.plan.schedule.op import Kind, Lane, Op
from offload.plan.schedule.schedule import Schedule


def ancestors(schedule: Schedule) -> list[set[int]]:
    """Return for each op all ops that have ended when it starts, by waits and lane order."""
    before: list[set[int]] = []
    last_on_lane: dict[Lane, int] = {}
    for number, op in enumerate(schedule.ops):
        direct = [*op.waits, *([last_on_lane[op.lane]] if op.lane in last_on_lane else [])]
        before.append(set().union(*({i} | before[i] for i in direct)))
        last_on_lane[op.lane] = number
    return before


Access = tuple[str, object, object]
"""Whether an op reads, writes, adds to or changes a place, which, and what that then holds.

Of a change, what it holds before and after.
"""


_OUTER: Access = ("add", ("gradients of the rank", -1), "of a step")


class Accesses:
    """What an op does to slots, buffers and kept inputs, from its kind alone."""

    def __init__(self, schedule: Schedule) -> None:
        self._last_layer = max(op.layer for op in schedule.ops if op.layer is not None)
        self._is_stashed = any(op.kind is Kind.STASH for op in schedule.ops)
        self._encoded = {op.layer for op in schedule.ops if op.kind is Kind.DECODE}
        self._trained = {op.layer for op in schedule.ops if op.kind is Kind.GRADIENT}
        self._is_scored = any(op.kind is Kind.OBJECTIVE for op in schedule.ops)
        updates = [op for op in schedule.ops if op.kind is Kind.UPDATE]
        self._updated = {op.layer for op in updates}
        self._head = {op.slot for op in schedule.ops if op.kind is Kind.HEAD}

    def _weights(self, layer: int) -> list[Access]:
        """Return what a load reads of a layer that is updated."""
        return [("read", ("weights", layer), "updated")] if layer in self._updated else []

    def of(self, op: Op) -> list[Access]:
        layer = -1 if op.layer is None else op.layer
        is_visit = op.lane is Lane.COMPUTE
        return (self._visited if is_visit else self._moved)(op, layer, op.micro_batch)

    def _kept(self, mode: str, layer: int, m: int | None) -> Access:
        return mode, ("input", m, layer % 2 if self._is_stashed else layer), layer

    def _carried(self, mode: str, op: Op) -> list[Access]:
        place = ("carried", op.carrier)
        return [] if op.carrier is None else [(mode, place, (op.layer, op.micro_batch))]

    def _updating(self, op: Op, layer: int) -> list[Access]:
        return [("read", ("sink", layer), None), ("write", ("weights", layer), "updated")]

    def _looked_up(self, op: Op, m: int | None) -> list[Access]:
        if op.kind is Kind.LOOK_UP:
            return [("write", ("gathered", op.buffer), m)]
        return [("read", ("gathered", op.buffer), m), ("write", ("rows", op.buffer), m)]

    def _reduced(self, op: Op, layer: int) -> list[Access]:
        layers = [layer] if op.layer is not None else range(-1, self._last_layer + 1)
        return [("read", ("gradients of the rank", i), "of a step") for i in layers]

    def _filled(self, op: Op, layer: int) -> list[Access]:
        if op.kind is Kind.HEAD:
            return [("add", ("slot", op.slot), "head")]
        staged: Access = ("read", ("staging", op.buffer), (layer, op.offset))
        filled: Access = ("add", ("slot", op.slot), layer)
        return [*self._weights(layer), filled] if op.buffer is None else [staged, filled]

    def _moved(self, op: Op, layer: int, m: int | None) -> list[Access]:
        if op.kind is Kind.REDUCE:
            return self._reduced(op, layer)
        if op.kind is Kind.UPDATE:
            return self._updating(op, layer)
        if op.kind in (Kind.LOOK_UP, Kind.ROWS):
            return self._looked_up(op, m)
        if op.kind is Kind.READ:
            staged = ("write", ("staging", op.buffer), (layer, op.offset))
            return [*self._weights(layer), staged]
        if op.kind in (Kind.LOAD, Kind.HEAD):
            return self._filled(op, layer)
        if op.kind is Kind.STASH:
            return [self._kept("read", layer, m), ("write", ("stash", layer, m), None)]
        if op.kind is Kind.FETCH:
            fetched = ("write", ("fetched", op.buffer), (layer, m))
            return [("read", ("stash", layer, m), None), fetched]
        if op.kind is Kind.SEND:
            carried = ("read", ("carried", op.carrier), (layer, m))
            return [carried, ("write", ("sent", layer, m), None)]
        if op.kind is Kind.RETURN:
            carried = ("write", ("carried", op.carrier), (layer, m))
            return [("read", ("sent", layer, m), None), carried]
        assert op.kind is Kind.GRADIENT
        sunk: Access = ("write" if not op.offset else "add", ("sink", layer), "new")
        return [("read", ("gradient", op.buffer), layer), sunk]

    def _visited(self, op: Op, layer: int, m: int | None) -> list[Access]:
        written = ("read", ("slot", op.slot), layer)
        weights = ("read", "decoded", layer) if layer in self._encoded else written
        if op.kind is Kind.DECODE:
            return [written, ("write", "decoded", layer)]
        if op.kind is Kind.FRONT:
            read: list[Access] = [] if op.buffer is None else [("read", ("rows", op.buffer), m)]
            return [*read, self._kept("write", 0, m)]
        if op.kind in (Kind.FORWARD, Kind.REFERENCE):
            graph: list[Access] = [("write", ("graph", layer, m), None)] if op.has_graph else []
            return [
                weights,
                self._kept("read", layer, m),
                self._kept("write", layer + 1, m),
                *graph,
                *self._carried("write", op),
            ]
        head: list[Access] = [("read", ("slot", slot), "head") for slot in self._head]
        if op.kind is Kind.SCORE:
            scored = self._kept("read", self._last_layer + 1, m)
            return [scored, *head, ("add", "scores", "of all")]
        if op.kind is Kind.OBJECTIVE:
            return [("read", "scores", "of all"), ("write", "weights of scores", None)]
        if op.kind is Kind.TAIL:
            worth: list[Access] = [("read", "weights of scores", None)] if self._is_scored else []
            return [self._kept("read", self._last_layer + 1, m), *head, *worth, _OUTER]
        if op.kind is Kind.BACKWARD:
            own: Access = ("read", ("graph", layer, m), None)
            if not op.has_graph:
                fetched: Access = ("read", ("fetched", op.buffer), (layer, m))
                is_fetched = self._is_stashed and layer < self._last_layer
                own = fetched if is_fetched else self._kept("read", layer, m)
            gathered = ("add", ("gradient", layer % 2), layer)
            carried = self._carried("read", op)
            final: Access = ("add", ("gradients of the rank", layer), "of a step")
            return [weights, own, *carried, *([gathered] if layer in self._trained else []), final]
        left: Access = ("write", ("rows", op.buffer), ("gradients", m))
        rows = [] if op.buffer is None else [left]
        return [_OUTER, *rows] if op.kind is Kind.FRONT_BACKWARD else []


def check_order(schedule: Schedule) -> None:
    """Check each access: what it must follow has ended when it starts.

    A read must follow all writes of what it wants; a write of something new must follow all reads
    and writes of what was there.
    """
    before = ancestors(schedule)
    content: dict[object, object] = {
        ("slot", slot): layer for slot, layer in enumerate(schedule.ring_before)
    }
    writers: dict[object, list[int]] = {}
    readers: dict[object, list[int]] = {}
    accesses = Accesses(schedule)
    for number, op in enumerate(schedule.ops):
        for mode, place, wanted in accesses.of(op):
            if mode == "read":
                assert content.get(place) == wanted
                assert before[number].issuperset(writers.get(place, ()))
                readers.setdefault(place, []).append(number)
            elif mode != "add" or content.get(place) != wanted:
                if mode == "change":
                    assert isinstance(wanted, tuple)
                    was, wanted = wanted
                    assert content.get(place) == was
                assert before[number].issuperset(readers.get(place, ()))
                assert before[number].issuperset(writers.get(place, ()))
                content[place], readers[place], writers[place] = wanted, [], [number]
            else:
                writers[place].append(number)
    of_trained = (Kind.GRADIENT, Kind.UPDATE)
    trained = {op.layer for op in schedule.ops if op.kind in of_trained}
    slots = (content[("slot", slot)] for slot in range(len(schedule.ring_before)))
    assert schedule.ring_after == tuple(None if i in trained or i == "head" else i for i in slots)
