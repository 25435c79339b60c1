"""The device side of the weights: C slots, allocated once, and where encoded layers are decoded.

A layer's parameters permanently alias its slot, or the decoded buffer, which all encoded layers
share: no address changes while the engine is attached.

An output head that waits in host memory computes in the slots too, over several of them, and its
gradient is added up there. They are one block of memory then, of at least the size of both.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from offload.engine.host.layer_layout import Record
from offload.engine.host.stash import Allocate
from offload.engine.memory_meter import Arena
from offload.plan.schedule.head import gradient_start, head_slots, room_bytes, slots_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadMemory:
    """Memory of slots that an output head computes in, uint8.

    Attributes:
        weight: Of its weight.
        gradient: Of the sum of its gradient, after it; empty if the head is frozen.
    """

    weight: torch.Tensor
    gradient: torch.Tensor


class Slots:
    """C flat buffers, each as large as the largest layer; layer l uses slot l mod C.

    A layer with encoded fields computes in the decoded buffer, which holds one layer at a time.
    """

    def __init__(
        self,
        records: Sequence[Record],
        *,
        num_slots: int,
        allocate_device: Allocate,
        staging: Sequence[torch.Tensor],
        head_bytes: int,
        head_gradient_bytes: int,
    ) -> None:
        """Allocate the buffers and bind every layer's parameters to where they compute.

        After this a parameter holds its layer's weights only while that memory does.

        Args:
            records: One per layer.
            num_slots: Number of slots.
            allocate_device: Returns uint8 memory on the compute device.
            staging: Host buffers that loads go through, if any.
            head_bytes: Of an output head that computes in the slots; 0 if there is none.
            head_gradient_bytes: Of its gradient; 0 if it is frozen.
        """
        slot_bytes = max(record.num_bytes for record in records)
        room = room_bytes(head_bytes, head_gradient_bytes)
        self.head: HeadMemory | None = None
        """Where the output head computes, if it does so in the slots."""
        if head_bytes:
            block = allocate_device(slots_bytes(num_slots, slot_bytes, room))
            starts = [slot_bytes * slot for slot in range(num_slots + 1)]
            self._buffers, blocks = [block[a:b] for a, b in pairwise(starts)], [block]
            sizes = [record.num_bytes for record in records]
            start = starts[head_slots(sizes, num_slots, room).start]
            after = start + gradient_start(head_bytes)
            self.head = HeadMemory(
                weight=block[start : start + head_bytes],
                gradient=block[after : after + head_gradient_bytes],
            )
        else:
            self._buffers = blocks = [allocate_device(slot_bytes) for _ in range(num_slots)]
        self._staging = list(staging)
        self._records = tuple(records)
        decoded_bytes = max(record.decoded_bytes for record in records)
        self._decoded = allocate_device(decoded_bytes)
        self.num_bytes = slots_bytes(num_slots, slot_bytes, room) + decoded_bytes
        self.arenas = (
            Arena(name="slots", blocks=blocks),
            Arena(name="decoded layer", blocks=[self._decoded]),
        )
        for layer, record in enumerate(records):
            buffer = self._buffers[layer % num_slots]
            for field in record.fields:
                field.parameter.data = (
                    field.decoded(self._decoded) if record.decoded_bytes else field.view(buffer)
                )

    def target(self, slot: int, offset: int, num_bytes: int) -> torch.Tensor:
        """Return the place in a slot that a piece of a record is copied to."""
        return self._buffers[slot][offset : offset + num_bytes]

    def memory(self, slot: int) -> torch.Tensor:
        """Return a slot."""
        return self._buffers[slot]

    def decode(self, layer: int, slot: int) -> None:
        """Decode a layer from its slot, on the running lane."""
        for field in self._records[layer].fields:
            field.decode(self._buffers[slot], self._decoded)

    def staging(self, buffer: int, num_bytes: int) -> torch.Tensor:
        """Return the first bytes of a staging buffer."""
        return self._staging[buffer][:num_bytes]
