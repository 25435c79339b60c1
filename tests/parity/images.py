"""Tiny random models of images and text, rows with images for them, and what plain ones compute.

An image is what a processor would make of it: tensors of random pixels, and the number of its
tokens, which is written down here. Nothing of `finetune.images` is used.
"""

import copy
import inspect
import itertools
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import CONFIG_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, PreTrainedModel

from tests.parity.architectures import Gradients, gradients, in_float64
from tests.parity.tiny_models import SPECIAL, VOCABULARY, small

Inputs = dict[str, torch.Tensor]

IMAGE, BREAK = 5, 9
_TOKENS = {
    "image_token_id": IMAGE,
    "video_token_id": 6,
    "vision_start_token_id": 7,
    "vision_end_token_id": 8,
    "image_start_token_id": 7,
    "image_end_token_id": 8,
    "boi_token_id": 7,
    "eoi_token_id": 8,
    "audio_token_id": 10,
}
_FIRST_WORD = 12


@dataclass(frozen=True, kw_only=True)
class Image:
    """One image of a family."""

    inputs: Inputs  # what the processor gives to the model
    num_tokens: int


@dataclass(frozen=True, kw_only=True)
class Family:
    """How tiny models of a type are built, and what their images look like."""

    images: Callable[[torch.Generator], Sequence[Image]]  # three of them
    config: Mapping[str, Any] = field(default_factory=dict)
    dim: int = 0  # of the tensors, in which images of a row are joined
    has_breaks: bool = False  # whether other tokens are between those of an image


