"""The pixels of an image's file.

Files come from anywhere, and a decoder is a program that runs on them. So few kinds are decoded,
and what a file says of its size is checked before it is decoded. Pixels are those that a viewer
shows on a white page: upright, without transparency, without a colour profile. Of 16 bits per
colour the upper 8 are taken. An image that would have to be chosen (a page, a frame) is refused.
"""

import hashlib
import stat
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from finetune.errors import ConfigError, RowError

if TYPE_CHECKING:
    from PIL.Image import Image
    from PIL.ImageFile import ImageFile

KINDS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "AVIF")
"""What is decoded, as Pillow names it."""
MOST_BYTES, MOST_PIXELS = 2**26, 2**26
_LEAST_SIDE, _MOST_ASPECT = 2, 200
_ORIENTATION = 0x0112  # tag of EXIF
_BITS, _ZERO = 258, 262  # tags of a TIFF: bits of a value, and what 0 is, 1 for black
_MODES = ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "RGBX", "CMYK", "YCbCr")
_ABOUT_TAGS = r"(?i).*(exif|metadata|tag offset|tag data|malformed MPO)"
"""Warnings of Pillow that are not about pixels."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Pixels:
    """A decoded image."""

    image: "Image"  # RGB, upright
    key: bytes  # digest of its size and its values, 16 bytes


def pixels_of(path: str | None, content: bytes | None) -> Pixels:
    """Decode an image.

    Args:
        path: File of the image; None where its bytes are given.
        content: The bytes of a file.

    Raises:
        RowError: It is missing or broken, or no image that can be trained on.
        ConfigError: Pillow is not installed.
    """
    require_pillow()
    from PIL import Image

    size, values = _decoded(_read(path or "") if content is None else content)
    key = hashlib.blake2b(np.array(size, dtype="<u4").tobytes(), digest_size=16)
    key.update(values)
    # without the tags of the file, by which others would turn it again
    return Pixels(image=Image.frombytes("RGB", size, values), key=key.digest())


def require_pillow() -> None:
    """Check that images can be decoded.

    Raises:
        ConfigError: Pillow is not installed.
    """
    try:
        import PIL.Image  # noqa: F401 - only whether it is there
    except ImportError as error:
        raise ConfigError(
            "the rows have images, and Pillow is not installed",
            limit="images are decoded by Pillow",
            hint="`pip install 'sluice-finetune[images]'`",
        ) from error


def _read(path: str) -> bytes:
    """Return the content of a regular file; any other could wait for ever.

    Raises:
        RowError: There is none, or it is empty or too large.
    """
    file = Path(path)
    try:
        status = file.stat()
        if not stat.S_ISREG(status.st_mode):
            what = "a folder" if stat.S_ISDIR(status.st_mode) else "no regular file"
            raise RowError(f"is {what}: name a file")
        if status.st_size > MOST_BYTES:
            raise too_many_bytes(status.st_size)
        with file.open("rb") as content:
            return content.read(MOST_BYTES + 1)
    except FileNotFoundError:
        raise RowError(
            f"is missing: there is no {printable(path)}; a relative path starts at the folder of"
            " the data file"
        ) from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise RowError(f"cannot be read ({reason}): correct the path or its permissions") from None


def printable(text: str) -> str:
    """Return a text whose control characters, and halves of characters, are written out."""
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)


def too_many_bytes(num: int) -> RowError:
    """Return the error for a file that is too large, to follow an image's name."""
    return RowError(
        f"has {num / 2**20:,.1f} MiB, and at most {MOST_BYTES // 2**20} MiB are read: save it"
        " smaller, or as a JPEG"
    )


def _decoded(content: bytes) -> tuple[tuple[int, int], bytes]:
    """Return the width and height of what a file shows upright, and its values as RGB.

    Raises:
        RowError: It is no such image.
    """
    if len(content) > MOST_BYTES:
        raise too_many_bytes(len(content))
    if not content:
        raise RowError("is empty: copy it anew, or leave the row out")
    with _strict():
        image = _opened(content)
        _require_fit(image)
        image.verify()  # checksums; it cannot be decoded after this
    with _strict():
        image = _opened(content)
        _correct_transparency(image)
        image.load()
        shown = _as_rgb(_upright(image))
        return shown.size, shown.tobytes()


