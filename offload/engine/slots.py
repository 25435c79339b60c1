"""The device side of the weights: C slots, allocated once.

The layers' parameters alias them for good: no address changes while the engine is attached.
"""

from collections.abc import Sequence

import torch

from offload.engine.slab import Record


class Slots:
    """C flat buffers, each as large as the largest layer; layer l lives in slot l mod C."""

    def __init__(
        self, records: Sequence[Record], *, num_slots: int, torch_device: torch.device
    ) -> None:
        """Allocate the buffers and bind every layer's parameters to its slot.

        After this a parameter holds its layer's weights only while the slot does.
        """
        slot_bytes = max(record.num_bytes for record in records)
        self._buffers = [
            torch.empty(slot_bytes, dtype=torch.uint8, device=torch_device)
            for _ in range(num_slots)
        ]
        self.num_bytes = slot_bytes * num_slots
        for layer, record in enumerate(records):
            buffer = self._buffers[layer % num_slots]
            for field in record.fields:
                field.parameter.data = field.view(buffer)

    def target(self, slot: int, num_bytes: int) -> torch.Tensor:
        """Return the first bytes of a slot, where a record of that size is copied to."""
        return self._buffers[slot][:num_bytes]
