"""Safetensors files: their headers, and their tensors mapped or read.

The official reader maps a file as writable. Such a mapping counts against memory limits like the
process's own memory, so a model larger than the limit could not even be opened. The format is a
length, a JSON header and the tensors one after the other; here the tensors are views of a shared,
read-only mapping. A tensor that is changed in place is read into its own memory.
Source: https://github.com/huggingface/safetensors#format
"""

import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import EllipsisType
from typing import Annotated, Any

import torch
from pydantic import BaseModel, Field, RootModel, ValidationError

from finetune.errors import ModelError
from finetune.files.shards import INDEX, SINGLE, read_weight_map
from offload.engine.host.pagelock import map_file

DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Unread:
    """A tensor that takes no memory until it is read, in transformers' way: `tensor[...]`."""

    # Returns the values: mapped, which must not be written to, or in their own memory.
    read: Callable[[], torch.Tensor]
    is_mapped: bool = False  # which of the two

    def __getitem__(self, _all: EllipsisType) -> torch.Tensor:
        """Return the values in their own memory."""
        values = self.read()
        return values.clone() if self.is_mapped else values


@dataclass(frozen=True, kw_only=True, slots=True)
class Spec:
    """What a tensor is."""

    dtype: str  # the type's name in a header, such as BF16
    shape: tuple[int, ...]  # its sizes
    num_bytes: int  # its size in a file


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Where a tensor is."""

    file: Path  # the file
    begin: int  # its first byte, from the beginning of the file
    spec: Spec  # what it is


_COPY_BYTES = 2**24
_MAX_HEADER_BYTES = 100_000_000  # as in the official reader


class _Entry(BaseModel):
    dtype: Annotated[str, Field(min_length=1, max_length=20)]
    shape: list[Annotated[int, Field(ge=0, le=2**60)]]
    data_offsets: Annotated[
        list[Annotated[int, Field(ge=0, le=2**60)]], Field(min_length=2, max_length=2)
    ]


class _Header(RootModel[dict[str, _Entry]]):
    pass


class _Metadata(RootModel[dict[str, str]]):
    pass


def read_header(file: Path) -> dict[str, Place]:
    """Return where each tensor of a safetensors file is, in the order of the file.

    The tensors fill the file without gaps, as the format asks.

    Raises:
        ModelError: The file is damaged.
        OSError: It is not there.
    """
    try:
        with file.open("rb") as stream:
            file_bytes = os.fstat(stream.fileno()).st_size
            header_bytes = int.from_bytes(stream.read(8), "little")
            if header_bytes > min(_MAX_HEADER_BYTES, file_bytes - 8):
                raise ValueError(f"{file_bytes} bytes do not hold its header")
            header = json.loads(stream.read(header_bytes))
        if isinstance(header, dict):
            _Metadata.model_validate(header.pop("__metadata__", {}), strict=True)
        _Header.model_validate(header, strict=True)
        return _places(header, file, 8 + header_bytes, file_bytes)
    except ValidationError as error:
        detail = error.errors(include_url=False, include_context=False)[0]
        where = ".".join(str(part)[:80] for part in detail["loc"])
        raise _damaged(file, f"in its header, {where}: {detail['msg']}") from error
    except (ValueError, RecursionError) as error:
        raise _damaged(file, str(error)[:200]) from error


def read_known_header(file: Path) -> dict[str, Place]:
    """Return where each tensor of a file is, if all are of types that can be read.

    Raises:
        ModelError: The file is damaged, or has a tensor of another type.
        OSError: It is not there.
    """
    places = read_header(file)
    for name, place in places.items():
        if place.spec.dtype not in DTYPES:
            raise _damaged(file, f"{name} is of type {place.spec.dtype}, which is not known")
    return places


def read_headers(
    files: Sequence[Path], *, read: Callable[[Path], dict[str, Place]] = read_header
) -> dict[str, Place]:
    """Return where each tensor of a model is, in the order of its files.

    Of a tensor that is in several files the index decides.

    Args:
        files: As `weight_files` returns them.
        read: Reads one header.

    Raises:
        ModelError: A file is damaged, or the index leaves open which of two tensors counts.
        OSError: A file is not there.
    """
    index = files[0].parent / INDEX if files else Path(INDEX)
    is_indexed = index.exists() and [file.name for file in files] != [SINGLE]
    listed = read_weight_map(index) if is_indexed else {}
    places: dict[str, Place] = {}
    for file in files:
        for name, place in read(file).items():
            if name in places and listed.get(name) not in (file.name, places[name].file.name):
                raise ModelError(
                    f"{name} is in {places[name].file} and in {file}",
                    limit=f"{INDEX} says which one counts, and does not name either",
                    hint="download the model again",
                )
            if name not in places or listed[name] == file.name:
                places[name] = place
    return places


def _places(header: Mapping[str, Any], file: Path, start: int, file_bytes: int) -> dict[str, Place]:
    places: dict[str, Place] = {}
    end = start
    for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        dtype, shape = entry["dtype"], tuple(entry["shape"])
        begin, stop = (start + offset for offset in entry["data_offsets"])
        is_sized = dtype in DTYPES
        num_bytes = math.prod(shape) * DTYPES[dtype].itemsize if is_sized else stop - begin
        if begin != end or stop - begin != num_bytes or stop > file_bytes:
            raise ValueError(f"{name} is not where its header says")
        spec = Spec(dtype=dtype, shape=shape, num_bytes=num_bytes)
        places[name] = Place(file=file, begin=begin, spec=spec)
        end = stop
    if end != file_bytes:
        raise ValueError(f"{file_bytes - end} bytes after its tensors")
    return places


def _damaged(file: Path, why: str) -> ModelError:
    return ModelError(
        f"{file} is cut off or damaged: {why}",
        limit="a safetensors file is its header, and the tensors that the header names",
        hint="download it again, or restore it from a copy",
    )


def open_tensors(files: Sequence[str]) -> dict[str, Unread]:
    """Return the tensors of these files by name; only the headers are read.

    Raises:
        OSError: A file is missing.
        ModelError: A file is damaged, or of a later version of the format.
    """
    places = read_headers([Path(file) for file in files], read=read_known_header)
    contents: dict[Path, torch.Tensor] = {}
    for file in {place.file for place in places.values()}:
        descriptor = os.open(file, os.O_RDONLY)
        try:
            contents[file] = map_file(descriptor, os.fstat(descriptor).st_size, is_writable=False)
        finally:
            os.close(descriptor)
    return {
        name: Unread(read=partial(_view, contents[place.file], place), is_mapped=True)
        for name, place in places.items()
    }


def _view(content: torch.Tensor, place: Place) -> torch.Tensor:
    dtype = DTYPES[place.spec.dtype]
    flat = content[place.begin : place.begin + place.spec.num_bytes]
    if flat.storage_offset() % dtype.itemsize:
        flat = flat.clone()  # the format allows unaligned tensors, which few writers make
    return flat.view(dtype).view(place.spec.shape)


def read_tensor(place: Place, first: int = 0, behind: int | None = None) -> torch.Tensor:
    """Return a tensor in its own memory, or its rows from `first` up to, not including, `behind`.

    Raises:
        ModelError: The file ends too early.
    """
    spec, dtype = place.spec, DTYPES[place.spec.dtype]
    shape, begin = spec.shape, place.begin
    if behind is not None:
        shape = (behind - first, *shape[1:])
        begin += first * (spec.num_bytes // spec.shape[0])
    values = torch.empty(math.prod(shape) * dtype.itemsize, dtype=torch.uint8)
    if values.numel():
        _read_into(place.file, begin, values.numpy().data)
    return values.view(dtype).view(shape)


def read_bytes(place: Place) -> Iterator[bytes]:
    """Return a tensor's bytes in pieces, as they are in the file.

    Raises:
        ModelError: The file ends too early.
    """
    with place.file.open("rb") as file:
        file.seek(place.begin)
        left = place.spec.num_bytes
        while left:
            piece = file.read(min(left, _COPY_BYTES))
            if not piece:
                raise _too_short(place.file)
            left -= len(piece)
            yield piece


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
