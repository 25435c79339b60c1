"""Counts of what trains: the adapter, and modules that are trained in full in addition to it.

Such a module is a copy that is on the device for the whole run; the original stays where it was.
The copy computes in the model's dtype. Updates with a small learning rate would be lost in 16 bits,
so a 16-bit copy has a master copy in fp32 for the optimizer's updates and for summing gradients.
"""

import math
from collections.abc import Collection, Mapping
from functools import lru_cache

from offload.errors import UnsupportedModelError
from offload.plan.facts.facts import (
    AdapterSpec,
    LayerFacts,
    ModelFacts,
    WholeWeights,
    adapted_linears,
    linear_names,
    nearest,
)
from offload.plan.facts.linears import FP32_BYTES, Linear, SoftmaxAttention
from offload.plan.facts.optimizer import ROUNDED_BYTES, Shape

NORMS, ROUTER, EMBEDDING, HEAD = "norms", "router", "embed_tokens", "lm_head"
SCORE = "score"
"""The head of a reward model or a classifier, by transformers' name."""
OTHERS = "others"
VIRTUAL = "virtual tokens"


@lru_cache(maxsize=64)  # each plan that a search weighs asks
def trained_parameters(facts: ModelFacts, spec: AdapterSpec) -> int:
    """Count all that trains.

    Raises:
        UnsupportedModelError: Something that should train is not in this model.
    """
    if spec.whole is not None:
        return spec.whole.num_parameters
    return adapter_parameters(facts, spec) + module_parameters(facts, spec)


@lru_cache(maxsize=64)
def layer_parameters(facts: ModelFacts, spec: AdapterSpec) -> tuple[int, ...]:
    """Count what trains of each layer, in forward order."""
    if spec.whole is not None:
        return spec.whole.layers
    return tuple(
        sum(map(math.prod, (*_adapter_shapes(layer, spec), *_layer_module_shapes(layer, spec))))
        for layer in facts.layers
    )


def all_weights(facts: ModelFacts) -> WholeWeights:
    """Return that all weights of a model train."""
    outer = {
        NORMS: facts.final_norm_parameters,
        EMBEDDING: facts.embedding_parameters,
        HEAD: facts.head_parameters,
        OTHERS: facts.num_others,
    }
    return WholeWeights(
        layers=tuple(layer.num_parameters for layer in facts.layers),
        outer=tuple((name, number) for name, number in outer.items() if number),
    )


@lru_cache(maxsize=64)
def trained_tensor_shapes(facts: ModelFacts, spec: AdapterSpec) -> tuple[Shape, ...]:
    """Return the shape of every tensor that is updated on the device."""
    if spec.whole is not None:
        return ()
    modules = [shape for layer in facts.layers for shape in _layer_module_shapes(layer, spec)]
    for name, size in outer_module_sizes(facts, spec).items():
        if name == VIRTUAL:
            modules += spec.virtual
            continue
        num_biases = size - facts.num_classes * facts.hidden_size if name == SCORE else 0
        rows = (size - num_biases) // facts.hidden_size
        modules.append((size,) if name == NORMS else (rows, facts.hidden_size))
        modules += [(num_biases,)] if num_biases else []
    return (*_adapter_tensor_shapes(facts, spec), *modules)


def rounded_tensor_sizes(facts: ModelFacts, spec: AdapterSpec) -> tuple[int, ...]:
    """Return the elements of every A and B that is kept in bf16 and rounded at random."""
    return adapter_tensor_sizes(facts, spec) if spec.is_rounded else ()


def adapter_tensor_sizes(facts: ModelFacts, spec: AdapterSpec) -> tuple[int, ...]:
    """Return the elements of every A, B and magnitude."""
    return tuple(map(math.prod, _adapter_tensor_shapes(facts, spec)))


@lru_cache(maxsize=64)
def _adapter_tensor_shapes(facts: ModelFacts, spec: AdapterSpec) -> tuple[Shape, ...]:
    """Return every A (rank * E, d_in), B (d_out, rank * E) and magnitude."""
    return tuple(shape for layer in facts.layers for shape in _adapter_shapes(layer, spec))


def _adapter_shapes(layer: LayerFacts, spec: AdapterSpec) -> list[Shape]:
    shapes: list[Shape] = []
    for linear in adapted_linears(layer, spec):
        counts = spec.counts_of(linear)
        if counts is not None:
            shapes += counts.shapes
            continue
        width = spec.rank_of(linear) * linear.num_experts
        shapes += [(width, linear.d_in), (linear.d_out, width)]
        shapes += [(linear.d_out,)] if spec.is_dora else []
    return shapes


