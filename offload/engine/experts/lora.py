"""Fused experts with low-rank branches alongside their matrices, never merged into them.

Problem. peft adapts fused experts (`target_parameters`) by building W + s * B A of *all* experts in
each forward, and a gradient as large in each backward: for Qwen3-30B-A3B 1.2 GB per layer and pass,
whatever the number of tokens.

Idea. A row that is routed to expert e needs x W_e + s * (x A_e) B_e: R more numbers per row are
computed and saved. Rows are sorted by expert once, and every product runs over slices of them.
transformers' experts interface passes the module and its routing to a registered function. Here
the branches are passed too, as one more keyword. Any other implementation fails on that keyword,
so none can silently leave the adapter out.

Layout of the backward. The forward saves the hidden states as they came in, not the S rows gathered
from them (the backward gathers them again), the activation between the two products, and S x R
numbers per branch. The routing weights are multiplied into that activation rather than into the
result: it is narrower, and the result need not be saved for their gradient.

Rejected: A of all experts on each token, selecting afterwards, which is one dense product of E / C
times the arithmetic; [W; A] as one matrix, which copies all weights on each visit.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any, Literal, Protocol, cast

import torch
from torch import nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from offload.engine.experts import fused
from offload.engine.experts.products import (
    Branch,
    Grouped,
    Loop,
    Products,
    Routing,
    reason_outside,
    route,
    takes_few_sizes,
)
from offload.engine.recompute import not_a_value
from offload.errors import UnsupportedModelError

SUFFIX = "+lora"
To = Literal["rows", "tokens", "nothing"]  # what a projection gives: nothing is its graph alone


def take_branches(experts: nn.Module) -> None:
    """Make a module of fused experts accept the keyword `lora`, a branch per projection.

    All experts of its config then use the functions below, which without that keyword compute the
    same as before.

    Raises:
        UnsupportedModelError: The module's computation has no place for a branch.
    """
    what = reason_outside(experts)
    if what is not None:
        raise UnsupportedModelError(
            f"{type(experts).__name__} {what}",
            limit="adapters on experts are computed through transformers' experts interface, which"
            " does not merge them",
            hint="adapt the linear layers alone: `adapter.experts: false`",
        )
    config: Any = experts.config
    plain = f"{config._experts_implementation}".removesuffix(SUFFIX)
    if plain not in IMPLEMENTATIONS:
        raise UnsupportedModelError(
            f"{type(experts).__name__} computes by experts_implementation={plain!r}",
            limit=f"adapters on experts take one of {', '.join(IMPLEMENTATIONS)}",
            hint='`model.set_experts_implementation("grouped_mm")` before the adapter is put on',
        )
    register()
    config._experts_implementation = plain + SUFFIX


def register() -> None:
    """Register our kernels in transformers' experts interface: `triton`, and all with branches."""
    ALL_EXPERTS_FUNCTIONS.register(TRITON, partial(_experts_forward, TRITON))
    for name in IMPLEMENTATIONS:
        ALL_EXPERTS_FUNCTIONS.register(name + SUFFIX, partial(_experts_forward, name))


def _experts_forward(
    plain: str,
    experts: Any,
    hidden_TD: torch.Tensor,
    expert_TC: torch.Tensor,
    weight_TC: torch.Tensor,
    *,
    lora: Mapping[str, Branch] | None = None,
    has_value: bool = True,
) -> torch.Tensor:
    """Compute the same as transformers' implementation `plain`, plus the branches.

    Without branches transformers computes it, except for kernels that it lacks, and for its loop
    where that would use too many different row counts.
    A choice of an expert that does not exist contributes nothing, as in transformers' own loop.
    If no value is asked for, ours leave out the projection down, whose gradients do not depend on
    it; the result is then a `not_a_value`.
    """
    is_own = plain == TRITON or (plain == LOOP and takes_few_sizes(experts.down_proj))
    if lora is None and not is_own:
        own_forward = type(experts).forward.__wrapped__
        as_before = ALL_EXPERTS_FUNCTIONS.get(plain, own_forward)
        return cast("torch.Tensor", as_before(experts, hidden_TD, expert_TC, weight_TC))
    num_experts, dtype = experts.num_experts, experts.down_proj.dtype
    weight_TC = weight_TC.masked_fill(expert_TC >= num_experts, 0)
    routing = route(expert_TC.clamp(max=num_experts - 1), num_experts=num_experts)
    compute = IMPLEMENTATIONS[plain]
    out_TD = compute(
        experts, lora or {}, routing, hidden_TD.to(dtype), weight_TC, has_value=has_value
    )
    if experts.has_bias:
        shape = (hidden_TD.shape[0], num_experts + 1)
        shares_TE = weight_TC.new_zeros(shape).scatter_reduce(1, expert_TC, weight_TC, "sum")
        out_TD = torch.addmm(out_TD, shares_TE[:, :-1].to(dtype), experts.down_proj_bias)
    return out_TD.to(hidden_TD.dtype)


