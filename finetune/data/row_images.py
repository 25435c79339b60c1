"""Where the images of a row are: in the parts of its turns, or in a column.

A column names images for the places that turns have for them: parts `{"type": "image"}` without a
source, as TRL writes them, or else `<image>` in the texts, as LLaVA and LLaMA-Factory do. Without
places all of them come before what the user says first. `<image>` is a text in any other row.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from finetune.data.pictures.picture import AWAITED, PLACE, TAG, Picture
from finetune.data.pictures.references import folder_of, found, read_reference
from finetune.data.sources import decoded
from finetune.data.turns import Message
from finetune.errors import RowError


def images_of(row: Mapping[str, object], names: Sequence[str]) -> tuple[Picture, ...]:
    """Return the images that a row's columns name.

    Args:
        row: The row.
        names: Columns with images, of which a row has one.

    Raises:
        RowError: A column holds something else, or there are several.
    """
    given = [name for name in names if row.get(name) not in (None, "", [])]
    if not given:
        return ()
    if len(given) > 1:
        raise RowError(f"it has images in {given[0]!r} and in {given[1]!r}: leave one out")
    name, value = given[0], row[given[0]]
    if isinstance(value, str) and value.lstrip().startswith("["):  # of a .csv file
        value = decoded(value.encode(errors="surrogatepass"))
    values = value if isinstance(value, list) else [value]
    try:
        if isinstance(value, RowError):
            raise value
        return tuple(map(read_reference, values))
    except RowError as error:
        raise RowError(f"{name!r}: {error}") from None


def with_images(messages: Sequence[Message], images: Sequence[Picture]) -> tuple[Message, ...]:
    """Return turns with a row's images in their places.

    Args:
        messages: Turns, with the images that their parts name.
        images: Images of a column.

    Raises:
        RowError: There are more places than images, or fewer, or an answer has one.
    """
    own = [one for message in messages for one in message.images]
    if not own and not images:
        return tuple(messages)
    for number, message in enumerate(messages, start=1):
        if message.content.count(PLACE) != len(message.images):
            raise RowError(
                f"turn {number} has the character U+FFFC in its text, the placeholder of an image:"
                " leave it out"
            )
    if images and not own:
        messages = _with_places(messages, len(images))
    elif images and not all(one.is_awaited for one in own):
        raise RowError("it has images both in its turns and in a column: leave out one of them")
    num_places = sum(one.is_awaited for message in messages for one in message.images)
    if num_places != len(images):
        raise RowError(
            f"it has {num_places} places for images in its turns, and {len(images)} images in a"
            ' column: as many are needed (a place is a part {"type": "image"}, or `<image>` in a'
            " text)"
        )
    left = enumerate(images)
    placed = [_filled(one, left) if images else one for one in messages]
    for number, message in enumerate(placed, start=1):
        if message.role == "assistant" and message.images:
            raise RowError(
                f"turn {number} is an answer with an image, and answers are text: give the image in"
                " a turn of the user"
            )
    return tuple(placed)


def _with_places(messages: Sequence[Message], num: int) -> tuple[Message, ...]:
    """Return turns of text with places where they have `<image>`, or before the first question."""
    if any(TAG in message.content for message in messages):
        return tuple(
            replace(
                message,
                content=message.content.replace(TAG, PLACE),
                images=(AWAITED,) * message.content.count(TAG),
            )
            for message in messages
        )
    first = next((n for n, message in enumerate(messages) if message.role == "user"), None)
    if first is None:
        raise RowError("it has images and no turn of the user to show them in")
    asked = messages[first]
    shown = replace(asked, content=PLACE * num + asked.content, images=(AWAITED,) * num)
    return (*messages[:first], shown, *messages[first + 1 :])


def _filled(message: Message, left: Iterator[tuple[int, Picture]]) -> Message:
    """Return a turn whose places are taken by the next images."""
    images = list[Picture]()
    for place, (index, image) in zip(message.images, left, strict=False):
        if place.name not in ("", str(index)):
            raise RowError(
                f"the image in place {index} has the index {place.name}: name images in the order"
                " of their places"
            )
        images.append(image)
    return replace(message, images=tuple(images))


def found_in(
    messages: Sequence[Message], source: str, *, allow_downloads: bool
) -> tuple[Message, ...]:
    """Return turns whose images are files that can be read, or their bytes.

    Args:
        messages: The turns.
        source: Where their row is, whose folder relative paths start at.
        allow_downloads: Whether URLs are read.

    Raises:
        RowError: An image is on a server that is not to be asked, or that does not give it.
    """
    folder = folder_of(source)

    def read(image: Picture) -> Picture:
        return found(image, folder=folder, allow_downloads=allow_downloads)

    return tuple(replace(one, images=tuple(map(read, one.images))) for one in messages)
