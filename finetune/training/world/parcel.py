"""A value to send to other processes: pickled, with its large parts apart.

`pickle` copies each tensor several times and holds the interpreter meanwhile: two seconds per 0.8
GB, in which a process gives no sign of life. So tensors in host memory travel as they lie there.
"""

import io
import pickle
from typing import Any

import torch


def packed(value: object) -> tuple[bytes, list[torch.Tensor]]:
    """Return a value as bytes, and its tensors that are sent by themselves.

    A tensor that is a part of another one's memory, or trains, is pickled with the rest.
    """
    content = io.BytesIO()
    pickler = _Pickler(content)
    pickler.dump(value)
    return content.getvalue(), pickler.tensors


def unpacked(content: bytes | memoryview) -> tuple[Any, list[torch.Tensor]]:
    """Return a packed value, and those of its tensors whose values are still to come, in order."""
    unpickler = _Unpickler(io.BytesIO(content))
    value = unpickler.load()
    return value, unpickler.tensors


def memory_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a contiguous tensor, (N,), in its own memory."""
    return tensor.view(-1).view(torch.uint8)


class _Pickler(pickle.Pickler):
    """Writes where in the list a tensor is, and what it looks like, in place of its values."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.tensors: list[torch.Tensor] = []
        self._places: dict[int, int] = {}

    def persistent_id(self, obj: Any) -> tuple[int, torch.Size, torch.dtype] | None:
        if type(obj) is not torch.Tensor or not _is_apart(obj):
            return None
        place = self._places.setdefault(id(obj), len(self.tensors))
        if place == len(self.tensors):
            self.tensors.append(obj)
        return place, obj.shape, obj.dtype


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.tensors: list[torch.Tensor] = []

    def persistent_load(self, pid: tuple[int, torch.Size, torch.dtype]) -> torch.Tensor:
        place, shape, dtype = pid
        if place == len(self.tensors):
            self.tensors.append(torch.empty(shape, dtype=dtype))
        return self.tensors[place]


def _is_apart(tensor: torch.Tensor) -> bool:
    return (
        tensor.device.type == "cpu"
        and tensor.layout is torch.strided
        and not tensor.requires_grad
        and tensor.is_contiguous()
        and tensor.numel() > 0
        and tensor.untyped_storage().nbytes() == tensor.nbytes
    )
