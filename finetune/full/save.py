"""A model whose own weights were trained, as files that plain transformers loads.

Its config.json is the published one. What transformers writes in its place has the layout of its
own version: others, and programs that pin another version, would read defaults for what they do not
find, such as the base of the rotary embedding.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from finetune.data.stops import Stops, write_generation_config
from finetune.files.manifest import whole_folder
from finetune.model.config import published_config
from finetune.model.empty import config_of
from finetune.recipe.sections import ModelSection
from finetune.report.model_card import MODEL_CARD

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

SHARD_SIZE = "5GB"
_DTYPE = ("torch_dtype", "dtype")
"""How older and newer versions of transformers call the type of the weights."""
_DROPPED = ("quantization_config", "auto_map")
"""Settings of the base that are not true of the new folder: it has plain weights, and no code."""


def save_model(
    model: "PreTrainedModel",
    weights: Mapping[str, torch.Tensor],
    tokenizer: "PreTrainedTokenizerBase",
    folder: Path,
    *,
    section: ModelSection,
    stops: Stops,
) -> None:
    """Write weights as published, config, tokenizer and generation config, whole with a manifest.

    Weights have the type that they computed in. Of a model that trained in bfloat16 these are the
    fp32 masters, rounded once.

    Args:
        model: On its engine.
        weights: Name -> what was trained, on the host.
        tokenizer: Of the model.
        folder: Where to.
        section: Of the base.
        stops: Where generation stops.

    Raises:
        CheckpointError: The folder cannot be written; what was there before is unchanged.
        ModelError: The base's config is no longer there.
    """
    frozen = {name: value.cpu() for name, value in model.state_dict().items()}
    first = {id(p): name for name, p in model.named_parameters()}
    one_of = {name: first[id(p)] for name, p in model.named_parameters(remove_duplicate=False)}
    state = {
        name: weights.get(one_of.get(name, name), value)  # tied weights are one, and saved as one
        for name, value in frozen.items()
    }
    with whole_folder(folder, unlisted=(MODEL_CARD,)) as partial:
        model.save_pretrained(str(partial), state_dict=state, max_shard_size=SHARD_SIZE)
        _write_config(partial / "config.json", section, model.config)
        tokenizer.save_pretrained(str(partial))
        fields = model.generation_config.to_diff_dict() if model.generation_config else {}
        write_generation_config(partial, fields, stops)


def _write_config(file: Path, section: ModelSection, own: "PreTrainedConfig") -> None:
    """Write the published config in place of the one that transformers has written of a model.

    If nothing is published of a composite's text part, which is the model, that one stays.
    """
    written, published = json.loads(file.read_text()), published_config(section)
    part = _text_part(published, config_of(section), own)
    if part is None:
        return
    types = {name: published[name] for name in _DTYPE if name in published}
    kept = {name: value for name, value in part.items() if name not in _DROPPED}
    fields = _of_dtype(types | kept, written["dtype"])
    fields["architectures"] = written["architectures"]
    fields.setdefault("model_type", written["model_type"])
    file.write_text(json.dumps(fields, indent=2, ensure_ascii=False) + "\n")


def _of_dtype(fields: Mapping[str, Any], dtype: str) -> dict[str, Any]:
    """Return fields that name another type of weights, in their parts too."""
    return {
        name: dtype
        if name in _DTYPE
        else _of_dtype(value, dtype)
        if isinstance(value, dict)
        else value
        for name, value in fields.items()
    }


def _text_part(
    published: Mapping[str, Any], config: "PreTrainedConfig", own: "PreTrainedConfig"
) -> Mapping[str, Any] | None:
    """Return the part of published fields that a model's config was made of.

    Args:
        published: The fields.
        config: What transformers makes of them.
        own: The model's config.
    """
    if type(config) is type(own):
        return published
    for name in config.sub_configs:
        fields = published.get(name)
        if isinstance(fields, dict):
            part = _text_part(fields, getattr(config, name), own)
            if part is not None:
                return part
    return None