@lru_cache(maxsize=64)
def adapter_bytes(facts: ModelFacts, spec: AdapterSpec) -> int:
    """Return what adapters take on the device, with what is frozen of them.

    With DoRA that includes the norms of all layers, which a step keeps from each layer's visit
    upwards to that downwards.
    """
    num_bytes = FP32_BYTES * adapter_parameters(facts, spec)
    num_bytes -= ROUNDED_BYTES * sum(rounded_tensor_sizes(facts, spec))
    if spec.is_dora and spec.are_branches_grouped:
        adapted = (linear for layer in facts.layers for linear in adapted_linears(layer, spec))
        num_bytes += FP32_BYTES * sum(linear.d_out for linear in adapted)
    return num_bytes + (0 if spec.method is None else spec.method.frozen_bytes)


@lru_cache(maxsize=64)
def adapter_parameters(facts: ModelFacts, spec: AdapterSpec) -> int:
    """Count the adapter's parameters: of LoRA, r * (d_in + d_out) for every target of every layer.

    Raises:
        UnsupportedModelError: A target's name occurs in no layer, there are no experts to adapt, or
            a pattern matches no projection with an adapter.
    """
    if spec.whole is not None or spec.virtual:
        return 0
    known = linear_names(facts)
    if not known and (spec.targets or not (spec.experts or SCORE in spec.modules)):
        raise UnsupportedModelError(
            f"nothing in a {facts.model_type} model can get an adapter",
            limit="adapters are put on linear layers inside `layers`",
            hint="train this model with another tool",
        )
    for target in spec.targets:
        if target not in known:
            raise UnsupportedModelError(
                f"adapter target '{target}' is no linear layer of a {facts.model_type} model",
                limit=f"its linear layers are {', '.join(known)}",
                hint=f"`adapter.targets: [{nearest(target, known)}]`",
            )
    if spec.experts:
        _require_experts(facts)
    adapted = {
        linear.key: None for layer in facts.layers for linear in adapted_linears(layer, spec)
    }
    if not adapted and (spec.targets or SCORE not in spec.modules):
        raise UnsupportedModelError(
            "nothing gets an adapter: adapter.modules_to_save names all of adapter.targets",
            limit="an adapter needs at least one target",
            hint="`adapter.targets: all-linear`",
        )
    for field, names in (
        ("rank_pattern", [name for name, _ in spec.rank_pattern]),
        ("alpha_pattern", spec.alpha_pattern),
    ):
        for name in names:
            if name not in adapted:
                raise UnsupportedModelError(
                    f"adapter.{field} names '{name}', which has no adapter",
                    limit=f"adapters are on {', '.join(adapted)}",
                    hint=f"leave {name} out of `adapter.{field}`, or name"
                    f" {nearest(name, adapted)} in its place",
                )
    return sum(adapter_tensor_sizes(facts, spec))


def _require_experts(facts: ModelFacts) -> None:
    """Check that a model has experts, and that an adapter can be put onto them.

    Raises:
        UnsupportedModelError: It has none, or no adapter goes onto them.
    """
    if not any(layer.num_experts for layer in facts.layers):
        raise UnsupportedModelError(
            f"adapter.experts is true, but this {facts.model_type} model has no experts",
            limit="only mixture-of-experts layers have them",
            hint="`adapter.experts: false`",
        )
    if facts.own_experts:
        raise UnsupportedModelError(
            f"adapter.experts is true, but {facts.own_experts}",
            limit="adapters on experts are computed through transformers' experts interface",
            hint="`adapter.experts: false`",
        )


def module_parameters(facts: ModelFacts, spec: AdapterSpec) -> int:
    """Count the parameters of the modules that are trained in full.

    Raises:
        UnsupportedModelError: One is not in this model, or is tied to another that is not named.
    """
    if HEAD in spec.modules and facts.tie_word_embeddings:
        raise UnsupportedModelError(
            f"adapter.modules_to_save names {HEAD}, which is {EMBEDDING} in this model",
            limit="tied weights are trained as one, by the name of the embedding",
            hint=f"`adapter.modules_to_save: [{EMBEDDING}]`",
        )
    heads = [] if facts.tie_word_embeddings else [_head(facts)]
    known = [NORMS, EMBEDDING, *heads, *linear_names(facts)]
    if any(layer.num_experts for layer in facts.layers):
        known.insert(1, ROUTER)
    for name in spec.modules:
        if name not in known:
            raise UnsupportedModelError(
                f"adapter.modules_to_save names '{name}', which a {facts.model_type} model has not",
                limit=f"it may hold {', '.join(known)}",
                hint=f"`adapter.modules_to_save: [{nearest(name, known)}]`",
            )
    return sum(module_tensor_sizes(facts, spec))


@lru_cache(maxsize=64)
def module_tensor_sizes(facts: ModelFacts, spec: AdapterSpec) -> tuple[int, ...]:
    """Return the elements of every tensor of the modules that are trained in full."""
    outside = outer_module_sizes(facts, spec)
    layers = [size for layer in facts.layers for size in layer_module_sizes(layer, spec)]
    return (*layers, *outside.values())


