"""Which of a model's own weights train: all, or those whose names match a pattern."""

from collections.abc import Sequence
from fnmatch import fnmatchcase
from functools import cache
from typing import TYPE_CHECKING, Literal

from torch import nn

from finetune.errors import ConfigError
from finetune.model.empty import empty_of
from finetune.recipe.sections import ModelSection
from offload.engine.model.layers import LayeredModel
from offload.plan.facts.facts import WholeWeights, nearest
from offload.plan.facts.trainable import EMBEDDING, HEAD, NORMS, OTHERS

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def choose_weights(model: "PreTrainedModel", what: Literal["all"] | Sequence[str]) -> None:
    """Let the chosen weights of a model train and freeze all others, those of towers too.

    Tied weights are one, by the name that transformers saves.

    Args:
        model: The model, perhaps without values.
        what: All, or patterns in the shell's way of names such as model.layers.0.mlp.up_proj.*.

    Raises:
        ConfigError: A pattern matches nothing that computes text.
    """
    named = _weights(model)
    patterns = ("*",) if isinstance(what, str) else tuple(what)
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in named):
            raise ConfigError(
                f"train.what: {pattern} matches no weight of a {type(model).__name__}",
                limit=f"patterns match whole names, such as {next(iter(named))}",
                hint=f"`train.what: [{nearest(pattern, named)}]`, or `train.what: all`",
            )
    for parameter in model.parameters():
        parameter.requires_grad = False
    for name, parameter in named.items():
        parameter.requires_grad = any(fnmatchcase(name, pattern) for pattern in patterns)


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


def _num_trained(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters() if p.requires_grad)
