"""Images of every kind: the pixels of good ones, and what is said of the others."""

import base64
import hashlib
import io
import os
import random
import socket
import struct
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageFile

from finetune.commands.data import labelled
from finetune.data.pictures.decode import KINDS, MOST_BYTES, MOST_PIXELS
from finetune.data.pictures.picture import PLACE, Picture
from finetune.data.pictures.thumbnail import MOST_SHOWN, SIDE, thumbnails
from finetune.errors import ConfigError, RowError
from finetune.report.data_view import (
    Bin,
    DataView,
    Piece,
    SeenRow,
    SeenSource,
    data_html,
    data_json,
)

WHITE, BLACK, RED = (255, 255, 255), (0, 0, 0), (255, 0, 0)
WIDTH, HEIGHT = 6, 4


def saved(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    content = io.BytesIO()
    image.save(content, kind, **options)
    return content.getvalue()


def colours() -> Image.Image:
    """An image whose pixels all differ."""
    values = np.arange(WIDTH * HEIGHT * 3, dtype=np.uint8).reshape(HEIGHT, WIDTH, 3) * 3
    return Image.fromarray(values)


def chunk(kind: bytes, data: bytes, *, is_intact: bool = True) -> bytes:
    checksum = zlib.crc32(kind + data) ^ (not is_intact)
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", checksum)


def png(
    bits: int,
    colour: int,
    *rows: bytes,
    size: tuple[int, int] = (2, 2),
    more: bytes = b"",
    data: bytes | None = None,
) -> bytes:
    """Return a PNG made by hand, with chunks before its pixels."""
    head = struct.pack(">IIBBBBB", *size, bits, colour, 0, 0, 0)
    lines = zlib.compress(b"".join(b"\0" + row for row in rows))
    parts = chunk(b"IHDR", head) + more + chunk(b"IDAT", lines if data is None else data)
    return b"\x89PNG\r\n\x1a\n" + parts + chunk(b"IEND", b"")


def opened(content: bytes) -> Image.Image:
    image = Picture(name="x", content=content).opened().image
    assert image.mode == "RGB"
    return image


def pixels(content: bytes) -> list[tuple[int, ...]]:
    return [tuple(one) for one in np.asarray(opened(content)).reshape(-1, 3).tolist()]


# --------------------------------------------------------------------------------------------------
# Pixels of good ones

LOSSLESS = [
    ("PNG", {}),
    ("BMP", {}),
    ("TIFF", {}),
    ("TIFF", {"compression": "tiff_lzw"}),
    ("TIFF", {"compression": "tiff_deflate"}),
    ("WEBP", {"lossless": True}),
]


@pytest.mark.parametrize(("kind", "options"), LOSSLESS)
def test_pixels_are_those_that_were_saved_and_so_is_their_key(
    kind: str, options: dict[str, Any]
) -> None:
    image = colours()
    found = Picture(name="x", content=saved(image, kind, **options)).opened()
    assert found.image.tobytes() == image.tobytes()
    size = struct.pack("<II", WIDTH, HEIGHT)
    assert found.key == hashlib.blake2b(size + image.tobytes(), digest_size=16).digest()


def test_a_key_knows_the_shape_and_each_value() -> None:
    def key(image: Image.Image) -> bytes:
        return Picture(name="x", content=saved(image)).opened().key

    one, other = colours(), colours()
    other.putpixel((WIDTH - 1, HEIGHT - 1), (0, 0, 1))
    wide, high = Image.new("RGB", (4, 2), RED), Image.new("RGB", (2, 4), RED)
    assert key(one) == key(colours())
    assert len({key(each) for each in (one, other, wide, high)}) == 4


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ("BMP", "GIF")])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_an_image_is_upright_in_each_orientation(kind: str, orientation: int) -> None:
    """An image is turned as a camera would have written it, and must come back."""
    upright = Image.new("RGB", (48, 32), "white")
    upright.paste((255, 0, 0), (0, 0, 16, 16))
    upright.paste((0, 0, 255), (32, 16, 48, 32))
    value = np.asarray(upright)
    # EXIF: the 0th row of the file is the top, bottom, left or right of the scene, and so on.
    written = {
        1: value,
        2: value[:, ::-1],
        3: value[::-1, ::-1],
        4: value[::-1],
        5: value.transpose(1, 0, 2),
        6: value.transpose(1, 0, 2)[::-1],
        7: value[::-1, ::-1].transpose(1, 0, 2),
        8: value.transpose(1, 0, 2)[:, ::-1],
    }[orientation]
    tags = Image.Exif()
    tags[0x0112] = orientation
    options: dict[str, dict[str, Any]] = {
        "JPEG": {"quality": 100},
        "WEBP": {"lossless": True},
        "AVIF": {"quality": 100},
    }
    content = saved(
        Image.fromarray(np.ascontiguousarray(written)),
        kind,
        exif=tags,
        **options.get(kind, {}),
    )
    image = opened(content)
    assert (image.info, dict(image.getexif())) == ({}, {}), "nothing by which it is turned again"
    shown = np.asarray(image).astype(int)
    assert shown.shape == value.shape
    assert np.abs(shown - value).mean() < 3


