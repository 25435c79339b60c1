"""The pass over images before the first step: each distinct one through the tower, once."""

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from accelerate import cpu_offload

from finetune.data.dataset import Rows
from finetune.data.pictures.decode import Pixels
from finetune.data.pictures.picture import Picture
from finetune.env import cache_dir
from finetune.errors import DataError, ModelError, RowError
from finetune.images.features import Features, FeatureStore
from finetune.images.imaging import RowImages
from finetune.images.rows import ImageNumbers
from finetune.images.tower import computed, load_tower, require_towers, tower_digest
from finetune.recipe.sections import ModelSection
from offload.plan.images import TOWER_FRAC

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True, kw_only=True, slots=True)
class Tower:
    """The tower of a run, and where it computes."""

    model: ModelSection
    seed: int  # seed of random weights
    device: torch.device

    def loaded(self) -> "PreTrainedModel":
        """Load it to its device; one that is too large for it stays on the host, and is streamed.

        Raises:
            ModelError: The model has none, or weights are missing.
        """
        found = load_tower(self.model, seed=self.seed)
        towers = require_towers(found)
        num_bytes = sum(p.numel() * p.element_size() for t in towers for p in t.parameters())
        for tower in towers:
            if num_bytes > TOWER_FRAC * free_bytes(self.device):
                cpu_offload(tower, execution_device=self.device)
            else:
                tower.to(self.device)
        return found

    def store(self, imaging: RowImages) -> FeatureStore:
        """Return where its features of images are kept, by the processor that it is given them by.

        Raises:
            ModelError: The model was not downloaded.
        """
        digest = tower_digest(self.model, seed=self.seed, device=self.device.type)
        folder = cache_dir() / "features" / f"{imaging.digest[:16]}-{digest[:16]}"
        return FeatureStore(folder=folder)


def free_bytes(device: torch.device) -> float:
    """Return the free memory of a device that computes; on a CPU weights are where they are."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else math.inf


def features_of(
    picture: Picture,
    pixels: Pixels,
    imaging: RowImages,
    model: "PreTrainedModel",
    *,
    device: torch.device,
) -> Features:
    """Return the features of an image.

    Args:
        picture: The image, for errors.
        pixels: Decoded pixels of the image.
        imaging: The processor.
        model: With its tower's weights.
        device: Device of the tower.

    Raises:
        RowError: The processor refuses the image.
        ModelError: The tower makes other features than the image has tokens.
    """
    processed = imaging.processor.processed(pixels)
    features = computed(model, processed.inputs, device=device)
    if len(features.rows_ND) != processed.num_tokens:
        raise ModelError(
            f"the tower makes {len(features.rows_ND)} rows of features of {picture.name}, which"
            f" has {processed.num_tokens} tokens",
            limit="a row of features takes the place of a token",
            hint="take the processor that was published with the model",
        )
    return features


def pictures_of(rows: Rows) -> Iterator[tuple[Picture, Pixels]]:
    """Read the rows of a run again, and yield their images; bad ones were skipped, or an error."""
    every = [rows.train, *([] if rows.held_out is None else [rows.held_out])]
    parts = (part.tokens for one in every for part in one.parts)
    for source in {id(tokens): tokens.rows for tokens in parts}.values():
        form, named = source.opened()
        for _, name, raw in named:
            with suppress(RowError):
                for picture in form.read(name, raw).images:
                    yield picture, picture.opened()


def take_features(
    images: ImageNumbers,
    pictures: Iterable[tuple[Picture, Pixels]],
    imaging: RowImages,
    tower: Tower,
    store: FeatureStore,
    *,
    progress: Callable[[int, int], None],
) -> None:
    """Compute the features of images that have none yet.

    Args:
        images: The distinct images of a run.
        pictures: The images of its rows with their pixels, among them all without features.
        imaging: The processor.
        tower: The frozen tower and its device.
        store: The features on disk.
        progress: Called with the number of images that have features, and of all.

    Raises:
        DataError: An image has changed since its row was tokenised.
        OSError: Features cannot be written.
        ModelError: The tower makes other features than the image has tokens.
    """
    missing = dict.fromkeys(store.missing(images.keys))
    if not missing:
        return
    model = tower.loaded()
    for picture, pixels in pictures:
        if pixels.key not in missing:
            continue
        store.put(pixels.key, features_of(picture, pixels, imaging, model, device=tower.device))
        del missing[pixels.key]
        progress(len(images.keys) - len(missing), len(images.keys))
        if not missing:
            return
    raise DataError(
        f"{len(missing)} images have changed since their rows were tokenised",
        limit="an image is read for its tokens, and again for its features",
        hint="start again: changed files are read anew",
    )
