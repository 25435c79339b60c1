"""Tokens of the images of rows: what a template writes in their places becomes the processor's own.

A template writes one token in the place of an image, and the model's processor replaces it by as
many as the image has, with breaks and boundaries around them. That is done in the text, before it
is tokenised, as the processor does it: so the tokens are those that it would give.
"""

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property, lru_cache, partial
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from finetune.data.pictures.picture import Picture
from finetune.data.spans import Rendering
from finetune.errors import RowError
from finetune.images.processor import ImageProcessor
from finetune.images.rows import numbered
from finetune.model.config import processor_files
from finetune.recipe.sections import ModelSection

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_VERSION = 1  # changes with the tokens of the same image
_LIBRARIES = ("transformers", "pillow", "torchvision")


@dataclass(frozen=True, kw_only=True)
class RowImages:
    """See `finetune.data.tokenize.Imaging`; the processor is loaded with the first image.

    Attributes:
        model: The model.
        tokenizer: The model's.
        max_tokens: Most tokens of an image; None for the processor's own settings.
        digest: Digest of all that the tokens of an image depend on.
    """

    model: ModelSection
    tokenizer: "PreTrainedTokenizerBase"
    max_tokens: int | None
    digest: str

    @classmethod
    def of(
        cls, model: ModelSection, tokenizer: "PreTrainedTokenizerBase", *, max_tokens: int | None
    ) -> "RowImages | None":
        """Return what makes tokens of images for a model; None where it has no processor."""
        files = processor_files(model)
        if not files:
            return None
        facts = [_VERSION, max_tokens, {name: _version(name) for name in _LIBRARIES}]
        digest = hashlib.sha256(json.dumps(facts).encode())
        for file in files:
            digest.update(file.read_bytes())
        return cls(
            model=model,
            tokenizer=tokenizer,
            max_tokens=max_tokens,
            digest=digest.hexdigest(),
        )

    @cached_property
    def processor(self) -> ImageProcessor:
        """The model's own processor.

        Raises:
            ModelError: It cannot be loaded here.
        """
        return ImageProcessor.load(self.model, self.tokenizer, max_tokens=self.max_tokens)

    @property
    def image_id(self) -> int:
        """The token in the place of each row of features."""
        return self.processor.image_token_id

    @property
    def silent_ids(self) -> frozenset[int]:
        """Tokens of images and around them, which have no loss."""
        return self.processor.special_ids

    def expanded(
        self, rendering: Rendering, pictures: Sequence[Picture], *, source: str
    ) -> tuple[Rendering, tuple[tuple[bytes, int], ...]]:
        """Return a text with the tokens of its images, and key and number of tokens of each.

        Raises:
            RowError: An image cannot be used, or the text has another number of places for them.
        """
        place = self.processor.image_token
        first, *others = rendering.text.split(place)
        if len(others) != len(pictures):
            raise RowError(
                f"it has {len(pictures)} images, and its text as the chat template writes it has"
                f" {len(others)} places for them ({place}): leave that token out of the text, or"
                " take a template for images"
            )
        feature = self.processor.feature_token
        if any(feature in text for text in (first, *others)):
            raise RowError(
                f"its text has {feature}, the token of a part of an image: leave that token out"
            )
        known = [self.tokens_of(picture) for picture in pictures]
        text, starts, silent, at = first, list[int](), list[tuple[int, int]](), len(first)
        for (_, _, tokens), after in zip(known, others, strict=True):
            starts.append(at)
            silent.append((len(text), len(text) + len(tokens)))
            text += tokens + after
            at += len(place) + len(after)
        growths = [end - start - len(place) for start, end in silent]

        def moved(position: int) -> int:
            grown = zip(starts, growths, strict=True)
            return position + sum(growth for start, growth in grown if start < position)

        spans = tuple(
            replace(span, start=moved(span.start), end=moved(span.end)) for span in rendering.spans
        )
        found = Rendering(text=text, spans=spans, silent=tuple(silent))
        return found, tuple((key, num) for key, num, _ in known)

    def ids_of(
        self,
        text: str,
        pictures: Sequence[Picture],
        own: Sequence[NDArray[np.int32]],
        *,
        source: str,
    ) -> list[int]:
        """Return the tokens of a text with images, of which each has tokens of its own.

        Args:
            text: As the chat template writes it.
            pictures: Its images.
            own: The tokens of each.
            source: The row, for errors.

        Raises:
            RowError: As `expanded`.
        """
        whole, _ = self.expanded(Rendering(text=text, spans=()), pictures, source=source)
        found = self.tokenizer(whole.text, add_special_tokens=False, verbose=False)["input_ids"]
        ids: list[int] = numbered(np.array(found), own, image_id=self.image_id).tolist()
        return ids

    @cached_property
    def tokens_of(self) -> Callable[[Picture], tuple[bytes, int, str]]:
        """Return key, number of tokens and text of a picture; rows and answers may share one."""

        @lru_cache(maxsize=64)
        def tokens(picture: Picture) -> tuple[bytes, int, str]:
            pixels = picture.opened()
            processed = self.processor.processed(pixels)
            return pixels.key, processed.num_tokens, processed.text

        return tokens

    def __reduce__(self) -> tuple[Any, ...]:
        """Let a worker load the processor itself."""
        return partial(RowImages, **{one.name: getattr(self, one.name) for one in fields(self)}), ()


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
