"""Writes safetensors files whose tensors come in any order and in pieces.

The library's own writer takes all tensors of a file at once, which for a shard of 5 GB is 5 GB of
memory. Sizes are known beforehand, so the headers are written first, the space is reserved, and
every piece is written to its position.
"""

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch

from finetune.files.atomic import flush
from finetune.files.shards import INDEX, SINGLE
from finetune.files.tensors import Spec

SHARD_BYTES = 5 * 10**9
_ALIGNMENT = 8


class Shards:
    """Writes a model's weights; see `new_shards`."""

    def __init__(self, folder: Path, specs: Mapping[str, Spec], files: ExitStack) -> None:
        """Write no header yet."""
        self._folder, self._specs, self._open = folder, specs, files
        self._places: dict[str, tuple[int, int]] = {}
        self._left = {name: spec.num_bytes for name, spec in specs.items()}
        self._files: dict[str, str] = {}

    def write(self, name: str, values: torch.Tensor, *, first_row: int = 0) -> None:
        """Write a tensor, or its rows from `first_row` on."""
        spec = self._specs[name]
        row_bytes = spec.num_bytes // spec.shape[0] if first_row else 0
        content = values.detach().contiguous().view(-1).view(torch.uint8).numpy().data
        self._write(name, content, first_row * row_bytes)

    def write_raw(self, name: str, pieces: Iterable[bytes]) -> None:
        """Write a tensor's bytes as they come."""
        offset = 0
        for piece in pieces:
            self._write(name, memoryview(piece), offset)
            offset += len(piece)

    def finish(self) -> None:
        """Flush the files and write their index."""
        unwritten = [name for name, num_bytes in self._left.items() if num_bytes]
        assert not unwritten, unwritten
        for file in set(self._files.values()):
            flush(self._folder / file)
        if len(set(self._files.values())) > 1:
            total = sum(spec.num_bytes for spec in self._specs.values())
            index = {"metadata": {"total_size": total}, "weight_map": self._files}
            (self._folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")
            flush(self._folder / INDEX)

    def begin(self, file: str, names: list[str]) -> None:
        """Write the header of a file and reserve its space."""
        offset = 0
        offsets: dict[str, int] = {}
        entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
        for name in names:
            spec = self._specs[name]
            entries[name] = {
                "dtype": spec.dtype,
                "shape": list(spec.shape),
                "data_offsets": [offset, offset + spec.num_bytes],
            }
            offsets[name] = offset
            offset += spec.num_bytes
        header = json.dumps(entries).encode()
        header = header.ljust(-(-len(header) // _ALIGNMENT) * _ALIGNMENT)
        start = 8 + len(header)
        descriptor = os.open(self._folder / file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        self._open.callback(os.close, descriptor)
        os.posix_fallocate(descriptor, 0, start + offset)
        _write_at(descriptor, memoryview(len(header).to_bytes(8, "little") + header), 0)
        for name in names:
            self._places[name] = (descriptor, start + offsets[name])
            self._files[name] = file

    def _write(self, name: str, content: memoryview, offset: int) -> None:
        descriptor, start = self._places[name]
        _write_at(descriptor, content, start + offset)
        self._left[name] -= len(content)
        assert self._left[name] >= 0, name


@contextmanager
def new_shards(
    folder: Path, specs: Mapping[str, Spec], *, shard_bytes: int = SHARD_BYTES
) -> Iterator[Shards]:
    """Yield what writes a model's weights, with headers written and space reserved.

    Call its `finish` at the end.

    Args:
        folder: An empty directory.
        specs: The tensors that will be written, in the order of the files.
        shard_bytes: Largest file size, unless a single tensor is larger.
    """
    shards = _packed(specs, shard_bytes)
    with ExitStack() as files:
        found = Shards(folder, specs, files)
        for number, names in enumerate(shards, 1):
            file = f"model-{number:05}-of-{len(shards):05}.safetensors"
            found.begin(SINGLE if len(shards) == 1 else file, names)
        yield found


def _packed(specs: Mapping[str, Spec], shard_bytes: int) -> list[list[str]]:
    """Distribute tensors over files; in each, wider dtypes come first, so that all are aligned."""
    shards: list[list[str]] = []
    room = 0
    for name, spec in specs.items():
        if not shards or spec.num_bytes > room:
            shards.append([])
            room = shard_bytes
        shards[-1].append(name)
        room -= spec.num_bytes
    return [sorted(names, key=lambda name: -_width(specs[name].dtype)) for names in shards]


def _width(code: str) -> int:
    """Return the bits of a type from its code: BF16 has 16, F8_E4M3 has 8, BOOL 8."""
    digits = code.split("_")[0].lstrip("ABCDEFGHIJKLMNOPQRSTUVWXYZ")
    return int(digits) if digits else 8


def _write_at(descriptor: int, content: memoryview, offset: int) -> None:
    while content:
        num_bytes = os.pwrite(descriptor, content, offset)
        content, offset = content[num_bytes:], offset + num_bytes
