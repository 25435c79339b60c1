"""A model's own processor: what tokens an image becomes, and what its tower is given.

Of the two forms that transformers has of most processors, Pillow's is taken wherever there is one,
installed torchvision or not: pixels then do not depend on the machine. The other form's differ by a
level of 255 here and there, more in noise.
"""

import copy
import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from finetune.data.pictures.decode import Pixels
from finetune.errors import ModelError, RowError, read_by_library
from finetune.images.budget import budget_of
from finetune.model.config import PROCESSOR_FILES, processor_files
from finetune.model.empty import config_of
from finetune.recipe.sections import ModelSection

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_TEXT = {"input_ids", "attention_mask", "token_type_ids", "text_replacement_offsets"}
"""What a processor returns of a text, in its own and the tokenizer's names."""
_BOUNDARIES = (
    "vision_start_token_id",
    "vision_end_token_id",
    "image_start_token_id",
    "image_end_token_id",
)
"""Fields of configs for the tokens that chat templates write before and after an image."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Processed:
    """One image by a processor."""

    text: str  # replacement of the placeholder in a rendered text
    num_tokens: int  # image tokens in it: the rows of its features
    inputs: Mapping[str, torch.Tensor]  # arguments of the model's `get_image_features`


class ImageProcessor:
    """Makes tokens and a tower's inputs of an image; it can be sent to other processes.

    Attributes:
        image_token: The placeholder that a chat template writes for an image.
        image_token_id: The token whose places an image's features take.
        feature_token: Text of that token; it may be the placeholder.
        special_ids: Special tokens of images, none of which is trained on. A text that takes the
            place of a placeholder may hold others, such as ends of lines.
    """

    def __init__(
        self,
        processor: Any,
        tokenizer: "PreTrainedTokenizerBase",
        *,
        image_token_id: int,
        boundaries: frozenset[int | None],
        max_tokens: int | None,
    ) -> None:
        """Take a processor of transformers, whose tokenizer has the tokens of this one.

        Raises:
            ModelError: It writes no image token.
            ConfigError: It has no setting for so few tokens.
        """
        self._processor, self._max_tokens = processor, max_tokens
        self._budget = budget_of(processor, max_tokens)
        self.image_token: str = processor.image_token
        self.image_token_id = image_token_id
        self.feature_token = str(tokenizer.convert_ids_to_tokens(image_token_id))
        of_images = {*boundaries, *self._ids_of_probe(tokenizer)}
        added = tokenizer.added_tokens_decoder.items()
        self.special_ids = frozenset(
            token for token, one in added if one.special and token in of_images
        )

    @classmethod
    def load(
        cls, section: ModelSection, tokenizer: "PreTrainedTokenizerBase", *, max_tokens: int | None
    ) -> "ImageProcessor":
        """Load the processor that a model was published with.

        Args:
            section: The model.
            tokenizer: The run's; it is not changed.
            max_tokens: The tokens that an image may have; None leaves what was published.

        Raises:
            ModelError: The model is for text alone, or has no processor, or that needs a package
                that is not here.
            ConfigError: The processor has no setting for so few tokens.
        """
        if find_spec("PIL") is None:
            raise ModelError(
                "rows with images, and Pillow is not installed",
                limit="it decodes images",
                hint="`pip install 'sluice-finetune[images]'`",
            )
        config = config_of(section)
        source = section.path or section.tokenizer_source
        image_token_id: int | None = getattr(config, "image_token_id", None)
        if image_token_id is None:
            raise ModelError(
                f"rows with images, and {section.config or source} is no model for them",
                limit=f"a config of type {config.model_type} has no image token",
                hint="take a model with a tower for images, or leave such rows away",
            )
        files = processor_files(section)
        if not files:
            raise ModelError(
                f"rows with images, and no processor in {source}",
                limit=f"it must hold {' or '.join(PROCESSOR_FILES)}",
                hint="download the model again, with those files",
            )
        return cls(
            _processor_in(files[0].parent, tokenizer, config=config, source=str(source)),
            tokenizer,
            image_token_id=image_token_id,
            boundaries=frozenset(getattr(config, name, None) for name in _BOUNDARIES),
            max_tokens=max_tokens,
        )

    def processed(self, pixels: Pixels) -> Processed:
        """Return the text and the inputs of one image.

        Raises:
            RowError: The processor refuses its shape, or it has more tokens than allowed.
        """
        width, height = pixels.image.size
        try:
            processed = self._called(pixels.image)
        except ValueError as error:
            name = type(self._processor.image_processor).__name__
            raise RowError(f"an image of {width} x {height} pixels: {name}: {error}") from error
        if self._max_tokens is not None and processed.num_tokens > self._max_tokens:
            raise RowError(
                f"an image of {width} x {height} pixels has {processed.num_tokens} image tokens,"
                f" and `image.max_tokens` is {self._max_tokens}: its processor keeps a patch a side"
                " at least, so raise that, or make the image less long"
            )
        return processed

    def described(self) -> str:
        """Return its name and its budget, for the screen."""
        name = type(self._processor.image_processor).__name__
        if self._budget is None:
            return name
        return f"{name}, at most {self._budget.num_tokens:,} tokens each ({self._budget.words})"

    def _called(self, image: Any) -> Processed:
        settings = {} if self._budget is None else dict(self._budget.settings)
        found = self._processor(
            images=[image],
            text=[self.image_token],
            images_kwargs=settings,
            return_mm_token_type_ids=False,
            return_text_replacement_offsets=True,
            return_tensors="pt",
        )
        ((replaced,),) = found["text_replacement_offsets"]
        text: str = replaced["replacement"]
        return Processed(
            text=text,
            num_tokens=text.count(self.feature_token),
            inputs={name: value for name, value in found.items() if name not in _TEXT},
        )

    def _ids_of_probe(self, tokenizer: "PreTrainedTokenizerBase") -> list[int]:
        """Return the tokens of a small image.

        Raises:
            ModelError: The processor writes none that the model replaces by features.
        """
        from PIL import Image

        name = type(self._processor).__name__
        with read_by_library(
            f"{name} makes nothing of an image",
            error=ModelError,
            limit="it and the tokenizer must be of one model",
            hint="download the model again, or `pip install -U transformers`",
        ):
            probe = self._called(Image.new("RGB", (64, 64)))
            ids: list[int] = tokenizer(probe.text, add_special_tokens=False)["input_ids"]
        if not probe.num_tokens or ids.count(self.image_token_id) != probe.num_tokens:
            raise ModelError(
                f"{name} writes no tokens {self.image_token_id} ({self.feature_token!r})",
                limit="that is the `image_token_id` of the model's config",
                hint="take processor, tokenizer and config of one model",
            )
        return ids


def _processor_in(
    folder: Path, tokenizer: "PreTrainedTokenizerBase", *, config: Any, source: str
) -> Any:
    """Build the processor in a folder, for images alone.

    Raises:
        ModelError: It cannot be read, or it needs a package that is not here.
    """
    from transformers import AutoImageProcessor, ProcessorMixin

    named = f"the processor in {source}"
    with read_by_library(
        f"{named} cannot be read",
        error=ModelError,
        limit="it must be of a class that transformers has",
        hint="download it again, or `pip install -U transformers`",
    ):
        kind = _class_of(folder, config)
        try:
            images = AutoImageProcessor.from_pretrained(
                str(folder), backend="pil", trust_remote_code=False
            )
            fields, _ = ProcessorMixin.get_processor_dict(folder)
            fields.pop("chat_template", None)  # the tokenizer has it
            return _for_images(kind, images, copy.deepcopy(tokenizer), fields)
        except (ImportError, ValueError) as error:
            package = _missing(str(error))
            if package is None:
                raise
            raise ModelError(
                f"{named} is a {kind.__name__}, which needs {package}",
                limit=f"{package} is not installed",
                hint=f"`pip install {package}`",
            ) from error


def _class_of(folder: Path, config: Any) -> Any:
    """Return the class that the files of a folder name, else that of the model's type."""
    import transformers

    for name in (*PROCESSOR_FILES, "tokenizer_config.json"):
        if (folder / name).exists():
            named = json.loads((folder / name).read_bytes()).get("processor_class")
            if hasattr(transformers, str(named)):
                return getattr(transformers, named)
    return transformers.PROCESSOR_MAPPING[type(config)]


def _for_images(
    kind: Any, images: Any, tokenizer: "PreTrainedTokenizerBase", fields: Mapping[str, Any]
) -> Any:
    """Build a processor without what it has for videos and sound, which would need torchvision."""
    parts = {"image_processor": images, "tokenizer": tokenizer}
    names = kind.get_attributes()

    class ForImages(kind):  # type: ignore[misc]  # its class is known as it runs
        """Takes None for the parts that no image needs."""

        def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> Any:
            if argument is not None:
                return super().check_argument_for_proper_class(argument_name, argument)
            return None

    processor = ForImages.from_args_and_dict([parts.get(name) for name in names], dict(fields))
    processor.__class__ = kind  # which can be pickled
    return processor


def _missing(message: str) -> str | None:
    """Return the package that a library's message asks for, of those that are not here."""
    packages = ("torchvision", "num2words")
    return next((one for one in packages if one in message.lower() and not find_spec(one)), None)
