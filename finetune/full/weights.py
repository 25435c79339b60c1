"""A model whose own weights train: which of them do, and its files for plain transformers."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from finetune.data.chat_template import Stops, write_generation_config
from finetune.errors import ConfigError
from finetune.files.manifest import whole_folder
from finetune.model.config import published_config
from finetune.model.empty import config_of, empty_of
from finetune.model.layer_facts import is_norm
from finetune.recipe.sections import ModelSection
from finetune.report.model_card import MODEL_CARD
from offload.engine.model.layers import LayeredModel
from offload.plan.facts.facts import WholeWeights, nearest
from offload.plan.facts.trainable import EMBEDDING, HEAD, NORMS, OTHERS

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase


BIASES = "biases"
_LAST_LAYERS = re.compile(r"last_([1-9]\d*)_layers?")


def choose_weights(model: "PreTrainedModel", what: Literal["all"] | Sequence[str]) -> None:
    """Let the chosen weights of a model train and freeze all others, those of towers too.

    Tied weights are one, by the name that transformers saves.

    Args:
        model: The model, perhaps without values.
        what: All, or of each a group (`biases`, `norms`, `last_4_layers`), or a pattern in the
            shell's way of names such as model.layers.0.mlp.up_proj.*.

    Raises:
        ConfigError: A group or a pattern matches nothing that computes text.
    """
    named = _weights(model)
    patterns = ("*",) if isinstance(what, str) else tuple(what)
    chosen: set[str] = set()
    for pattern in patterns:
        found = _group(model, pattern, named)
        if found is None:
            found = {name for name in named if fnmatchcase(name, pattern)}
        if not found:
            near = [nearest(pattern, named) if one == pattern else one for one in patterns]
            raise ConfigError(
                f"train.what: {pattern} matches no weight of a {type(model).__name__}",
                limit=f"patterns match whole names, such as {next(iter(named))}",
                hint=f"`train.what: [{', '.join(near)}]`, or `train.what: all`",
            )
        chosen |= found
    for parameter in model.parameters():
        parameter.requires_grad = False
    for name in chosen:
        named[name].requires_grad = True


def _group(
    model: "PreTrainedModel", word: str, named: Mapping[str, nn.Parameter]
) -> set[str] | None:
    """Return the names of a group's weights, of those with names; None if a word is no group.

    Raises:
        ConfigError: The model has none of the group.
    """
    last = _LAST_LAYERS.fullmatch(word)
    if word == BIASES:
        # A router's correction of its scores is no bias that is learned: it has no gradient.
        found = {n for n in named if n.endswith("bias") and not n.endswith("correction_bias")}
        limit = "its linear layers and norms have weights only"
    elif word == NORMS:
        within = {id(p) for m in filter(is_norm, model.modules()) for p in _own(m)}
        found = {name for name, p in named.items() if id(p) in within}
        limit = "its norms have none"
    elif last:
        layers, num = list(LayeredModel(model).layers), int(last[1])
        within = {id(p) for layer in layers[-num:] for p in layer.parameters()}
        found = {name for name, p in named.items() if id(p) in within}
        found, limit = found if num <= len(layers) else set(), f"it has {len(layers)} layers"
    else:
        return None
    if not found:
        raise ConfigError(
            f"train.what: {word}, and a {type(model).__name__} has no such weights",
            limit=limit,
            hint="`train.what: [norms]`, `[last_2_layers]`, or `all`",
        )
    return found


@cache
def counted(section: ModelSection, what: tuple[str, ...]) -> WholeWeights:
    """Count the weights that patterns choose, on a model without values.

    Raises:
        ConfigError: See `choose_weights`; or none is in a layer.
    """
    model = empty_of(section)
    choose_weights(model, what)
    layered = LayeredModel(model)
    layers = tuple(map(_num_trained, layered.layers))
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    outer = {
        EMBEDDING: _num_trained(embedding),
        HEAD: _num_trained(head) if head is not None else 0,
    }
    if head is not None and head.weight is embedding.weight:
        outer[HEAD] = 0
    rest = _num_trained(model) - sum(layers) - sum(outer.values())
    norm = getattr(model.get_decoder(), "norm", None)
    outer[NORMS] = _num_trained(norm) if isinstance(norm, nn.Module) else 0
    outer[OTHERS] = rest - outer[NORMS]
    if not any(layers):
        raise ConfigError(
            f"train.what: {', '.join(what)} chooses no weight of a layer",
            limit="layers are what is streamed; weights around them alone need no streaming",
            hint=f"`train.what: [{', '.join((*what, 'last_1_layer'))}]`, or an adapter with"
            " `adapter.modules_to_save`",
        )
    return WholeWeights(layers=layers, outer=tuple((n, size) for n, size in outer.items() if size))


def _weights(model: "PreTrainedModel") -> dict[str, nn.Parameter]:
    """Return the weights that text passes through, by name."""
    left = {id(p) for tower in LayeredModel(model).towers for p in tower.parameters()}
    return {name: p for name, p in model.named_parameters() if id(p) not in left}


def _own(module: nn.Module) -> Iterator[nn.Parameter]:
    return module.parameters(recurse=False)


def _num_trained(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters() if p.requires_grad)


# ---------------------------------------------------------------------------------------------
# A model whose own weights were trained, as files that plain transformers loads.
#
# Its config.json is the published one. What transformers writes in its place has the layout of its
# own version: others, and programs that pin another version, would read defaults for what they do
# not find, such as the base of the rotary embedding.

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
