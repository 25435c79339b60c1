"""The same model computed as a reference within its visits: without its adapters, or with another.

Problem. A reference that differs from the policy by its adapter alone needs no weights of its own:
a visit can compute both while the layer is there. But a library's own switches walk over the whole
model and change which parameters train, which must not happen within a step.

Idea. A module that holds an adapter looks at two of its attributes in each call: whether adapters
are off, and which are active. These are set for one call of one layer, and set back. No parameter
is touched. Modules that are trained whole are such modules too: without their adapters they compute
with the original. For the reference the modules are in evaluation mode, so that it has no dropout
and no noise and draws no random number; TRL switches dropout off in both models.

A reference is exact only if nothing else has changed since training began. So weights that train
and are no adapter's are refused.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn

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


class ScoringModel:
    """A model as it computes rows that it is not trained on: in evaluation mode."""

    def __init__(self, model: LayeredModel) -> None:
        """Keep the model."""
        self._layers = [list(layer.modules()) for layer in model.layers]
        self._around = list(model.around)

    @contextmanager
    def in_layer(self, layer: int) -> Iterator[None]:
        """Switch one layer for one visit."""
        with _in_evaluation(self._layers[layer]):
            yield

    @contextmanager
    def around_layers(self) -> Iterator[None]:
        """Switch everything else, for what comes before and after the layers."""
        with _in_evaluation(self._around):
            yield


class ReferenceModel(ScoringModel):
    """A model as its reference computes: in evaluation mode, with other adapters or none."""

    def __init__(self, model: LayeredModel, reference: Reference) -> None:
        """Find the modules with adapters.

        Raises:
            OffloadError: The model has no such reference.
        """
        super().__init__(model)
        _require_reference(model, reference.adapter)
        name = reference.adapter
        self._values = {_OFF: True} if name is None else {_OFF: False, _ACTIVE: [name]}
        self._adapted_layers = [_adapted(modules) for modules in self._layers]
        self._adapted_around = _adapted(self._around)

    @contextmanager
    def in_layer(self, layer: int) -> Iterator[None]:
        """Switch one layer for one visit."""
        with _in_evaluation(self._layers[layer]), _set(self._adapted_layers[layer], self._values):
            yield

    @contextmanager
    def around_layers(self) -> Iterator[None]:
        """Switch everything else, for what comes before and after the layers."""
        with _in_evaluation(self._around), _set(self._adapted_around, self._values):
            yield


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
    merged = next((m for m in adapted if getattr(m, "merged", False)), None)
    if merged is not None:
        raise OffloadError(
            f"the adapter of a {type(merged).__name__} is merged into its weights",
            limit="the reference is the same model with its adapters off",
            hint="`model.unmerge_adapter()` before `offload.attach`",
        )
    if all(vars(module).get(_OFF, False) for module in adapted):
        raise OffloadError(
            f"the adapters of {model.name} are switched off",
            limit="the reference is the same model with its adapters off: both would be one",
            hint="`model.enable_adapter_layers()`, and leave `model.disable_adapter()` first",
        )
    owned = {
        id(parameter): path
        for module in adapted
        for path, parameter in module.named_parameters()
        if path.partition(".")[0] not in _BASES
    }
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


def _adapted(modules: Iterable[nn.Module]) -> list[nn.Module]:
    """Return the modules that hold adapters, by what they offer: peft's, or alike."""
    return [
        module
        for module in modules
        if isinstance(getattr(type(module), "disable_adapters", None), property)
        and hasattr(module, _OFF)
        and hasattr(module, _ACTIVE)
    ]


@contextmanager
def _in_evaluation(modules: Iterable[nn.Module]) -> Iterator[None]:
    training = [module for module in modules if module.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True


@contextmanager
def _set(modules: Iterable[nn.Module], values: Mapping[str, Any]) -> Iterator[None]:
    """Set attributes of modules past `nn.Module`, and set them back."""
    tables = [vars(module) for module in modules]
    before = [{name: table[name] for name in values if name in table} for table in tables]
    for table in tables:
        table.update(values)
    try:
        yield
    finally:
        for table, old in zip(tables, before, strict=True):
            for name in values:
                del table[name]
            table.update(old)
