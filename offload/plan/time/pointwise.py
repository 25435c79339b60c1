"""The passes over activations outside products and attention: norms, rotary, gates, sums.

Counted from the operators that the models' own code runs, each of which reads its arguments from
memory and writes its result; `tests/unit/offload/plan/time/test_pointwise.py` counts them again.
A pass is one read or write of a tensor. A fused operator counts as its operands, each read or
written once: declared, until a card has shown it. Weights of norms and tables of angles are small
and left out, and so is what a kernel needs per row.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from offload.plan.facts.facts import LayerFacts, adapted_linears
from offload.plan.facts.linears import FP32_BYTES, Linear, SoftmaxAttention
from offload.plan.facts.workload import FusedParts
from offload.plan.time.pricer import SUM_PASSES, Pricer
from offload.plan.time.roofline import VisitWork, Work


@dataclass(frozen=True, kw_only=True, slots=True)
class PassCounts:
    """Passes over a tensor, and operators: in a forward, and in the backward after it."""

    forward: float
    backward: float
    forward_ops: int
    backward_ops: int


# RMSNorm in fp32 over the features that it norms: square, mean, scaling; in the backward the same
# with the gradients of both factors, and the two parts of the input's gradient added.
NORM = PassCounts(forward=5, backward=17, forward_ops=5, backward_ops=11)
# In the dtype: the product with the weight.
NORM_WEIGHT = PassCounts(forward=2, backward=2, forward_ops=1, backward_ops=1)
# Casts to fp32 and back, in 16 bits: each reads one and writes the other.
NORM_CASTS = PassCounts(forward=2, backward=2, forward_ops=2, backward_ops=2)
# Of a norm that multiplies by 1 + its weight: that sum, and its cast to fp32 in 16 bits.
WEIGHT_SUM = PassCounts(forward=0, backward=0, forward_ops=1, backward_ops=0)
ADDS_ONE = frozenset(("gemma", "gemma2", "gemma3_text"))
# Over queries and keys: half negated, both halves joined, two products, a sum. A backward launches
# two more: copies of gradients in the order of the products before, which its passes leave out.
ROTARY = PassCounts(forward=10, backward=14, forward_ops=10, backward_ops=16)
# Over the width of an MLP: its activation, and for a gated one the product.
GATED = PassCounts(forward=5, backward=9, forward_ops=2, backward_ops=3)
PLAIN = PassCounts(forward=2, backward=3, forward_ops=1, backward_ops=1)
OUTPUT_GATE = PassCounts(forward=5, backward=9, forward_ops=2, backward_ops=3)
LATENT = PassCounts(forward=4, backward=8, forward_ops=2, backward_ops=4)
# Over the hidden state, after token mixing and after the MLP: a sum, and that of two gradients.
RESIDUALS = PassCounts(forward=6, backward=6, forward_ops=2, backward_ops=2)
# Of a product whose output is cut: the gradients of the parts are put together, over its width
# those of queries, keys and values (each padded with zeros, and added), over both halves a gate's.
FUSED_QKV = PassCounts(forward=0, backward=10, forward_ops=0, backward_ops=5)
FUSED_GATE = PassCounts(forward=0, backward=2, forward_ops=0, backward_ops=1)

# The same as one operator: the backward of a norm, with a rotation or not, reads a gradient and the
# norm's input; a gate's reads a gradient, gate and up, and writes the gradients of both.
FUSED_NORM = PassCounts(forward=2, backward=3, forward_ops=1, backward_ops=1)
FUSED_ROTARY = PassCounts(forward=2, backward=2, forward_ops=1, backward_ops=1)
FUSED_NORMS_AND_ROTARY = PassCounts(forward=2, backward=3, forward_ops=1, backward_ops=1)
FUSED_GATED = PassCounts(forward=3, backward=5, forward_ops=1, backward_ops=1)


# Bytes per token of one pass, how often the operators run, and their passes.
Part = tuple[float, int, PassCounts]


def pointwise_work(at: Pricer, layer: LayerFacts) -> VisitWork:
    """Price norms, rotary embedding, residuals, and activations except those of routed experts."""
    fused = at.workload.fused(layer, at.machine.device)
    forward, backward = Work(), _summed_gradients(at, layer)
    is_compiled = at.workload.code_on(at.machine.device) == "compiled"
    for parts, is_fused in (
        (list(_plain(at, layer, fused)), False),
        (list(_fused(at, layer, fused)), True),
    ):
        are_ours = is_fused and not is_compiled
        calls = Work(num_calls=sum(times for _, times, _ in parts) if are_ours else 0)
        forward, backward = forward + calls, backward + calls
        for num_bytes, times, counts in parts:
            all_bytes = at.workload.num_tokens * num_bytes
            forward = forward + at.traffic(
                all_bytes * counts.forward, num_ops=times * counts.forward_ops, is_fused=is_fused
            )
            backward = backward + at.traffic(
                all_bytes * counts.backward, num_ops=times * counts.backward_ops, is_fused=is_fused
            )
    return VisitWork(forward=forward, recompute=forward, backward=backward)


def _fused(at: Pricer, layer: LayerFacts, fused: FusedParts) -> Iterator[Part]:
    """Yield what is one operator each."""
    b, kind = at.workload.dtype_bytes, layer.attention
    alone = [norm for norm in fused.norms if norm not in fused.head_norms]
    yield sum(norm.num_features for norm in alone) * b, len(alone), FUSED_NORM
    if fused.has_rotary and isinstance(kind, SoftmaxAttention):
        counts = FUSED_NORMS_AND_ROTARY if fused.head_norms else FUSED_ROTARY
        yield kind.num_rotated_heads * kind.qk_dim * b, 1, counts
    for down in fused.downs:
        yield down.d_in * b, 1, FUSED_GATED


def _plain(at: Pricer, layer: LayerFacts, fused: FusedParts) -> Iterator[Part]:
    """Yield what the model's own code computes."""
    b, hidden = at.workload.dtype_bytes, at.facts.hidden_size
    num_norms = len(layer.norms) - len(fused.norms)
    per_norm = layer.normed_features - sum(norm.num_features for norm in fused.norms)
    yield per_norm * FP32_BYTES, num_norms, NORM
    yield per_norm * b, num_norms, NORM_WEIGHT
    yield hidden * b, 1, RESIDUALS
    if b != FP32_BYTES:
        yield per_norm * (b + FP32_BYTES), num_norms, NORM_CASTS
    if at.facts.model_type in ADDS_ONE:
        yield 0, num_norms * (1 if b == FP32_BYTES else 2), WEIGHT_SUM
    kind = layer.attention
    if isinstance(kind, SoftmaxAttention):
        yield from _around_softmax(layer, kind, b, is_rotary_fused=fused.has_rotary)
    yield from _mlp([x for x in layer.linears if x not in fused.downs], b)