def exif(*entries: bytes) -> bytes:
    """Return tags made by hand, of 12 bytes each."""
    return b"Exif\0\0MM\0\x2a\0\0\0\x08" + struct.pack(">H", len(entries)) + b"".join(entries)


TAGS = {
    "of 0": exif(struct.pack(">HHIHH", 0x0112, 3, 1, 0, 0)),
    "of 9": exif(struct.pack(">HHIHH", 0x0112, 3, 1, 9, 0)),
    "a text": exif(struct.pack(">HHI4s", 0x0112, 2, 4, b"six\0")),
    "beyond the end": exif(struct.pack(">HHII", 0x0112, 3, 900, 90_000)),
    "an unknown type": exif(struct.pack(">HHIHH", 0x0112, 99, 1, 6, 0)),
    "cut off": exif(struct.pack(">HHIHH", 0x0112, 3, 1, 6, 0))[:-6],
    "cut off early": b"Exif\0\0MM\0",
    "no tags": b"Exif\0\0nothing of the kind",
}


@pytest.mark.parametrize("tags", TAGS.values(), ids=[*TAGS])
def test_an_image_with_broken_tags_is_shown_as_it_is(tags: bytes) -> None:
    content = saved(colours(), "JPEG", exif=tags)
    assert opened(content).size == (WIDTH, HEIGHT)


