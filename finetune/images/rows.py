"""Rows with images as tokens: those of an image are the numbers of its rows of features.

The distinct images of a run have features end to end, and row r of them is the token V + r of a
vocabulary of V tokens. So a row says by its tokens alone which images it has.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import numpy as np
import numpy.typing as npt

from finetune.data.dataset import ExampleSet, Rows
from finetune.data.tokenize import Example
from finetune.errors import DataError
from finetune.images.features import tokens_of


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ImageNumbers:
    """The distinct images of a run, in the order of their keys.

    So runs of the same rows have the same numbers, whichever rows they hold out.
    """

    keys: tuple[bytes, ...]
    starts: npt.NDArray[np.int64]  # (images + 1): the first row of features of each, and the end
    first_id: int  # the token of the first row: the size of the vocabulary
    image_id: int  # the model's own token in the place of each row

    @classmethod
    def of(cls, every: Sequence[ExampleSet], *, first_id: int, image_id: int) -> Self:
        """Number the images of rows."""
        sizes = dict[bytes, int]()
        for part in (part for rows in every for part in rows.parts):
            for key, num in zip(part.images, part.image_tokens, strict=True):
                sizes[bytes(key)] = int(num)
        keys = tuple(sorted(sizes))
        starts = np.concatenate([[0], np.cumsum([sizes[key] for key in keys], dtype=np.int64)])
        return cls(keys=keys, starts=starts, first_id=first_id, image_id=image_id)

    def tokens(self, number: int) -> npt.NDArray[np.int32]:
        """Return the tokens of an image."""
        return tokens_of(number, self.starts, self.first_id)

    def numbers(self) -> dict[bytes, int]:
        """Return the number of each image by its key."""
        return {key: number for number, key in enumerate(self.keys)}


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class WithImages(ExampleSet):
    """Examples whose image tokens are the numbers of rows of features."""

    images: ImageNumbers
    numbers: dict[bytes, int]  # number of each image, by its key

    def __getitem__(self, index: int) -> Example:
        found = ExampleSet.__getitem__(self, index)
        if not found.images:
            return found
        own = [self.images.tokens(self.numbers[key]) for key, _ in found.images]
        ids = numbered(found.input_ids, own, image_id=self.images.image_id)
        return replace(found, input_ids=ids)


def numbered(
    input_ids: npt.NDArray[np.int32], own: Sequence[npt.NDArray[np.int32]], *, image_id: int
) -> npt.NDArray[np.int32]:
    """Return tokens with those of images in the places of a model's image token.

    Args:
        input_ids: The tokens of a row.
        own: The tokens of each of its images.
        image_id: The model's image token.
    """
    ids = input_ids.copy()
    ids[ids == image_id] = np.concatenate(own)
    return ids


def _require_no_others(rows: ExampleSet, image_id: int) -> None:
    """Check that no text has the model's image token, whose features the model would look for.

    Raises:
        DataError: One has it; the row is named.
    """
    for part in rows.parts:
        num = sum(int(np.count_nonzero(ids == image_id)) for ids in part.blocks("input_ids"))
        if num == int(part.image_tokens.sum()):
            continue
        found = next(
            example.source
            for example in ExampleSet(parts=(part,))
            if np.count_nonzero(example.input_ids == image_id) != sum(n for _, n in example.images)
        )
        raise DataError(
            f"{found} has the model's image token in its text, where an image would be",
            limit="where rows have images, each such token takes a row of features",
            hint="write it otherwise in that row, or leave the row out",
        )


def with_images(rows: Rows, *, first_id: int, image_id: int) -> tuple[Rows, ImageNumbers]:
    """Return rows whose image tokens are numbers of rows of features, and the images.

    Raises:
        DataError: The text of a row has the model's image token.
    """
    every = [rows.train, *([] if rows.held_out is None else [rows.held_out])]
    for one in every:
        _require_no_others(one, image_id)
    images = ImageNumbers.of(every, first_id=first_id, image_id=image_id)
    numbers = images.numbers()
    changed = [
        WithImages(parts=one.parts, notes=one.notes, images=images, numbers=numbers)
        for one in every
    ]
    held_out = changed[1] if len(changed) > 1 else None
    return replace(rows, train=changed[0], held_out=held_out), images