@contextmanager
def _strict() -> Iterator[None]:
    """Turn whatever Pillow raises or warns of into an error of the row."""
    from PIL import Image, UnidentifiedImageError

    too_large = f"has more than {MOST_PIXELS:,} pixels: scale it down"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            warnings.filterwarnings("ignore", category=DeprecationWarning)
            warnings.filterwarnings("ignore", message=_ABOUT_TAGS)
            yield
    except (RowError, MemoryError):
        raise
    except UnidentifiedImageError:
        kinds = ", ".join(_kinds())
        raise RowError(
            f"is none of the kinds that are read ({kinds}), or is broken: save it as PNG or JPEG"
        ) from None
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        raise RowError(too_large) from None
    except Exception as error:  # on broken files Pillow raises anything
        words = " ".join(str(error).split()) or type(error).__name__
        raise RowError(f"is broken ({words[:100]}): save it anew as PNG or JPEG") from error


def _kinds() -> list[str]:
    """Return the kinds that this Pillow can decode."""
    from PIL import Image

    Image.init()
    return [kind for kind in KINDS if kind in Image.OPEN]


def _opened(content: bytes) -> "ImageFile":
    from io import BytesIO

    from PIL import Image

    return Image.open(BytesIO(content), formats=_kinds())


def _require_fit(image: "Image") -> None:
    """Check what a file says of its image, before it is decoded."""
    width, height = image.size
    shown = f"has {width:,}x{height:,} pixels"
    if min(width, height) < _LEAST_SIDE:
        raise RowError(f"{shown}, and each side needs {_LEAST_SIDE}: leave the row out")
    if width * height > MOST_PIXELS:
        raise RowError(f"{shown}, and at most {MOST_PIXELS:,} are read: scale it down")
    if max(width, height) > _MOST_ASPECT * min(width, height):
        raise RowError(
            f"{shown}, and a side may be {_MOST_ASPECT} times the other at most: cut or pad it"
        )
    tags = getattr(image, "tag_v2", {})  # of a TIFF
    if image.mode.startswith("I;16") and (tags.get(_BITS, (16,)), tags.get(_ZERO, 1)) != ((16,), 1):
        raise RowError("has gray of 12 bits, or of 16 in which 0 is white: save it as PNG")
    # The further images of an MPO file are previews and depths, which viewers do not show either.
    if getattr(image, "is_animated", False) and image.format != "MPO":
        raise RowError("has several frames or pages: save the one that is meant as PNG or JPEG")


def _correct_transparency(image: "ImageFile") -> None:
    """Scale a PNG's transparent gray to 8 bits, as its values are; Pillow leaves it as it is.

    Raises:
        RowError: It is a colour of 16 bits, of which Pillow keeps 8.
    """
    if image.format != "PNG" or "transparency" not in image.info:
        return
    how = image.tile[0][3]
    if how == "RGB;16B":
        raise RowError("has a transparent colour of 16 bits: save it as PNG with 8 bits")
    image.info["transparency"] *= {"L;2": 85, "L;4": 17}.get(str(how), 1)


def _upright(image: "Image") -> "Image":
    """Return an image as it is turned by its EXIF tag; as it is if the tag is broken."""
    from PIL.Image import Transpose

    turns = {
        2: Transpose.FLIP_LEFT_RIGHT,
        3: Transpose.ROTATE_180,
        4: Transpose.FLIP_TOP_BOTTOM,
        5: Transpose.TRANSPOSE,
        6: Transpose.ROTATE_270,
        7: Transpose.TRANSVERSE,
        8: Transpose.ROTATE_90,
    }
    try:
        tag: Any = image.getexif().get(_ORIENTATION)
    except Exception:  # noqa: BLE001 - on broken tags Pillow raises anything
        return image
    turn = turns.get(tag) if isinstance(tag, int) else None
    return image if turn is None else image.transpose(turn)


def _as_rgb(image: "Image") -> "Image":
    """Return an image as RGB, on white where it is transparent.

    Raises:
        RowError: Its values are no colours.
    """
    from PIL import Image

    if image.mode.startswith("I;16"):
        image = _of_8_bits(image)
    elif image.mode not in _MODES:
        raise RowError(
            f"has values of the kind {image.mode}, which are no colours of 8 or 16 bits: save it as"
            " PNG or JPEG"
        )
    if not image.has_transparency_data:
        return image if image.mode == "RGB" else image.convert("RGB")
    shown = image.convert("RGBA")
    white = Image.new("RGBA", shown.size, "white")
    return Image.alpha_composite(white, shown).convert("RGB")


def _of_8_bits(image: "Image") -> "Image":
    """Return the upper 8 bits of gray values, as Pillow reads colours; white where transparent."""
    from PIL import Image

    values = np.asarray(image)
    shown = (values >> 8).astype(np.uint8)
    shown[values == image.info.get("transparency", -1)] = 255
    return Image.fromarray(shown)
