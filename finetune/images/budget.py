"""`image.max_tokens` in the settings that each processor has for it.

A budget only lowers what a model was published with; Gemma 4's, which its makers meant to be
chosen, is set to the largest one within it. Thin images can exceed a budget in pixels, since a side
has a patch at least: so each image is counted afterwards.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from finetune.errors import ConfigError

_GEMMA4_TOKENS = (70, 140, 280, 560, 1120)  # the values that its processor accepts


@dataclass(frozen=True, kw_only=True, slots=True)
class Budget:
    """Most tokens of an image, and the settings of the processor for it."""

    num_tokens: int
    words: str  # the same in the processor's own measure
    settings: Mapping[str, Any] = field(default_factory=dict)  # keyword arguments for images


def budget_of(processor: Any, max_tokens: int | None) -> Budget | None:
    """Return what holds for a processor; None for one without a budget whose bound is not known.

    Args:
        processor: transformers' own.
        max_tokens: The tokens an image may have at most; None leaves what was published.

    Raises:
        ConfigError: It has no setting for so few tokens, or none that is known here.
    """
    name = type(processor.image_processor).__name__.removesuffix("Pil")
    if name in _BUDGETS:
        return _BUDGETS[name](processor, math.inf if max_tokens is None else max_tokens)
    if max_tokens is None:
        return None
    raise ConfigError(
        f"image.max_tokens: {max_tokens} with {name}",
        limit="it is not known which of its settings bound the tokens of an image",
        hint="leave `image.max_tokens` away, and make the image files smaller",
    )


def _too_few(processor: Any, max_tokens: float, least: int) -> ConfigError:
    return ConfigError(
        f"image.max_tokens: {max_tokens} with {type(processor.image_processor).__name__}",
        limit=f"it makes {least} tokens of an image at least",
        hint=f"`image.max_tokens: {least}` or more",
    )


def _by_pixels(processor: Any, max_tokens: float, *, num_frames: int = 1) -> Budget:
    """Return the budget of Qwen-VL's, which bound height times width, by frames in GLM-V's."""
    images = processor.image_processor
    side = images.patch_size * images.merge_size
    token_pixels = num_frames * side**2
    least, most = images.size["shortest_edge"], images.size["longest_edge"]
    num_tokens = int(min(most // token_pixels, max_tokens))
    settings = {}
    if num_tokens < most // token_pixels:
        most = num_tokens * token_pixels
        settings["size"] = {"shortest_edge": min(least, most), "longest_edge": most}
    return Budget(
        num_tokens=num_tokens, words=f"{num_tokens:,} x {side}^2 pixels", settings=settings
    )


def _by_frames(processor: Any, max_tokens: float) -> Budget:
    frames = processor.image_processor.temporal_patch_size  # an image is as many equal ones
    return _by_pixels(processor, max_tokens, num_frames=frames)


def _by_side(processor: Any, max_tokens: float) -> Budget:
    """Return the budget of Pixtral's, which bound the longer side."""
    patch = processor.patch_size * processor.spatial_merge_size
    published = processor.image_processor.size["longest_edge"]
    num_patches = math.ceil(published / patch)
    side, settings = published, {}
    if num_patches**2 > max_tokens:
        num_patches = math.isqrt(int(max_tokens))
        side = num_patches * patch
        settings["size"] = {"longest_edge": side}
    return Budget(num_tokens=num_patches**2, words=f"{side:,} pixels a side", settings=settings)


def _fixed(processor: Any, max_tokens: float) -> Budget:
    """Return the budget of Gemma 3's, which make the same of every image."""
    num_tokens: int = processor.image_seq_length
    if num_tokens > max_tokens:
        raise _too_few(processor, max_tokens, num_tokens)
    return Budget(num_tokens=num_tokens, words="the same for every image")