GRAY = bytes([0, 100])
PALETTE = chunk(b"PLTE", bytes([1, 2, 3, 4, 5, 6]))
SHOWN: dict[str, tuple[bytes, list[tuple[int, ...]]]] = {
    "gray": (png(8, 0, GRAY, GRAY), [(0, 0, 0), (100, 100, 100)] * 2),
    "1 bit": (png(1, 0, b"\x40", b"\x80"), [BLACK, WHITE, WHITE, BLACK]),
    "2 bits": (png(2, 0, b"\x10", b"\xb0"), [BLACK, (85,) * 3, (170,) * 3, WHITE]),
    "4 bits": (png(4, 0, b"\x0f", b"\x12"), [BLACK, WHITE, (17,) * 3, (34,) * 3]),
    "gray of 16 bits": (
        png(16, 0, bytes.fromhex("000000ff"), bytes.fromhex("0100ffff")),
        [BLACK, BLACK, (1,) * 3, WHITE],
    ),
    "colours of 16 bits": (
        png(16, 2, bytes.fromhex("00ff01008080ffff01ff0000"), bytes(12)),
        [(0, 1, 128), (255, 1, 0), BLACK, BLACK],
    ),
    "1 bit, black transparent": (
        png(1, 0, b"\x40", b"\x80", more=chunk(b"tRNS", b"\0\0")),
        [WHITE] * 4,
    ),
    "2 bits, one transparent": (
        png(2, 0, b"\x10", b"\xb0", more=chunk(b"tRNS", b"\0\2")),
        [BLACK, (85,) * 3, WHITE, WHITE],
    ),
    "4 bits, one transparent": (
        png(4, 0, b"\x0f", b"\x12", more=chunk(b"tRNS", b"\0\1")),
        [BLACK, WHITE, WHITE, (34,) * 3],
    ),
    "gray, one transparent": (
        png(8, 0, GRAY, GRAY, more=chunk(b"tRNS", b"\0\x64")),
        [BLACK, WHITE] * 2,
    ),
    "gray of 16 bits, one transparent": (
        png(
            16,
            0,
            bytes.fromhex("00010100"),
            bytes.fromhex("01010002"),
            more=chunk(b"tRNS", b"\1\0"),
        ),
        [BLACK, WHITE, (1,) * 3, BLACK],
    ),
    "a colour transparent": (
        png(
            8,
            2,
            bytes(range(6)),
            bytes(range(1, 7)),
            more=chunk(b"tRNS", bytes([0, 0, 0, 1, 0, 2])),
        ),
        [WHITE, (3, 4, 5), (1, 2, 3), (4, 5, 6)],
    ),
    "a palette": (
        png(8, 3, b"\0\1", b"\1\0", more=PALETTE),
        [(1, 2, 3), (4, 5, 6), (4, 5, 6), (1, 2, 3)],
    ),
    "a palette, one transparent": (
        png(8, 3, b"\0\1", b"\1\0", more=PALETTE + chunk(b"tRNS", b"\0")),
        [WHITE, (4, 5, 6), (4, 5, 6), WHITE],
    ),
    "a palette, half transparent": (
        png(8, 3, b"\0\1", b"\1\0", more=PALETTE + chunk(b"tRNS", b"\x80")),
        [(128, 128, 129), (4, 5, 6), (4, 5, 6), (128, 128, 129)],
    ),
    "gray and opacity": (
        png(8, 4, bytes([100, 255, 100, 0]), bytes([0, 51, 0, 255])),
        [(100,) * 3, WHITE, (204,) * 3, BLACK],
    ),
    "colours and opacity": (
        png(8, 6, bytes([9, 8, 7, 255, 9, 8, 7, 0]), bytes([0, 0, 0, 102, 255, 0, 0, 255])),
        [(9, 8, 7), WHITE, (153,) * 3, RED],
    ),
    "ink": (saved(Image.new("CMYK", (2, 2), (255, 0, 0, 0)), "TIFF"), [(0, 255, 255)] * 4),
    "ink in a JPEG": (saved(Image.new("CMYK", (2, 2), (0, 0, 0, 255)), "JPEG"), [BLACK] * 4),
    "a GIF": (saved(Image.new("RGB", (2, 2), RED), "GIF"), [RED] * 4),
    "a TIFF of 16 bits": (saved(Image.new("I;16", (2, 2), 0x80FF), "TIFF"), [(128,) * 3] * 4),
    "a profile": (saved(Image.new("RGB", (2, 2), RED), icc_profile=b"not a profile"), [RED] * 4),
}


@pytest.mark.parametrize(("content", "wanted"), SHOWN.values(), ids=[*SHOWN])
def test_pixels_are_what_a_viewer_shows_on_white(
    content: bytes, wanted: list[tuple[int, ...]]
) -> None:
    assert pixels(content) == wanted


def test_a_photo_with_a_preview_in_its_file_is_the_photo() -> None:
    photo, preview = Image.new("RGB", (32, 16), RED), Image.new("RGB", (8, 4), "blue")
    content = io.BytesIO()
    photo.save(content, "MPO", save_all=True, append_images=[preview])
    assert opened(content.getvalue()).size == photo.size


# --------------------------------------------------------------------------------------------------
# What is said of the others

SMALL = Image.new("RGB", (8, 8), RED)
FRAMES = {"save_all": True, "append_images": [Image.new("RGB", (8, 8), "blue")]}
NO_KIND = "none of the kinds that are read"


def flipped(content: bytes, at: int) -> bytes:
    return content[:at] + bytes([content[at] ^ 0xFF]) + content[at + 1 :]


def with_size(content: bytes, at: int, size: tuple[int, int], form: str) -> bytes:
    """Return a file that says another size."""
    written = struct.pack(form, *size)
    return content[:at] + written + content[at + len(written) :]


