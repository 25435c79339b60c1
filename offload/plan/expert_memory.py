"""What the experts of one layer take in a visit, by how they are multiplied and what is adapted."""

import math
from collections.abc import Sequence
from typing import Literal

from offload.plan.facts import AdapterSpec
from offload.plan.machine import ExpertsImplementation
from offload.plan.parts import FP32_BYTES, Linear, Reads

# By transformers' own code, by products with branches beside them, or by the fused kernels.
ExpertsForm = Literal["plain", "beside", "fused", "fused beside"]
# Grouped products take rows of a multiple of this: ranks of adapters on experts are filled up.
ROW_BYTES = 16
# What the activation before a projection down saves, in widths of its result.
ACTIVATION_WIDTHS: dict[Reads, int] = {"plain": 1, "gated": 3, "clamped": 6}


def experts_form(implementation: ExpertsImplementation, *, is_adapted: bool) -> ExpertsForm:
    """Return what decides the memory of a visit."""
    if implementation == "triton":
        return "fused beside" if is_adapted else "fused"
    return "beside" if is_adapted else "plain"


def saved_features(down: Linear, form: ExpertsForm) -> int:
    """Return what each routed row saves for the backward, the inputs of adapters aside.

    Transformers' code saves the activation's operands and the row's result, products with branches
    the weighted activation and its factor in place of the result, the kernels what the gate saw.
    """
    if form in ("fused", "fused beside"):
        return 2 * down.d_in
    widths = ACTIVATION_WIDTHS[down.reads]
    return widths * down.d_in + down.d_out if form == "plain" else (widths + 2) * down.d_in


def gradient_features(down: Linear, form: ExpertsForm) -> int:
    """Return the gradients of each routed row that stand beside all that is saved.

    They are widest behind the projection down or at the activation; in the kernels at what the gate
    saw, with the activation again beside it for its adapter, or the rows that become tokens.
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
    """Return A and B as products want them, and their gradients until they are added up.

    In fp32 an A is as the adapter holds it. The kernels give the gradients of both projections at
    once, in fp32; products those of one, before a cast.
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
    """Return the rank that products of experts have."""
    return math.ceil(rank * dtype_bytes / ROW_BYTES) * ROW_BYTES // dtype_bytes
