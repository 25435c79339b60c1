"""The output head in host memory: which slots it is copied to once per step, and when.

Problem. The head of a large vocabulary takes a gigabyte or more of device memory all the time, and
computes only between the last forward visit and the first backward visit.

Idea. The head is one more visit at the turn of the snake ring. Its weight is copied over the slots
of the layers that were visited longest ago, as they are needed again last. These layers are loaded
again on the way down, each before its backward visit. So the head takes no memory of its own, and
its copy runs while the last layers compute, as that of a layer does.

Layout. The weight is one matrix, so its slots follow one another in memory. Where all slots are
smaller than the head, their memory is as large as the head.

Cost. On the link a step moves the head, and as many layers again as the head covers slots. In
return the device has room for that many more slots, each of which saves two loads.

Rejected. A buffer that is allocated for the head alone: unless it is given back it saves nothing,
and a piece of a gigabyte rarely comes back to the allocator whole. Slices of the vocabulary through
a small buffer: the loss then needs all logits twice.
"""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from offload.plan.schedule.hazards import Line
from offload.plan.schedule.op import Kind, Lane, Op
from offload.plan.schedule.updates import slot_of

if TYPE_CHECKING:
    from offload.plan.schedule.schedule import TransferSizes


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


def head_copies(slots: range, sizes: "TransferSizes") -> Iterator[Line]:
    """Yield the copies of the head over its slots, a line for each slot.

    The end of the weight is in the last of its slots, or after it.
    """
    slot_bytes = max(sizes.layer_bytes)
    for number, slot in enumerate(slots):
        start = number * slot_bytes
        end = sizes.head_bytes if slot == slots[-1] else start + slot_bytes
        copy = Op(lane=Lane.H2D, kind=Kind.HEAD, slot=slot)
        pieces = copy.pieces(end - start, sizes.head_piece_bytes)
        ops = tuple(piece._replace(offset=start + piece.offset) for piece in pieces)
        yield Line(ops=ops, writes=(slot_of(slot),))
