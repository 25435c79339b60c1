"""What `data` shows: the rows of a recipe as the model will see them, before it is loaded."""

import json
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, islice
from typing import TYPE_CHECKING, cast

import numpy as np

from finetune.data.compared import Comparison, require_classes, require_comparable
from finetune.data.dataset import Chosen, ExampleSet, load_rows
from finetune.data.order import PackedOrder, RowCost, StepSizes
from finetune.data.pictures.picture import PLACE, Picture
from finetune.data.pictures.thumbnail import thumbnails
from finetune.data.rows import RowForm
from finetune.data.sources import Raw, decoded
from finetune.data.tokenize import IGNORE_INDEX, Example, Imaging
from finetune.env import cache_dir
from finetune.model.tokenizer import load_tokenizer
from finetune.recipe.load import load_recipe
from finetune.recipe.recipe import Recipe
from finetune.report.data_view import (
    DataView,
    Piece,
    SeenRow,
    SeenSource,
    Taught,
    histogram,
)
from finetune.report.format import shown_span
from finetune.report.screen import Working
from finetune.training.packing import settled_packing
from finetune.training.prepare import imaging_of

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from transformers import PreTrainedTokenizerBase

    from finetune.objectives.grpo import Grpo

_NUM_TAUGHT, _NUM_TOP = 3, 4


def data_view(
    recipe: str, overrides: Sequence[str], *, num_rows: int, working: Working
) -> DataView:
    """Read and tokenise what a recipe names, and return what the model will see of it.

    The tokens are those that the run takes, from the same cache.

    Args:
        recipe: A recipe's path, or a shipped name.
        overrides: Settings over the recipe's.
        num_rows: Rows of each source to show.
        working: Shows the progress of tokenising.

    Raises:
        ConfigError: The recipe is wrong.
        DataError: A file is missing or empty, or rows are bad; each is named by file and line.
        ModelError: There is no tokenizer.
    """
    settings = load_recipe(recipe, overrides)
    tokenizer = load_tokenizer(settings.model)
    imaging = imaging_of(settings, tokenizer)
    seq_len = settings.train.seq_len
    rows = load_rows(
        settings.data,
        tokenizer,
        seq_len=seq_len,
        seed=settings.train.seed,
        cache_dir=cache_dir(),
        working=working,
        formats=settings.objective.read_formats,
        imaging=imaging,
    )
    encoding = Encoding(tokenizer=tokenizer, imaging=imaging)
    require_comparable(rows, settings.objective)
    if settings.model.num_classes is not None:
        of_words = settings.objective.classifies_tokens
        require_classes(rows, settings.model.num_classes, of_words=of_words)
    lengths, notes = rows.train.lengths, [*rows.notes, *rows.prompted.notes]
    if (sizes := np.concatenate([part.image_tokens for part in rows.train.parts])).size:
        keys = np.concatenate([part.images for part in rows.train.parts])
        notes.append(
            f"Images: {len(sizes):,} in the rows of an epoch, {len(np.unique(keys)):,} of them"
            f" distinct, with {shown_span(sizes.min(), sizes.max())} tokens each"
        )
    is_sampled = settings.objective.samples_answers
    packed_fill = None if is_sampled else _packed_fill(settings, rows.train, notes.append)
    if is_sampled:
        settings.objective.planned(rows, seq_len=seq_len)  # prompts have room for answers
        notes.append(_sampling_note(settings))
    return DataView(
        recipe=recipe,
        seq_len=seq_len,
        sources=tuple(
            _source(part, encoding, num_rows, is_sampled=is_sampled) for part in rows.train.parts
        ),
        held_out_rows=len(rows.held_out) if rows.held_out else 0,
        lengths=histogram(lengths),
        longest=max(lengths),
        packed_fill=packed_fill,
        notes=tuple(notes),
        data_hash=rows.data_hash,
    )


def _sampling_note(recipe: Recipe) -> str:
    section = cast("Grpo", recipe.objective)
    return (
        "Answers are sampled in training, and they alone are learned: each prompt of a step is"
        f" answered {section.num_answers} times, with at most {section.max_new_tokens} tokens"
    )


def _packed_fill(recipe: Recipe, rows: ExampleSet, note: Callable[[str], None]) -> float | None:
    """Return how full the sequences of the first steps are; None where rows do not share them."""
    if settled_packing(recipe, note) == "off":
        return None
    train = recipe.train
    comparison = Comparison.of(
        rows, is_mismatched=recipe.objective.scores_mismatched, seq_len=train.seq_len
    )
    cost = RowCost(flops_per_token=1.0)  # it decides who share a sequence, not how many they need
    order = PackedOrder.of(train, rows, cost=cost, comparison=comparison)
    packing = StepSizes.of(order, rows).packing
    assert packing is not None
    return packing.fill


def _source(part: Chosen, encoding: "Encoding", num_rows: int, *, is_sampled: bool) -> SeenSource:
    examples = ExampleSet(parts=(part,))
    _, first = np.unique(part.examples, return_index=True)
    shown = [examples[int(at)] for at in first[:num_rows]]
    seen = _with_images([_seen(one, encoding) for one in shown], shown, part)
    return SeenSource(
        path=part.tokens.rows.source.path,
        num_rows=len(part.tokens.store.fates),
        num_used=len(first),
        epoch_rows=len(part.examples),
        epoch_tokens=int(part.lengths.sum()),
        epoch_loss_tokens=int(examples.loss_tokens.sum()),
        rows=tuple(_with_columns(seen, part) if is_sampled else seen),
    )


