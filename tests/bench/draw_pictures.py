"""Draw small pictures of shapes, and write questions about them with their answers.

A picture shows one to five shapes of one kind and colour. They lie in a grid of 3 x 3 cells, each a
little off the middle of its own.

Rows are chat rows with the picture inside, as a PNG in a data URL::

    {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": ...}},
      {"type": "text", "text": "What do you see?"}]},
     {"role": "assistant", "content": "2 blue squares"}]}

Three pairs of colour and shape are seen in held-out rows only.

Run it from the repository root::

    python -m tests.bench.draw_pictures
"""

import argparse
import base64
import io
import json
import math
import random
from dataclasses import dataclass
from pathlib import Path

from PIL import Image, ImageDraw

SEED = 50
QUICKSTART_DIR = Path(__file__).parents[2] / "recipes" / "quickstart"

SIDE = 60  # pixels of a picture
CELL = 20  # pixels of a cell of its grid
MAX_SHAPES = 5

COLOURS = {
    "blue": (35, 85, 215),
    "green": (40, 155, 65),
    "orange": (245, 140, 25),
    "purple": (140, 55, 165),
    "red": (215, 35, 40),
    "yellow": (235, 210, 40),
}
SHAPES = ("circle", "square", "star", "triangle")
BACKGROUNDS = ((255, 255, 255), (225, 225, 225), (95, 95, 95), (20, 20, 20))

# Pairs of colour and shape that training rows never show.
HELDOUT_PAIRS = frozenset({("blue", "triangle"), ("green", "circle"), ("red", "star")})


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """So many shapes of one kind and colour."""

    count: int
    colour: str
    shape: str

    @property
    def noun(self) -> str:
        """The shape in English, in the number of the group."""
        return self.shape if self.count == 1 else f"{self.shape}s"

    def describe(self) -> str:
        """Name the group in English."""
        return f"{self.count} {self.colour} {self.noun}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Picture:
    """A drawing and what it shows."""

    group: Group
    cells: tuple[bool, ...]  # whether a shape is in each cell of the grid, row by row
    image: Image.Image  # with a palette: the background, then the colour of the shapes


def draw_group(rng: random.Random) -> Group:
    """Draw what a picture shows."""
    return Group(
        count=rng.randint(1, MAX_SHAPES),
        colour=rng.choice(list(COLOURS)),
        shape=rng.choice(SHAPES),
    )


def corners(
    num_points: int, *, middle: tuple[float, float], radii: tuple[float, ...]
) -> list[tuple[float, float]]:
    """Return points on a circle, the first at its top, with radii that take turns."""
    return [
        (
            middle[0] + radii[i % len(radii)] * math.sin(2 * math.pi * i / num_points),
            middle[1] - radii[i % len(radii)] * math.cos(2 * math.pi * i / num_points),
        )
        for i in range(num_points)
    ]


def draw_shape(
    canvas: ImageDraw.ImageDraw, shape: str, *, middle: tuple[float, float], radius: float
) -> None:
    """Draw one shape in the second colour of the palette."""
    x, y = middle
    if shape == "circle":
        canvas.ellipse((x - radius, y - radius, x + radius, y + radius), fill=1)
    elif shape == "square":
        half = 0.85 * radius
        canvas.rectangle((x - half, y - half, x + half, y + half), fill=1)
    elif shape == "triangle":
        canvas.polygon(corners(3, middle=(x, y + radius / 4), radii=(1.15 * radius,)), fill=1)
    else:
        canvas.polygon(corners(10, middle=middle, radii=(1.1 * radius, 0.45 * radius)), fill=1)


def draw_picture(rng: random.Random, group: Group) -> Picture:
    """Draw ``group`` at random places, in a shade of its colour."""
    image = Image.new("P", (SIDE, SIDE), 0)
    parts = (*rng.choice(BACKGROUNDS), *COLOURS[group.colour])
    image.putpalette([min(255, max(0, part + rng.randint(-15, 15))) for part in parts])
    canvas = ImageDraw.Draw(image)
    side = SIDE // CELL
    chosen = rng.sample(range(side**2), group.count)
    for cell in chosen:
        radius = rng.uniform(6.0, 8.5)
        slack = CELL / 2 - radius - 0.5
        x, y = (CELL * (i + 0.5) + rng.uniform(-slack, slack) for i in (cell % side, cell // side))
        draw_shape(canvas, group.shape, middle=(x, y), radius=radius)
    return Picture(group=group, cells=tuple(i in chosen for i in range(side**2)), image=image)


# ---------------------------------------------------------------------------------------------
# Rows


def ask(rng: random.Random, group: Group, kind: str) -> tuple[str, str]:
    """Return a question of a kind and its answer.

    Args:
        rng: Chooses the wording.
        group: The shapes in the picture.
        kind: ``see``, ``count``, ``colour`` or ``shape``.
    """
    verb = "is" if group.count == 1 else "are"
    if kind == "see":
        phrasings = "What do you see? / Describe the picture. / What is in the picture?"
        answer = group.describe()
    elif kind == "count":
        phrasings = "How many shapes are there? / Count the shapes. / How many do you see?"
        answer = str(group.count)
    elif kind == "colour":
        phrasings = f"What colour {verb} the {group.noun}? / Name the colour."
        answer = group.colour
    else:
        phrasings = f"What {verb} {group.colour}? / Name the shape."
        answer = group.shape
    return rng.choice(phrasings.split(" / ")), answer


KINDS = ("see", "count", "see", "colour", "see", "shape")


def data_url(image: Image.Image) -> str:
    """Return ``image`` as a PNG in a data URL."""
    file = io.BytesIO()
    image.save(file, format="PNG", optimize=True)
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode('ascii')}"


def make_rows(*, seed: int, num: int, heldout: bool) -> str:
    """Make the text of a file of rows.

    Args:
        seed: Another seed for other pictures.
        num: Rows, whose kinds of question take turns.
        heldout: Whether every tenth round of kinds shows ``HELDOUT_PAIRS``. Otherwise none does.
    """
    rng = random.Random(seed)
    lines = []
    for i in range(num):
        unseen = heldout and i // len(KINDS) % 10 == 3
        group = draw_group(rng)
        while ((group.colour, group.shape) in HELDOUT_PAIRS) != unseen:
            group = draw_group(rng)
        picture = draw_picture(rng, group)
        question, answer = ask(rng, group, KINDS[i % len(KINDS)])
        parts = [
            {"type": "image_url", "image_url": {"url": data_url(picture.image)}},
            {"type": "text", "text": question},
        ]
        messages = [
            {"role": "user", "content": parts},
            {"role": "assistant", "content": answer},
        ]
        lines.append(json.dumps({"messages": messages}) + "\n")
    rng.shuffle(lines)
    return "".join(lines)


def main() -> None:
    """Write the rows."""
    parser = argparse.ArgumentParser(description="Draw the pictures of recipes/quickstart.")
    parser.add_argument("--out", type=Path, default=QUICKSTART_DIR)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    train = make_rows(seed=SEED, num=600, heldout=False)
    heldout = make_rows(seed=SEED + 1, num=120, heldout=True)
    (args.out / "pictures.jsonl").write_text(train, encoding="ascii")
    (args.out / "pictures_heldout.jsonl").write_text(heldout, encoding="ascii")


if __name__ == "__main__":
    main()
