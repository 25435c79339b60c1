"""Layers whose norms, rotations and gated activations are computed by the fused operators.

A part is replaced on its module while a layer is visited, and the model's own code is back after
it: nothing of the model or of its library is changed in between, and other models of the same
class never notice. A function that a module calls by name is replaced in a copy of the module's
forward, not in its library's file. Norms whose result is only rotated return what they read, and
the rotation norms it.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import FunctionType
from typing import Any, cast

import torch
from torch import nn

from offload.engine.decisions import Proven
from offload.engine.internals import has_hooks
from offload.engine.pointwise import ops
from offload.engine.pointwise.recognise import (
    DTYPES,
    GatedMlp,
    Norm,
    Rotary,
    find_gated_mlp,
    find_norm,
    find_rotary,
    own_forward,
    renamed_arguments,
)
from offload.engine.visit_cache import patched
from offload.plan.facts.workload import FusedPart

Part = Norm | Rotary | GatedMlp
NAMES: Mapping[type[Part], FusedPart] = {Norm: "norms", Rotary: "rotary", GatedMlp: "gates"}


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class FusedModule:
    """A module of a layer, and what it is known to compute."""

    module: nn.Module  # the module
    part: Part  # what it computes
    # Norms of what a rotation rotates, if it is to compute them too.
    normed: "HeadNorms | None" = None

    def forwards(self) -> Iterator[tuple[nn.Module, Callable[..., Any]]]:
        """Yield what modules compute in place of their own forward."""
        if isinstance(self.part, Norm):
            yield self.module, partial(_norm, self.module, self.part)
        elif isinstance(self.part, GatedMlp):
            yield self.module, partial(_gated_mlp, self.module, self.part)
        else:
            # What listens to a norm must hear its result.
            is_joined = self.normed is not None and not any(
                has_hooks(norm) or "forward" in vars(norm)
                for norm in (*self.normed.modules, self.module)
            )
            yield (
                self.module,
                _with_rotary(self.module, self.part, self.normed if is_joined else None),
            )
            for norm in self.normed.modules if self.normed is not None and is_joined else ():
                yield norm, _passed


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class HeadNorms:
    """The norms of queries and keys, of one form."""

    modules: tuple[nn.Module, nn.Module]
    form: Norm

    @property
    def weights(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The weights of both."""
        q, k = (x for norm in self.modules for x in norm.parameters(recurse=False))
        return q, k


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
        self._parts = [tuple(_parts_of(layer, proven, plain_parts)) for layer in layers]
        self.has_loss = "loss" not in plain_parts
        """Whether the loss is fused too."""

    @contextmanager
    def visited(self, layer: int) -> Iterator[None]:
        """Compute a layer's parts by the fused operators meanwhile."""
        forwards: dict[nn.Module, Callable[..., Any]] = {}
        for one in self._parts[layer]:
            for module, forward in one.forwards():  # attention comes before its norms
                if "forward" not in vars(module):
                    forwards.setdefault(module, forward)
        with patched(*((vars(module), {"forward": f}) for module, f in forwards.items())):
            yield

    def parts(self) -> Iterator[FusedModule]:
        """Yield all modules that are fused, with what each computes."""
        for parts in self._parts:
            yield from parts

    def counts(self, layer: int) -> Counter[str]:
        """Return how many norms, rotations and gates of a layer are fused.

        `HeadNorms` are the norms that a rotation computes.
        """
        parts = self._parts[layer]
        counts = Counter(type(one.part).__name__ for one in parts)
        counts["HeadNorms"] = sum(len(one.normed.modules) for one in parts if one.normed)
        return counts


_known: dict[object, Part | None] = {}
"""What was proven of modules in this process; see `Proven`."""


def _parts_of(
    layer: nn.Module, proven: Proven[Part | None], plain_parts: frozenset[FusedPart]
) -> Iterator[FusedModule]:
    found = {
        module: part
        for module in layer.modules()
        if (part := proven.of(module, partial(_part_of, module))) is not None
        and NAMES[type(part)] not in plain_parts
    }
    num_held = Counter(child for module in layer.modules() for child in module.children())
    alone = {module: part for module, part in found.items() if num_held[module] == 1}
    for module, part in found.items():
        yield FusedModule(module=module, part=part, normed=_normed(module, part, alone))


