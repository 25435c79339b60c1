"""Finds the stack of decoder layers, and refuses models that are known not to work."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch import nn

from offload.errors import UnsupportedModelError
from offload.plan.facts.families import RESIDENT_HINT

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_STORES, _READS = "store_full_length_kv", "is_kv_shared_layer"


def require_language_model(model: nn.Module) -> None:
    """Check that this is a transformers model with a decoder.

    Raises:
        UnsupportedModelError: It is another module.
    """
    if not (hasattr(model, "config") and hasattr(model, "get_decoder")):
        raise UnsupportedModelError(
            f"a {type(model).__name__} is no causal language model of transformers",
            limit="its config and its decoder are what the layers are found by",
            hint="attach the whole model, e.g. `AutoModelForCausalLM.from_pretrained(...)`, or the"
            " peft model around it",
        )


def find_layers(model: "PreTrainedModel", text_config: Any) -> tuple[nn.Module, str]:
    """Return the module that owns the decoder layers, and the name of their attribute."""
    keys = ("decoder_layers", "num_hidden_layers", "num_layers")
    numbers = {getattr(text_config, key) for key in keys if hasattr(text_config, key)}
    for root in (model.get_decoder(), model.base_model):
        found = [
            (owner, name)
            for owner in (root, *root.children())
            for name, child in owner.named_children()
            if isinstance(child, nn.ModuleList) and len(child) in numbers
        ]
        if len(found) == 1:
            return found[0]
    raise UnsupportedModelError(
        f"{type(model).__name__} has no list, or several, of as many modules as its config has"
        f" layers ({', '.join(map(str, sorted(numbers))) or 'which it does not say'})",
        limit="one list, of its decoder layers, can be streamed",
        hint=RESIDENT_HINT,
    )


def modules_outside(model: nn.Module, layers: nn.ModuleList) -> list[nn.Module]:
    """Return all modules that are reachable from a model other than through its list of layers.

    A layer's module is included if it is reachable in another way as well.
    """
    found: dict[nn.Module, None] = {}
    waiting = [model]
    while waiting:
        module = waiting.pop()
        if module not in found:
            found[module] = None
            waiting += [child for child in module.children() if child is not layers]
    return list(found)


def homes_of(layers: nn.ModuleList, outside: Iterable[nn.Module]) -> dict[int, int]:
    """Return the layer of each parameter, by id, that belongs to one layer alone."""
    shared = {id(p) for module in outside for p in module.parameters(recurse=False)}
    homes: dict[int, int] = {}
    for index, layer in enumerate(layers):
        for parameter in layer.parameters():
            if homes.setdefault(id(parameter), index) != index:
                shared.add(id(parameter))
    return {key: home for key, home in homes.items() if key not in shared}


def find_towers(model: "PreTrainedModel") -> list[nn.Module]:
    """Return the modules next to the decoder of a composite: towers for images and audio.

    Text does not pass through them, so they need not be where the layers compute.
    """
    decoder, owner = model.get_decoder(), model.base_model
    embedding = model.get_input_embeddings()
    towers: list[nn.Module] = []
    while decoder is not owner and decoder in set(owner.modules()):
        children = {child: set(child.modules()) for child in owner.children()}
        towers += [c for c, inside in children.items() if not inside & {decoder, embedding}]
        owner = next(child for child, inside in children.items() if decoder in inside)
    return towers


def refuse_trained_outside(model: nn.Module, base: nn.Module) -> None:
    """Refuse trained parameters in wrappers around the model, such as a soft prompt."""
    inside = {id(parameter) for parameter in base.parameters()}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and id(parameter) not in inside:
            raise UnsupportedModelError(
                f"`{name}` trains, but is no part of {type(base).__name__}",
                limit="the adapter must live inside the model's own modules",
                hint="use an adapter such as LoRA",
            )


def refuse_shared_state(text_config: Any) -> None:
    """Refuse configurations whose gradients would be wrong layer by layer."""
    if getattr(text_config, "num_kv_shared_layers", 0):
        raise UnsupportedModelError(
            f"config.num_kv_shared_layers is {text_config.num_kv_shared_layers}",
            limit="layers that read another layer's keys and values cannot be visited alone",
            hint=RESIDENT_HINT,
        )


def refuse_layer_drop(model: nn.Module, owner: nn.Module) -> None:
    """Refuse a model that skips layers at random in training.

    Args:
        model: The model.
        owner: Its module that runs the layers.

    Raises:
        UnsupportedModelError: It skips layers.
    """
    if rate := vars(owner).get("layerdrop", 0):
        name = next(name for name, module in model.named_modules() if module is owner)
        raise UnsupportedModelError(
            f"{type(model).__name__} skips layers at random in training: `{name}.layerdrop` is"
            f" {rate}",
            limit="each layer is visited once per pass",
            hint=f"`get_submodule({name!r}).layerdrop = 0.0` on the model, before `offload.attach`",
        )


def find_unread_stores(layers: Sequence[nn.Module]) -> list[list[nn.Module]]:
    """Return for each layer its modules that store keys and values that no layer reads.

    Some versions of transformers have the last layer of each kind store them where
    `num_kv_shared_layers` is 0 too. Where any layer reads them, all are read.
    """
    parts = [
        [module for module in layer.modules() if {_STORES, _READS} <= vars(module).keys()]
        for layer in layers
    ]
    if any(vars(module)[_READS] for found in parts for module in found):
        return [[] for _ in parts]
    return [[module for module in found if vars(module)[_STORES]] for found in parts]


@contextmanager
def not_storing(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Keep modules that `find_unread_stores` found from storing."""
    for module in modules:
        setattr(module, _STORES, False)
    try:
        yield
    finally:
        for module in modules:
            setattr(module, _STORES, True)