def _rand(generator: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.rand(*shape, generator=generator, dtype=torch.float64)


def _by_grid(*size: int) -> Callable[..., Sequence[Image]]:
    """Return images of patches of a size in a grid, four of which are a token."""

    def images(generator: torch.Generator) -> Sequence[Image]:
        return [
            Image(
                inputs={
                    "pixel_values": _rand(generator, rows * columns, *size),
                    "image_grid_thw": torch.tensor([[1, rows, columns]]),
                },
                num_tokens=rows * columns // 4,
            )
            for rows, columns in ((4, 4), (2, 6), (6, 4))
        ]

    return images


def _by_size(generator: torch.Generator) -> Sequence[Image]:
    """Return images that are padded to the largest one, a token for 16 x 16 pixels."""
    return [
        Image(
            inputs={
                "pixel_values": _rand(generator, 1, 3, 32, 32),
                "image_sizes": torch.tensor([[height, width]]),
            },
            num_tokens=height * width // 16**2,
        )
        for height, width in ((32, 32), (16, 32), (32, 16))
    ]


def _squares(size: int) -> Callable[..., Sequence[Image]]:
    """Return images of one size, four tokens each."""

    def images(generator: torch.Generator) -> Sequence[Image]:
        return [
            Image(inputs={"pixel_values": _rand(generator, 1, 3, size, size)}, num_tokens=4)
            for _ in range(3)
        ]

    return images


def _tiles(*, has_rows: bool) -> Callable[..., Sequence[Image]]:
    """Return images of several squares, four tokens each."""

    def images(generator: torch.Generator) -> Sequence[Image]:
        rows = (1,) if has_rows else ()
        return [
            Image(
                inputs={"pixel_values": _rand(generator, *rows, num, 3, 32, 32)},
                num_tokens=4 * num,
            )
            for num in (1, 3, 2)
        ]

    return images


def _in_patches(generator: torch.Generator) -> Sequence[Image]:
    """Return images of at most 16 patches, each of which says how many they are."""
    return [
        Image(
            inputs={
                "pixel_values": _rand(generator, 1, 16, 8 * 8 * 3),
                "spatial_shapes": torch.tensor([[rows, columns]]),
                "pixel_attention_mask": (torch.arange(16) < rows * columns).long()[None],
            },
            num_tokens=rows * columns // 4,
        )
        for rows, columns in ((4, 4), (2, 4), (2, 6))
    ]


def _at_positions(generator: torch.Generator) -> Sequence[Image]:
    """Return images of at most 16 patches, with the place of each, which pooling merges by four."""
    images = []
    for rows, columns in ((4, 4), (2, 4), (2, 6)):
        places = torch.full((1, 16, 2), -1)
        both = torch.meshgrid(torch.arange(columns), torch.arange(rows), indexing="xy")
        places[0, : rows * columns] = torch.stack(both, dim=-1).reshape(-1, 2)
        pixels = _rand(generator, 1, 16, 4 * 4 * 3)
        pixels[places[..., 0] < 0] = 0
        images.append(
            Image(
                inputs={"pixel_values": pixels, "image_position_ids": places},
                num_tokens=rows * columns // 4,
            )
        )
    return images


_DEEPSTACK = {"vision_config": {"deepstack_visual_indexes": [0, 1], "num_position_embeddings": 64}}
_FLAT, _SQUARES = (3 * 2 * 8 * 8,), (3, 8, 8)  # patches, of two frames or one
_SQUARE = {"vision_config": {"image_size": 32}}
_LINEAR = {
    "text_config": {
        "layer_types": ["linear_attention", "full_attention"] * 2,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "mrope_section": [2, 1, 1],
            "partial_rotary_factor": 1.0,
        },
    },
    "vision_config": {"num_position_embeddings": 64},
}
FAMILIES: Mapping[str, Family] = {
    "aya_vision": Family(images=_tiles(has_rows=False), config=_SQUARE),
    "cohere2_vision": Family(images=_tiles(has_rows=False), config=_SQUARE),
    "exaone4_5": Family(images=_by_grid(*_FLAT)),
    "gemma3": Family(
        images=_squares(32),
        config={
            "mm_tokens_per_image": 4,
            "text_config": {"layer_types": ["sliding_attention", "full_attention"] * 2},
            **_SQUARE,
        },
    ),
    "gemma4": Family(
        images=_at_positions,
        config={
            "audio_config": None,
            "text_config": {
                "layer_types": ["sliding_attention", "full_attention"] * 2,
                "use_bidirectional_attention": "vision",
                "global_head_dim": 8,
            },
            "vision_config": {"patch_size": 4, "pooling_kernel_size": 2, "head_dim": 8}
            | {"num_key_value_heads": 4, "position_embedding_size": 64},
        },
    ),
    "glm46v": Family(images=_by_grid(*_FLAT)),
    "glm4v": Family(images=_by_grid(*_FLAT)),
    "glm4v_moe": Family(images=_by_grid(*_FLAT)),
    "glm5_next": Family(images=_by_grid(*_FLAT)),
    "glm_ocr": Family(images=_by_grid(*_FLAT)),
    "hyperclovax_vision_v2": Family(images=_by_grid(*_FLAT)),
    "idefics3": Family(
        images=_tiles(has_rows=True), config={"scale_factor": 2, **_SQUARE}, dim=1, has_breaks=True
    ),
    "internvl": Family(
        images=_tiles(has_rows=False),
        config={"vision_config": {"image_size": [32, 32], "patch_size": [8, 8]}},
    ),
    "kimi_k25": Family(images=_by_grid(*_SQUARES), config={"projection_hidden_size": 32}),
    "lfm2_vl": Family(
        images=_in_patches,
        config={
            "text_config": {"layer_types": ["conv", "full_attention"] * 2},
            "vision_config": {"num_patches": 16},
        },
    ),
    "lfm3_vl": Family(images=_by_grid(*_FLAT)),
    "lighton_ocr": Family(images=_by_size, config=_SQUARE, has_breaks=True),
    "llava": Family(images=_squares(16)),
    "minimax_m3_vl": Family(images=_by_grid(*_FLAT)),
    "mistral3": Family(images=_by_size, config=_SQUARE, has_breaks=True),
    "mistral_large4": Family(images=_by_size, config=_SQUARE, has_breaks=True),
    "muse_glimmer": Family(images=_by_grid(*_FLAT), config={"out_hidden_size": 128}),
    "paddleocr_vl": Family(images=_by_grid(*_SQUARES)),
    "qwen2_5_vl": Family(images=_by_grid(*_FLAT)),
    "qwen2_vl": Family(images=_by_grid(*_FLAT)),
    "qwen3_5": Family(images=_by_grid(*_FLAT), config=_LINEAR),
    "qwen3_5_moe": Family(images=_by_grid(*_FLAT), config=_LINEAR),
    "qwen3_vl": Family(images=_by_grid(*_FLAT), config=_DEEPSTACK),
    "qwen3_vl_moe": Family(images=_by_grid(*_FLAT), config=_DEEPSTACK),
    "qwen4_exp": Family(images=_by_grid(*_FLAT)),
    "smolvlm": Family(
        images=_tiles(has_rows=True), config={"scale_factor": 2, **_SQUARE}, dim=1, has_breaks=True
    ),
}


