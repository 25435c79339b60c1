"""Tries the fused operators on a device, against the model's own code, before a run uses them.

Each kind of norm, rotation and gate of the layers, and the loss of a few tokens, is computed once
by both, forward and backward, on the same random values; then both are timed in turns, since a
card's clock changes with its load.
The first run of each, in which Triton compiles, is not timed.
"""

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from offload.engine.pointwise import ops
from offload.engine.pointwise.layers import NAMES, FusedLayers, FusedModule
from offload.engine.pointwise.recognise import (
    GatedMlp,
    Norm,
    Rotary,
    drawn_mlp,
    is_close,
    own_forward,
    twin_of,
)
from offload.engine.streams import release_cached, seconds_of
from offload.plan.facts.workload import FusedPart

NUM_TOKENS, NUM_ROUNDS, NUM_HEADS, NUM_KEY_HEADS, HEAD_DIM = 2048, 5, 16, 4, 128
NUM_LABELS = 256
TIE_FRAC = 0.03  # a fused operator keeps less memory and launches less: a tie is its
GRADIENT_ERRORS = 4  # a gradient's rounding error is at most that many of a value's
Compute = Callable[..., Sequence[torch.Tensor]]
Timed = tuple[float, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """One kind of part, and its time by either code."""

    name: str  # the class of its module, and the kind of part
    part: FusedPart  # the part of a layer that is tried
    # Forward and backward by the model's own code, the median of all rounds; None if a reason was
    # found before.
    plain_s: float | None = None
    fused_s: float | None = None  # the time of the fused operator
    reason: str | None = None  # why the operator is not to be used; None if it may be


def try_fused(
    layers: Sequence[nn.Module], vocab_size: int, device: torch.device
) -> tuple[Trial, ...]:
    """Try each kind of part that is fused, and the loss.

    Args:
        layers: Of a model in its compute dtype; no weight is read, so they may be on meta.
        vocab_size: How many tokens the model predicts.
        device: Where to compute.
    """
    dtype = next(p.dtype for layer in layers for p in layer.parameters())
    trials = [
        _attempted(
            f"{type(one.part).__name__} of {type(one.module).__name__}",
            NAMES[type(one.part)],
            partial(_tried, one, dtype, device),
        )
        for one in _kinds(FusedLayers(layers))
    ]
    loss = partial(_tried_loss, vocab_size, dtype, device)
    trials.append(_attempted("cross-entropy", "loss", loss))
    release_cached(device)
    return tuple(trials)


def _attempted(name: str, part: FusedPart, attempt: Callable[[], Timed]) -> Trial:
    try:
        plain_s, fused_s = attempt()
    except Exception as error:  # noqa: BLE001  # the model's own code remains, and it is shown
        first = (str(error).strip().splitlines() or [""])[0]
        why = first if isinstance(error, _WrongError) else f"{type(error).__name__}: {first}"
        return Trial(name=name, part=part, reason=why)
    reason = "it is slower" if fused_s > (1 + TIE_FRAC) * plain_s else None
    return Trial(name=name, part=part, plain_s=plain_s, fused_s=fused_s, reason=reason)


class _WrongError(Exception):
    """Results that are not those of the model's code."""


def _kinds(fused: FusedLayers) -> Iterator[FusedModule]:
    seen = set()
    for one in fused.parts():
        shapes = tuple(tuple(p.shape) for p in one.module.parameters(recurse=False))
        kind = (type(one.module), one.part, one.normed and one.normed.form, shapes)
        if kind not in seen:
            seen.add(kind)
            yield one


def _tried(one: FusedModule, dtype: torch.dtype, device: torch.device) -> Timed:
    plain, fused, inputs = _both(one, dtype, device)
    forked = [device] if device.type == "cuda" else []
    with torch.enable_grad(), torch.random.fork_rng(devices=forked):
        torch.manual_seed(0)
        leaves = [torch.randn(x.shape, device=device, dtype=dtype) for x in inputs]
        leaves = [leaf.transpose(1, 2) if isinstance(one.part, Rotary) else leaf for leaf in leaves]
        leaves = [leaf.requires_grad_() for leaf in leaves]
        expected = plain(*leaves)
        gradients = [torch.randn_like(y) for y in expected]

        def step(compute: Compute) -> tuple[torch.Tensor, ...]:
            return torch.autograd.grad(list(compute(*leaves)), leaves, gradients)

        pairs = [
            *zip(fused(*leaves), expected, [1] * len(expected), strict=True),
            *zip(step(fused), step(plain), [GRADIENT_ERRORS] * len(leaves), strict=True),
        ]
        return _compared(pairs, partial(step, plain), partial(step, fused), device)


def _tried_loss(vocab_size: int, dtype: torch.dtype, device: torch.device) -> Timed:
    forked = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=forked):
        torch.manual_seed(0)
        logits_NV = 4 * torch.randn(NUM_LABELS, vocab_size, device=device, dtype=dtype)
        labels_N = torch.randint(vocab_size, (NUM_LABELS,), device=device)
    num_items = torch.tensor(float(NUM_LABELS), device=device)

    def plain() -> tuple[torch.Tensor, torch.Tensor]:
        with torch.enable_grad():
            leaf_NV = logits_NV.detach().requires_grad_()
            losses_N = F.cross_entropy(leaf_NV.float(), labels_N, reduction="none")
            (losses_N.sum() / num_items).backward()
        assert leaf_NV.grad is not None
        return losses_N.detach(), leaf_NV.grad

    def fused() -> tuple[torch.Tensor, torch.Tensor]:
        return ops.cross_entropy(logits_NV, labels_N, num_items=num_items, has_gradient=True)

    pairs = list(zip(fused(), plain(), [1, GRADIENT_ERRORS], strict=True))
    return _compared(pairs, plain, fused, device)


