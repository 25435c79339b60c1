"""Safetensors files, read without taking memory.

The maintained reader maps a file so that it could be written to. That counts against limits of
memory as if the file were the process's own, so a model larger than the limit could not be opened,
let alone read tensor by tensor. The format is a length, a JSON header and the tensors one behind
the other; here they are views of a mapping that is shared and read-only.
Source: https://github.com/huggingface/safetensors#format
"""

import json
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import EllipsisType
from typing import Any

import torch

from offload.engine.host.mapping import map_file

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
    """A tensor that takes no memory until it is read, in transformers' way: `tensor[...]`.

    Attributes:
        read: Returns the values: mapped, not to be written to, or memory of their own.
        is_mapped: Which of the two.
    """

    read: Callable[[], torch.Tensor]
    is_mapped: bool = False

    def __getitem__(self, _all: EllipsisType) -> torch.Tensor:
        """Return the values in memory of their own."""
        values = self.read()
        return values.clone() if self.is_mapped else values


def open_tensors(files: Sequence[str]) -> dict[str, Unread]:
    """Return the tensors of these files by name; only headers are read.

    Raises:
        OSError: A file is missing.
        ValueError: A file is damaged, or of a later version of the format.
    """
    tensors: dict[str, Unread] = {}
    for file in map(Path, files):
        num_bytes = file.stat().st_size
        if num_bytes == 0:  # which cannot be mapped
            raise ValueError(f"{file.name} is cut off or damaged: it is empty")
        descriptor = os.open(file, os.O_RDONLY)
        try:
            content = map_file(descriptor, num_bytes, is_writable=False)
        finally:
            os.close(descriptor)
        tensors |= _tensors_of(content, file.name)
    return tensors


def _tensors_of(content: torch.Tensor, file: str) -> dict[str, Unread]:
    num_header_bytes = int.from_bytes(bytes(content[:8].tolist()), "little")
    try:
        if 8 + num_header_bytes > content.numel():
            raise ValueError(f"{content.numel()} bytes do not hold its header")
        body = content[8 + num_header_bytes :]
        header = json.loads(content[8 : 8 + num_header_bytes].numpy().tobytes())
        places = {name: place for name, place in header.items() if name != "__metadata__"}
        for name, place in places.items():
            begin, end = place["data_offsets"]
            num_bytes = math.prod(place["shape"]) * DTYPES[place["dtype"]].itemsize
            if not 0 <= begin <= end <= body.numel() or end - begin != num_bytes:
                raise ValueError(f"{name} does not lie in it")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{file} is cut off or damaged: {error!r}") from error
    return {
        name: Unread(read=partial(_view, body, place), is_mapped=True)
        for name, place in places.items()
    }


def _view(body: torch.Tensor, place: dict[str, Any]) -> torch.Tensor:
    begin, end = place["data_offsets"]
    dtype, flat = DTYPES[place["dtype"]], body[begin:end]
    if flat.storage_offset() % dtype.itemsize:
        flat = flat.clone()  # few writers leave tensors unaligned, the format lets them
    return flat.view(dtype).view(place["shape"])
