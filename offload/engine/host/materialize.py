"""Temporarily decodes encoded layers, for code that must read weights before they stream."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from offload.engine.host.mapping import aligned_empty
from offload.engine.host.slab import Slab, give_back
from offload.engine.host.store import Store


@contextmanager
def values_shown(backing: Slab | Store, layer: int) -> Iterator[None]:
    """Let a layer's parameters show their values instead of placeholders, inside a block.

    They are decoded to separate host memory, the size of one layer. Changes to them are lost.

    Args:
        backing: Where the layers are stored; it has adopted the parameters.
        layer: Which layer.

    Raises:
        TransferError: The layer cannot be read.
    """
    record = backing.records[layer]
    shown = [field.parameter.data for field in record.fields]
    if record.decoded_bytes:
        if isinstance(backing, Slab):
            memory = backing.layer(layer)
        else:
            memory = aligned_empty(record.num_bytes)
            backing.read_into(layer, memory)
        give_back(record, memory, torch.device("cpu"))
    try:
        yield
    finally:
        for field, tensor in zip(record.fields, shown, strict=True):
            field.parameter.data = tensor
