"""Which of a model's own weights train: all, groups of them, or those that match a pattern."""

import re
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import cache
from typing import TYPE_CHECKING, Literal

from torch import nn

from finetune.errors import ConfigError
from finetune.model.empty import empty_of
from finetune.model.layer_facts import is_norm
from finetune.recipe.sections import ModelSection
from offload.engine.model.layers import LayeredModel
from offload.plan.facts.facts import WholeWeights, nearest
from offload.plan.facts.trainable import EMBEDDING, HEAD, NORMS, OTHERS

if TYPE_CHECKING:
    from transformers import PreTrainedModel

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
            raise ConfigError(
                f"train.what: {pattern} matches no weight of a {type(model).__name__}",
                limit=f"patterns match whole names, such as {next(iter(named))}",
                hint=f"`train.what: [{nearest(pattern, named)}]`, or `train.what: all`",
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
            hint="add a pattern such as `model.layers.*`, or `adapter.modules_to_save`",
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
