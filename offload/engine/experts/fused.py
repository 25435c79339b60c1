"""Frozen experts and their branches in a few Triton programs (see kernels.py).

Layout of the backward. In addition to its inputs, the forward saves the gate's inputs (2 F numbers
per row) and R numbers per row and branch. The backward recomputes the activation in the tile that
holds its gradient and turns that into the gradient of the gate's inputs there, so the activation's
gradient is never written to memory.

A branch is two products. The first, rows to rank, is a separate pass that reads the rows once, at
memory speed: inside each tile it would be repeated for each block of columns, an eighth more
arithmetic. The second is one more step of the tile's sum, so it is rounded together with the frozen
product and not separately.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch

from offload.engine.experts.launcher import Blocks, Launcher, blocks_for
from offload.engine.experts.products import Branch, Gate, Routing, gate_of, reason_outside
from offload.engine.recompute import not_a_value
from offload.errors import UnsupportedModelError

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MIN_CAPABILITY = (8, 0)


def reason_against(experts: Any, device: torch.device) -> str | None:
    """Return why a module's experts cannot be computed on a device; None if they can."""
    what = _reason_in(experts)
    if what is not None:
        return f"{type(experts).__name__} {what}"
    if device.type != "cuda":
        return "Triton's kernels run on CUDA"
    if torch.cuda.get_device_capability(device) < MIN_CAPABILITY:
        return f"{torch.cuda.get_device_name(device)} is older than Ampere"
    return None if find_spec("triton") else "Triton is not installed: `pip install triton`"


def _reason_in(experts: Any) -> str | None:
    what = reason_outside(experts)
    if what is not None:
        return what
    if gate_of(experts) is None:
        return "has no gate that Triton's kernels know"
    if experts.down_proj.dtype not in DTYPES:
        return f"has weights in {experts.down_proj.dtype}"
    return None


def compute(
    experts: Any,
    lora: Mapping[str, Branch],
    routing: Routing,
    hidden_TD: torch.Tensor,
    weight_TC: torch.Tensor,
    *,
    has_value: bool,
) -> torch.Tensor:
    """Return the sum of each token's experts (T, D), without the bias of the projection down.

    Args:
        experts: A module of fused experts, frozen.
        lora: Branches by projection.
        routing: Rows by expert.
        hidden_TD: In the dtype of the experts.
        weight_TC: Routing weights.
        has_value: Whether to compute it, or only its graph.

    Raises:
        UnsupportedModelError: The gate has no kernel, or the experts' weights train.
    """
    what = _reason_in(experts)
    if what is None and any(parameter.requires_grad for parameter in experts.parameters()):
        what = "has weights that train"
    if what is not None:
        raise UnsupportedModelError(
            f"{type(experts).__name__} {what}",
            limit="they compute frozen experts whose gate is SiLU, GELU by tanh, or gpt_oss's",
            hint="`model.experts_implementation: grouped_mm`",
        )
    gate = gate_of(experts)
    assert gate is not None
    up_EDF, down_EFD = experts.gate_up_proj, experts.down_proj
    if not experts.is_transposed:
        up_EDF, down_EFD = up_EDF.transpose(1, 2), down_EFD.transpose(1, 2)
    bias_EF = experts.gate_up_proj_bias if experts.has_bias else None
    branches = (lora.get("gate_up_proj"), lora.get("down_proj"))
    factors = [
        factor
        for branch in branches
        for factor in ((branch.a_ERK, branch.b_ERN) if branch else (None, None))
    ]
    inputs = (hidden_TD.contiguous(), weight_TC.contiguous(), up_EDF, down_EFD, bias_EF, *factors)
    form = _Form(
        routing=routing,
        gate=gate,
        blocks=blocks_for(
            torch.cuda.get_device_capability(hidden_TD.device) if hidden_TD.is_cuda else None,
            hidden_TD.dtype,
            rows_per_expert=math.ceil(routing.token_S.numel() / experts.num_experts),
        ),
        scalings=tuple(branch.scaling if branch else 1.0 for branch in branches),
        keys=tuple(branch.key if branch else None for branch in branches),
        is_kept=torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs),
        has_value=has_value,
    )
    fused: Any = _Fused.apply
    result: torch.Tensor = fused(form, *inputs)
    return result


