"""Layers whose norms, rotations and gated activations are computed by the fused operators.

A part is replaced on its module while a layer is visited, and the model's own code is back after
it: nothing of the model or of its library is changed in between, and other models of the same
class never notice. A function that a module calls by name is replaced in a copy of the module's
forward, not in its library's file.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import FunctionType, MethodType
from typing import Any, cast

import torch
from torch import nn

from offload.engine.decisions import Proven
from offload.engine.pointwise import ops
from offload.engine.pointwise.recognise import (
    DTYPES,
    GatedMlp,
    Norm,
    Rotary,
    find_gated_mlp,
    find_norm,
    find_rotary,
)
from offload.plan.facts.fused import FusedPart

Part = Norm | Rotary | GatedMlp
NAMES: Mapping[type[Part], FusedPart] = {Norm: "norms", Rotary: "rotary", GatedMlp: "gates"}


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Fused:
    """A module of a layer, and what it is known to compute."""

    module: nn.Module
    part: Part

    @property
    def forward(self) -> Callable[..., Any]:
        """What the module computes in place of its own forward."""
        if isinstance(self.part, Norm):
            return partial(_norm, self.module, self.part)
        if isinstance(self.part, GatedMlp):
            return partial(_gated_mlp, self.module, self.part)
        return _with_rotary(self.module, self.part)


class FusedLayers:
    """What is fused in each layer of a model."""

    def __init__(
        self, layers: Sequence[nn.Module], plain_parts: frozenset[FusedPart] = frozenset()
    ) -> None:
        """Find it; layers of the same code and sizes are proven once.

        Args:
            layers: Of the model.
            plain_parts: What the model's own code computes.
        """
        proven = Proven[Part | None](_known)
        self._parts = [
            tuple(
                one for one in _parts_of(layer, proven) if NAMES[type(one.part)] not in plain_parts
            )
            for layer in layers
        ]
        self.has_loss = "loss" not in plain_parts
        """Whether the loss is fused too."""

    @contextmanager
    def visited(self, layer: int) -> Iterator[None]:
        """Compute a layer's parts by the fused operators meanwhile."""
        replaced = [one for one in self._parts[layer] if "forward" not in vars(one.module)]
        for one in replaced:
            vars(one.module)["forward"] = one.forward
        try:
            yield
        finally:
            for one in replaced:
                vars(one.module).pop("forward", None)

    def parts(self) -> Iterator[tuple[nn.Module, Part]]:
        """Yield all modules that are fused, with what each computes."""
        for parts in self._parts:
            yield from ((one.module, one.part) for one in parts)

    def counts(self, layer: int) -> Counter[str]:
        """Return how many norms, rotations and gates of a layer are fused."""
        return Counter(type(one.part).__name__ for one in self._parts[layer])


_known: dict[object, Part | None] = {}
"""What was proven of modules in this process; see `Proven`."""


def _parts_of(layer: nn.Module, proven: Proven[Part | None]) -> Iterator[_Fused]:
    for module in layer.modules():
        part = proven.of(module, partial(_part_of, module))
        if part is not None:
            yield _Fused(module=module, part=part)


def _part_of(module: nn.Module) -> Part | None:
    return find_norm(module) or find_gated_mlp(module) or find_rotary(module)


def _norm(module: nn.Module, form: Norm, *args: Any, **kwargs: Any) -> torch.Tensor:
    (weight,) = module._parameters.values()
    x = args[0] if len(args) == 1 and not kwargs else None
    if x is None or weight is None or weight.requires_grad or weight.dtype != x.dtype:
        return cast("torch.Tensor", _own(module, *args, **kwargs))
    return ops.norm(x, weight, eps=form.eps, offset=form.offset, is_cast_first=form.is_cast_first)


def _gated_mlp(module: nn.Module, form: GatedMlp, *args: Any, **kwargs: Any) -> torch.Tensor:
    is_known = len(args) == 1 and not kwargs and args[0].dtype in DTYPES
    others = (x for name, x in module.named_children() if name not in (*form.first, form.down))
    if not is_known or any(map(has_hooks, others)):
        return cast("torch.Tensor", _own(module, *args, **kwargs))
    outputs = {name: cast("Any", module._modules[name])(args[0]) for name in form.first}
    (up,) = set(form.first) - {form.gate}
    y: torch.Tensor = cast("Any", module._modules[form.down])(
        ops.gated(outputs[form.gate], outputs[up], form.curve)
    )
    return y


def _with_rotary(module: nn.Module, part: Rotary) -> Callable[..., Any]:
    """Return a module's forward, in which one function is the fused one."""
    forward = cast("FunctionType", type(module).forward)
    own = forward.__globals__[part.name]
    copy = FunctionType(
        forward.__code__,
        {**forward.__globals__, part.name: partial(_rotate, own, part)},
        forward.__name__,
        forward.__defaults__,
        forward.__closure__,
    )
    copy.__kwdefaults__ = forward.__kwdefaults__
    return MethodType(copy, module)


def _rotate(own: Callable[..., Any], part: Rotary, *args: Any, **kwargs: Any) -> Any:
    if len(args) != 4 or kwargs or not _is_as_proven(part, *args):
        return own(*args, **kwargs)
    return ops.rotate(*args)


def _is_as_proven(
    part: Rotary, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> bool:
    width = q.shape[-1]
    return (
        q.dim() == k.dim() == 4
        and cos.dim() == 3
        and cos.shape == sin.shape
        and cos.dtype == sin.dtype
        and q.dtype == k.dtype
        and (q.dtype, cos.dtype) in part.dtypes
        and (len(q), q.shape[2], width) == (len(k), k.shape[2], k.shape[-1])
        and len(cos) in (1, len(q))
        and cos.shape[1] == q.shape[2]
        and (cos.shape[-1] == width or (part.is_partial and cos.shape[-1] < width))
        and not (cos.requires_grad or sin.requires_grad)
    )


def has_hooks(module: nn.Module) -> bool:
    """Return whether something listens to a module's calls."""
    tables = ("forward_pre", "forward", "backward_pre", "backward")
    return any(vars(module)[f"_{table}_hooks"] for table in tables)


def _own(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return type(module).forward(cast("Any", module), *args, **kwargs)
