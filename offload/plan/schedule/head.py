"""The output head in host memory: which slots it is copied to once per step, and when.

Problem. The head of a large vocabulary takes a gigabyte or more of device memory all the time, and
computes only between the last forward visit and the first backward visit.

Idea. The head is one more visit at the turn of the snake ring. Its weight is copied over the slots
of the layers that were visited longest ago, as they are needed again last. These layers are loaded
again on the way down, each before its backward visit. So the head takes no memory of its own, and
its copy runs while the last layers compute, as that of a layer does.

Layout. The weight is one matrix, so its slots follow one another in memory. Where all slots are
smaller than the head, their memory is as large as the head.

A head that trains there has its gradient in the slots too, after the weight: the ops after the last
layer add it up for the whole step. It leaves for host memory as soon as the last of them has ended,
and layers are loaded over it once it has left. Slots that hold nothing but the weight are free
before.

Cost. On the link a step moves the head, and as many layers again as the head covers slots. In
return the device has room for that many more slots, each of which saves two loads.

Rejected. A buffer that is allocated for the head alone: unless it is given back it saves nothing,
and a piece of a gigabyte rarely comes back to the allocator whole. Slices of the vocabulary through
a small buffer: the loss then needs all logits twice.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from offload.plan.schedule.hazards import Line, Resource
from offload.plan.schedule.op import Kind, Lane, Op
from offload.plan.schedule.updates import slot_of

if TYPE_CHECKING:
    from offload.plan.schedule.schedule import TransferSizes

GRADIENT_ALIGN_BYTES = 256  # where its gradient begins after a weight of any size


def slots_bytes(num_slots: int, slot_bytes: int, head_bytes: int) -> int:
    """Return the memory of all slots; that of a head in host memory is within it."""
    return max(num_slots * slot_bytes, head_bytes)


def held_at_turn(num_layers: int, num_slots: int, slot: int) -> int:
    """Return the layer that a slot holds at the end of a sweep upwards, before the head."""
    oldest = num_layers - num_slots
    return oldest + (slot - oldest) % num_slots


def head_slots(layer_bytes: Sequence[int], num_slots: int, head_bytes: int) -> range:
    """Return the slots that the head is copied to, one after another; none without a head.

    Of all places it is that whose layers were visited longest ago at the end of a sweep upwards.

    Args:
        layer_bytes: What each layer takes in a slot.
        num_slots: Slots, each as large as the largest layer.
        head_bytes: Of the head; 0 if it is not copied.
    """
    if not head_bytes:
        return range(0)
    num_covered = min(num_slots, -(-head_bytes // max(layer_bytes)))

    def newest(start: int) -> int:
        slots = range(start, start + num_covered)
        return max(held_at_turn(len(layer_bytes), num_slots, slot) for slot in slots)

    start = min(range(num_slots - num_covered + 1), key=newest)
    return range(start, start + num_covered)


def gradient_start(head_bytes: int) -> int:
    """Return where the gradient of a head begins, from the start of the weight."""
    return -(-head_bytes // GRADIENT_ALIGN_BYTES) * GRADIENT_ALIGN_BYTES


def room_bytes(head_bytes: int, gradient_bytes: int) -> int:
    """Return what a head takes in the slots: its weight, and its gradient if it trains."""
    return gradient_start(head_bytes) + gradient_bytes if gradient_bytes else head_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadPlace:
    """The slots that a head computes in; none if the device has it elsewhere.

    Attributes:
        weight: Those that its weight is copied to, one after another.
        gradient: Those that its gradient is added up in; the first may be the weight's last.
    """

    weight: range = range(0)
    gradient: range = range(0)

    @classmethod
    def of(
        cls, layer_bytes: Sequence[int], num_slots: int, head_bytes: int, gradient_bytes: int
    ) -> "HeadPlace":
        """Choose them; what is too large for all slots counts as in the last one.

        Args:
            layer_bytes: What each layer takes in a slot.
            num_slots: Slots, each as large as the largest layer.
            head_bytes: Of the weight; 0 if it is not copied.
            gradient_bytes: Of its gradient; 0 if it is frozen.
        """
        slots = head_slots(layer_bytes, num_slots, room_bytes(head_bytes, gradient_bytes))
        if not slots:
            return cls()
        slot_bytes, last = max(layer_bytes), len(slots) - 1
        end = min(last, (head_bytes - 1) // slot_bytes)
        first = min(last, gradient_start(head_bytes) // slot_bytes)
        gradient = slots[first:] if gradient_bytes else range(0)
        return cls(weight=slots[: end + 1], gradient=gradient)

    def covered(self, *, adds_up: bool) -> frozenset[int]:
        """Return the slots whose layers are gone after it; `adds_up` if gradients are computed."""
        return frozenset((*self.weight, *self.gradient) if adds_up else self.weight)

    @property
    def read(self) -> tuple[Resource, ...]:
        """What an op reads that computes with the head."""
        return tuple(map(slot_of, self.weight))

    @property
    def added_up(self) -> tuple[Resource, ...]:
        """What an op writes that adds to the gradient; none if the head is frozen."""
        return (*map(slot_of, self.gradient), *([_GRADIENT] if self.gradient else []))


def head_copies(place: HeadPlace, sizes: "TransferSizes") -> Iterator[Line]:
    """Yield the copies of the head over its slots, a line for each slot.

    The end of the weight is in the last of its slots, or after it.
    """
    slot_bytes = max(sizes.layer_bytes)
    for number, slot in enumerate(place.weight):
        start = number * slot_bytes
        end = sizes.head_bytes if slot == place.weight[-1] else start + slot_bytes
        copy = Op(lane=Lane.H2D, kind=Kind.HEAD, slot=slot)
        pieces = copy.pieces(end - start, sizes.head_piece_bytes)
        ops = tuple(piece._replace(offset=start + piece.offset) for piece in pieces)
        yield Line(ops=ops, writes=(slot_of(slot),))


def leaving_head_gradient(sizes: "TransferSizes", num_slots: int) -> Iterator[Line]:
    """Yield the copies of the head's gradient to the host; none if it is frozen."""
    place = sizes.head_place(num_slots)
    if place.gradient:
        op = Op(lane=Lane.D2H, kind=Kind.HEAD_GRADIENT)
        pieces = op.pieces(sizes.head_gradient_bytes, sizes.head_piece_bytes)
        yield Line(ops=pieces, reads=place.added_up)


_GRADIENT: Resource = ("gradient of the head", 0, 0)
"""What of it is after all slots, in memory that no layer uses."""