def _read_again(part: Chosen, names: Collection[str]) -> Iterator[tuple[str, Raw, RowForm]]:
    """Yield some of a source's rows by their names, as they are in it, and how they are read."""
    form, named = part.tokens.rows.opened()
    wanted = ((name, raw, form) for _, name, raw in named if name in names)
    return islice(wanted, len(names))


def _with_columns(seen: Sequence[SeenRow], part: Chosen) -> list[SeenRow]:
    """Return prompts with their other columns, which rewards may read."""
    found: dict[str, tuple[tuple[str, str], ...]] = {}
    for name, raw, form in _read_again(part, {row.source for row in seen}):
        row = decoded(raw)
        if isinstance(row, dict):
            found[name] = tuple(
                (key, value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))
                for key, value in row.items()
                if key != form.column("prompt")
            )
    return [replace(row, columns=found.get(row.source, ())) for row in seen]


def _with_images(
    seen: Sequence[SeenRow], examples: Sequence[Example], part: Chosen
) -> list[SeenRow]:
    """Return rows with what images are, for which their texts have places."""
    names = {one.source for one in examples if one.images}
    every = [form.read(name, raw).images for name, raw, form in _read_again(part, names)]
    by_key = {image.opened().key: image for images in every for image in images}
    return [
        labelled(row, [(by_key[key], num) for key, num in example.images if key in by_key])
        for row, example in zip(seen, examples, strict=True)
    ]


def labelled(row: SeenRow, images: Sequence[tuple[Picture, int]]) -> SeenRow:
    """Return a row with what its images are in their places, and small copies of them.

    Args:
        row: The row, with `PLACE` for each image.
        images: Images of the row, each with its number of tokens.
    """
    labels = (_label(*image, number) for number, image in enumerate(images, start=1))
    pieces = []
    for piece in row.pieces:
        first, *others = piece.text.split(PLACE)
        text = first + "".join(next(labels, PLACE) + other for other in others)
        pieces.append(replace(piece, text=text))
    small = thumbnails([image for image, _ in images])
    return replace(row, pieces=tuple(pieces), thumbnails=tuple(small))


def _label(image: Picture, num_tokens: int, number: int) -> str:
    width, height = image.opened().image.size
    return f"[image {number}: {image.name}, {width}x{height}, {num_tokens:,} tokens]"


@dataclass(frozen=True, kw_only=True, slots=True)
class Encoding:
    """How rows become tokens."""

    tokenizer: "PreTrainedTokenizerBase"  # the model's
    imaging: Imaging | None  # for images; None where the model sees none

    def text(self, ids: Sequence[int], first: Collection[int]) -> str:
        """Return the text of tokens, `PLACE` for the first one of each image and no others of it.

        Args:
            ids: The tokens.
            first: The places of tokens that begin an image.
        """
        image_id = self.imaging.image_id if first and self.imaging else None
        parts: list[list[int]] = [[]]
        for place, token in enumerate(ids):
            if place in first:
                parts.append([])
            elif token != image_id:
                parts[-1].append(token)
        decoded = (self.tokenizer.decode(x, clean_up_tokenization_spaces=False) for x in parts)
        return PLACE.join(map(str, decoded))


def _first_of_images(example: Example, imaging: Imaging | None) -> set[int]:
    """Return the places of tokens that begin an image."""
    if not example.images or imaging is None:
        return set()
    places = np.flatnonzero(example.input_ids == imaging.image_id)
    sizes = [num for _, num in example.images]
    return set(places[np.cumsum([0, *sizes[:-1]])].tolist())


def _seen(example: Example, encoding: Encoding) -> SeenRow:
    """Return a row as text, cut where the loss begins or ends.

    Characters whose tokens are on both sides of a cut are shown as replacement characters.
    """
    has_loss = example.labels != IGNORE_INDEX
    has_loss[0] = False  # the first token is never predicted
    first = _first_of_images(example, encoding.imaging)
    tokens = zip(example.input_ids.tolist(), has_loss.tolist(), strict=True)
    pieces, at = [], 0
    for is_learned, group in groupby(tokens, key=lambda one: one[1]):
        ids = [token for token, _ in group]
        text = encoding.text(ids, {place - at for place in first if 0 <= place - at < len(ids)})
        at += len(ids)
        pieces.append(Piece(text=text, has_loss=bool(is_learned), num_tokens=len(ids)))
    return SeenRow(
        source=example.source,
        pieces=tuple(pieces),
        taught=_taught(example, has_loss, encoding.tokenizer),
    )


def _taught(
    example: Example, has_loss: "NDArray[np.bool_]", tokenizer: "PreTrainedTokenizerBase"
) -> tuple[Taught, ...]:
    """Return what a teacher says of the first tokens with a loss."""
    if example.top is None:
        return ()
    is_shown = has_loss & (has_loss.cumsum() <= _NUM_TAUGHT)
    ids, logprobs = example.top.table(is_shown, _NUM_TOP)
    known = zip(example.input_ids[is_shown].tolist(), ids, np.exp(logprobs), strict=True)
    return tuple(
        Taught(
            token=str(tokenizer.decode([token])),
            top=tuple(
                (str(tokenizer.decode([one])), p)
                for one, p in zip(top.tolist(), probabilities.tolist(), strict=True)
                if one >= 0
            ),
        )
        for token, top, probabilities in known
    )
