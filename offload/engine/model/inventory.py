"""Takes inventory of a model: the class of each parameter, and the form in which it is stored.

A parameter's class follows from the module that owns it and the modules around it, as
transformers builds its models. Norms, attentions and MLPs are recognised by their class names.
Experts are a module named so, or a block's attribute `experts`; their block has a router, with
one output per expert, and everything else in the block is shared by all tokens. Parameters that
match none of these are "other", and are listed too: nothing is left out.
"""

from collections.abc import Iterator, Sequence
from typing import get_args

from torch import nn

from offload.engine.host.slab import Record
from offload.engine.model.layers import LayeredModel
from offload.engine.model.placement import modules_on_device
from offload.plan.facts.facts import InventoryRow, TensorClass, WeightInventory

_ATTENTIONS = ("Attention", "Attn", "MLA", "Mixer", "DeltaNet", "Mamba")
_MLPS = ("MLP", "Mlp", "FeedForward", "FFN")
_ROUTERS = ("Router", "Gate", "Gating")
_Kinds = dict[nn.Module, TensorClass]


def inventory_of(layered: LayeredModel, records: Sequence[Record]) -> WeightInventory:
    """Count a model's parameters by class and form; those of towers are left out.

    Args:
        layered: The model, as it runs.
        records: Its layers' layouts.
    """
    forms: dict[int, tuple[str, int]] = {
        id(field.parameter): (field.codec.name, field.num_bytes)
        for record in records
        for field in record.fields
    }
    in_layers = {id(parameter) for parameter in layered.layers.parameters()}
    totals: dict[tuple[TensorClass, str, bool], list[int]] = {}
    for parameter, found in _classes(layered):
        is_trained_there = parameter.requires_grad and id(parameter) not in forms
        kind: TensorClass = "adapters and other trained" if is_trained_there else found
        codec, num_bytes = forms.get(id(parameter), ("native", parameter.nbytes))
        is_in_layers = id(parameter) in in_layers and not is_trained_there
        total = totals.setdefault((kind, codec, is_in_layers), [0, 0, 0])
        for i, count in enumerate((parameter.numel(), parameter.nbytes, num_bytes)):
            total[i] += count
    order = get_args(TensorClass)
    return WeightInventory(
        rows=tuple(
            InventoryRow(
                kind=key[0],
                codec=key[1],
                is_in_layers=key[2],
                num_parameters=totals[key][0],
                decoded_bytes=totals[key][1],
                encoded_bytes=totals[key][2],
            )
            for key in sorted(totals, key=lambda key: (order.index(key[0]), key[1:]))
        )
    )


def _classes(layered: LayeredModel) -> Iterator[tuple[nn.Parameter, TensorClass]]:
    """Return each parameter once, with its class; a tied head is embeddings."""
    model = layered.model
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    kinds: _Kinds = {}
    for layer in layered.layers:
        kinds |= parts_of(layer)
    if head is not None:
        kinds[head] = "head"
    kinds[embedding] = "embeddings"
    seen: set[int] = set()
    for module in [embedding, *modules_on_device(layered)]:
        for name, parameter in module.named_parameters(recurse=False):
            if id(parameter) not in seen:
                seen.add(id(parameter))
                yield parameter, _class_of(module, name, kinds.get(module, "other"))


def _class_of(module: nn.Module, name: str, around: TensorClass) -> TensorClass:
    if name == "bias" or name.endswith("_bias"):
        return "biases"
    if "norm" in type(module).__name__.lower():
        return "norms"
    return "embeddings" if isinstance(module, nn.Embedding) else around


def parts_of(layer: nn.Module) -> dict[nn.Module, TensorClass]:
    """Return the class of each module of a layer."""
    kinds: _Kinds = {}
    _mark(layer, "other in layers", kinds, name="")  # its own name may match a part's
    return kinds


def _mark(
    module: nn.Module, around: TensorClass, kinds: _Kinds, *, name: str | None = None
) -> None:
    """Set the class of a module of a layer, and of all modules inside it."""
    name = type(module).__name__ if name is None else name
    if around == "other in layers" and any(part in name for part in _ATTENTIONS):
        around = "attention"
    experts = [child for key, child in module.named_children() if _are_experts(key, child)]
    if around == "other in layers" and not experts and any(part in name for part in _MLPS):
        around = "dense MLP"
    kinds[module] = around
    is_layer = any(
        any(p in type(child).__name__ for p in _ATTENTIONS) for child in module.children()
    )
    is_block = bool(experts) and not is_layer and around != "attention"
    for child in module.children():
        if child in experts:
            _mark_all(child, "experts", kinds)
        elif experts and _is_router(child, experts[0]):
            _mark_all(child, "router", kinds)
        else:
            _mark(child, "shared experts" if is_block else around, kinds)


def _mark_all(module: nn.Module, kind: TensorClass, kinds: _Kinds) -> None:
    kinds.update(dict.fromkeys(module.modules(), kind))


def _are_experts(name: str, module: nn.Module) -> bool:
    kind = type(module).__name__
    return name == "experts" or ("Experts" in kind and "Shared" not in kind)


def _is_router(module: nn.Module, experts: nn.Module) -> bool:
    """Return whether a sibling of experts is a router: by name, or by one output per expert."""
    if type(module).__name__.endswith(_ROUTERS):
        return True
    fused = next((len(p) for p in experts.parameters() if p.dim() == 3), 0)
    sizes = {1, len(experts) if isinstance(experts, nn.ModuleList) else fused}
    return isinstance(module, nn.Linear) and module.out_features in sizes