def tiny_base(model_type: str) -> PreTrainedModel:
    """Return a model of images and text in float64, frozen, all of its weights random."""
    family, known = FAMILIES[model_type], SPECIAL.get(model_type, {})
    special = {**known, **_TOKENS, **family.config}
    for name in ("text_config", "vision_config"):
        special[name] = {**known.get(name, {}), **family.config.get(name, {})}
    model_class: Any = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[CONFIG_MAPPING[model_type]]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: PreTrainedModel = model_class._from_config(
            small(CONFIG_MAPPING[model_type], special)
        )
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
                parameter.requires_grad_(False)
    return cast("PreTrainedModel", in_float64(model.eval()))


def with_lora(model: PreTrainedModel, *others: str) -> nn.Module:
    """Put LoRA on all linear modules of the text layers, both of its factors random.

    Args:
        model: Without an adapter.
        others: Further modules.
    """
    decoder: Any = model.get_decoder()
    names = [
        name
        for name, module in model.named_modules()
        if module in set(decoder.layers.modules()) and type(module) is nn.Linear
    ]
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # peft's about patterns that match nothing
        torch.manual_seed(0)
        adapted = get_peft_model(
            model, LoraConfig(r=2, lora_alpha=4, target_modules=[*names, *others])
        )
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                nn.init.normal_(parameter, std=0.1)
    return adapted.double().eval()


# -------------------------------------------------------------------------------------------- rows

ROWS: Sequence[Sequence[int]] = (
    (4, -1, 5),
    (3, -2, 2, -3, 4),
    (11,),
    (2, -1, 3, -1, 2),
    (-3, 6),
    (7,),
)
"""The parts of each row: a number of random words, or which image there is, from -1 on."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """The tokens of a row; token k of the images, end to end, is -1 - k."""

    tokens: Sequence[int]
    labels: Sequence[int]
    images: Sequence[int]  # from left to right, from 0


def rows_of(family: Family, images: Sequence[Image], *, seed: int = 1) -> list[Row]:
    """Return the rows with random words, which alone have a loss."""
    generator = torch.Generator().manual_seed(seed)
    starts = starts_of(images)
    found = []
    for parts in ROWS:
        tokens: list[int] = []
        for part in parts:
            if part > 0:
                words = torch.randint(_FIRST_WORD, VOCABULARY, (part,), generator=generator)
                tokens += words.tolist()
                continue
            for number in range(images[-part - 1].num_tokens):
                tokens += [BREAK] if number and number % 2 == 0 and family.has_breaks else []
                tokens.append(-1 - starts[-part - 1] - number)
        labels = [token if token >= _FIRST_WORD else -100 for token in tokens]
        own = [-part - 1 for part in parts if part < 0]
        found.append(Row(tokens=tokens, labels=labels, images=own))
    return found


def starts_of(images: Sequence[Image]) -> list[int]:
    """Return where each image begins if they are end to end, and the end of the last one."""
    return [0, *itertools.accumulate(image.num_tokens for image in images)]


def plain_inputs(model: nn.Module, family: Family, images: Sequence[Image], row: Row) -> Inputs:
    """Return what plain transformers is given of a row, as a processor would make it."""
    ids_1T = torch.tensor([[IMAGE if token < 0 else token for token in row.tokens]])
    own = [images[number].inputs for number in row.images]
    pixels = {n: torch.cat([x[n] for x in own], dim=family.dim) for n in (own[0] if own else ())}
    unwrap: Any = getattr(model, "get_base_model", lambda: model)
    takes = inspect.signature(unwrap().forward).parameters
    names = [name for name in ("mm_token_type_ids", "token_type_ids") if name in takes]
    types_1T = (ids_1T == IMAGE).long()
    return {
        "input_ids": ids_1T,
        "attention_mask": torch.ones_like(ids_1T),
        **pixels,
        **dict.fromkeys(names, types_1T),
    }


def plain_step(
    model: nn.Module,
    family: Family,
    images: Sequence[Image],
    rows: Sequence[Row],
    *,
    without: Sequence[str] = (),
) -> tuple[float, Gradients]:
    """Return loss and gradients of all rows, each by itself, from pixels.

    Args:
        model: With its adapter and its tower.
        family: Its family.
        images: Those of the rows.
        rows: The rows.
        without: Arguments that are left out.
    """
    model = copy.deepcopy(model)
    num, loss = sum(label >= 0 for row in rows for label in row.labels[1:]), 0.0
    for row in rows:
        inputs = plain_inputs(model, family, images, row)
        given = {name: value for name, value in inputs.items() if name not in without}
        logits_TV = model(**given, use_cache=False).logits[0, :-1].float()
        labels_T = torch.tensor(row.labels[1:])
        part = nn.functional.cross_entropy(logits_TV, labels_T, reduction="sum") / num
        part.backward()
        loss += part.item()
    return loss, gradients(model)
