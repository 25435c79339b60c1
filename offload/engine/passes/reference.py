"""The same model computed within its visits as others: without its adapters, or with another.

Problem. A reference that differs from the policy by its adapter alone needs no weights of its own:
a visit can compute both while the layer is there. But a library's own switches walk over the whole
model and change which parameters train, which must not happen within a step.

Idea. A module that holds an adapter looks at two of its attributes in each call: whether adapters
are off, and which are active. These are set for one call of one layer, and set back. No parameter
is touched. Modules that are trained whole are such modules too: without their adapters they compute
with the original. For the reference the modules are in evaluation mode, so that it has no dropout
and no noise and draws no random number; TRL switches dropout off in both models.

In the same way a visit computes the rows of several runs, each with its own adapter.

A reference is exact only if nothing else has changed since training began. So weights that train
and are no adapter's are refused.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

from torch import nn

from offload.engine.meanwhile import meanwhile
from offload.engine.model.layers import LayeredModel
from offload.engine.objective import Reference
from offload.errors import OffloadError

_OFF, _ACTIVE = "_disable_adapters", "_active_adapter"
_BASES = ("base_layer", "original_module")
"""Children of a module with adapters that hold what they adapt."""

_PRECOMPUTED = (
    "score the rows with `engine.evaluate` before training, and use an objective that is given"
    " these numbers and whose `reference` is None"
)


class SwitchedModel:
    """A model as the passes of one run compute it: with its adapter, or as the model is."""

    def __init__(
        self,
        model: LayeredModel,
        adapter: str | None = None,
        *,
        values: Mapping[str, Any] | None = None,
        is_evaluated: bool = False,
    ) -> None:
        """Find the modules to switch.

        Args:
            model: The model.
            adapter: The adapter that computes; None leaves those that are active.
            values: What to set in place of the adapter.
            is_evaluated: Whether modules are in evaluation mode, and in their own if not.
        """
        if values is None:
            values = {} if adapter is None else {_OFF: False, _ACTIVE: [adapter]}
        is_switched = bool(values) or is_evaluated
        layers = [list(layer.modules()) if is_switched else [] for layer in model.layers]
        around = list(model.around) if is_switched else []
        self._evaluated_layers = layers if is_evaluated else [[] for _ in layers]
        self._evaluated_around = around if is_evaluated else []
        self._adapted_layers = [_switches(modules, values, adapter) for modules in layers]
        self._adapted_around = _switches(around, values, adapter)

    @contextmanager
    def in_layer(self, layer: int) -> Iterator[None]:
        """Switch one layer for one visit."""
        evaluated, adapted = self._evaluated_layers[layer], self._adapted_layers[layer]
        with _in_evaluation(evaluated), meanwhile(*adapted):
            yield

    @contextmanager
    def around_layers(self) -> Iterator[None]:
        """Switch everything else, for what comes before and after the layers."""
        with _in_evaluation(self._evaluated_around), meanwhile(*self._adapted_around):
            yield

    @contextmanager
    def everywhere(self) -> Iterator[None]:
        """Switch all of the model, for passes of its own."""
        with self.around_layers(), ExitStack() as layers:
            for layer in range(len(self._adapted_layers)):
                layers.enter_context(self.in_layer(layer))
            yield


def reference_model(model: LayeredModel, reference: Reference) -> SwitchedModel:
    """Return a model as its reference computes: in evaluation mode, with other adapters or none.

    Raises:
        OffloadError: The model has no such reference.
    """
    _require_reference(model, reference.adapter)
    values = {_OFF: True} if reference.adapter is None else None
    return SwitchedModel(model, reference.adapter, values=values, is_evaluated=True)


def adapted_model(model: LayeredModel, adapter: str | None) -> SwitchedModel:
    """Return a model in evaluation mode with one of its adapters; with None without any.

    Raises:
        OffloadError: It has no such adapter, or one is merged into its weights.
    """
    adapted = _adapted(model.whole.modules())
    _require_unmerged(adapted)
    if adapter is None:
        return SwitchedModel(model, values={_OFF: True}, is_evaluated=True)
    if not any(adapter in path.split(".") for path in _owned(adapted).values()):
        raise OffloadError(
            f"{model.name} has no adapter {adapter!r}",
            limit="rows are scored with one of the model's adapters, or None for the model"
            " without them",
            hint=f"`model.load_adapter(..., adapter_name={adapter!r})` before `offload.attach`",
        )
    return SwitchedModel(model, adapter, is_evaluated=True)


def require_owners(model: LayeredModel, adapters: Sequence[str]) -> None:
    """Check that each of some adapters trains, and, if they are several, that nothing else does.

    Raises:
        OffloadError: One does not, or something else does.
    """
    owned = _owned(_adapted(model.whole.modules()))
    training: set[str] = set()
    for name, parameter in model.whole.named_parameters():
        if not parameter.requires_grad:
            continue
        training |= set(owned.get(id(parameter), "").split("."))
        if id(parameter) not in owned and len(adapters) > 1:
            raise OffloadError(
                f"{name} trains, and it is no adapter's",
                limit="runs that share the layers share no weight that trains",
                hint="freeze it, or train one run at a time",
            )
    for adapter in adapters:
        if adapter not in training:
            raise OffloadError(
                f"{model.name} has no adapter {adapter!r} that trains",
                limit="a run trains an adapter of its own",
                hint="`model.add_adapter(...)` and `requires_grad_()` before `offload.attach`",
            )


def _require_reference(model: LayeredModel, adapter: str | None) -> None:
    """Check that the model without its adapters, or with this one, is what it was before training.

    Raises:
        OffloadError: It is not.
    """
    adapted = _adapted(model.whole.modules())
    if not adapted:
        raise OffloadError(
            f"{model.name} has no adapter, and the objective has a reference",
            limit="the reference is the same model with its adapters off",
            hint=f"add an adapter, e.g. `peft.get_peft_model(model, ...)`; or {_PRECOMPUTED}",
        )
    _require_unmerged(adapted)
    if all(vars(module).get(_OFF, False) for module in adapted):
        raise OffloadError(
            f"the adapters of {model.name} are switched off",
            limit="the reference is the same model with its adapters off: both would be one",
            hint="`model.enable_adapter_layers()`, and leave `model.disable_adapter()` first",
        )
    owned = _owned(adapted)
    for name, parameter in model.whole.named_parameters():
        if parameter.requires_grad and id(parameter) not in owned:
            raise OffloadError(
                f"{name} trains, and it is no adapter's",
                limit="the reference is the same model with its adapters off: what else trains is"
                " no longer what it was",
                hint=f"freeze it, or {_PRECOMPUTED}",
            )
    if adapter is not None:
        _require_fixed(model, adapter, owned)


def _require_unmerged(adapted: Iterable[nn.Module]) -> None:
    """Check that no adapter is part of the weights that it adapts."""
    merged = next((m for m in adapted if getattr(m, "merged", False)), None)
    if merged is not None:
        raise OffloadError(
            f"the adapter of a {type(merged).__name__} is merged into its weights",
            limit="another adapter, or none, is computed with the weights as they were before",
            hint="`model.unmerge_adapter()` before `offload.attach`",
        )


def _require_fixed(model: LayeredModel, adapter: str, owned: Mapping[int, str]) -> None:
    """Check that an adapter exists and does not train."""
    named = [
        (name, parameter)
        for name, parameter in model.whole.named_parameters()
        if adapter in owned.get(id(parameter), "").split(".")
    ]
    if not named:
        raise OffloadError(
            f"the objective's reference is the adapter {adapter!r}, which {model.name} lacks",
            limit="it is one of the model's adapters, or None for the model without them",
            hint=f"`model.load_adapter(..., adapter_name={adapter!r})` before `offload.attach`",
        )
    trained = next((name for name, parameter in named if parameter.requires_grad), None)
    if trained is not None:
        raise OffloadError(
            f"{trained} trains, and it is of the reference's adapter {adapter!r}",
            limit="a reference stays as it is",
            hint=f"load the adapter twice: train one, and keep {adapter!r} frozen",
        )


def _owned(adapted: Iterable[nn.Module]) -> dict[int, str]:
    """Return the path within its module of each parameter of an adapter, by id."""
    return {
        id(parameter): path
        for module in adapted
        for path, parameter in module.named_parameters()
        if path.partition(".")[0] not in _BASES
    }


def _adapted(modules: Iterable[nn.Module]) -> list[nn.Module]:
    """Return the modules that hold adapters, by what they offer: peft's, or alike."""
    return [
        module
        for module in modules
        if isinstance(getattr(type(module), "disable_adapters", None), property)
        and hasattr(module, _OFF)
        and hasattr(module, _ACTIVE)
    ]


def _in_evaluation(modules: Iterable[nn.Module]) -> AbstractContextManager[None]:
    return meanwhile(*((vars(module), {"training": False}) for module in modules))


_Switches = Sequence[tuple[dict[str, Any], Mapping[str, Any]]]
"""Attributes of modules, and what to set of them for a call."""


def _switches(
    modules: Iterable[nn.Module], values: Mapping[str, Any], adapter: str | None
) -> _Switches:
    """Return what to set; a module that an adapter has no part in computes without adapters.

    Modules that another adapter saves whole would look for this one's weights.
    """
    adapted = _adapted(modules) if values else []
    return [
        (vars(module), values if adapter is None or _has(module, adapter) else {_OFF: True})
        for module in adapted
    ]


def _has(module: nn.Module, adapter: str) -> bool:
    return any(adapter in path.split(".") for path in _owned([module]).values())
