"""A model's tower for images and its projector: loaded without the model, and of one image."""

import hashlib
import inspect
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate import init_empty_weights

from finetune.errors import ModelError
from finetune.files.shards import weight_files
from finetune.images.features import Features
from finetune.model.base_weights import BaseWeights
from finetune.model.config import model_folder
from finetune.model.empty import config_of, model_class
from finetune.model.load import random_model
from finetune.model.renaming import Renaming
from finetune.recipe.sections import ModelSection
from offload.engine.model.layers import find_towers

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def tower_digest(section: ModelSection, *, seed: int, device: str) -> str:
    """Digest all that the features of an image depend on, besides the image and its processor.

    Published weights are known by size and last write of their files, which are not read. The time
    is that of the inode, which no program can set back.

    Raises:
        ModelError: The model was not downloaded.
    """
    facts: list[Any] = [config_of(section).to_dict(), section.dtype, device, torch.__version__]
    if section.init == "random":
        facts.append(seed)
    else:
        stats = [(file.name, Path(file).stat()) for file in weight_files(model_folder(section))]
        facts += [(name, stat.st_size, stat.st_ctime_ns) for name, stat in stats]
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()


def load_tower(section: ModelSection, *, seed: int) -> "PreTrainedModel":
    """Return a model whose towers have their weights, on the host; all else has no memory.

    Args:
        section: The model.
        seed: Seed of random weights.

    Raises:
        ModelError: It has no tower, or weights are missing.
    """
    if section.init == "random":
        model = random_model(section, seed)
        require_towers(model)
    else:
        model = _with_published_towers(section)
    model.eval()
    return model


def _with_published_towers(section: ModelSection) -> "PreTrainedModel":
    config, folder = config_of(section), model_folder(section)
    kind = model_class(config, source=str(folder))
    with init_empty_weights(include_buffers=False):  # towers compute buffers that no file has
        model: PreTrainedModel = kind.from_config(config, dtype=getattr(torch, section.dtype))
    name_of = {module: name for name, module in model.named_modules()}
    wanted = {f"{name_of[one]}.{key}" for one in require_towers(model) for key in one.state_dict()}
    weights = BaseWeights(folder)
    renaming = Renaming(model, weights.specs)
    for group in renaming.groups:
        if not wanted.isdisjoint(group.parameters):
            published = {name: weights.read(name) for name in group.names}
            for name, values in renaming.forward(group, published).items():
                _set(model, name, values)
    return model


def _set(model: "PreTrainedModel", name: str, values: torch.Tensor) -> None:
    owner, _, own = name.rpartition(".")
    module = model.get_submodule(owner)
    before: torch.Tensor = getattr(module, own)
    values = values.to(before.dtype)
    if isinstance(before, torch.nn.Parameter):
        values = torch.nn.Parameter(values, requires_grad=False)
    setattr(module, own, values)


def require_towers(model: "PreTrainedModel") -> list[torch.nn.Module]:
    """Return the modules of a model that compute features of images.

    Raises:
        ModelError: It has none.
    """
    towers = find_towers(model)
    if not towers or not hasattr(model.base_model, "get_image_features"):
        raise ModelError(
            f"{type(model).__name__} has no tower for images",
            limit="rows with images train a model that transformers lists for images and text",
            hint="name such a model, or leave the images out by `data.ignored_columns`",
        )
    return towers


def computed(
    model: "PreTrainedModel",
    inputs: Mapping[str, torch.Tensor],
    *,
    device: str | torch.device = "cpu",
) -> Features:
    """Return what a model's tower makes of one image.

    Args:
        model: The model without its adapter, with the weights of its tower.
        inputs: Output of the processor for the image; the tower ignores what it does not take.
        device: Device of the tower.
    """
    of_image: Any = getattr(model.base_model, "get_image_features")  # noqa: B009 - untyped
    takes = inspect.signature(of_image).parameters
    given = {name: value.to(device) for name, value in inputs.items() if name in takes}
    with torch.no_grad():
        output = of_image(**given, return_dict=True)
    grid = inputs.get("image_grid_thw")
    return Features(
        rows_ND=_rows(output.pooler_output),
        layers=tuple(map(_rows, getattr(output, "deepstack_features", None) or ())),
        grid=None if grid is None else tuple(grid.flatten().tolist()),
    )


def _rows(values: Any) -> torch.Tensor:
    """Return features (N, D), of which a model may have a list, or a dimension of tiles."""
    if isinstance(values, torch.Tensor):
        return values.flatten(0, -2)
    return torch.cat(list(map(_rows, values)))
