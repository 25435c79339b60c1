"""Facts of a model that is built without weights: the one place where they are read.

The model is built on torch's meta device, where tensors have shapes and no memory. Parameters are
counted exactly, class by class. The cost of attention is exact for softmax attention; any other
token mixing is treated as a recurrence with the state size that the config names.
"""

import sys
from collections import Counter
from collections.abc import Mapping, Set
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finetune.model.config import quantization_of
from finetune.model.empty import empty_from, empty_whole, implementation_of, linear_modules
from finetune.model.layer_facts import Reader, is_norm
from finetune.model.tower import tower_facts
from offload.engine.experts.products import reason_outside
from offload.engine.model.layers import ONE_STATE, RESIDENT_HINT, LayeredModel, find_towers
from offload.engine.model.placement import modules_on_device
from offload.engine.pointwise.layers import FusedLayers
from offload.engine.tracing.visits import trace_unread
from offload.errors import UnsupportedModelError
from offload.plan.facts.facts import LayerFacts, ModelFacts

if TYPE_CHECKING:
    from transformers import PreTrainedModel


MEMORY_TESTED = frozenset(
    (
        *("deepseek_v2", "deepseek_v3", "gemma", "gemma2", "gemma3_text", "gemma4_text", "glm"),
        *("glm4", "glm4_moe", "glm4_moe_lite", "gpt_oss", "granite", "granitemoe", "llama"),
        *("ministral", "ministral3", "mistral", "mixtral", "nemotron_h", "olmo", "olmo2", "olmo3"),
        *("olmoe", "phi3", "qwen2", "qwen2_5_vl_text", "qwen2_moe", "qwen2_vl_text", "qwen3"),
        *("qwen3_5_moe_text", "qwen3_5_text", "qwen3_moe", "qwen3_next", "qwen3_vl_moe_text"),
        "qwen3_vl_text",
    )
)
"""Types for which formulas of the layers' memory are tested; of others a trace tells it."""


_OWN_LOSS = (
    "has a loss that compares each token's logits with the label in its own place",
    "its loss must be the mean cross-entropy of the next tokens",
)
_FRONT_READ = (
    "does not compute a token's logits from the last layer's output for it alone, but reads a"
    " tensor that the part before the layers made, and that it was not handed",
    "what follows the layers must work token by token",
)
_SEEN_IN_A_STEP = {
    **dict.fromkeys(("bart", "bigbird_pegasus", "blenderbot", "blenderbot-small"), _OWN_LOSS),
    **dict.fromkeys(("marian", "mbart", "mvp", "pegasus", "plbart", "trocr", "whisper"), _OWN_LOSS),
    "diffusion_gemma": (
        "has no frozen parameter in its layers",
        "only frozen weights are streamed",
    ),
    "git": (
        "reads `attention` of a layer from outside, where it has no weights, as run by PeftModel"
        " and LoraModel",
        ONE_STATE,
    ),
    **dict.fromkeys(("inkling2_text", "inkling2_loop", "inkling2_loop_text"), _FRONT_READ),
    "dory": (
        "visits its layers in the order {twice}, not each once, as run by PeftModel and LoraModel",
        ONE_STATE,
    ),
    "kosmos-2.5": (
        "computes its loss by other code than its `loss_function`",
        "its loss must be the mean cross-entropy of the next tokens",
    ),
}
"""What the engine refuses a type for, and the limit, where only a step with values shows it."""


def facts_from(
    config: Mapping[str, Any], *, folder: Path | None = None, is_published: bool = True
) -> ModelFacts:
    """Return the facts of the model of a config, if `finetune` can build and stream it.

    Args:
        config: The fields of config.json.
        folder: The folder of the weights; None if they are random or not here.
        is_published: Whether weights are as the config says, in a form that is read.

    Raises:
        ModelError: transformers builds no language model from the config.
        UnsupportedModelError: It cannot be trained layer by layer, or what it computes cannot be
            determined.
    """
    model = empty_from(config, folder=folder).requires_grad_(requires_grad=False)
    quantization, published, kept = quantization_of(config), "", frozenset[str]()
    if quantization is not None and is_published:
        from finetune.model.form import kept_parameters

        published, kept = kept_parameters(model, quantization)
    facts = facts_of(model, kept)
    tower = tower_facts(model if find_towers(model) else empty_whole(config))
    return replace(facts, published=published, tower=tower)


def facts_of(model: "PreTrainedModel", kept: Set[str] = frozenset()) -> ModelFacts:
    """Read the facts off a model, without its image and audio towers.

    Args:
        model: Perhaps without values.
        kept: Names of the parameters that a codec keeps as they were published.

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
    for name in {config.model_type, model.config.model_type} & _SEEN_IN_A_STEP.keys():
        what, limit = _SEEN_IN_A_STEP[name]
        layered.refuse(what.format(twice=[*range(len(layered.layers))] * 2), limit=limit)
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
    layers, proven = [], dict[LayerFacts, LayerFacts]()
    unread_by_layer, num_features = _traced(model, config.hidden_size)
    for number, (layer, unread) in enumerate(zip(layered.layers, unread_by_layer, strict=True)):
        own = {name.partition(f"layers.{number}.")[2] for name in kept}
        facts = reader.layer(layer, number, unread=unread, kept=own, fused=())
        if facts not in proven:  # what is fused is proven once of layers that are alike
            fused = list(FusedLayers([layer]).parts())
            proven[facts] = reader.layer(layer, number, unread=unread, kept=own, fused=fused)
        layers.append(proven[facts])
    found = ModelFacts(
        model_type=config.model_type,
        hidden_size=config.hidden_size,
        num_streams=-(-num_features // config.hidden_size),
        vocab_size=embedding.weight.shape[0],
        max_position_embeddings=layered.max_positions,
        embedding_parameters=embedded,
        head_parameters=head_size,
        tie_word_embeddings=is_tied,
        final_norm_parameters=norms,
        num_others=total - embedded - head_size - norms,
        layer_input_features=max(
            (x.d_out for x in layers[0].linears if x.name == "per_layer_input_gate"), default=0
        ),
        layers=tuple(layers),
        is_memory_tested=config.model_type in MEMORY_TESTED,
        own_experts=_own_experts(layered),
    )
    return found if layered.carried is None else layered.carried.with_carried(found)


def _own_experts(layered: LayeredModel) -> str:
    """Return why no adapter goes onto the fused experts, or nothing."""
    fused = (
        module
        for name, module in layered.layers.named_modules()
        if name.endswith(".experts")
        or (name.endswith("experts") and any(True for _ in module.parameters(recurse=False)))
    )
    whys = ((type(module).__name__, reason_outside(module)) for module in fused)
    return next((f"{name} {why}" for name, why in whys if why), "")


def _traced(model: "PreTrainedModel", hidden: int) -> tuple[tuple[frozenset[str], ...], int]:
    """Return as `trace_unread`; no products, and `hidden` features, if a trace needs values.

    Raises:
        UnsupportedModelError: It cannot be computed layer by layer.
    """
    try:
        return trace_unread(model)
    except RuntimeError:  # torch's, for operations that need values
        return (frozenset(),) * len(LayeredModel(model).layers), hidden


def _flat(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config merged with its sub-configs; its own values take precedence."""
    parts = [part for part in config.values() if isinstance(part, Mapping)]
    return {key: value for part in parts for key, value in part.items()} | dict(config)
