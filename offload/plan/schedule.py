"""The step as a value: one list of ops, simulated for the prediction and run for the training.

Problem. L layers share C < L slots of device memory. Each layer is visited twice per optimizer
step, upwards in the forward and downwards in the backward, and every visit needs its layer's
weights in a slot.

Idea. The *vertical snake ring*: slot = layer mod C, and all micro-batches of a step pass a layer
before the next layer is fetched. The visits run 0..L-1, L-1..0, 0..L-1, a snake, for which
evicting the least recently used layer is optimal and equals this fixed map. The last C layers of
the forward are still in place for the backward and the first C for the next forward, so a step
loads 2 * (L - C) layers, whatever the number of micro-batches.

Layout. Ops are listed in an order in which they can be issued: an op stands behind every op that
it waits for, and a load stands right behind the visit that frees its slot, which is as early as
it can be issued. Lanes are FIFO, so `waits` names only ops of other lanes.

Rejected. A dynamic cache: the same loads, but slot addresses change, so parameters would have to
be bound again at each visit. The micro-batch-major order is kept, as the baseline that everybody
else runs: it loads 2 * M * (L - C) layers.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

MIN_SLOTS = 2  # a layer computes in one while the next arrives in another


class Lane(StrEnum):
    """A FIFO queue of ops, such as a CUDA stream."""

    COMPUTE = "compute"
    H2D = "h2d"


class Kind(StrEnum):
    """What an op does."""

    FRONT = "front"
    LOAD = "load"
    FORWARD = "forward"
    TAIL = "tail"
    BACKWARD = "backward"
    FRONT_BACKWARD = "front_backward"


class Order(StrEnum):
    """Which loop is the outer one: layers, or micro-batches."""

    LAYER_MAJOR = "layer_major"
    MICRO_BATCH_MAJOR = "micro_batch_major"


@dataclass(frozen=True, kw_only=True, slots=True)
class Op:
    """One piece of work on one lane.

    `waits` holds positions in the op list, always smaller than the op's own.
    """

    lane: Lane
    kind: Kind
    layer: int | None = None
    micro_batch: int | None = None
    slot: int | None = None
    num_bytes: int = 0
    waits: tuple[int, ...] = ()


Ring = tuple[int | None, ...]
"""Which layer each slot holds; None is an empty slot."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """The ops of one pass, the ring it started from and the ring it leaves."""

    ops: tuple[Op, ...]
    ring_before: Ring
    ring_after: Ring

    @property
    def num_loads(self) -> int:
        """Layers copied from host to device."""
        return sum(op.kind is Kind.LOAD for op in self.ops)

    @property
    def h2d_bytes(self) -> int:
        """Bytes copied from host to device."""
        return sum(op.num_bytes for op in self.ops if op.lane is Lane.H2D)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Visit:
    """All work at one layer, in one direction, while its weights stand in their slot."""

    kind: Kind
    layer: int | None
    micro_batches: tuple[int, ...]


def cold_ring(num_slots: int) -> Ring:
    """Return a ring whose slots are all empty."""
    return (None,) * num_slots


def warm_ring(num_slots: int) -> Ring:
    """Return the ring that a training step leaves behind: layers 0..C-1."""
    return tuple(range(num_slots))


def training_schedule(
    *,
    layer_bytes: Sequence[int],
    ring: Ring,
    num_micro_batches: int,
    order: Order,
    trains_front: bool,
) -> Schedule:
    """List the ops of one optimizer step, without the optimizer.

    Args:
        layer_bytes: Cargo of each layer, in forward order.
        ring: What the slots hold at the start; its length is the number of slots.
        num_micro_batches: Micro-batches of the step.
        order: Layer-major, or micro-batch-major as a baseline.
        trains_front: Whether a gradient has to go back through the embeddings.

    Returns:
        A schedule with 2 * (L - C) loads from a warm ring in layer-major order.
    """
    everything = tuple(range(num_micro_batches))
    groups = [everything] if order is Order.LAYER_MAJOR else [(m,) for m in everything]
    upwards = range(len(layer_bytes))
    visits = []
    for group in groups:
        visits.append(_Visit(kind=Kind.FRONT, layer=None, micro_batches=group))
        visits += [_Visit(kind=Kind.FORWARD, layer=i, micro_batches=group) for i in upwards]
        visits.append(_Visit(kind=Kind.TAIL, layer=None, micro_batches=group))
        visits += [
            _Visit(kind=Kind.BACKWARD, layer=i, micro_batches=group) for i in reversed(upwards)
        ]
        if trains_front:
            visits.append(_Visit(kind=Kind.FRONT_BACKWARD, layer=None, micro_batches=group))
    return _issue(visits, layer_bytes, ring)


def forward_schedule(*, layer_bytes: Sequence[int], ring: Ring, num_micro_batches: int) -> Schedule:
    """List the ops of one pass without gradients, for evaluation and generation.

    The ring is left at the top of the snake, so the next pass upwards starts with reloads, which
    its own schedule counts.
    """
    everything = tuple(range(num_micro_batches))
    visits = [_Visit(kind=Kind.FRONT, layer=None, micro_batches=everything)]
    visits += [
        _Visit(kind=Kind.FORWARD, layer=i, micro_batches=everything)
        for i in range(len(layer_bytes))
    ]
    visits.append(_Visit(kind=Kind.TAIL, layer=None, micro_batches=everything))
    return _issue(visits, layer_bytes, ring)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Load:
    """A load that a visit needs, and the earlier visit (a position) that frees its slot."""

    visit: int
    layer: int
    freed_by: int | None


def _loads(visits: Sequence[_Visit], ring: Ring) -> tuple[list[_Load], Ring]:
    """Walk the visits over the ring and note every miss."""
    slots = list(ring)
    last_user: dict[int, int] = {}
    loads = []
    for position, visit in enumerate(visits):
        if visit.layer is None:
            continue
        slot = visit.layer % len(slots)
        if slots[slot] != visit.layer:
            loads.append(_Load(visit=position, layer=visit.layer, freed_by=last_user.get(slot)))
            slots[slot] = visit.layer
        last_user[slot] = position
    return loads, tuple(slots)


def _issue(visits: Sequence[_Visit], layer_bytes: Sequence[int], ring: Ring) -> Schedule:
    """Lay visits and loads out in one list, each load as early as its slot is free.

    A load is freed by a visit that stands before the visit that needs it, and loads keep the
    order of the visits, so when a visit is reached its load has been issued.
    """
    loads, ring_after = _loads(visits, ring)
    ops: list[Op] = []
    last_op_of_visit: dict[int, int] = {}
    op_of_load: dict[int, int] = {}
    next_load = 0
    for position, visit in enumerate(visits):
        while next_load < len(loads):
            load = loads[next_load]
            if load.freed_by is not None and load.freed_by not in last_op_of_visit:
                break
            waits = () if load.freed_by is None else (last_op_of_visit[load.freed_by],)
            op_of_load[load.visit] = len(ops)
            ops.append(
                Op(
                    lane=Lane.H2D,
                    kind=Kind.LOAD,
                    layer=load.layer,
                    slot=load.layer % len(ring),
                    num_bytes=layer_bytes[load.layer],
                    waits=waits,
                )
            )
            next_load += 1
        arrival = (op_of_load[position],) if position in op_of_load else ()
        for number, micro_batch in enumerate(visit.micro_batches):
            ops.append(
                Op(
                    lane=Lane.COMPUTE,
                    kind=visit.kind,
                    layer=visit.layer,
                    micro_batch=micro_batch,
                    slot=None if visit.layer is None else visit.layer % len(ring),
                    waits=arrival if number == 0 else (),
                )
            )
        last_op_of_visit[position] = len(ops) - 1
    return Schedule(ops=tuple(ops), ring_before=ring, ring_after=ring_after)
