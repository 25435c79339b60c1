"""The device side of the weights: C slots, allocated once, and where encoded layers are decoded.

A layer's parameters permanently alias its slot, or the decoded buffer, which all encoded layers
share: no address changes while the engine is attached.

An output head that waits in host memory computes in the slots too, over several of
them. They are one block of memory then, of at least its size.
"""

from collections.abc import Sequence
from itertools import pairwise

import torch

from offload.engine.host.slab import Allocate, Record
from offload.engine.internals import refer
from offload.engine.memory_meter import Arena
from offload.plan.schedule.schedule import head_slots, slots_bytes


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
    ) -> None:
        """Allocate the buffers and bind every layer's parameters to where they compute.

        After this a parameter holds its layer's weights only while that memory does.

        Args:
            records: One per layer.
            num_slots: Number of slots.
            allocate_device: Returns uint8 memory on the compute device.
            staging: Host buffers that loads go through, if any.
            head_bytes: Size of an output head that computes in the slots; 0 if there is none.
        """
        slot_bytes = max(record.num_bytes for record in records)
        self.head: torch.Tensor | None = None
        """Where the output head's weight computes, uint8, if it does so in the slots."""
        if head_bytes:
            block = allocate_device(slots_bytes(num_slots, slot_bytes, head_bytes))
            starts = [slot_bytes * slot for slot in range(num_slots + 1)]
            self._buffers, blocks = [block[a:b] for a, b in pairwise(starts)], [block]
            sizes = [record.num_bytes for record in records]
            start = starts[head_slots(sizes, num_slots, head_bytes).start]
            self.head = block[start : start + head_bytes]
        else:
            self._buffers = blocks = [allocate_device(slot_bytes) for _ in range(num_slots)]
        self._staging = list(staging)
        self._records = tuple(records)
        decoded_bytes = max(record.decoded_bytes for record in records)
        self._decoded = allocate_device(decoded_bytes)
        self.num_bytes = slots_bytes(num_slots, slot_bytes, head_bytes) + decoded_bytes
        self.arenas = (
            Arena(name="slots", blocks=blocks),
            Arena(name="decoded layer", blocks=[self._decoded]),
        )
        for layer, record in enumerate(records):
            buffer = self._buffers[layer % num_slots]
            for field in record.fields:
                is_decoded = bool(record.decoded_bytes)
                refer(
                    field.parameter,
                    field.decoded(self._decoded) if is_decoded else field.view(buffer),
                )

    def target(self, slot: int, offset: int, num_bytes: int) -> torch.Tensor:
        """Return the place in a slot that a piece of a record is copied to."""
        return self._buffers[slot][offset : offset + num_bytes]

    def decode(self, layer: int, slot: int) -> None:
        """Decode a layer from its slot, on the running lane."""
        for field in self._records[layer].fields:
            field.decode(self._buffers[slot], self._decoded)

    def staging(self, buffer: int, num_bytes: int) -> torch.Tensor:
        """Return the first bytes of a staging buffer."""
        return self._staging[buffer][:num_bytes]
