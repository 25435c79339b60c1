"""A published checkpoint, read tensor by tensor or row by row.

The files' headers give each tensor's position, so unchanged tensors are copied as bytes, whatever
their dtype. Changed tensors are read into their own memory and not mapped, because they are added
to in place. A quantised checkpoint appears as the tensors that it decodes to.
"""

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from finetune.errors import ModelError
from finetune.files.shard_writer import Shards
from finetune.files.shards import INDEX, SINGLE, read_weight_map, weight_files
from finetune.files.tensors import (
    DTYPES,
    Place,
    Spec,
    Unread,
    open_tensors,
    read_bytes,
    read_headers,
    read_tensor,
)
from finetune.model.checkpoint import format_of, plain_tensors
from finetune.recipe.load import load_shape


class BaseWeights:
    """The weights in a folder.

    Attributes:
        specs: The type and shape of each tensor, by its published name, in the order of the files;
            of a quantised one, those that it decodes to.
        is_quantised: Whether any tensor is quantised.
    """

    def __init__(self, folder: Path) -> None:
        """Read the headers.

        Raises:
            ModelError: A file or a tensor is missing, or the weights are in a form that is not
                read.
        """
        files = weight_files(folder)
        self._places = read_headers(files)
        _require_listed(folder, self._places)
        config = load_shape(str(folder))
        stored = {name: place.spec for name, place in self._places.items()}
        self._packed, plain = find_packed(stored, files, config, source=str(folder))
        self.is_quantised = bool(self._packed)
        self.specs: dict[str, Spec] = {
            **{name: stored[name] for name in stored if name in plain},
            **{name: packed.spec for name, packed in self._packed.items()},
        }

    def is_copied(self, name: str) -> bool:
        """Return whether a tensor's bytes are those of the file."""
        return name not in self._packed

    def read(self, name: str, first: int = 0, stop: int | None = None) -> torch.Tensor:
        """Return a tensor, or its rows from `first` up to, not including, `stop`.

        Raises:
            ModelError: Its type is not known, or the file ends too early.
        """
        if name in self._packed:
            return self._packed[name].read()[first:stop]
        place = self._places[name]
        if place.spec.dtype not in DTYPES:
            raise ModelError(
                f"{name} in {place.file} is of type {place.spec.dtype}",
                limit=f"the types that can be merged into are {', '.join(DTYPES)}",
                hint="name the model in bfloat16 as the base",
            )
        return read_tensor(place, first, stop)

    def raw(self, name: str) -> Iterator[bytes]:
        """Return a tensor's bytes in pieces, as they are in the file."""
        return read_bytes(self._places[name])

    def copy(self, name: str, shards: Shards) -> None:
        """Write a tensor as it is: its bytes, or of a quantised one its values."""
        if self.is_copied(name):
            shards.write_raw(name, self.raw(name))
        else:
            shards.write(name, self.read(name))


def _require_listed(folder: Path, places: Mapping[str, Place]) -> None:
    if not (folder / INDEX).exists() or (folder / SINGLE).exists():
        return
    for name, file in read_weight_map(folder / INDEX).items():
        if name not in places:
            raise ModelError(
                f"{folder / file} lacks {name}",
                limit=f"{INDEX} says that it is there",
                hint="download the model again",
            )


# ---------------------------------------------------------------------------------------------
# Published tensors that are quantised, for a merge: what each decodes to, and its values.
#
# They are decoded by `finetune.model.dequantize`, as for training. Their decoded dtypes and shapes
# are known without decoding, because a file's header is written before its tensors.

_CODES: Mapping[torch.dtype, str] = {dtype: code for code, dtype in DTYPES.items()}
_BNB_STATE = ".quant_state.bitsandbytes__"
_MXFP4_BLOCKS = "_blocks"


@dataclass(frozen=True, kw_only=True, slots=True)
class Packed:
    """A tensor that is quantised."""

    spec: Spec  # what it decodes to
    read: Callable[[], torch.Tensor]  # returns its values


def find_packed(
    specs: Mapping[str, Spec], files: Sequence[Path], config: Mapping[str, Any], *, source: str
) -> tuple[dict[str, Packed], set[str]]:
    """Return the tensors of a checkpoint that are quantised, and the names of the others.

    Args:
        specs: The tensors in the files.
        files: Where each tensor is.
        config: The fields of config.json; it names the method.
        source: Name of the checkpoint in errors.

    Raises:
        ModelError: The method is not known, or a part of a tensor is missing.
    """
    quantization = config.get("quantization_config")
    if quantization is None:
        return {}, set(specs)
    stored = open_tensors([str(file) for file in files])
    tensors = plain_tensors(stored, format_of(quantization, source), source)
    dtype = getattr(torch, config.get("dtype") or config.get("torch_dtype") or "bfloat16")
    states = {name.split(_BNB_STATE)[0]: name for name in specs if _BNB_STATE in name}
    packed = {}
    for name, tensor in tensors.items():
        if name in states:
            fields = json.loads(bytes(stored[states[name]].read().numpy()))
            spec = spec_of(getattr(torch, fields["dtype"]), tuple(fields["shape"]))
        elif name + _MXFP4_BLOCKS in specs:
            num_experts, num_out, *blocks = specs[name + _MXFP4_BLOCKS].shape
            spec = spec_of(torch.bfloat16, (num_experts, 2 * math.prod(blocks), num_out))
        elif specs[name].dtype.startswith("F8"):
            spec = spec_of(dtype, specs[name].shape)
        else:
            continue
        packed[name] = Packed(spec=spec, read=_reader(tensor, DTYPES[spec.dtype]))
    return packed, tensors.keys() - packed.keys()


def _reader(tensor: Unread, dtype: torch.dtype) -> Callable[[], torch.Tensor]:
    return lambda: tensor[...].to(dtype)


def spec_of(dtype: torch.dtype, shape: tuple[int, ...]) -> Spec:
    """Return what a tensor of a type and shape is in a file."""
    return Spec(dtype=_CODES[dtype], shape=shape, num_bytes=math.prod(shape) * dtype.itemsize)
