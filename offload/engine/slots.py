"""The device side of the weights: C slots, allocated once.

The layers' parameters alias them for good: no address changes while the engine is attached.
"""

from collections.abc import Sequence

import torch

from offload.engine.host.slab import Record
from offload.engine.stash import Allocate


class Slots:
    """C flat buffers, each as large as the largest layer; layer l lives in slot l mod C."""

    def __init__(
        self,
        records: Sequence[Record],
        *,
        num_slots: int,
        allocate_device: Allocate,
        staging: Sequence[torch.Tensor],
    ) -> None:
        """Allocate the buffers and bind every layer's parameters to its slot.

        After this a parameter holds its layer's weights only while the slot does.

        Args:
            records: One per layer.
            num_slots: How many.
            allocate_device: Returns uint8 memory on the compute device.
            staging: Host buffers that loads pass on their way, if they do.
        """
        slot_bytes = max(record.num_bytes for record in records)
        self._buffers = [allocate_device(slot_bytes) for _ in range(num_slots)]
        self._staging = list(staging)
        self.num_bytes = slot_bytes * num_slots
        for layer, record in enumerate(records):
            buffer = self._buffers[layer % num_slots]
            for field in record.fields:
                field.parameter.data = field.view(buffer)

    def target(self, slot: int, offset: int, num_bytes: int) -> torch.Tensor:
        """Return the place in a slot that a piece of a record is copied to."""
        return self._buffers[slot][offset : offset + num_bytes]

    def staging(self, buffer: int, num_bytes: int) -> torch.Tensor:
        """Return the first bytes of a staging buffer."""
        return self._staging[buffer][:num_bytes]
