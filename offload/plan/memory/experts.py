"""The memory of one layer's experts in a visit, by expert kernels and by what is adapted."""

import math
from collections.abc import Sequence
from typing import Literal

from offload.plan.facts.facts import AdapterSpec
from offload.plan.facts.linears import FP32_BYTES, Linear, Reads
from offload.plan.machine.machine import ExpertsImplementation

# Transformers' own code, products with separate low-rank branches, or the fused kernels.
ExpertsForm = Literal["plain", "beside", "fused", "fused beside"]
# Grouped products need rows of a multiple of this: ranks of adapters on experts are padded.
ROW_BYTES = 16
# What the activation before a down projection saves, in widths of its result.
ACTIVATION_WIDTHS: dict[Reads, int] = {"plain": 1, "gated": 3, "clamped": 6}


def experts_form(implementation: ExpertsImplementation, *, is_adapted: bool) -> ExpertsForm:
    """Return the form of the experts, which determines the memory of a visit."""
    if implementation == "triton":
        return "fused beside" if is_adapted else "fused"
    return "beside" if is_adapted else "plain"


def saved_features(down: Linear, form: ExpertsForm) -> int:
    """Return the features that each routed row saves for the backward, except adapter inputs.

    Transformers' code saves the activation's operands and the row's result. Products with branches
    save the weighted activation and its factor in place of the result. The fused kernels save the
    inputs of the gated activation.
    """
    if form in ("fused", "fused beside"):
        return 2 * down.d_in
    widths = ACTIVATION_WIDTHS[down.reads]
    return widths * down.d_in + down.d_out if form == "plain" else (widths + 2) * down.d_in


def gradient_features(down: Linear, form: ExpertsForm) -> int:
    """Return the gradient features of each routed row that are live in addition to what is saved.

    They are widest after the down projection or at the activation. In the fused kernels they are
    widest at the inputs of the gated activation, plus the larger of the activation, recomputed for
    its adapter, and the rows that become tokens.
    """
    if form == "plain":
        return 2 * down.d_out + down.d_in
    if form == "beside":
        return max(down.d_out + down.d_in, 4 * down.d_in)
    again = down.d_in if form == "fused beside" else 0
    return 2 * down.d_in + max(again, down.d_out)


def factor_bytes(
    experts: Sequence[Linear], *, spec: AdapterSpec, dtype_bytes: int, form: ExpertsForm
) -> int:
    """Return the bytes of A and B as products need them, and of gradients until they are added up.

    In fp32 an A is used as the adapter holds it. The fused kernels return the gradients of both
    projections at once, in fp32; products return those of one, before a cast.
    """
    is_fused = form == "fused beside"
    ranks = [spec.rank_of(x) if is_fused else filled(spec.rank_of(x), dtype_bytes) for x in experts]
    copied = sum(
        rank * x.num_experts * (x.d_out + (x.d_in if dtype_bytes != FP32_BYTES else 0))
        for x, rank in zip(experts, ranks, strict=True)
    )
    factors = [x.adapter_parameters(rank) for x, rank in zip(experts, ranks, strict=True)]
    if is_fused:
        return copied * dtype_bytes + sum(factors) * FP32_BYTES
    return copied * dtype_bytes + max(factors, default=0) * (dtype_bytes + FP32_BYTES)


def filled(rank: int, dtype_bytes: int) -> int:
    """Return the padded rank in products of experts."""
    return math.ceil(rank * dtype_bytes / ROW_BYTES) * ROW_BYTES // dtype_bytes