def _compared(
    pairs: Sequence[tuple[torch.Tensor, torch.Tensor, int]],
    plain: Callable[[], object],
    fused: Callable[[], object],
    device: torch.device,
) -> Timed:
    """Return the medians of both, the model's code first.

    Args:
        pairs: Results to compare, and how many rounding errors they may be off by.
        plain: The model's own code.
        fused: The operator.
        device: Where to compute.

    Raises:
        _WrongError: The results differ.
    """
    if not all(is_close(found, wanted, errors) for found, wanted, errors in pairs):
        raise _WrongError("its results are not those of the model's code")
    times_s: dict[bool, list[float]] = {True: [], False: []}
    for _ in range(NUM_ROUNDS):
        for is_fused, compute in ((False, plain), (True, fused)):
            times_s[is_fused].append(seconds_of(compute, device))
    return statistics.median(times_s[False]), statistics.median(times_s[True])


def _frozen_twin(norm: nn.Module, dtype: torch.dtype, device: torch.device) -> Any:
    """Return a norm of the same code with weights of its own."""
    ((name, like),) = norm.named_parameters(recurse=False)
    weight = 1 + 0.1 * torch.randn(like.shape, device=device)
    return twin_of(norm, {name: nn.Parameter(weight.to(dtype), requires_grad=False)})


def _both(
    one: FusedModule, dtype: torch.dtype, device: torch.device
) -> tuple[Compute, Compute, list[torch.Tensor]]:
    """Return the model's own code, the operator, and empty tensors shaped as what both read."""
    meta, module, part, normed = torch.device("meta"), one.module, one.part, one.normed
    if isinstance(part, Norm):
        twin = _frozen_twin(module, dtype, device)
        (frozen,) = twin.parameters()
        x = torch.empty(1, NUM_TOKENS, len(frozen), device=meta)
        return (
            lambda x: (type(module).forward(twin, x),),
            lambda x: (
                ops.norm(
                    x,
                    frozen,
                    eps=part.eps,
                    offset=part.offset,
                    is_cast_first=part.is_cast_first,
                ),
            ),
            [x],
        )
    if isinstance(part, Rotary):
        width = getattr(module, "head_dim", HEAD_DIM)
        angles = torch.rand(1, NUM_TOKENS, width, device=device)
        cos, sin = (f(angles).to(dtype) for f in (torch.cos, torch.sin))
        own: Any = own_forward(type(module)).__globals__[part.name]
        heads = (NUM_HEADS, NUM_KEY_HEADS)
        inputs = [torch.empty(1, NUM_TOKENS, n, width, device=meta) for n in heads]
        if normed is None:
            return lambda q, k: own(q, k, cos, sin), lambda q, k: ops.rotate(q, k, cos, sin), inputs
        q_norm, k_norm = (_frozen_twin(norm, dtype, device) for norm in normed.modules)
        form = normed.form

        def plain_rotation(q: torch.Tensor, k: torch.Tensor) -> Sequence[torch.Tensor]:
            rotated: Sequence[torch.Tensor] = own(q_norm(q), k_norm(k), cos, sin)
            return rotated

        def fused_rotation(q: torch.Tensor, k: torch.Tensor) -> Sequence[torch.Tensor]:
            (q_weight_D,), (k_weight_D,) = q_norm.parameters(), k_norm.parameters()
            return ops.norm_rotate(
                q,
                k,
                cos,
                sin,
                weights_D=(q_weight_D, k_weight_D),
                eps=form.eps,
                offset=form.offset,
                is_cast_first=form.is_cast_first,
            )

        return plain_rotation, fused_rotation, inputs
    assert isinstance(part, GatedMlp)
    width = getattr(module, part.gate).out_features
    (up,) = set(part.first) - {part.gate}
    plain = drawn_mlp(module, part)
    both = [torch.empty(1, NUM_TOKENS, width, device=meta) for _ in range(2)]
    return (
        lambda gate, up_: (plain({part.gate: gate, up: up_}),),
        lambda gate, up_: (ops.gated(gate, up_, part.curve),),
        both,
    )