def layer_module_sizes(layer: LayerFacts, spec: AdapterSpec) -> tuple[int, ...]:
    """Return the elements of the tensors of one layer's modules that are trained in full."""
    return tuple(map(math.prod, _layer_module_shapes(layer, spec)))


def _layer_module_shapes(layer: LayerFacts, spec: AdapterSpec) -> tuple[Shape, ...]:
    shapes: list[Shape] = []
    if NORMS in spec.modules:
        shapes += [(n,) for norm in layer.norms for n in (norm.num_weights, norm.num_biases) if n]
    for linear in whole_linears(layer, spec):
        shapes += [(linear.d_out, linear.d_in)]
        shapes += [(linear.num_biases,)] if linear.has_bias else []
    return tuple(shapes)


def whole_linears(layer: LayerFacts, spec: AdapterSpec) -> tuple[Linear, ...]:
    """Return the matrices of a layer that are trained in full."""
    return tuple(
        linear
        for linear in layer.linears
        if linear.group != "experts"
        and (ROUTER if linear.group == "router" else linear.name) in spec.modules
    )


def unread_linears(layer: LayerFacts, spec: AdapterSpec) -> tuple[Linear, ...]:
    """Return the matrices of a layer whose products a recompute can leave out.

    Not modules that are trained in full; nor adapted ones with DoRA or another method than LoRA,
    whose gradients read their values. Experts only where they are adapted, for then our own code
    computes them, and without biases, which the gradients of the router read.
    """
    adapted = adapted_linears(layer, spec)
    read = whole_linears(layer, spec) + (adapted if spec.reads_outputs else ())
    computes_experts = any(linear.group == "experts" for linear in adapted)
    return tuple(
        linear
        for linear in layer.linears
        if linear.is_unread
        and linear not in read
        and (linear.group != "experts" or (computes_experts and not linear.has_bias))
    )


def outer_module_sizes(facts: ModelFacts, spec: AdapterSpec) -> Mapping[str, int]:
    """Return the elements of the modules before and after the layers trained in full, by name."""
    if spec.whole is not None:
        return dict(spec.whole.outer)
    sizes = {
        NORMS: facts.final_norm_parameters,
        EMBEDDING: facts.embedding_parameters,
        _head(facts): facts.head_parameters,
    }
    found = {name: size for name, size in sizes.items() if size and name in spec.modules}
    return found | ({VIRTUAL: sum(map(math.prod, spec.virtual))} if spec.virtual else {})


def virtual_shapes(num: int, hidden_size: int, *, has_encoder: bool) -> tuple[Shape, ...]:
    """Return the shapes of embeddings of virtual tokens, and of p-tuning's encoder in peft.

    That is an MLP of three linear layers, as wide as the model.
    """
    encoder = ((hidden_size, hidden_size), (hidden_size,)) * 3
    return ((num, hidden_size), *(encoder if has_encoder else ()))


def prefix_spec(facts: ModelFacts, *, num_past: int, has_encoder: bool) -> AdapterSpec:
    """Return what trains for keys and values in front of each layer's own, as peft makes them.

    That is one table, or an embedding as wide as a layer's keys and an MLP of two linear layers.

    Raises:
        UnsupportedModelError: Not all layers have keys and values of the same heads.
    """
    found = {
        (kind.num_kv_heads, kind.qk_dim)
        if isinstance(kind, SoftmaxAttention) and not kind.is_latent
        else None
        for kind in (layer.attention for layer in facts.layers)
    }
    heads = found.pop()
    if found or heads is None or facts.carried_features:  # readers have none of their own
        raise UnsupportedModelError(
            f"adapter.method: {'prefix_mlp' if has_encoder else 'prefix'} for a"
            f" {facts.model_type} model",
            limit="a prefix is plain keys and values, of the same heads in each layer",
            hint="`adapter.method: lora`",
        )
    width = math.prod(heads)
    of_all = 2 * facts.num_layers * width
    table: tuple[Shape, ...] = ((num_past, of_all),)
    encoder: tuple[Shape, ...] = (
        (num_past, width),
        (width, width),
        (width,),
        (of_all, width),
        (of_all,),
    )
    return AdapterSpec(
        rank=1,
        targets=(),
        experts=False,
        virtual=encoder if has_encoder else table,
        num_past=num_past,
    )


def trains_head(facts: ModelFacts, trained: Collection[str]) -> bool:
    """Return whether the head is among the modules that train, as itself or as the embedding."""
    return _head(facts) in trained or (EMBEDDING in trained and facts.tie_word_embeddings)


def _head(facts: ModelFacts) -> str:
    return SCORE if facts.num_classes else HEAD