def _normed(module: nn.Module, part: Part, found: Mapping[nn.Module, Part]) -> HeadNorms | None:
    """Return the norms of what a module rotates, if one operator can compute all of it.

    Args:
        module: It.
        part: What it computes.
        found: What is known of modules that one module alone holds.
    """
    if not isinstance(part, Rotary) or part.norms is None:
        return None
    children = dict(module.named_children())
    norms = [children.get(name) for name in part.norms]
    forms = {found.get(norm) if norm is not None else None for norm in norms}
    if len(forms) != 1 or not isinstance(form := forms.pop(), Norm):
        return None
    return HeadNorms(modules=cast("Any", tuple(norms)), form=form)


def _passed(x: torch.Tensor) -> torch.Tensor:
    """Return what a norm reads: the rotation after it norms it."""
    return x


def _part_of(module: nn.Module) -> Part | None:
    return find_norm(module) or find_gated_mlp(module) or find_rotary(module)


def _norm(module: nn.Module, form: Norm, *args: Any, **kwargs: Any) -> torch.Tensor:
    (weight,) = module.parameters(recurse=False)
    x = args[0] if len(args) == 1 and not kwargs else None
    if x is None or weight.requires_grad or weight.dtype != x.dtype:
        return cast("torch.Tensor", _own(module, *args, **kwargs))
    return ops.norm(x, weight, eps=form.eps, offset=form.offset, is_cast_first=form.is_cast_first)


def _gated_mlp(module: nn.Module, form: GatedMlp, *args: Any, **kwargs: Any) -> torch.Tensor:
    is_known = len(args) == 1 and not kwargs and args[0].dtype in DTYPES
    others = (x for name, x in module.named_children() if name not in (*form.first, form.down))
    if not is_known or any(map(has_hooks, others)):
        return cast("torch.Tensor", _own(module, *args, **kwargs))
    outputs = {name: getattr(module, name)(args[0]) for name in form.first}
    (up,) = set(form.first) - {form.gate}
    y: torch.Tensor = getattr(module, form.down)(
        ops.gated(outputs[form.gate], outputs[up], form.curve)
    )
    return y


def _with_rotary(module: nn.Module, part: Rotary, normed: HeadNorms | None) -> Callable[..., Any]:
    """Return a module's forward, in which one function is the fused one."""
    forward = own_forward(type(module))
    own = forward.__globals__[part.name]
    copy = FunctionType(
        forward.__code__,
        {**forward.__globals__, part.name: partial(_rotate, own, part, normed)},
        forward.__name__,
        forward.__defaults__,
        forward.__closure__,
    )
    copy.__kwdefaults__ = forward.__kwdefaults__
    renames = renamed_arguments(type(module))

    def compute(*args: Any, **named: Any) -> Any:
        new = {renames[name]: named.pop(name) for name in renames.keys() & named.keys()}
        return copy(module, *args, **{**new, **named})

    return compute


def _rotate(
    own: Callable[..., Any], part: Rotary, normed: HeadNorms | None, *args: Any, **kwargs: Any
) -> Any:
    is_known = len(args) == 4 and not kwargs and _is_as_proven(part, *args)
    if normed is None:
        return ops.rotate(*args) if is_known else own(*args, **kwargs)
    weights_D, form = normed.weights, normed.form
    if is_known and all(
        w.dtype == args[0].dtype and len(w) == args[0].shape[-1] and not w.requires_grad
        for w in weights_D
    ):
        return ops.norm_rotate(
            *args,
            weights_D=weights_D,
            eps=form.eps,
            offset=form.offset,
            is_cast_first=form.is_cast_first,
        )
    q, k = (_norm(norm, form, x) for norm, x in zip(normed.modules, args[:2], strict=True))
    return own(q, k, *args[2:], **kwargs)


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


def _own(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return type(module).forward(cast("Any", module), *args, **kwargs)
