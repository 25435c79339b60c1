"""A value to send to other processes: JSON, and the memory of its tensors.

Nothing that a process reads from another one can run code: JSON has numbers, texts, lists and
tables, and of objects only those of `_SENT` are made, by their fields. `pickle` makes any object,
and calls what its sender likes.

What JSON has no word for is an object with one key: `{"tuple": [...]}`, `{"Machine": {...}}`. A
tensor is `{"tensor": [dtype, shape]}`; its values follow apart, as they lie in memory. They are not
copied, and the interpreter is free while they are sent, so that a process gives signs of life.
"""

import json
import struct
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any, get_args, get_type_hints

import numpy as np
import torch

from finetune.planning.parallel import Shares
from finetune.recipe.recipe import Recipe
from finetune.recipe.sections import OffloadSection
from finetune.run.checkpoint import LossScale
from finetune.run.run_files import Evaluation, Evaluations
from offload.engine.host.slab import SlabHandle
from offload.plan.machine.machine import Machine
from offload.plan.memory.memory import TracedBytes
from offload.plan.plan import OtherRank
from offload.probe.energy import Taken

# With all that is in their fields.
_SENT = (
    *(Evaluation, Evaluations, LossScale, Machine, OtherRank, Shares, SlabHandle, Taken),
    TracedBytes,
)
_SETTINGS = {kind.__name__: kind for kind in (Recipe, OffloadSection)}
_SEQUENCES: dict[str, Callable[[list[Any]], Any]] = {
    kind.__name__: kind for kind in (tuple, set, frozenset)
}
_DTYPES = {str(one): one for one in vars(torch).values() if isinstance(one, torch.dtype)}
_LENGTH = struct.Struct(">Q")
_SHOWN = 200


class ParcelError(ValueError):
    """What another process has sent is no value that this one reads."""


def packed(value: object) -> tuple[str, list[torch.Tensor]]:
    """Return a value as JSON, and its tensors and arrays, in memory of the host.

    Raises:
        TypeError: It has a part that is not sent.
    """
    tensors: list[torch.Tensor] = []
    return json.dumps(_written(value, tensors)), tensors


def unpacked(content: str | bytes) -> tuple[Any, list[torch.Tensor]]:
    """Return a packed value, and its tensors whose values are still to come, in order.

    Raises:
        ParcelError: It is not one.
    """
    tensors: list[torch.Tensor] = []
    try:
        return _read(json.loads(content), tensors), tensors
    except (ValueError, TypeError, LookupError, AttributeError, RuntimeError) as error:
        raise ParcelError(f"{type(error).__name__}: {str(error)[:_SHOWN]!r}") from error


def sealed(value: object) -> torch.Tensor:
    """Return a value with the values of its tensors as bytes, (N,)."""
    text, tensors = packed(value)
    content = text.encode()
    parts = (_LENGTH.pack(len(content)), content, *map(_bytes_of, tensors))
    return torch.frombuffer(bytearray(b"".join(parts)), dtype=torch.uint8)


def opened(parcel: torch.Tensor) -> Any:
    """Return a sealed value.

    Raises:
        ParcelError: It is not one.
    """
    if len(parcel) < _LENGTH.size:
        raise ParcelError(f"{len(parcel)} bytes")
    (length,) = _LENGTH.unpack(_bytes_of(parcel[: _LENGTH.size]))
    rest = parcel[_LENGTH.size :]
    value, tensors = unpacked(_bytes_of(rest[:length]))
    parts = [memory_of(tensor) for tensor in tensors]
    if length + sum(map(len, parts)) != len(rest):
        raise ParcelError(f"{len(rest)} bytes are not those of the tensors that it names")
    for part, sent in zip(parts, rest[length:].split([len(one) for one in parts]), strict=True):
        part.copy_(sent)
    return value


def memory_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a contiguous tensor, (N,), in its own memory."""
    return tensor.view(-1).view(torch.uint8)


def _bytes_of(tensor: torch.Tensor) -> bytes:
    return memory_of(tensor).numpy().tobytes()


def _written(value: Any, tensors: list[torch.Tensor]) -> Any:
    """Return a value in JSON's words; its tensors are appended."""
    name = type(value).__name__
    is_plain = isinstance(value, (bool, int, float, str)) and not isinstance(value, Enum)
    if value is None or is_plain:
        return value
    if isinstance(value, list):
        return [_written(one, tensors) for one in value]
    if type(value) in _SEQUENCES.values():
        return {name: [_written(one, tensors) for one in value]}
    if isinstance(value, Mapping):
        pairs = [[_written(key, tensors), _written(one, tensors)] for key, one in value.items()]
        return {"dict": pairs}
    if isinstance(value, Path):
        return {"Path": str(value)}
    if isinstance(value, (torch.Tensor, np.ndarray)):
        return _written_tensor(value, tensors)
    if _SETTINGS.get(name) is type(value):
        return {name: value.model_dump_json(exclude_unset=True)}
    kind = _sent().get(name)
    if kind is not None and type(value) is kind:
        if isinstance(value, Enum):
            return {name: value.value}
        own = ((one.name, getattr(value, one.name)) for one in fields(kind))
        return {name: {key: _written(one, tensors) for key, one in own}}
    raise TypeError(f"a {name} is not sent to other processes")


def _written_tensor(
    value: "torch.Tensor | np.ndarray[Any, Any]", tensors: list[torch.Tensor]
) -> Any:
    kind = "tensor" if isinstance(value, torch.Tensor) else "array"
    tensor = value.detach() if isinstance(value, torch.Tensor) else torch.from_numpy(value.copy())
    assert tensor.device.type == "cpu", "the values of a tensor are sent from the host"
    if not tensor.is_contiguous() or tensor.numel() < 2:  # whose strides may be anything
        tensor = torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor)
    tensors.append(tensor)
    return {kind: [str(tensor.dtype), list(tensor.shape)]}


def _read(found: Any, tensors: list[torch.Tensor]) -> Any:
    if isinstance(found, list):
        return [_read(one, tensors) for one in found]
    if not isinstance(found, dict):
        return found
    ((name, content),) = found.items()
    if name in _SEQUENCES:
        return _SEQUENCES[name](_read(content, tensors))
    if name == "dict":
        return {_read(key, tensors): _read(one, tensors) for key, one in content}
    if name == "Path":
        return Path(content)
    if name in ("tensor", "array"):
        dtype, shape = content
        tensors.append(torch.empty(shape, dtype=_DTYPES[dtype]))
        return tensors[-1] if name == "tensor" else tensors[-1].numpy()
    if name in _SETTINGS:
        return _SETTINGS[name].model_validate_json(content)
    kind = _sent()[name]
    if issubclass(kind, Enum):
        return kind(content)
    return kind(**{key: _read(one, tensors) for key, one in content.items()})


@cache
def _sent() -> dict[str, Any]:
    """Return the classes that are sent, by name: those listed, and those in their fields."""
    found: dict[str, Any] = {}
    left: list[Any] = list(_SENT)
    while left:
        kind = left.pop()
        if isinstance(kind, type) and kind.__name__ not in found:
            if is_dataclass(kind):
                left += get_type_hints(kind).values()
            elif not issubclass(kind, Enum):
                continue
            found[kind.__name__] = kind
        left += get_args(kind)
    return found
