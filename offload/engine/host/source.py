"""Access to layers that are in no slot, in host memory or in a store."""

from collections.abc import Callable
from typing import Protocol

import torch

from offload.engine.host.slab import Slab

Copy = Callable[[torch.Tensor, torch.Tensor], None]
"""Copies the bytes of its second argument into its first."""


class LayerSource(Protocol):
    """The records of all layers."""

    def deliver(self, layer: int, offset: int, target: torch.Tensor, copy: Copy) -> None:
        """Fill `target`, uint8, with a layer's bytes from `offset` on.

        Memory is copied by `copy`, which the running lane provides; a file is read.
        """


class SlabSource:
    """Layers in host memory."""

    def __init__(self, slab: Slab) -> None:
        """Use the layers of this slab."""
        self._slab = slab

    def deliver(self, layer: int, offset: int, target: torch.Tensor, copy: Copy) -> None:
        """Copy a piece of the layer's record."""
        copy(target, self._slab.layer(layer)[offset : offset + target.numel()])
