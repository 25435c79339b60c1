"""The model that a recipe is asked for: its name, and the settings that a recipe has of it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from finetune.files.atomic import expanded
from finetune.model.config import cached_file, has_weights
from finetune.planning.subject import HUB_ID
from finetune.recipe.shipped import (
    find_shape,
    named_shape,
    published_ids,
    shape_of_id,
    shipped_shapes,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class WantedModel:
    """A model to write a recipe for.

    Attributes:
        name: Short, for titles and names of files.
        settings: The section `model` of its recipe.
        note: What to know of these; empty if there is nothing.
    """

    name: str
    settings: Mapping[str, Any]
    note: str = ""


def wanted_model(text: str) -> WantedModel:
    """Return the model that a text means.

    Args:
        text: A folder with a config.json, such a file, a hub id, or the name of a shipped shape,
            which need not be exact.

    Raises:
        ConfigError: It is none of these; the error names the nearest shapes.
    """
    path = expanded(text)
    if path.is_file() or (path / "config.json").is_file():
        return _on_disk(text)
    is_id = HUB_ID.fullmatch(text) is not None
    if is_id and (cached_file(text, "config.json") is not None or shape_of_id(text) is not None):
        return WantedModel(name=text.rpartition("/")[2].lower(), settings={"path": text})
    ids = published_ids()
    if text in shipped_shapes() and text not in ids:
        note = "a shape to try the program with: its weights are random"
        return WantedModel(name=text, settings={"config": text, "init": "random"}, note=note)
    name = named_shape(text)
    note = "planned as the text model of it alone" if name.endswith("-text") else ""
    return WantedModel(name=name.removesuffix("-text"), settings={"path": ids[name]}, note=note)


def _on_disk(text: str) -> WantedModel:
    file = find_shape(text).absolute()
    folder = file.parent
    if file.name == "config.json" and has_weights(str(folder)):
        return WantedModel(name=folder.name.lower(), settings={"path": str(folder)})
    name = folder.name if file.name == "config.json" else file.stem
    note = "a config alone, which a plan reads; to train, name the folder with the weights"
    return WantedModel(name=name.lower(), settings={"path": str(file)}, note=note)
