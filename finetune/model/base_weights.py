"""A published checkpoint, read tensor by tensor or row by row.

The files' headers give each tensor's position, so unchanged tensors are copied as bytes, whatever
their dtype. Changed tensors are read into their own memory and not mapped, because they are added
to in place. A quantised checkpoint appears as the tensors that it decodes to.
"""

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
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
    open_tensors,
    read_bytes,
    read_headers,
    read_tensor,
)
from finetune.model.config import method_of, quantization_of
from finetune.model.form import Packed, Packing, Parts, find_packed
from finetune.recipe.load import load_shape


class BaseWeights:
    """The weights in a folder.

    Attributes:
        specs: The type and shape of each tensor, by its published name, in the order of the files;
            of a quantised one, those that it decodes to.
        stored: Those of all that the files hold, of a quantised tensor its parts.
        published: The `quant_method` of its tensors; empty if none is quantised.
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
        self.stored = stored = {name: place.spec for name, place in self._places.items()}
        self._packed, plain = find_decoded(stored, files, config, source=str(folder))
        self.published = method_of(quantization_of(config) or {}) if self._packed else ""
        self.specs: dict[str, Spec] = {
            **{name: stored[name] for name in stored if name in plain},
            **{name: packed.spec for name, packed in self._packed.items()},
        }

    @property
    def decoded_dtype(self) -> str:
        """The type that its quantised tensors decode to, as torch calls it."""
        spec = next(iter(self._packed.values())).spec
        return str(DTYPES[spec.dtype]).removeprefix("torch.")

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

    def packing(self, name: str) -> Packing:
        """Return how a quantised tensor is stored."""
        return self._packed[name].packed.packing

    def parts(self, name: str) -> Parts:
        """Return the stored parts of a quantised tensor, mapped."""
        return self._packed[name].packed.read()

    def raw(self, name: str) -> Iterator[bytes]:
        """Return the bytes of what the files hold under a name, in pieces."""
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
# They are decoded by `finetune.model.form`, as for training. Their decoded dtypes and shapes are
# known without decoding, because a file's header is written before its tensors.

_CODES: Mapping[torch.dtype, str] = {dtype: code for code, dtype in DTYPES.items()}


@dataclass(frozen=True, kw_only=True, slots=True)
class Decoded:
    """A tensor that is quantised."""

    spec: Spec  # what it decodes to
    read: Callable[[], torch.Tensor]  # returns its values
    packed: Packed  # how it is stored


def find_decoded(
    specs: Mapping[str, Spec], files: Sequence[Path], config: Mapping[str, Any], *, source: str
) -> tuple[dict[str, Decoded], Collection[str]]:
    """Return the tensors of a checkpoint that are quantised, and the names of the others.

    Args:
        specs: The tensors in the files.
        files: Where each tensor is.
        config: The fields of config.json.
        source: Name of the checkpoint in errors.

    Raises:
        ModelError: The form is not known, or a part of a tensor is missing.
    """
    quantization = quantization_of(config)
    if quantization is None:
        return {}, specs.keys()
    stored = open_tensors([str(file) for file in files])
    packed, plain = find_packed(
        {name: tensor.read for name, tensor in stored.items()}, quantization, source
    )
    default = getattr(torch, config.get("dtype") or config.get("torch_dtype") or "bfloat16")
    found = {}
    for name, tensor in packed.items():
        shape, dtype = tensor.packing.decoded(tensor.read())
        spec = spec_of(dtype or default, tuple(shape))
        read = partial(_values, tensor, DTYPES[spec.dtype])
        found[name] = Decoded(spec=spec, read=read, packed=tensor)
    return found, plain


def _values(tensor: Packed, dtype: torch.dtype) -> torch.Tensor:
    return tensor.values().to(dtype)


def spec_of(dtype: torch.dtype, shape: tuple[int, ...]) -> Spec:
    """Return what a tensor of a type and shape is in a file."""
    return Spec(dtype=_CODES[dtype], shape=shape, num_bytes=math.prod(shape) * dtype.itemsize)
