"""A published checkpoint, read tensor by tensor or row by row.

The files' headers give each tensor's position, so unchanged tensors are copied as bytes, whatever
their dtype. Changed tensors are read into their own memory and not mapped, because they are added
to in place. A quantised checkpoint appears as the tensors that it decodes to.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch

from finetune.errors import ModelError
from finetune.export.quantised_tensors import find_packed
from finetune.files.shards import INDEX, SINGLE, read_weight_map, weight_files
from finetune.files.tensors import DTYPES, Place, Spec, read_bytes, read_headers, read_tensor
from finetune.recipe.shipped import load_shape


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
