"""What the recompute and backward of one layer take: what is saved, and what stands beside it."""

import math

from offload.plan.costs import FP32_BYTES
from offload.plan.facts import AdapterSpec, LayerFacts, Linear, ModelFacts

# The rank of an adapter on experts is filled up to rows of this.
EXPERT_ROW_BYTES = 16
# fp32 copies of a weight while DoRA takes its norm, by bytes of a weight: measured with peft 0.21
# on a CPU, to 0.01 of a copy.
DORA_WEIGHT_COPIES = {4: 3, 2: 4}


def saved_bytes_per_token(
    facts: ModelFacts,
    layer: LayerFacts,
    *,
    dtype_bytes: int,
    is_masked: bool,
    has_adapted_experts: bool,
) -> int:
    """Return what one layer saves for its backward, the inputs of adapters aside.

    Frozen products save no input. Norms save theirs in fp32 (where layers compute in fp32, the
    first norm's is the kept layer input itself), attention its output, queries, keys and values
    (with a mask the keys and values repeated to all heads), an MLP 3 widths, a mixture 3 widths
    and the result of each routed row. With adapters on the experts it is 5 widths, the weighted
    activation among them, and no result.
    """
    normed = layer.normed_features - (facts.hidden_size if dtype_bytes == FP32_BYTES else 0)
    key_value_heads = facts.num_heads if is_masked else facts.num_kv_heads
    features = 2 * (facts.num_heads + key_value_heads) * facts.head_dim
    for linear in layer.linears:
        if linear.name == "down_proj":
            is_adapted = linear.group == "experts" and has_adapted_experts
            result = linear.d_out if linear.group == "experts" and not is_adapted else 0
            features += linear.active * ((5 if is_adapted else 3) * linear.d_in + result)
    return normed * FP32_BYTES + features * dtype_bytes + 3 * layer.num_experts * FP32_BYTES


def adapter_input_bytes(adapted: tuple[Linear, ...], *, spec: AdapterSpec, dtype_bytes: int) -> int:
    """Return what low-rank branches save per token.

    In fp32, linears that read the same tensor share it. Otherwise peft casts it for each of them.
    Branches of experts save the hidden state as it came, and a rank for each routed row. DoRA
    scales both a linear's own output and the branch's.
    """
    inputs: dict[tuple[str, str], int] = {}
    for linear in adapted:
        is_down = linear.name == "down_proj"
        if linear.group == "experts":
            rank = _filled(spec.rank_of(linear), dtype_bytes)
            features = linear.active * rank + (0 if is_down else linear.d_in)
            inputs[linear.group, linear.name] = features * dtype_bytes
            continue
        is_shared = dtype_bytes == FP32_BYTES and linear.name != "o_proj" and not is_down
        key = (linear.group, "input" if is_shared else linear.name)
        inputs[key] = linear.active * linear.d_in * FP32_BYTES
    outputs = sum(linear.d_out for linear in adapted) if spec.is_dora else 0
    return sum(inputs.values()) + (dtype_bytes + FP32_BYTES) * outputs


def dora_bytes(adapted: tuple[Linear, ...], *, spec: AdapterSpec, dtype_bytes: int) -> int:
    """Return what stands while the norm of the widest linear's merged weight is taken."""
    if not spec.is_dora:
        return 0
    copies = DORA_WEIGHT_COPIES[dtype_bytes]
    return FP32_BYTES * max(x.d_in**2 + copies * x.num_weights for x in adapted)


def expert_factor_bytes(experts: list[Linear], *, spec: AdapterSpec, dtype_bytes: int) -> int:
    """Return A and B as products want them, and the gradients of one projection's before a cast.

    In fp32 an A is as the adapter holds it.
    """
    ranks = [_filled(spec.rank_of(linear), dtype_bytes) for linear in experts]
    copied = sum(
        rank * x.num_experts * (x.d_out + (x.d_in if dtype_bytes != FP32_BYTES else 0))
        for x, rank in zip(experts, ranks, strict=True)
    )
    factors = (x.adapter_parameters(rank) for x, rank in zip(experts, ranks, strict=True))
    largest = max(factors, default=0)
    return copied * dtype_bytes + largest * (dtype_bytes + FP32_BYTES)


def _filled(rank: int, dtype_bytes: int) -> int:
    """Return the rank that products of experts have."""
    return math.ceil(rank * dtype_bytes / EXPERT_ROW_BYTES) * EXPERT_ROW_BYTES // dtype_bytes


def gradient_bytes(
    facts: ModelFacts, layer: LayerFacts, *, dtype_bytes: int, has_adapted_experts: bool
) -> int:
    """Return the gradients per token that stand beside all saved activations."""
    widest = 0
    for linear in layer.linears:
        if linear.name == "down_proj" and linear.group == "experts":
            width = 2 * linear.d_out + linear.d_in
            if has_adapted_experts:  # behind the projection down, or at the activation
                width = max(linear.d_out + linear.d_in, 4 * linear.d_in)
            widest = max(widest, linear.active * width * dtype_bytes)
        elif linear.name == "down_proj":
            cast_bytes = 0 if dtype_bytes == FP32_BYTES else FP32_BYTES
            widest = max(widest, linear.d_in * (2 * dtype_bytes + cast_bytes))
    return facts.hidden_size * dtype_bytes + widest
