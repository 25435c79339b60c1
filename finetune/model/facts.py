"""Facts of a model that is built without weights, also of types that the planner does not know.

The model is built on torch's meta device, where tensors have shapes and no memory. Parameters are
counted exactly, class by class. The cost of attention is exact for softmax attention; any other
token mixing is treated as a recurrence with the state size that the config names.
"""

import sys
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from transformers import CONFIG_MAPPING

from finetune.model.empty import empty_from, implementation_of, linear_modules
from finetune.model.layer_facts import Reader, is_norm
from offload.engine.model.layers import LayeredModel
from offload.engine.model.placement import modules_on_device
from offload.engine.tracing.visits import trace_unread
from offload.errors import UnsupportedModelError
from offload.plan.facts.facts import (
    ModelFacts,
    is_known,
    model_facts,
    refuse_by_name,
    text_config,
)
from offload.plan.facts.families import RESIDENT_HINT

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def facts_from(config: Mapping[str, Any]) -> ModelFacts:
    """Return the facts of the model of a config, if `finetune` can build and stream it.

    It is built without weights, also if the planner knows its family, so that a plan is refused for
    what would end the run.

    Raises:
        ModelError: transformers builds no causal language model from the config.
        UnsupportedModelError: It cannot be trained layer by layer, or what it computes cannot be
            determined.
    """
    if config.get("model_type") not in CONFIG_MAPPING:
        return model_facts(config)  # which refuses it, and names the nearest
    refuse_by_name(text_config(config))
    model = empty_from(config)
    LayeredModel(model)
    return model_facts(config) if is_known(config) else facts_of(model)


def facts_of(model: "PreTrainedModel") -> ModelFacts:
    """Read the facts off a model, without its image and audio towers.

    Raises:
        UnsupportedModelError: Its layers cannot be identified, or share weights.
    """
    layered = LayeredModel(model)
    owners = Counter(id(p) for layer in layered.layers for p in set(layer.parameters()))
    if any(count > 1 for count in owners.values()):
        raise UnsupportedModelError(
            f"{layered.name} has layers that share weights",
            limit="the planner counts each layer's weights as its own",
            hint=RESIDENT_HINT,
        )
    config: Any = model.config.get_text_config()
    reader = Reader(
        config=_flat(config.to_dict()),
        hidden=config.hidden_size,
        modules={id(module) for module in linear_modules(model).values()},
        has_rotary=any("Rotary" in type(module).__name__ for module in model.modules()),
        has_windows="create_sliding_window_causal_mask"
        in vars(sys.modules[type(model).__module__]),
        is_eager=implementation_of(model.config) == "eager",
    )
    embedding: Any = model.get_input_embeddings()
    head: Any = model.get_output_embeddings()
    is_tied = head is not None and head.weight is embedding.weight
    inside = {id(p) for p in layered.layers.parameters()}
    outside = {
        id(p): (module, p)
        for module in modules_on_device(layered)
        for p in module.parameters(recurse=False)
        if id(p) not in inside
    }
    total = sum(p.numel() for _, p in outside.values())
    embedded = embedding.weight.numel()
    head_size = 0 if head is None or is_tied else head.weight.numel()
    norms = sum(p.numel() for m, p in outside.values() if is_norm(m) and m is not embedding)
    return ModelFacts(
        model_type=config.model_type,
        hidden_size=config.hidden_size,
        vocab_size=embedding.weight.shape[0],
        max_position_embeddings=layered.max_positions,
        embedding_parameters=embedded,
        head_parameters=head_size,
        tie_word_embeddings=is_tied,
        final_norm_parameters=norms,
        num_others=total - embedded - head_size - norms,
        layers=tuple(
            reader.layer(layer, i, unread=unread)
            for i, (layer, unread) in enumerate(zip(layered.layers, _unread(model), strict=True))
        ),
        grade="built",
    )


def _unread(model: "PreTrainedModel") -> tuple[frozenset[str], ...]:
    """Return by layer the linears whose products nothing reads; none if it cannot be traced."""
    try:
        return trace_unread(model)
    except (RuntimeError, UnsupportedModelError):  # torch's, for operations that need values
        return (frozenset(),) * len(LayeredModel(model).layers)


def _flat(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config merged with its sub-configs; its own values take precedence."""
    parts = [part for part in config.values() if isinstance(part, Mapping)]
    return {key: value for part in parts for key, value in part.items()} | dict(config)
