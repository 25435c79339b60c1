"""The images of a run's rows: their pass before the model is loaded, and its front."""

import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from finetune.data.dataset import Rows
from finetune.data.pictures.picture import Picture
from finetune.data.pictures.thumbnail import thumbnails
from finetune.data.rows import Conversation
from finetune.errors import ConfigError, DataError, RowError
from finetune.images.computing import Tower, pictures_of, take_features
from finetune.images.features import FeatureStore, Images
from finetune.images.front import add_images, require_exact
from finetune.images.imaging import RowImages
from finetune.images.rows import ImageNumbers, with_images
from finetune.model.empty import config_of
from finetune.recipe.capabilities import require_images_allowed
from finetune.recipe.recipe import Recipe
from finetune.report.format import shown_gib, shown_time
from finetune.report.images import ImageFigures, images_section, pass_of, write_images
from finetune.report.pages import NUM_SAMPLES
from finetune.training.run import Run
from offload.plan.facts.facts import ModelFacts
from offload.plan.facts.images import Images as CountedImages
from offload.plan.images import ImagePass
from offload.plan.plan import Plan

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from finetune.training.prepare import Data


@dataclass(frozen=True, kw_only=True, slots=True)
class RunImages:
    """The distinct images of a run, and what computes their features."""

    numbers: ImageNumbers
    imaging: RowImages
    tower: Tower
    store: FeatureStore

    @property
    def counted(self) -> CountedImages:
        """How many there are, and of how many tokens."""
        sizes = np.diff(self.numbers.starts)
        return CountedImages(
            num_images=len(sizes), num_tokens=int(sizes.sum()), most_tokens=int(sizes.max())
        )

    def section(self, recipe: Recipe) -> str:
        """Return what a model card says of them."""
        counted = self.counted
        return images_section(
            num_images=counted.num_images or 0,
            num_tokens=counted.total_tokens or 0,
            max_tokens=recipe.image.max_tokens,
            processor=self.imaging.processor.described(),
        )

    def thumbnails(self, rows: Sequence[Conversation]) -> list[list[str]]:
        """Return small copies of the images of the first rows, which a page shows."""
        return [thumbnails(row.images) for row in rows[:NUM_SAMPLES]]

    def ids_of(self, text: str, pictures: Sequence[Picture], *, source: str) -> list[int]:
        """Return the tokens of a text with images; see `finetune.data.tokenize.PromptImages`."""
        numbers = self.numbers.numbers()
        keys = [self.imaging.tokens_of(picture)[0] for picture in pictures]
        for key, picture in zip(keys, pictures, strict=True):
            if key not in numbers:
                raise RowError(f"the image {picture.name} is none of those that have features")
        own = [self.numbers.tokens(numbers[key]) for key in keys]
        return self.imaging.ids_of(text, pictures, own, source=source)


def take(runs: Sequence["Data"], first: Run, plan: Plan) -> list[ImageFigures | None]:
    """Compute the features that are missing: on each machine once, by its first rank.

    Args:
        runs: The rows of runs that share a model.
        first: The first of them.
        plan: The plan of their steps.

    Returns:
        What it took for each run, by its rank; None for rows without images.

    Raises:
        SluiceError: An image has changed, the disk is too full, or the model has no tower.
    """
    cost = pass_of(plan)
    return [None if one.images is None else _taken(one, one.images, first, cost) for one in runs]


def _taken(data: "Data", images: RunImages, first: Run, cost: ImagePass) -> ImageFigures:
    keys, took_s = images.numbers.keys, 0.0
    with first.ranks.first_here_first():
        num_missing = len(images.store.missing(keys))
        predicted_s = (cost.pass_s or 0.0) * num_missing / len(keys)
        if num_missing:
            _require_room(images.store.folder, cost, num_missing)
            begin_s = time.perf_counter()
            with first.screen.working("Encoding images", "images") as progress:
                take_features(
                    images.numbers,
                    pictures_of(data.rows),
                    images.imaging,
                    images.tower,
                    images.store,
                    progress=progress,
                )
            took_s = time.perf_counter() - begin_s
            first.screen.note(
                f"Encoded {num_missing:,} images in {shown_time(took_s)}, predicted"
                f" {shown_time(predicted_s)}; their features are in {images.store.folder}"
            )
    counted = images.counted
    return ImageFigures(
        num_images=len(keys),
        num_tokens=counted.total_tokens or 0,
        feature_bytes=images.store.num_bytes(keys),
        predicted_bytes=(counted.total_tokens or 0) * cost.token_bytes,
        num_encoded=num_missing,
        pass_s=took_s,
        predicted_pass_s=predicted_s,
    )


def write_figures(figures: Sequence[ImageFigures | None], runs: Sequence[Run]) -> None:
    """Write what the pass took into the directory of each run, as its main rank."""
    for one, run in zip(figures, runs, strict=True):
        if one is not None and run.ranks.is_main:
            write_images(run.dir.path, one)


def _require_room(folder: Path, cost: ImagePass, num_missing: int) -> None:
    """Check that features can be written.

    Raises:
        DataError: The disk is too full.
    """
    needed = (cost.feature_bytes or 0) * num_missing // (cost.images.num_images or 1)
    folder.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise DataError(
            f"features of {num_missing:,} images take {shown_gib(needed)}, and {folder} has"
            f" {shown_gib(free)} free",
            limit="they are computed once, and read in each step",
            hint="a smaller `image.max_tokens`, or XDG_CACHE_HOME in a folder on a larger disk",
        )


def put_in_front(runs: Sequence["Data"], model: "PreTrainedModel") -> None:
    """Let a model's front take features in the places of images.

    Args:
        runs: The rows of runs that share the model.
        model: The model, without adapters.

    Raises:
        ConfigError: They have other images than each other.
    """
    first, *others = (data.images for data in runs)
    of_runs = [one and (one.numbers.keys, one.store.folder) for one in (first, *others)]
    if first is None or any(one != of_runs[0] for one in of_runs):
        raise ConfigError(
            "the runs of a sweep have other images than each other",
            limit="they share a model, whose front has one table of images",
            hint="sweep over settings that leave the rows alone, or run each recipe by itself",
        )
    numbers, get = first.numbers, first.store.get
    images = Images(
        first_id=numbers.first_id,
        starts=numbers.starts,
        of=lambda number: get(numbers.keys[number]),
    )
    add_images(model, images)


def images_of(
    run: Run, rows: Rows, imaging: RowImages, facts: ModelFacts
) -> tuple[Rows, RunImages]:
    """Return rows whose image tokens are numbers of rows of features, and the images.

    Raises:
        SluiceError: The model has no tower, or a setting does not go with images.
    """
    recipe = run.recipe
    require_images_allowed(recipe)
    require_exact(config_of(recipe.model).model_type)
    run.screen.note(f"Images by {imaging.processor.described()}")
    rows, numbers = with_images(rows, first_id=facts.vocab_size, image_id=imaging.image_id)
    tower = Tower(model=recipe.model, seed=recipe.train.seed, device=run.device)
    store = tower.store(imaging)
    return rows, RunImages(numbers=numbers, imaging=imaging, tower=tower, store=store)
