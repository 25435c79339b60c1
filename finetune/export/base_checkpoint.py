"""A published checkpoint, read tensor by tensor or row by row.

The files' headers give each tensor's position, so unchanged tensors are copied as bytes, whatever
their dtype. Changed tensors are read into their own memory and not mapped, because they are added
to in place. A quantised checkpoint appears as the tensors that it decodes to.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from finetune.errors import ModelError
from finetune.export.quantised_tensors import Spec, find_packed
from finetune.files.tensors import (
    DTYPES,
    INDEX,
    SINGLE,
    read_header,
    read_weight_map,
    weight_files,
)
from finetune.recipe.shipped import load_shape

_COPY_BYTES = 2**24


@dataclass(frozen=True, kw_only=True, slots=True)
class _Place:
    file: Path
    offset: int
    spec: Spec


class BaseWeights:
    """The weights in a folder.

    Attributes:
        specs: What each tensor is, by its published name, in the order of the files. A quantised
            one is what it decodes to.
        is_quantised: Whether any is.
    """

    def __init__(self, folder: Path) -> None:
        """Read the headers.

        Raises:
            ModelError: A file or a tensor is missing, or the weights are in a form that is not
                read.
        """
        self._places: dict[str, _Place] = {}
        files = weight_files(folder)
        for file in files:
            self._places |= _read_places(file)
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

    def read(self, name: str, first: int = 0, behind: int | None = None) -> torch.Tensor:
        """Return a tensor, or its rows from `first` up to, not including, `behind`.

        Raises:
            ModelError: Its type is not known, or the file ends too early.
        """
        if name in self._packed:
            return self._packed[name].read()[first:behind]
        return self._read(name, first, behind)

    def raw(self, name: str) -> Iterator[bytes]:
        """Return a tensor's bytes in pieces, as they are in the file."""
        place = self._places[name]
        with place.file.open("rb") as file:
            file.seek(place.offset)
            left = place.spec.num_bytes
            while left:
                piece = file.read(min(left, _COPY_BYTES))
                if not piece:
                    raise _too_short(place.file)
                left -= len(piece)
                yield piece

    def _read(self, name: str, first: int = 0, behind: int | None = None) -> torch.Tensor:
        place = self._places[name]
        spec = place.spec
        if spec.dtype not in DTYPES:
            raise ModelError(
                f"{name} in {place.file} is of type {spec.dtype}",
                limit=f"the types that can be merged into are {', '.join(DTYPES)}",
                hint="name the model in bfloat16 as the base",
            )
        shape = spec.shape
        if behind is not None:
            shape = (behind - first, *shape[1:])
        row_bytes = spec.num_bytes // spec.shape[0] if behind is not None else 0
        values = torch.empty(math.prod(shape) * DTYPES[spec.dtype].itemsize, dtype=torch.uint8)
        if values.numel():
            _read_into(place.file, place.offset + first * row_bytes, values.numpy().data)
        return values.view(DTYPES[spec.dtype]).view(shape)


def _require_listed(folder: Path, places: Mapping[str, _Place]) -> None:
    if not (folder / INDEX).exists() or (folder / SINGLE).exists():
        return
    for name, file in read_weight_map(folder / INDEX).items():
        if name not in places:
            raise ModelError(
                f"{folder / file} lacks {name}",
                limit=f"{INDEX} says that it is there",
                hint="download the model again",
            )


def _read_places(file: Path) -> dict[str, _Place]:
    return {
        name: _Place(
            file=file,
            offset=place.begin,
            spec=Spec(dtype=place.dtype, shape=place.shape, num_bytes=place.end - place.begin),
        )
        for name, place in read_header(file).items()
    }


def _read_into(file: Path, offset: int, target: memoryview) -> None:
    with file.open("rb", buffering=0) as stream:
        stream.seek(offset)
        while target:
            num_bytes = stream.readinto(target)
            if not num_bytes:
                raise _too_short(file)
            target = target[num_bytes:]


def _too_short(file: Path) -> ModelError:
    return ModelError(
        f"{file} ends too early",
        limit="its header names tensors beyond its end",
        hint="download the model again",
    )