def _of_gemma4(processor: Any, max_tokens: float) -> Budget:
    published = processor.image_processor.max_soft_tokens
    if max_tokens == math.inf:
        return Budget(num_tokens=published, words=f"max_soft_tokens {published}")
    if max_tokens < _GEMMA4_TOKENS[0]:
        raise _too_few(processor, max_tokens, _GEMMA4_TOKENS[0])
    chosen = max(one for one in _GEMMA4_TOKENS if one <= max_tokens)
    return Budget(
        num_tokens=chosen,
        words=f"max_soft_tokens {chosen}",
        settings={"max_soft_tokens": chosen},
    )


def _by_grid(processor: Any, max_tokens: float) -> Budget:
    """Return the budget of Idefics 3's, a grid of tiles and the whole image as one more."""
    images, each = processor.image_processor, processor.image_seq_len
    tile = images.max_image_size["longest_edge"]
    published = math.ceil(images.size["longest_edge"] / tile) if images.do_image_splitting else 1
    if each > max_tokens:
        raise _too_few(processor, max_tokens, each)
    fitting = (n for n in range(published, 1, -1) if (n**2 + 1) * each <= max_tokens)
    side = next(fitting, 1)
    return Budget(
        num_tokens=each * (side**2 + 1 if side > 1 else 1),
        words=f"{side} x {side} tiles of {tile}^2 pixels",
        settings={"size": {"longest_edge": side * tile}} if side < published else {},
    )


def _by_tiles(processor: Any, max_tokens: float) -> Budget:
    """Return the budget of InternVL's, some tiles and, if several, the whole as one more."""
    images, each = processor.image_processor, processor.image_seq_length
    if each > max_tokens:
        raise _too_few(processor, max_tokens, each)
    fitting = (n for n in range(images.max_patches, 1, -1) if (n + 1) * each <= max_tokens)
    num_tiles = next(fitting, 1)
    settings = {}
    if num_tiles < images.max_patches:
        settings["max_patches"] = num_tiles
        settings["min_patches"] = min(images.min_patches, num_tiles)
    return Budget(
        num_tokens=each * (num_tiles + 1 if num_tiles > 1 else 1),
        words=f"{num_tiles} tiles of {images.size['height']}^2 pixels",
        settings=settings,
    )


def _of_lfm2(processor: Any, max_tokens: float) -> Budget:
    """Return the budget of LFM2-VL's: one image, or if it is large tiles and a small one."""
    images = processor.image_processor
    each = math.ceil(images.tile_size // images.encoder_patch_size / images.downsample_factor) ** 2
    whole = images.max_image_tokens
    small = whole if images.use_thumbnail else 0
    tiles = range(images.max_tiles, images.min_tiles - 1, -1) if images.do_image_splitting else ()
    if num_tiles := next((n for n in tiles if n * each + small <= max_tokens), 0):
        return Budget(
            num_tokens=max(num_tiles * each + small, whole),
            words=f"{num_tiles} tiles of {images.tile_size}^2 pixels",
            settings={"max_tiles": num_tiles} if num_tiles < images.max_tiles else {},
        )
    num_tokens = int(min(whole, max_tokens))
    side = images.encoder_patch_size * images.downsample_factor
    return Budget(
        num_tokens=num_tokens,
        words=f"{num_tokens} x {side}^2 pixels, no tiles",
        settings={
            "do_image_splitting": False,
            "max_image_tokens": num_tokens,
            "min_image_tokens": min(images.min_image_tokens, num_tokens),
        },
    )


_BUDGETS: Mapping[str, Callable[[Any, float], Budget]] = {
    "Gemma3ImageProcessor": _fixed,
    "Gemma4ImageProcessor": _of_gemma4,
    "Glm46VImageProcessor": _by_frames,
    "Glm4vImageProcessor": _by_frames,
    "GotOcr2ImageProcessor": _by_tiles,
    "Idefics3ImageProcessor": _by_grid,
    "Lfm2VlImageProcessor": _of_lfm2,
    "PixtralImageProcessor": _by_side,
    "Qwen2VLImageProcessor": _by_pixels,
    "SmolVLMImageProcessor": _by_grid,
}
"""The budget of each class of image processors that transformers has, by its name without `Pil`."""
