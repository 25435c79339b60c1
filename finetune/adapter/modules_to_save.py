"""Modules trained whole alongside LoRA: norms, routers, embeddings, the head, linear layers.

peft calls them `modules_to_save`: a module gets a trainable copy, which is saved with the adapter.
Plain peft restores the copy on load, so none of our code is needed. The original stays where it
was, frozen, and is streamed with its layer.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from torch import nn

from finetune.errors import ConfigError
from offload.engine.model.find_layers import find_layers
from offload.plan.facts.facts import nearest
from offload.plan.facts.trainable import EMBEDDING, HEAD, NORMS, ROUTER, SCORE

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True, kw_only=True, slots=True)
class Whole:
    """Modules that are trained whole.

    Attributes:
        modules: Their full names.
        names: What is passed to peft: suffixes of names that match these modules and no others.
        has_tied: Whether the head is tied to a trained embedding, so that both are one copy.
    """

    modules: frozenset[str]
    names: tuple[str, ...]
    has_tied: bool


def whole_modules(
    model: "PreTrainedModel", wanted: Sequence[str], *, linears: Mapping[str, nn.Module]
) -> Whole:
    """Find what a recipe wants to be trained whole.

    Args:
        model: Without adapters.
        wanted: `norms`, `router`, `embed_tokens`, `lm_head`, of a reward model its head `score`, or
            last names of linear layers.
        linears: Linear layers inside the decoder layers, by full name.

    Raises:
        ConfigError: The model has no such module, or it is tied to another.
    """
    known = _known(model, linears) if wanted else {}
    head = model.get_output_embeddings()
    is_tied = head is not None and head.weight is model.get_input_embeddings().weight
    if is_tied and HEAD in wanted:
        raise ConfigError(
            f"adapter.modules_to_save names {HEAD}, which is {EMBEDDING} in this model",
            limit="tied weights are trained as one, by the name of the embedding",
            hint=f"`adapter.modules_to_save: [{EMBEDDING}]`",
        )
    if is_tied and EMBEDDING in wanted and (type(head) is not nn.Linear or head.bias is not None):
        raise ConfigError(
            f"adapter.modules_to_save names {EMBEDDING}, which is tied to a {type(head).__name__}",
            limit="peft ties a plain linear head, without a bias, to a trained embedding",
            hint="leave it out of `adapter.modules_to_save`",
        )
    for name in wanted:
        if not known.get(name):
            there = [choice for choice, modules in known.items() if modules]
            raise ConfigError(
                f"adapter.modules_to_save names {name}, which {type(model).__name__} has not",
                limit=f"it may hold {', '.join(there)}",
                hint=f"`adapter.modules_to_save: [{nearest(name, there)}]`",
            )
    modules = frozenset(module for name in wanted for module in known[name])
    return Whole(
        modules=modules,
        names=tuple(sorted({_end(model, name) for name in modules})),
        has_tied=is_tied and EMBEDDING in wanted,
    )


def _known(model: "PreTrainedModel", linears: Mapping[str, nn.Module]) -> dict[str, set[str]]:
    """Return what may be trained whole, by a recipe's name: full names of modules."""
    names = {module: name for name, module in model.named_modules()}
    decoder, head = cast("nn.Module", model.get_decoder()), model.get_output_embeddings()
    known = {
        NORMS: {names[m] for m in decoder.modules() if "Norm" in type(m).__name__ and _owns(m)},
        ROUTER: {names[router] for block in decoder.modules() for router in _routers(block)},
        EMBEDDING: {names[model.get_input_embeddings()]},
        HEAD: set() if head is None else {names[head]},
        SCORE: {SCORE} & {name for name, _ in model.named_children()},
    }
    for name in linears:
        known.setdefault(name.rsplit(".", 1)[-1], set()).add(name)
    return known


def _routers(block: nn.Module) -> list[nn.Module]:
    """Return the modules next to fused experts that have a row of weights for each expert."""
    children = dict(block.named_children())
    experts = [m for name, m in children.items() if name.endswith("experts")]
    counts = {p.shape[0] for m in experts for p in m.parameters(recurse=False) if p.dim() == 3}
    return [
        child
        for child in children.values()
        if child not in experts
        and any(p.dim() == 2 and p.shape[0] in counts for p in child.parameters(recurse=False))
    ]


def _owns(module: nn.Module) -> bool:
    return next(module.parameters(recurse=False), None) is not None


def _end(model: "PreTrainedModel", name: str) -> str:
    """Return a module's name from its layer on, or all of it for one outside the layers."""
    owner, attribute = find_layers(model, model.config.get_text_config())
    prefix = next(f"{n}." if n else "" for n, m in model.named_modules() if m is owner)
    return re.sub(rf"^{re.escape(prefix + attribute)}\.\d+\.", "", name)
