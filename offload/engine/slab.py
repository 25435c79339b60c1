"""The host side of the weights: one page-aligned block of memory, one flat record per layer.

A record has the layout of the slot that it is copied to, so a load is one copy. The block is
mapped at its exact size and, for a GPU, page-locked in place: torch's own pinned allocator would
round it up to a power of two.
"""

import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import nn

from offload.errors import TransferError
from offload.plan.machine import GIB

_ALIGN_BYTES = 256


@dataclass(frozen=True, kw_only=True, slots=True)
class Field:
    """One parameter's place in its layer's record."""

    parameter: nn.Parameter
    offset: int
    num_bytes: int
    shape: torch.Size
    dtype: torch.dtype

    def view(self, record: torch.Tensor) -> torch.Tensor:
        """Return this parameter's tensor inside a flat uint8 record."""
        flat = record[self.offset : self.offset + self.num_bytes]
        return flat.view(self.dtype).view(self.shape)


@dataclass(frozen=True, kw_only=True, slots=True)
class Record:
    """The fields of one layer and their total size, aligned."""

    fields: tuple[Field, ...]
    num_bytes: int

    @property
    def weight_bytes(self) -> int:
        """Bytes of the parameters themselves, without alignment."""
        return sum(field.num_bytes for field in self.fields)


def lay_out(parameters: Sequence[nn.Parameter]) -> Record:
    """Place the parameters of one layer one behind the other."""
    fields = []
    offset = 0
    for parameter in parameters:
        num_bytes = parameter.numel() * parameter.element_size()
        fields.append(
            Field(
                parameter=parameter,
                offset=offset,
                num_bytes=num_bytes,
                shape=parameter.shape,
                dtype=parameter.dtype,
            )
        )
        offset += -(-num_bytes // _ALIGN_BYTES) * _ALIGN_BYTES
    return Record(fields=tuple(fields), num_bytes=offset)


class Slab:
    """The records of all layers in one block of host memory."""

    def __init__(self, records: Sequence[Record]) -> None:
        """Map the block; its pages take memory as they are filled.

        Args:
            records: One per layer.
        """
        self.records = tuple(records)
        offsets = [0]
        for record in records:
            offsets.append(offsets[-1] + record.num_bytes)
        self.num_bytes = offsets[-1]
        self._memory = mmap.mmap(-1, max(1, self.num_bytes))
        self._block = torch.frombuffer(self._memory, dtype=torch.uint8)[: self.num_bytes]
        self._layers = [self._block[start:end] for start, end in pairwise(offsets)]
        self._is_page_locked = False

    def layer(self, layer: int) -> torch.Tensor:
        """Return a layer's record, uint8 (record.num_bytes,)."""
        return self._layers[layer]

    def take(self, layer: int) -> None:
        """Copy a layer's parameters in from where they are and let them alias the record.

        The memory that they had before is free once nobody else holds it.
        """
        for field in self.records[layer].fields:
            view = field.view(self._layers[layer])
            view.copy_(field.parameter.data)
            field.parameter.data = view

    def give_back(self, layer: int, torch_device: torch.device) -> None:
        """Give a layer's parameters memory of their own again, on `torch_device`."""
        for field in self.records[layer].fields:
            view = field.view(self._layers[layer])
            field.parameter.data = view.clone().to(torch_device)

    def page_lock(self) -> None:
        """Register the filled block with CUDA, so that copies from it are asynchronous.

        Raises:
            TransferError: The system does not allow it.
        """
        status = int(
            torch.cuda.cudart().cudaHostRegister(self._block.data_ptr(), self.num_bytes, 0)
        )
        if status != 0:
            raise TransferError(
                f"page-locking {self.num_bytes / GIB:.2f} GiB of host memory failed"
                f" (CUDA error {status})",
                limit="the system allows less page-locked memory than the model's layers need",
                hint="raise the limit (`ulimit -l unlimited`; on WSL2 it is 1 to 2 GiB),"
                " or train a smaller model",
            )
        self._is_page_locked = True

    def close(self) -> None:
        """Unlock the pages. The memory is freed with the last view of it."""
        if self._is_page_locked:
            torch.cuda.cudart().cudaHostUnregister(self._block.data_ptr())
            self._is_page_locked = False
