"""Published processors of images with tiny tokenizers, as folders of models without weights."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import transformers
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AddedToken,
    AutoImageProcessor,
    PreTrainedTokenizerFast,
    ProcessorMixin,
)

from finetune.data.pictures.decode import Pixels
from finetune.recipe.sections import ModelSection

BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """Models whose processors are of one class."""

    model_type: str
    processor: str  # its class
    images: str  # the class of its image processor, as files name it
    around: str  # what a chat template writes for an image, `{}` for the placeholder
    tokens: tuple[str, ...]  # special tokens; the first takes the features
    named: Mapping[str, str] = field(default_factory=dict)  # tokens by attributes of the tokenizer
    settings: Mapping[str, Any] = field(default_factory=dict)  # of the image processor
    own: Mapping[str, Any] = field(default_factory=dict)  # of the processor
    config: Mapping[str, str] = field(default_factory=dict)  # fields of the config, and tokens
    package: str | None = None  # what it needs besides Pillow

    @property
    def is_usable(self) -> bool:
        """Whether what it needs is installed."""
        return self.package is None or find_spec(self.package) is not None

    def tokenizer(self) -> PreTrainedTokenizerFast:
        """Return a tokenizer of bytes and of the tokens of images."""
        backend = Tokenizer(models.BPE({one: i for i, one in enumerate(BYTES)}, []))
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = decoders.ByteLevel()
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=backend,
            bos_token="<s>",
            eos_token="</s>",
            pad_token="<pad>",
            extra_special_tokens=dict(self.named),
        )
        tokenizer.add_tokens([AddedToken(one, special=True) for one in self.tokens])
        return tokenizer

    def written(self, folder: Path) -> ModelSection:
        """Write config, tokenizer and processor, and return the model of a recipe."""
        tokenizer = self.tokenizer()
        tokenizer.save_pretrained(folder)
        ids = {name: tokenizer.convert_tokens_to_ids(one) for name, one in self.config.items()}
        image = {"image_token_id": tokenizer.convert_tokens_to_ids(self.tokens[0])}
        if self.model_type in ("gemma3", "mistral3"):
            image = {"image_token_index": image["image_token_id"]}
        files = {
            "config.json": {"model_type": self.model_type, **image, **ids},
            "processor_config.json": {"processor_class": self.processor, **self.own},
            "preprocessor_config.json": {"image_processor_type": self.images, **self.settings},
        }
        for name, values in files.items():
            (folder / name).write_text(json.dumps(values))
        return ModelSection(path=str(folder))


_QWEN_TOKENS = ("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>")
_QWEN: dict[str, Any] = {
    "images": "Qwen2VLImageProcessorFast",
    "around": "<|vision_start|>{}<|vision_end|>",
    "tokens": _QWEN_TOKENS,
    "config": {
        "vision_start_token_id": "<|vision_start|>",
        "vision_end_token_id": "<|vision_end|>",
    },
}
_QWEN3_SETTINGS = {
    "patch_size": 16,
    "size": {"shortest_edge": 65536, "longest_edge": 16777216},
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}
_TILES = tuple(f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7))
_IDEFICS_TOKENS = (
    "<image>",
    "<fake_token_around_image>",
    "<global-img>",
    "<end_of_utterance>",
    "<video>",
    *_TILES,
)
_GEMMA = {
    "image_token": "<image_soft_token>",
    "boi_token": "<start_of_image>",
    "eoi_token": "<end_of_image>",
}

FAMILIES = (
    Family(
        model_type="qwen2_5_vl",
        processor="Qwen2_5_VLProcessor",
        settings={"min_pixels": 3136, "max_pixels": 12845056},
        **_QWEN,
    ),
    Family(model_type="qwen3_vl", processor="Qwen3VLProcessor", settings=_QWEN3_SETTINGS, **_QWEN),
    Family(model_type="qwen3_5", processor="Qwen3VLProcessor", settings=_QWEN3_SETTINGS, **_QWEN),
    Family(
        model_type="gemma3",
        processor="Gemma3Processor",
        images="Gemma3ImageProcessor",
        around="{}",
        tokens=tuple(_GEMMA.values()),
        named=_GEMMA,
        settings={"size": {"height": 896, "width": 896}},
        own={"image_seq_length": 256},
    ),
    Family(
        model_type="gemma4",
        processor="Gemma4Processor",
        images="Gemma4ImageProcessor",
        around="{}",
        tokens=("<|image|>", "<|image>", "<image|>", "<|audio|>", "<|audio>", "<audio|>"),
        named={
            "image_token": "<|image|>",
            "boi_token": "<|image>",
            "eoi_token": "<image|>",
            "audio_token": "<|audio|>",
            "boa_token": "<|audio>",
            "eoa_token": "<audio|>",
        },
        own={"image_seq_length": 280},
    ),
    Family(
        model_type="mistral3",
        processor="PixtralProcessor",
        images="PixtralImageProcessorFast",
        around="{}",
        tokens=("[IMG]", "[IMG_BREAK]", "[IMG_END]"),
        settings={"patch_size": 14, "size": {"longest_edge": 1540}},
        own={"patch_size": 14, "spatial_merge_size": 2},
        package="torchvision",
    ),
    Family(
        model_type="idefics3",
        processor="Idefics3Processor",
        images="Idefics3ImageProcessor",
        around="{}",
        tokens=_IDEFICS_TOKENS,
        own={"image_seq_len": 169},
    ),
    Family(
        model_type="smolvlm",
        processor="SmolVLMProcessor",
        images="SmolVLMImageProcessor",
        around="{}",
        tokens=_IDEFICS_TOKENS,
        settings={"size": {"longest_edge": 1536}, "max_image_size": {"longest_edge": 384}},
        own={"image_seq_len": 81},
        package="num2words",
    ),
    Family(
        model_type="internvl",
        processor="InternVLProcessor",
        images="GotOcr2ImageProcessorFast",
        around="{}",
        tokens=("<IMG_CONTEXT>", "<img>", "</img>", "<video>"),
        named={
            "start_image_token": "<img>",
            "end_image_token": "</img>",
            "context_image_token": "<IMG_CONTEXT>",
            "video_token": "<video>",
        },
        settings={"size": {"height": 448, "width": 448}, "crop_to_patches": False},
        own={"image_seq_length": 256},
    ),
    Family(
        model_type="lfm2_vl",
        processor="Lfm2VlProcessor",
        images="Lfm2VlImageProcessorFast",
        around="{}",
        tokens=(
            "<image>",
            "<|image_start|>",
            "<|image_end|>",
            "<|img_thumbnail|>",
            *(f"<|img_row_{row}_col_{column}|>" for row in range(1, 11) for column in range(1, 11)),
        ),
        package="torchvision",
    ),
    Family(
        model_type="glm46v",
        processor="Glm46VProcessor",
        images="Glm46VImageProcessorFast",
        around="<|begin_of_image|>{}<|end_of_image|>",
        tokens=("<|image|>", "<|video|>", "<|begin_of_image|>", "<|end_of_image|>"),
        config={
            "image_start_token_id": "<|begin_of_image|>",
            "image_end_token_id": "<|end_of_image|>",
        },
    ),
)
USABLE = tuple(family for family in FAMILIES if family.is_usable)


def family_of(model_type: str) -> Family:
    """Return the family of a type of models."""
    return next(family for family in FAMILIES if family.model_type == model_type)


def pixels(width: int, height: int, *, seed: int = 0) -> Pixels:
    """Return an image of noise."""
    values = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Pixels(image=Image.fromarray(values), key=seed.to_bytes(16))


def plain_processor(family: Family, folder: Path) -> Any:
    """Build a family's processor by transformers alone, without what it has for videos."""
    kind = getattr(transformers, family.processor)
    images = AutoImageProcessor.from_pretrained(folder, backend="pil")
    parts = {"image_processor": images, "tokenizer": family.tokenizer()}
    unchecked: Any = type("Own", (kind,), {"check_argument_for_proper_class": lambda *_: None})
    fields, _ = ProcessorMixin.get_processor_dict(folder)
    names = kind.get_attributes()
    return unchecked.from_args_and_dict([parts.get(name) for name in names], fields)
