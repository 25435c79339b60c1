"""Small copies of images for pages: each a `data:` URI of a few kilobytes."""

import base64
import io
from collections.abc import Sequence

from finetune.data.pictures.picture import Picture

SIDE, MOST_SHOWN = 96, 4
"""Pixels of the longer side of a copy, and copies of a row at most."""
_QUALITY = 70  # a JPEG of noise has 6 kB then


def thumbnails(pictures: Sequence[Picture]) -> list[str]:
    """Return small copies of the first images of a row.

    Args:
        pictures: The images of the row.

    Raises:
        RowError: One is missing or broken.
    """
    return [_thumbnail(picture) for picture in pictures[:MOST_SHOWN]]


def _thumbnail(picture: Picture) -> str:
    small, file = picture.opened().image, io.BytesIO()
    small.thumbnail((SIDE, SIDE))
    small.save(file, "JPEG", quality=_QUALITY)
    return f"data:image/jpeg;base64,{base64.b64encode(file.getvalue()).decode()}"