def _in_parts(
    kind: type[Products],
    experts: Any,
    lora: Mapping[str, Branch],
    routing: Routing,
    hidden_TD: torch.Tensor,
    weight_TC: torch.Tensor,
    *,
    has_value: bool,
) -> torch.Tensor:
    """Compute the products by one of products.py and the rest by torch, but no down bias."""
    up = "gate_up_proj" if experts.has_gate else "up_proj"
    project = partial(_project, experts, lora, kind(routing))
    rows_SF = project(up, hidden_TD, to="rows")
    if experts.has_bias:
        rows_SF = rows_SF + getattr(experts, f"{up}_bias")[routing.expert_S]
    rows_SF = experts._apply_gate(rows_SF) if experts.has_gate else experts.act_fn(rows_SF)
    weight_S1 = weight_TC.reshape(-1, 1)[routing.choice_S]
    rows_SF = (rows_SF * weight_S1).to(hidden_TD.dtype)
    return project("down_proj", rows_SF, to="tokens" if has_value else "nothing")


class Compute(Protocol):
    """Computes the sum of each token's experts, without the bias of the projection down."""

    def __call__(
        self,
        experts: Any,
        lora: Mapping[str, Branch],
        routing: Routing,
        hidden_TD: torch.Tensor,
        weight_TC: torch.Tensor,
        *,
        has_value: bool,
    ) -> torch.Tensor:
        """Return it, or a placeholder that has its graph and no value."""


LOOP, TRITON = "eager", "triton"
IMPLEMENTATIONS: Mapping[str, Compute] = {
    LOOP: partial(_in_parts, Loop),
    "grouped_mm": partial(_in_parts, Grouped),
    TRITON: fused.compute,
}


def _project(
    experts: Any,
    lora: Mapping[str, Branch],
    products: Products,
    name: str,
    given: torch.Tensor,
    *,
    to: To,
) -> torch.Tensor:
    """Project tokens up to rows, or rows down to tokens, by one projection of all experts."""
    weights_EKN: torch.Tensor = getattr(experts, name)
    if not experts.is_transposed:
        weights_EKN = weights_EKN.transpose(1, 2)
    branch: tuple[Any, ...] = (None, None, None)
    if name in lora:
        fitted = lora[name].fit(weights_EKN.dtype)
        branch = (fitted.a_ERK, fitted.b_ERN, fitted.scaling)
    projected: Any = _Projection.apply
    return cast("torch.Tensor", projected(given, weights_EKN, *branch, products, to))


class _Projection(torch.autograd.Function):
    """Rows times their experts' matrices, plus a branch; frozen weights get no gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        given: torch.Tensor,
        weights_EKN: torch.Tensor,
        a_ERK: torch.Tensor | None,
        b_ERN: torch.Tensor | None,
        scaling: float | torch.Tensor,
        products: Products,
        to: To,
    ) -> torch.Tensor:
        is_up = to == "rows"
        rows = products.rows(given) if is_up else given
        low_SR, pairs = None, [(rows, weights_EKN)]
        if a_ERK is not None and b_ERN is not None:
            low_SR = products.sum((rows, a_ERK.transpose(1, 2))).mul_(scaling)
            pairs.insert(0, (low_SR, b_ERN))
        ctx.save_for_backward(given, weights_EKN, a_ERK, b_ERN, low_SR)
        ctx.scaling, ctx.products, ctx.is_up = scaling, products, is_up
        if to == "nothing":
            return not_a_value(given[: products.num_tokens], weights_EKN.shape[2])
        return products.sum(*pairs, to_tokens=not is_up)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        given, weights_EKN, a_ERK, b_ERN, low_SR = ctx.saved_tensors
        products, is_up = ctx.products, ctx.is_up
        is_given, is_weight, is_a, is_b, *_ = ctx.needs_input_grad
        gradient = gradients[0].contiguous()
        grad_rows = gradient if is_up else products.rows(gradient)
        of_given = of_weight = of_a = of_b = grad_low_SR = None
        pairs = [(grad_rows, weights_EKN.transpose(1, 2))]
        if a_ERK is not None:
            grad_low_SR = products.sum((grad_rows, b_ERN.transpose(1, 2))).mul_(ctx.scaling)
            pairs.insert(0, (grad_low_SR, a_ERK))
        if is_b:
            of_b = products.outer(low_SR, grad_rows)
        if is_a or is_weight:
            rows = products.rows(given) if is_up else given
            of_a = products.outer(grad_low_SR, rows) if is_a else None
            of_weight = products.outer(rows, grad_rows) if is_weight else None
            del rows
        if is_given:
            of_given = products.sum(*pairs, to_tokens=is_up)
        return of_given, of_weight, of_a, of_b, None, None, None
