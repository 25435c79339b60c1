"""Facts of a model's image tower, counted on a model without values."""

import inspect
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal

from torch import nn

from offload.engine.model.layers import find_towers
from offload.plan.facts.tower import TowerFacts

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# What configs call the patches that become one token: by a side, or a side's inverse.
_SIDES = (
    *("spatial_merge_size", "merge_size", "merge_kernel_size", "pooling_kernel_size"),
    *("scale_factor", "downsample_factor"),
)
_RATIOS = ("downsample_ratio", "pixel_shuffle_ratio")


def tower_facts(model: "PreTrainedModel | None") -> TowerFacts | None:
    """Return the facts of a model's image tower.

    None if it has no tower, or one that is not a list of equal layers over square patches.
    """
    config: Any = None if model is None else model.config
    vision = getattr(config, "vision_config", None)
    patch_size = getattr(vision, "patch_size", None)
    if model is None or patch_size is None:
        return None
    towers = list(_image_towers(model))
    lists = [m for tower in towers for m in tower.modules() if isinstance(m, nn.ModuleList)]
    blocks = max(lists, key=_size, default=nn.ModuleList())
    width = next((m.in_features for m in blocks.modules() if isinstance(m, nn.Linear)), None)
    if width is None:
        return None
    return TowerFacts(
        num_parameters=sum(map(_size, towers)),
        block_parameters=_size(blocks),
        num_blocks=len(blocks),
        width=width,
        patch_size=patch_size if isinstance(patch_size, int) else patch_size[0],
        patches_per_token=_merged(config, vision),
        num_added=len(getattr(vision, "deepstack_visual_indexes", None) or ()),
        seen_whole=_seen_whole(model),
    )


def _image_towers(model: "PreTrainedModel") -> Iterator[nn.Module]:
    """Yield the towers and projectors of a composite but for those of sound."""
    names = {module: name for name, module in model.named_modules()}
    return (tower for tower in find_towers(model) if "audio" not in names[tower])


def _seen_whole(model: "PreTrainedModel") -> Literal["in none", "in those with a window", "in all"]:
    if "token_type_ids" in inspect.signature(model.forward).parameters:  # Gemma 3
        return "in all"
    text: Any = model.config.get_text_config()
    is_gemma4 = getattr(text, "use_bidirectional_attention", None) == "vision"
    return "in those with a window" if is_gemma4 else "in none"


def _size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _merged(config: Any, vision: Any) -> int:
    """Return the patches that become one token: one, where a config has no name for more."""

    def said(name: str) -> Any:
        return getattr(vision, name, None) or getattr(config, name, None)

    for name in _SIDES:
        if side := said(name):
            return side**2 if isinstance(side, int) else math.prod(side)
    for name in _RATIOS:
        if ratio := said(name):
            return int(round(1 / ratio) ** 2)
    if num_tokens := said("mm_tokens_per_image"):  # of Gemma 3, whose images have one size
        return max(1, int((vision.image_size // vision.patch_size) ** 2 // num_tokens))
    return 1
