"""A model whose own weights train: which of them do, and its files for plain transformers."""

import json
import re
import shutil
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
from finetune.files.shard_writer import new_shards
from finetune.model.base_weights import BaseWeights, spec_of
from finetune.model.config import model_folder, published_config
from finetune.model.empty import config_of, empty_of
from finetune.model.layer_facts import is_norm
from finetune.model.renaming import Renaming
from finetune.recipe.sections import ModelSection
from finetune.report.model_card import MODEL_CARD
from offload.engine.model.layers import LayeredModel
from offload.plan.facts.facts import WholeWeights, nearest
from offload.plan.facts.trainable import EMBEDDING, HEAD, NORMS, OTHERS

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


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
        UnsupportedModelError: A layer changes one of them by itself.
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
    if (carried := LayeredModel(model).carried) is not None:
        carried.refuse_trained()


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
# A model whose own weights were trained, as files that load where its base does.
#
# Each tensor has the name that its base publishes, by transformers' own rules for loading, each of
# which is reversed alone: `save_pretrained` reverses all of them, of which some then act on names
# that they did not act on before (those of kimi_k25's text model become `blocks`). Towers and other
# tensors that the model does not have are copied. Only a model that began with random weights is
# saved by transformers: nothing of it is published.
#
# Its config.json is the published one. What transformers writes in its place has the layout of its
# own version: others, and programs that pin another version, would read defaults for what they do
# not find, such as the base of the rotary embedding.

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
        ModelError: The base's files are no longer there.
    """
    first = {id(p): name for name, p in model.named_parameters()}
    one_of = {name: first[id(p)] for name, p in model.named_parameters(remove_duplicate=False)}
    state = {
        # tied weights are one, and saved as one
        name: weights.get(one_of.get(name, name), value.cpu())
        for name, value in model.state_dict().items()
        if not value.is_meta  # as towers are
    }
    with whole_folder(folder, unlisted=(MODEL_CARD,)) as partial:
        if section.init == "random":
            model.save_pretrained(str(partial), state_dict=state)
        else:
            _write_published(model, state, model_folder(section), partial)
        _write_config(partial / "config.json", section, model)
        tokenizer.save_pretrained(str(partial))
        fields = model.generation_config.to_diff_dict() if model.generation_config else {}
        write_generation_config(partial, fields, stops)


def _write_published(
    model: "PreTrainedModel", state: Mapping[str, torch.Tensor], base: Path, folder: Path
) -> None:
    """Write a model's weights as its base is published, with its processors of images and sound."""
    published = BaseWeights(base)
    renaming = Renaming(model, published.specs)
    groups = [group for group in renaming.groups if not state.keys().isdisjoint(group.parameters)]
    types = {name: state[group.parameters[0]].dtype for group in groups for name in group.names}
    specs = {
        name: spec_of(types[name], spec.shape) if name in types else spec
        for name, spec in published.specs.items()
    }
    with new_shards(folder, specs) as shards:
        for group in groups:
            values = {name: state[name] for name in group.parameters}
            for name, tensor in renaming.published(group, values).items():
                shards.write(name, tensor)
        for name in specs.keys() - types.keys():
            published.copy(name, shards)
        shards.finish()
    for file in base.glob("*processor*.json"):
        shutil.copyfile(file, folder / file.name)


def _write_config(file: Path, section: ModelSection, model: "PreTrainedModel") -> None:
    """Write the published config, with the type of the weights.

    Of a composite's text part with random weights nothing is published, so what transformers has
    written stays.
    """
    if section.init == "random" and type(config_of(section)) is not type(model.config):
        return
    published = published_config(section)
    kept = {name: value for name, value in published.items() if name not in _DROPPED}
    fields = _of_dtype(kept, str(model.dtype).removeprefix("torch."))
    fields.setdefault("architectures", [type(model).__name__])
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
