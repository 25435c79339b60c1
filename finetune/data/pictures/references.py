"""How a row writes an image: a path, a URL, its bytes, or the fields of one.

What is written is read as a `Picture` whose path is as the row has it. `found` makes it a file or
the bytes of one: a relative path starts at the folder of the data file.
"""

import base64
import binascii
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from urllib.parse import unquote

from finetune.data.pictures.decode import KINDS, MOST_BYTES, printable, too_many_bytes
from finetune.data.pictures.download import downloaded
from finetune.data.pictures.picture import AWAITED, Picture
from finetune.errors import RowError

_SCHEME = re.compile(r"([a-z][a-z0-9+.-]+)://", re.IGNORECASE)
_MOST_SHOWN = 60
_OF_ROW = re.compile(r"(:[0-9]+|\[[0-9]+\])$")


def read_reference(value: object) -> Picture:
    """Return an image as a row writes it.

    Args:
        value: A text, bytes, or an object with `path`, `url` or `bytes`, as data sets have them.

    Raises:
        RowError: It is something else.
    """
    if isinstance(value, Mapping):
        return _of_fields(value)
    if isinstance(value, bytes):
        return Picture(name="of bytes", content=value)
    if not isinstance(value, str):
        raise RowError(
            f"an image is given as {type(value).__name__}: it must be a path, a URL, bytes, or an"
            " object with `path`, `url` or `bytes`"
        )
    if not value.strip():
        raise RowError("an image has an empty path: name a file, or leave it out")
    if value[:5].lower() == "data:":
        return _of_data_url(value)
    return Picture(name=_shortened(value), path=value)


_KEYS = {"image": ("image", "path", "url", "base64"), "image_url": ("image_url",)}
"""Type of a part -> keys of its source."""


def read_part(kind: str, given: Mapping[str, object], where: str) -> Picture:
    """Read a part of a turn that is an image, which awaits one of a column if it names none.

    Args:
        kind: Type of the part.
        given: Other fields of the part.
        where: Place of the part, for errors.

    Raises:
        RowError: It is something else.
    """
    given = {key: value for key, value in given.items() if (key, value) != ("text", "")}
    if kind == "image" and isinstance(given.get("index"), int) and len(given) == 1:
        return replace(AWAITED, name=str(given["index"]))
    unread = [key for key in given if key not in _KEYS[kind]]
    if unread or len(given) > 1:
        names = ", ".join(map(repr, unread or given))
        raise RowError(f"{where} is an image with {names}: one of {_KEYS[kind]} is read")
    if not given and kind == "image":
        return AWAITED
    try:
        source = given.get("image_url") if kind == "image_url" else next(iter(given.values()))
        return read_base64(source) if "base64" in given else read_reference(source)
    except RowError as error:
        raise RowError(f"{where}: {error}") from None


def read_base64(value: object) -> Picture:
    """Return an image whose bytes are written in base64, with or without `data:` before them.

    Raises:
        RowError: They are not.
    """
    if not isinstance(value, str):
        raise RowError(f"`base64` of an image must be text, this is a {type(value).__name__}")
    if value[:5].lower() == "data:":
        return _of_data_url(value)
    return Picture(name="in base64", content=_decoded(value))


def found(picture: Picture, *, folder: Path, allow_downloads: bool) -> Picture:
    """Return an image whose file can be read, or its bytes.

    Args:
        picture: Image as its row names it.
        folder: Folder that relative paths start at.
        allow_downloads: Whether URLs are read.

    Raises:
        RowError: It is on a server that is not to be asked, or that does not give it.
    """
    if picture.path is None:
        return picture
    scheme = _SCHEME.match(picture.path)
    if scheme is None:
        return replace(picture, path=str(folder.absolute() / picture.path))
    kind = scheme[1].lower()
    if kind == "file":
        host, _, path = picture.path[scheme.end() :].partition("/")
        if host not in ("", "localhost"):
            raise RowError(f"the image {picture.name} is on another host: write file:///path")
        return replace(picture, path=unquote(f"/{path}"))
    if kind not in ("http", "https"):
        raise RowError(f"the image {picture.name} is not in a file: download it, and name the file")
    if not allow_downloads:
        raise RowError(
            f"the image {picture.name} is on a server: set `data.allow_downloads: true`, or"
            " download it and name the file"
        )
    try:
        return Picture(name=picture.name, content=downloaded(picture.path))
    except RowError as error:
        raise RowError(f"the image {picture.name} {error}") from error


def folder_of(source: str) -> Path:
    """Return where the relative paths of a row start: the folder of its file.

    Args:
        source: Where the row is: `path:line` or `path[index]`; the path may be a data set's.
    """
    path = Path(_OF_ROW.sub("", source))
    return path.parent if path.is_file() else path


def _of_fields(fields: Mapping[str, object]) -> Picture:
    """Return an image that is written as an object; with its bytes, a path is but a name."""
    given = {str(key): value for key, value in fields.items() if value is not None}
    key = next((key for key in ("bytes", "url", "path") if key in given), None)
    if key is None:
        raise RowError("an image is an object without `path`, `url` or `bytes`: write one of them")
    value = given.pop(key)
    if not isinstance(value, bytes if key == "bytes" else str):
        raise RowError(f"`{key}` of an image is given as {type(value).__name__}")
    picture = read_reference(value)
    if key == "bytes" and given.get("path"):
        picture = replace(picture, name=_shortened(given.pop("path")))
    if given.pop("detail", "auto") != "auto":
        raise RowError(
            "an image has a `detail`, and all have one budget: leave it out, and set"
            " `image.max_tokens`"
        )
    if given:
        names = ", ".join(f"`{name}`" for name in given)
        raise RowError(f"an image has {names}, which would not be read: leave it out")
    return picture


def _of_data_url(value: str) -> Picture:
    head, comma, written = value.partition(",")
    kind, *options = head[5:].lower().split(";")
    if not comma or not options or options[-1].strip() != "base64":
        raise RowError("an image is a data URL that is not `data:image/png;base64,...`: write so")
    if kind.strip() not in {f"image/{name.lower()}" for name in (*KINDS, "JPG")}:
        raise RowError(
            f"an image is a data URL of the type {kind or 'of no name'!r}: images of the types"
            f" {', '.join(KINDS)} are read"
        )
    return Picture(name=f"in {kind.strip()};base64", content=_decoded(written))


def _decoded(written: str) -> bytes:
    """Return bytes from base64; blanks between the letters mean nothing.

    Raises:
        RowError: It is broken or too long.
    """
    written = "".join(written.split())
    if len(written) // 4 * 3 > MOST_BYTES:
        raise RowError(f"an image in base64 {too_many_bytes(len(written) // 4 * 3)}")
    try:
        return base64.b64decode(written, validate=True)
    except (binascii.Error, ValueError) as error:
        raise RowError(f"an image has broken base64 ({error}): encode its file anew") from None


def _shortened(text: object) -> str:
    shown = printable(str(text))
    return shown if len(shown) <= _MOST_SHOWN else f"...{shown[3 - _MOST_SHOWN :]}"