def tiff(**tags: Any) -> bytes:
    return saved(Image.new(tags.pop("mode"), (8, 8)), "TIFF", **tags)


def retagged(tag: int, value: int, other: int) -> bytes:
    """Return a gray TIFF of 16 bits with another value of one tag."""
    content = tiff(mode="I;16")
    before, after = (struct.pack("<HHII", tag, 3, 1, one) for one in (value, other))
    assert content.count(before) == 1
    return content.replace(before, after)


noise = random.Random(0).randbytes(3_000)
JPEG = saved(Image.effect_noise((64, 64), 90), "JPEG")
PNG = saved(Image.effect_noise((64, 64), 90))
BOMB_TEXT = chunk(b"zTXt", b"k\0\0" + zlib.compress(b"a" * 80_000_000, 9))
BOMB_PROFILE = chunk(b"iCCP", b"k\0\0" + zlib.compress(b"a" * 80_000_000, 9))
MANY_TEXTS = chunk(b"zTXt", b"k\0\0" + zlib.compress(b"a" * 1_000_000, 9)) * 80
IDAT = zlib.compress(b"\0" + b"\1\2\3" * 8)
REFUSED: dict[str, tuple[bytes, str]] = {
    "nothing": (b"", "is empty"),
    "one byte": (b"\x89", NO_KIND),
    "noise": (noise, NO_KIND),
    "zeros": (bytes(3_000), NO_KIND),
    "a text": (b"a cat", NO_KIND),
    "an error of a server": (b"<!DOCTYPE html><html>404</html>", NO_KIND),
    "a pointer of Git": (b"version https://git-lfs.github.com/spec/v1\noid sha256:0", NO_KIND),
    "JSON": (b'{"bytes": null}', NO_KIND),
    "base64 in place of bytes": (b"iVBORw0KGgoAAAANSUhEUg", NO_KIND),
    "SVG": (b'<svg xmlns="http://www.w3.org/2000/svg" width="9" height="9"/>', NO_KIND),
    "PDF": (b"%PDF-1.7\n1 0 obj", NO_KIND),
    "EPS": (saved(SMALL, "EPS"), NO_KIND),
    "PPM": (saved(SMALL, "PPM"), NO_KIND),
    "TGA": (saved(SMALL, "TGA"), NO_KIND),
    "ICO": (saved(SMALL, "ICO"), NO_KIND),
    "ICNS": (saved(Image.new("RGB", (16, 16)), "ICNS"), NO_KIND),
    "PCX": (saved(SMALL, "PCX"), NO_KIND),
    "SGI": (saved(SMALL, "SGI"), NO_KIND),
    "DDS": (saved(SMALL, "DDS"), NO_KIND),
    "JPEG 2000": (saved(SMALL, "JPEG2000"), NO_KIND),
    "FITS": (b"SIMPLE  =                    T" + b" " * 3000, NO_KIND),
    "WMF": (b"\xd7\xcd\xc6\x9a" + bytes(100), NO_KIND),
    "a film": (b"\0\0\0\x18ftypmp42" + bytes(100), NO_KIND),
    "HEIC": (b"\0\0\0\x18ftypheic" + bytes(100), NO_KIND),
    "a zip": (b"PK\3\4" + bytes(100), NO_KIND),
    "gzip": (b"\x1f\x8b\x08" + bytes(100), NO_KIND),
    "a PNG cut to its name": (PNG[:8], "broken|" + NO_KIND),
    "a PNG cut in its head": (PNG[:20], "broken|" + NO_KIND),
    "a PNG cut in its pixels": (PNG[: len(PNG) // 2], "broken"),
    "a PNG without its end": (PNG[:-12], "broken"),
    "a PNG with a wrong pixel": (flipped(PNG, len(PNG) // 2), "broken"),
    "a PNG with a wrong head": (flipped(PNG, 17), "broken|" + NO_KIND),
    "a PNG without pixels": (png(8, 2, data=b""), "broken"),
    "a PNG with pixels that are not packed": (png(8, 2, data=b"not packed"), "broken"),
    "a PNG of a wrong filter": (png(8, 2, data=zlib.compress(b"\x63" + b"\1" * 20)), "broken"),
    "a PNG of no size": (png(8, 2, b"", size=(0, 0)), "broken|pixels|" + NO_KIND),
    "a PNG of a wrong depth": (png(7, 2, b"\1\2\3" * 2), "broken|" + NO_KIND),
    "a PNG with a wrong checksum": (
        png(8, 2, b"\1\2\3" * 2, b"\1\2\3" * 2, more=chunk(b"gAMA", b"\0" * 4, is_intact=False)),
        "broken",
    ),
    "a PNG with a long text": (png(8, 2, b"\1\2\3" * 2, b"\1\2\3" * 2, more=BOMB_TEXT), "broken"),
    "a PNG with many texts": (png(8, 2, b"\1\2\3" * 2, b"\1\2\3" * 2, more=MANY_TEXTS), "broken"),
    "a PNG with a long profile": (
        png(8, 2, b"\1\2\3" * 2, b"\1\2\3" * 2, more=BOMB_PROFILE),
        "broken",
    ),
    "a PNG with a transparent colour of 16 bits": (
        png(16, 2, bytes(12), bytes(12), more=chunk(b"tRNS", bytes(6))),
        "a transparent colour of 16 bits",
    ),
    "a JPEG cut to its name": (JPEG[:3], "broken|" + NO_KIND),
    "a JPEG cut in its head": (JPEG[:100], "broken|" + NO_KIND),
    "a JPEG cut in its pixels": (JPEG[: len(JPEG) // 2], "truncated"),
    "a JPEG without its end": (JPEG[:-10], "truncated"),
    "a WEBP cut in its pixels": (saved(SMALL, "WEBP")[:-20], "broken|" + NO_KIND),
    "a GIF cut in its pixels": (saved(Image.effect_noise((64, 64), 90), "GIF")[:1500], "broken"),
    "a GIF cut in its head": (saved(SMALL, "GIF")[:8], "broken|" + NO_KIND),
    "a BMP cut in its pixels": (saved(SMALL, "BMP")[:-20], "truncated"),
    "a TIFF cut in its tags": (saved(SMALL, "TIFF")[:30], "broken|" + NO_KIND),
    "a TIFF cut in its pixels": (
        saved(Image.effect_noise((64, 64), 90), "TIFF")[:-1000],
        "broken|" + NO_KIND,
    ),
    "an AVIF cut in its pixels": (saved(SMALL, "AVIF")[:-20], "broken|" + NO_KIND),
    "an animated GIF": (saved(SMALL, "GIF", **FRAMES), "several frames"),
    "an animated WEBP": (saved(SMALL, "WEBP", **FRAMES), "several frames"),
    "an animated PNG": (saved(SMALL, "PNG", **FRAMES), "several frames"),
    "an animated AVIF": (saved(SMALL, "AVIF", **FRAMES), "several frames"),
    "pages of a TIFF": (saved(SMALL, "TIFF", **FRAMES), "several frames or pages"),
    "a TIFF of whole numbers": (tiff(mode="I"), "values of the kind I"),
    "a TIFF of numbers": (tiff(mode="F"), "values of the kind F"),
    "a TIFF of 16 bits, 0 is white": (retagged(262, 1, 0), "16 in which 0 is white"),
    "a TIFF of 12 bits": (retagged(258, 16, 12), "gray of 12 bits"),
    "a TIFF of a colour space": (tiff(mode="LAB"), "values of the kind LAB"),
    "one pixel": (saved(Image.new("RGB", (1, 1))), "has 1x1 pixels"),
    "one column": (saved(Image.new("RGB", (1, 40))), "has 1x40 pixels"),
    "one row": (saved(Image.new("RGB", (40, 1))), "has 40x1 pixels"),
    "a ribbon": (saved(Image.new("RGB", (4_010, 20))), "200 times the other"),
    "a column": (saved(Image.new("RGB", (20, 4_010))), "200 times the other"),
    "a PNG of many pixels": (
        png(8, 2, size=(8_193, 8_192), data=IDAT),
        rf"has 8,193x8,192 pixels, and at most {MOST_PIXELS:,}",
    ),
    "a PNG of far too many": (png(8, 2, size=(2**31 - 1,) * 2, data=IDAT), "more than 67,108,864"),
    "a JPEG of many pixels": (
        with_size(JPEG, JPEG.index(b"\xff\xc0") + 5, (65_000, 65_000), ">HH"),
        "more than 67,108,864",
    ),
    "a GIF of many pixels": (with_size(saved(SMALL, "GIF"), 6, (9_000, 9_000), "<HH"), "pixels"),
    "a BMP of many pixels": (
        with_size(saved(SMALL, "BMP"), 18, (9_000, 9_000), "<ii"),
        "has 9,000x9,000 pixels",
    ),
    "a file of many bytes": (b"\x89PNG\r\n\x1a\n" + bytes(MOST_BYTES), "64.0 MiB"),
}
assert len(REFUSED) >= 60


@pytest.mark.parametrize(("content", "problem"), REFUSED.values(), ids=[*REFUSED])
def test_a_file_is_refused_with_its_name_and_what_to_do(content: bytes, problem: str) -> None:
    with pytest.raises(RowError, match=problem) as caught:
        Picture(name="pic.png", content=content).opened()
    shown = str(caught.value)
    assert shown.startswith("the image pic.png ")
    assert "\n" not in shown
    assert ": " in shown  # what is wrong, and what to do


def test_what_is_too_large_is_not_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the size is read of a file that says it is larger than any that is decoded."""

    def load(_: ImageFile.ImageFile) -> None:
        raise AssertionError("decoded")

    monkeypatch.setattr(ImageFile.ImageFile, "load", load)
    for name, (content, problem) in REFUSED.items():
        if "many" in name and "text" not in name:
            with pytest.raises(RowError, match=problem):
                Picture(name="x", content=content).opened()


def folder(path: Path) -> None:
    path.mkdir()


def looping(path: Path) -> None:
    path.symlink_to(path)


def dangling(path: Path) -> None:
    path.symlink_to("nowhere")


def listening(path: Path) -> None:
    os.chdir(path.parent)  # a socket's path is short
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(path.name)


def sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(2**40)


ODD_FILES: list[tuple[Callable[[Path], object], str]] = [
    (lambda _: None, "is missing"),
    (folder, "is a folder"),
    (looping, "cannot be read"),
    (dangling, "is missing"),
    (os.mkfifo, "is no regular file"),
    (listening, "is no regular file"),
    (lambda path: path.symlink_to("/dev/zero"), "is no regular file"),
    (lambda path: path.symlink_to("/dev/null"), "is no regular file"),
    (Path.touch, "is empty"),
    (sparse, "has 1,048,576.0 MiB"),
    (lambda path: path.write_text("text"), f"is {NO_KIND}"),
]


@pytest.mark.parametrize(("made", "problem"), ODD_FILES)
@pytest.mark.timeout(20)
def test_no_file_makes_a_reader_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, made: Callable[[Path], object], problem: str
) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "pic.png"
    made(path)
    with pytest.raises(RowError, match=f"the image pic {problem}"):
        Picture(name="pic", path=str(path)).opened()


@pytest.mark.parametrize("path", ["a\0b.png", "\ud800.png", "a" * 300, "a/" * 3_000, "", "/"])
def test_no_path_is_more_than_an_error(path: str) -> None:
    with pytest.raises(RowError, match=r"the image pic (is|cannot)"):
        Picture(name="pic", path=path).opened()


def test_a_file_without_permission_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> int:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "stat", refuse)  # root may read every file
    with pytest.raises(RowError, match=r"cannot be read \(Permission denied\)"):
        Picture(name="pic", path=str(tmp_path / "a.png")).opened()


def test_links_are_followed(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(PNG)
    (tmp_path / "b.png").symlink_to("a.png")
    one, other = (
        Picture(name="x", path=str(tmp_path / name)).opened() for name in ("a.png", "b.png")
    )
    assert one.key == other.key


@pytest.mark.parametrize("kind", KINDS)
def test_whatever_is_in_a_file_there_is_a_picture_or_an_error_of_the_row(kind: str) -> None:
    chance = random.Random(kind)
    content = saved(Image.effect_noise((40, 30), 80).convert("RGB"), kind)
    results = set[bool]()
    for _ in range(400):
        broken = bytearray(content)
        if chance.random() < 0.3:
            del broken[chance.randrange(1, len(broken)) :]
        for _ in range(chance.choice([1, 1, 2, 5, 20])):
            within = min(len(broken), chance.choice([64, len(broken)]))
            broken[chance.randrange(within)] = chance.randrange(256)
        try:
            results.add(opened(bytes(broken)).mode == "RGB")
        except RowError:
            results.add(False)
    assert False in results


def test_without_pillow_an_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    with pytest.raises(ConfigError, match=r"`pip install 'sluice-finetune\[images\]'`"):
        Picture(name="x", content=PNG).opened()


def test_a_shown_row_names_its_images_and_their_sizes(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(PNG)
    images = [
        Picture(name="a.png", path=str(tmp_path / "a.png")),
        Picture(name="of bytes", content=saved(colours())),
    ]
    pieces = (
        Piece(text=f"See {PLACE}{PLACE}", has_loss=False, num_tokens=9),
        Piece(text=f"{PLACE} now", has_loss=True, num_tokens=2),
    )
    row = labelled(
        SeenRow(source="rows.jsonl:1", pieces=pieces), list(zip(images, (16, 1), strict=True))
    )
    assert [piece.text for piece in row.pieces] == [
        "See [image 1: a.png, 64x64, 16 tokens][image 2: of bytes, 6x4, 1 tokens]",
        f"{PLACE} now",  # of a text
    ]
    assert (row.num_tokens, row.num_loss_tokens) == (11, 2)


def small_image(uri: str) -> Image.Image:
    head, _, content = uri.partition(",")
    assert head == "data:image/jpeg;base64"
    return Image.open(io.BytesIO(base64.b64decode(content)))


@pytest.mark.parametrize(
    ("size", "small"),
    [((400, 200), (96, 48)), ((60, 40), (60, 40)), ((SIDE, SIDE), (96, 96)), ((800, 4), (96, 1))],
)
def test_a_copy_is_small_in_pixels_and_in_bytes(
    size: tuple[int, int], small: tuple[int, int]
) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    (uri,) = thumbnails([Picture(name="x", content=saved(Image.fromarray(noise)))])
    assert small_image(uri).size == small
    assert len(uri) < 2**13


def test_a_copy_has_the_colours_of_its_image_and_a_row_a_few_copies() -> None:
    red = Picture(name="x", content=saved(Image.new("RGB", (300, 300), RED)))
    found = thumbnails([red] * (MOST_SHOWN + 3))
    assert len(found) == MOST_SHOWN
    pixel = np.asarray(small_image(found[-1]))[50, 50].astype(int)
    assert np.abs(pixel - RED).max() < 8


def test_the_page_of_rows_shows_their_images_and_json_leaves_them_out() -> None:
    piece = Piece(text=f"See {PLACE}", has_loss=False, num_tokens=9)
    image = Picture(name="x", content=PNG)
    row = labelled(SeenRow(source="rows.jsonl:1", pieces=(piece,)), [(image, 9)])
    source = SeenSource(
        path="rows.jsonl",
        num_rows=1,
        num_used=1,
        epoch_rows=1,
        epoch_tokens=9,
        epoch_loss_tokens=0,
        rows=(row,),
    )
    view = DataView(
        recipe="x",
        seq_len=16,
        sources=(source,),
        held_out_rows=0,
        lengths=(Bin(first=1, last=9, num_rows=1),),
        longest=9,
        packed_fill=None,
        notes=(),
        data_hash="0" * 64,
    )
    text = data_html(view)
    assert f'<img src="{row.thumbnails[0]}" alt="image 1">' in text
    assert "img-src data:" in text
    assert "data:image" not in data_json(view)