@dataclass(frozen=True, kw_only=True, slots=True)
class _Form:
    """The settings of a pass through the experts, without its tensors."""

    routing: Routing
    gate: Gate
    blocks: Blocks
    scalings: tuple[float, ...]
    keys: tuple[object, ...]
    is_kept: bool
    has_value: bool


class _Fused(torch.autograd.Function):
    """Projection up, gate, projection down, and the sum over each token's choices."""

    @staticmethod
    def forward(ctx: Any, form: _Form, *inputs: Any) -> torch.Tensor:
        hidden_TD, weight_TC, up_EDF, down_EFD, bias_EF, *factors = inputs
        at = Launcher(form.routing, form.gate, form.blocks)
        up, down = _branches(form, factors, hidden_TD.dtype)
        up_low = at.beside(hidden_TD, up, is_gathered=True)
        inner_SF, gates_SF = at.activate(
            hidden_TD, up_EDF, bias_EF, up_low, weight_TC, is_kept=form.is_kept
        )
        down_low = at.beside(inner_SF, down)
        if form.has_value:
            out_TD = at.to_tokens(inner_SF, down_EFD, down_low)
        else:
            out_TD = not_a_value(hidden_TD, down_EFD.shape[2])
        if form.is_kept:
            made = (gates_SF, up_low[0], down_low[0])
            ctx.save_for_backward(hidden_TD, weight_TC, up_EDF, down_EFD, *factors, *made)
            ctx.form = form
        return out_TD

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden_TD, weight_TC, up_EDF, down_EFD, *factors = ctx.saved_tensors[:8]
        gates_SF, up_low_SR, down_low_SR = ctx.saved_tensors[8:]
        at = Launcher(ctx.form.routing, ctx.form.gate, ctx.form.blocks)
        up, down = _branches(ctx.form, factors, hidden_TD.dtype)
        grad_TD = gradients[0].contiguous()
        of_hidden = of_up_a = of_up_b = of_down_a = of_down_b = None

        low = at.beside(grad_TD, down, is_back=True, is_gathered=True)
        of_gates_SF, of_weight_TC, inner_SF = at.activate_backward(
            grad_TD, down_EFD.transpose(1, 2), low, weight_TC, gates_SF, is_again=down is not None
        )
        if down is not None:
            of_down_a = at.outer(low[0], inner_SF)
            of_down_b = at.outer(down_low_SR, grad_TD, is_gathered=True)
        del inner_SF
        low = at.beside(of_gates_SF, up, is_back=True)
        if up is not None:
            of_up_a = at.outer(low[0], hidden_TD, is_gathered=True)
            of_up_b = at.outer(up_low_SR, of_gates_SF)
        if ctx.needs_input_grad[1]:
            of_hidden = at.to_tokens(of_gates_SF, up_EDF.transpose(1, 2), low)
        of_frozen = (None, None, None)
        of_factors = (of_up_a, of_up_b, of_down_a, of_down_b)
        return None, of_hidden, of_weight_TC, *of_frozen, *of_factors


def _branches(
    form: _Form, factors: Sequence[torch.Tensor | None], dtype: torch.dtype
) -> tuple[Branch | None, ...]:
    """Return the branches of both projections, laid out for the kernels."""
    return tuple(
        None
        if a_ERK is None or b_ERN is None
        else Branch(a_ERK=a_ERK, b_ERN=b_ERN, scaling=scaling, key=key).cast(dtype)
        for a_ERK, b_ERN, scaling, key in zip(
            factors[::2], factors[1::2], form.scalings, form.keys, strict=True
        )
    )
