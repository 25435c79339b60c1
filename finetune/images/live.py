"""Images that are encoded as they come: those of prompts, and of rows that are scored.

Their table grows, so the tokens of an image are free numbers when it first comes: those
after the tokens of the images before it, and they stay its own.
"""

from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from finetune.data.pictures.picture import Picture
from finetune.data.tokenize import Example
from finetune.errors import RowError
from finetune.images.computing import Tower, features_of
from finetune.images.features import Features, FeatureStore, Images
from finetune.images.front import add_images, require_exact
from finetune.images.imaging import RowImages
from finetune.images.rows import numbered
from finetune.model.empty import config_of
from finetune.recipe.recipe import Recipe

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_MOST_IDS = 2**31


class LiveImages:
    """The images that a model has been shown so far.

    Attributes:
        imaging: Turns images into tokens.
        images: Table of their features, which grows.
    """

    def __init__(self, imaging: RowImages, tower: Tower, *, num_tokens: int) -> None:
        """Begin without images; the tower is loaded for the first without features.

        Args:
            imaging: The model's.
            tower: The model's.
            num_tokens: Rows of the model's embedding.
        """
        self.imaging, self._tower = imaging, tower
        self._model: PreTrainedModel | None = None
        self._numbers, self._keys = dict[bytes, int](), list[bytes]()
        # a token that the tokenizer has and the model lacks is none of an image
        highest = max(imaging.tokenizer.get_vocab().values(), default=0)
        first_id = max(num_tokens, highest + 1)
        self.images = Images(
            first_id=first_id,
            starts=np.zeros(1, dtype=np.int64),
            of=self._features,
            most_tokens=_MOST_IDS - first_id,
        )

    @classmethod
    def of(
        cls,
        recipe: Recipe,
        tokenizer: "PreTrainedTokenizerBase",
        *,
        num_tokens: int,
        device: torch.device,
    ) -> "LiveImages | None":
        """Return none yet, of a recipe's model; None where it has no processor for images."""
        imaging = RowImages.of(recipe.model, tokenizer, max_tokens=recipe.image.max_tokens)
        if imaging is None:
            return None
        tower = Tower(model=recipe.model, seed=recipe.train.seed, device=device)
        return cls(imaging, tower, num_tokens=num_tokens)

    @property
    def are_none(self) -> bool:
        """Whether no image has come yet."""
        return not self._keys

    def require_exact(self) -> None:
        """Check that the model's answers to images were compared with plain transformers.

        Raises:
            ModelError: They were not.
        """
        require_exact(config_of(self._tower.model).model_type)

    def put_in_front(self, model: "PreTrainedModel") -> None:
        """Let a model's front take features in the places of images.

        Args:
            model: The model, without adapters.
        """
        add_images(model, self.images)

    def look(self, picture: Picture) -> NDArray[np.int32]:
        """Return the tokens of an image, which has features from now on.

        Raises:
            RowError: The image cannot be used.
            ModelError: The model has no tower, or no processor that can be loaded here.
        """
        if self.are_none:
            self.require_exact()
        key, num, _ = self.imaging.tokens_of(picture)
        if key not in self._numbers:
            if self._store.missing([key]):
                self._compute(picture, key)
            starts = self.images.starts
            self.images.starts = np.append(starts, starts[-1] + num)
            self._numbers[key] = len(self._keys)
            self._keys.append(key)
        return self.images.tokens(self._numbers[key])

    def ids_of(self, text: str, pictures: Sequence[Picture], *, source: str) -> list[int]:
        """Return the tokens of a text with images; see `finetune.data.tokenize.PromptImages`."""
        own = [self.look(picture) for picture in pictures]
        return self.imaging.ids_of(text, pictures, own, source=source)

    def tokens(self, example: Example, pictures: Sequence[Picture]) -> NDArray[np.int32]:
        """Return the tokens of a row, those of its images by their numbers.

        Args:
            example: The row's, or those of its first turns.
            pictures: The images of the row.

        Raises:
            RowError: As `look`.
        """
        if not example.images:
            return example.input_ids
        own = [self.look(picture) for picture in pictures[: len(example.images)]]
        return numbered(example.input_ids, own, image_id=self.imaging.image_id)

    def without(self, ids: Iterable[int]) -> list[int]:
        """Return the tokens that are those of no image."""
        return [token for token in ids if token < self.images.first_id]

    def let_go(self) -> None:
        """Free the memory of the tower; the next image without features loads it again."""
        self._model = None

    def _compute(self, picture: Picture, key: bytes) -> None:
        """Write the features of an image.

        Raises:
            RowError: It is another one by now.
        """
        pixels = picture.opened()
        if pixels.key != key:
            raise RowError(f"the image {picture.name} has changed since it was read: start again")
        if self._model is None:
            self._model = self._tower.loaded()
        device = self._tower.device
        features = features_of(picture, pixels, self.imaging, self._model, device=device)
        self._store.put(key, features)

    @cached_property
    def _store(self) -> FeatureStore:
        return self._tower.store(self.imaging)

    def _features(self, number: int) -> Features:
        return self._store.get(self._keys[number])