def _around_softmax(
    layer: LayerFacts, kind: SoftmaxAttention, dtype_bytes: int, *, is_rotary_fused: bool
) -> Iterator[Part]:
    if not is_rotary_fused:
        yield kind.num_rotated_heads * kind.rotary_dim * dtype_bytes, 1, ROTARY
    if kind.is_latent:
        yield kind.num_heads * kind.qk_dim * dtype_bytes, 1, LATENT
    if kind.has_output_gate:
        yield kind.width * dtype_bytes, 1, OUTPUT_GATE
    if kind.is_fused:
        (joined,) = (x for x in layer.linears if x.group == "attention" and x.reads == "input")
        yield joined.d_out * dtype_bytes, 1, FUSED_QKV


def mlp_work(at: Pricer, linears: Sequence[Linear]) -> VisitWork:
    """Price the activations of MLPs as their own code, except those of routed experts."""
    forward, backward = Work(), Work()
    for num_bytes, _, counts in _mlp(linears, at.workload.dtype_bytes):
        all_bytes = at.workload.num_tokens * num_bytes
        forward = forward + at.traffic(all_bytes * counts.forward, num_ops=counts.forward_ops)
        backward = backward + at.traffic(all_bytes * counts.backward, num_ops=counts.backward_ops)
    return VisitWork(forward=forward, recompute=forward, backward=backward)


def _mlp(linears: Sequence[Linear], dtype_bytes: int) -> Iterator[Part]:
    for linear in linears:
        if linear.is_down and linear.group != "experts":
            yield linear.d_in * dtype_bytes, 1, PLAIN if linear.reads == "plain" else GATED
        if linear.group in ("mlp", "shared_experts") and linear.name == "gate_up_proj":
            yield linear.d_out * dtype_bytes, 1, FUSED_GATE


def _summed_gradients(at: Pricer, layer: LayerFacts) -> Work:
    """Price the sums of gradients by an input that several linears read.

    Those with branches in the base's dtype add theirs up in their products.
    """
    spec = at.workload.adapter
    adapted = adapted_linears(layer, spec) if spec.are_branches_grouped else ()
    features, num_ops = 0, 0
    for readers in _shared_inputs(layer):
        together = [x for x in readers if x in adapted and not spec.reads_alone(x)]
        num_sums = len(readers) - max(1, len(together))
        features, num_ops = features + num_sums * readers[0].d_in, num_ops + num_sums
    num_bytes = at.workload.num_tokens * features * at.workload.dtype_bytes
    return at.traffic(SUM_PASSES * num_bytes, num_ops=num_ops)


def _shared_inputs(layer: LayerFacts) -> list[Sequence[Linear]]:
    groups: dict[str, list[Linear]] = {}
    for linear in layer.linears:
        if linear.reads == "input" and linear.group in ("attention", "mlp", "shared_experts"):
            groups.setdefault(linear.group, []).append(linear)
    return list(groups.values())
