"""What a frozen tower and its projector make of an image, on disk: a file for each image."""

import os
import secrets
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from finetune.errors import DataError

_ROWS, _LAYER, _GRID = "rows", "layer", "grid"


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Features:
    """The features of one image of N tokens, in the dtype of the model."""

    rows_ND: torch.Tensor  # features in the places of its tokens
    # What is added to its tokens after the first layer, the second, ... (deepstack).
    layers: tuple[torch.Tensor, ...] = ()
    grid: tuple[int, int, int] | None = None  # frames, rows and columns of patches, for M-RoPE


def tokens_of(number: int, starts: npt.NDArray[np.int64], first_id: int) -> npt.NDArray[np.int32]:
    """Return the tokens of an image.

    Args:
        number: Number of the image.
        starts: The first row of each image, and the end.
        first_id: The token of the first row.
    """
    start, end = starts[number : number + 2].tolist()
    return np.arange(first_id + start, first_id + end, dtype=np.int32)


@dataclass(kw_only=True, slots=True, eq=False)
class Images:
    """All images of a run, end to end: token j of image i is the id `first_id + starts[i] + j`."""

    first_id: int  # the size of the vocabulary
    starts: npt.NDArray[np.int64]  # (images + 1): first row of each image, and the end of the last
    of: Callable[[int], Features]  # returns the features of an image, by its number
    most_tokens: int | None = None  # most tokens of all images that may be added; None for no more

    def tokens(self, number: int) -> npt.NDArray[np.int32]:
        """Return the tokens of an image."""
        return tokens_of(number, self.starts, self.first_id)

    def features(self, number: int) -> Features:
        """Return the features of an image.

        Raises:
            DataError: They are not as many as it has tokens.
        """
        found, num_tokens = self.of(number), len(self.tokens(number))
        if len(found.rows_ND) != num_tokens:
            raise DataError(
                f"an image has {len(found.rows_ND)} rows of features and {num_tokens} tokens",
                limit="a row of features takes the place of a token",
                hint="delete the folder of features in the cache: they are computed again",
            )
        return found


@dataclass(frozen=True, kw_only=True, slots=True)
class FeatureStore:
    """A folder with the features of images, by their keys."""

    folder: Path  # named by all else that they depend on

    def missing(self, keys: Iterable[bytes]) -> list[bytes]:
        """Return the keys of images that have no features yet."""
        return [key for key in keys if not self._file(key).is_file()]

    def num_bytes(self, keys: Iterable[bytes]) -> int:
        """Return the size on disk of the features of images, which all have some."""
        return sum(self._file(key).stat().st_size for key in keys)

    def put(self, key: bytes, features: Features) -> None:
        """Write the features of an image; a kill leaves none, or all.

        Raises:
            OSError: They cannot be written.
        """
        tensors = {_ROWS: features.rows_ND}
        tensors |= {f"{_LAYER}.{i:02}": layer for i, layer in enumerate(features.layers)}
        metadata = {} if features.grid is None else {_GRID: " ".join(map(str, features.grid))}
        content = save({k: v.contiguous().cpu() for k, v in tensors.items()}, metadata)
        self.folder.mkdir(parents=True, exist_ok=True)
        partial = self._file(key).with_suffix(f".{secrets.token_hex(4)}.tmp")
        try:
            with partial.open("xb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            partial.replace(self._file(key))
        finally:
            partial.unlink(missing_ok=True)

    def get(self, key: bytes) -> Features:
        """Return the features of an image.

        Raises:
            DataError: Its file is missing or damaged.
        """
        file = self._file(key)
        try:
            with safe_open(file, "pt") as tensors:
                grid = (tensors.metadata() or {}).get(_GRID)
                names = sorted(tensors.keys())
                layers = tuple(tensors.get_tensor(name) for name in names if name != _ROWS)
                return Features(
                    rows_ND=tensors.get_tensor(_ROWS),
                    layers=layers,
                    grid=None if grid is None else _grid(grid),
                )
        except (OSError, SafetensorError, ValueError) as error:
            raise DataError(
                f"the features of an image in {file} cannot be read: {error}",
                limit="they are computed before the first step and read in each",
                hint=f"delete {file}: the next start computes them again",
            ) from error

    def _file(self, key: bytes) -> Path:
        return self.folder / f"{key.hex()}.safetensors"


def _grid(text: str) -> tuple[int, int, int]:
    frames, rows, columns = map(int, text.split())
    return frames, rows, columns
