"""One image of a row: where it is."""

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from finetune.errors import RowError

if TYPE_CHECKING:
    from finetune.data.pictures.decode import Pixels

PLACE = "\ufffc"
"""Placeholder of an image in the text of a turn: Unicode's object replacement character."""
TAG = "<image>"
"""Placeholder of an image in texts whose row names its images in a column."""
COLUMNS = ("images", "image")
"""Columns of a row that name images."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Picture:
    """An image as a row has it: a file, or its bytes."""

    name: str  # its name in errors
    path: str | None = None  # the file, absolute
    content: bytes | None = None  # the bytes of a file

    @property
    def is_awaited(self) -> bool:
        """Whether it is but a place, for one that a column of its row names."""
        return self.path is None and self.content is None

    @property
    def identity(self) -> str:
        """What tells it from others without opening it: its path, or a digest of its bytes."""
        if self.content is None:
            return self.path or ""
        return hashlib.blake2b(self.content, digest_size=16).hexdigest()

    def opened(self) -> "Pixels":
        """Decode it.

        Raises:
            RowError: It is missing or broken, or no image that can be trained on.
            ConfigError: Pillow is not installed.
        """
        from finetune.data.pictures.decode import pixels_of

        try:
            return pixels_of(self.path, self.content)
        except RowError as error:
            raise RowError(f"the image {self.name} {error}") from error


AWAITED = Picture(name="")
"""The place of an image that a column names; its name is the index there, if a part says it."""
