"""The memory of one layer's recompute and backward: what is saved, and what is live with it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from offload.plan.facts.facts import AdapterSpec, LayerFacts, ModelFacts, adapted_linears
from offload.plan.facts.linears import (
    DELTA_CHUNK_TOKENS,
    FP32_BYTES,
    Attention,
    DeltaAttention,
    Linear,
    Reads,
    SoftmaxAttention,
)
from offload.plan.facts.workload import NOTHING, FusedParts, Workload
from offload.plan.machine.machine import ExpertsImplementation, Machine

# Transformers' own code, products with separate low-rank branches, or the fused kernels.
ExpertsForm = Literal["plain", "adapted", "fused", "fused adapted"]
# Grouped products need rows of a multiple of this: ranks of adapters on experts are padded.
ROW_BYTES = 16
# What the activation before a down projection saves, in widths of its result.
ACTIVATION_WIDTHS: dict[Reads, int] = {"plain": 1, "gated": 3, "clamped": 6}


def experts_form(implementation: ExpertsImplementation, *, is_adapted: bool) -> ExpertsForm:
    """Return the form of the experts, which determines the memory of a visit."""
    if implementation == "triton":
        return "fused adapted" if is_adapted else "fused"
    return "adapted" if is_adapted else "plain"


def saved_features(down: Linear, form: ExpertsForm) -> int:
    """Return the features that each routed row saves for the backward, except adapter inputs.

    Transformers' code saves the activation's operands and the row's result. Products with branches
    save the weighted activation and its factor in place of the result. The fused kernels save the
    inputs of the gated activation.
    """
    if form in ("fused", "fused adapted"):
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
    if form == "adapted":
        return max(down.d_out + down.d_in, 4 * down.d_in)
    again = down.d_in if form == "fused adapted" else 0
    return 2 * down.d_in + max(again, down.d_out)


def factor_bytes(
    experts: Sequence[Linear], *, spec: AdapterSpec, dtype_bytes: int, form: ExpertsForm
) -> int:
    """Return the bytes of A and B as products need them, and of gradients until they are added up.

    In fp32 an A is used as the adapter holds it. The fused kernels return the gradients of both
    projections at once, in fp32; products return those of one, before a cast.
    """
    is_fused = form == "fused adapted"
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


# fp32 copies of a weight while DoRA computes its norm, by bytes of a weight: measured with peft
# 0.21 on a CPU, to 0.01 of a copy.
DORA_WEIGHT_COPIES = {4: 3, 2: 4}
# fp32 copies of the hidden state that are live at once in the backward of an RMSNorm, by bytes of
# an activation: counted in transformers' own code.
NORM_COPIES = {4: 4, 2: 4}
FUSED_NORM_COPIES = 2  # in the dtype, where that is one operator: two gradients of the input


@dataclass(frozen=True, kw_only=True, slots=True)
class VisitBytes:
    """The memory of one micro-batch's visit of a layer, with its graph."""

    saved: int  # activations except scores
    scores: int  # attention scores, if no fused kernel avoids materializing them
    adapter_inputs: int  # what low-rank branches save
    factors: int  # a and B in the compute dtype, where they are cast to it
    gradients: int  # the widest gradients that are live together with all of these
    dora: int  # what is live while peft computes a merged weight's norm
    update: int = 0  # what is live while another method than LoRA computes on a whole weight
    tile: int = 0  # all that one tile of an MLP in tiles takes, if that is when most is live
    # The layer's input, if autograd saves it without a copy: `saved` leaves it out, as it is
    # counted with the kept layer inputs.
    own_input: int = 0

    @property
    def beside_saved(self) -> int:
        """What is live at most in addition to what is saved."""
        return self.gradients + self.dora + self.update + self.tile

    @property
    def graph(self) -> int:
        """What is live for as long as the graph is kept."""
        return self.saved + self.scores + self.adapter_inputs + self.factors

    @property
    def sent_graph(self) -> int:
        """What leaves the device if the graph is sent."""
        return self.graph + self.own_input


def visit_bytes(
    facts: ModelFacts, machine: Machine, layer: LayerFacts, workload: Workload, *, is_padded: bool
) -> VisitBytes:
    """Add up a visit of a layer on a machine."""
    mlp = workload.tiled(layer)
    if mlp:
        rest = replace(layer, linears=tuple(x for x in layer.linears if x not in mlp))
        one = _visit_bytes(facts, machine, rest, workload, is_padded=is_padded)
        adapted = tuple(x for x in adapted_linears(layer, workload.adapter) if x in mlp)
        return _with_tiles(one, facts, machine, workload, rest, mlp, adapted)
    return _visit_bytes(facts, machine, layer, workload, is_padded=is_padded)


def _with_tiles(
    one: VisitBytes,
    facts: ModelFacts,
    machine: Machine,
    workload: Workload,
    layer: LayerFacts,
    mlp: tuple[Linear, ...],
    adapted: tuple[Linear, ...],
) -> VisitBytes:
    """Add an MLP in tiles to the visit of the rest of its layer.

    The MLP saves its input alone. Most is live within a tile, or in the backward of the norm before
    the MLP, when the MLP itself takes no more than that input and its gradient, or in attention.
    """
    b, spec = workload.dtype_bytes, workload.adapter
    hidden = workload.num_tokens * facts.hidden_size
    cast_bytes_of = 0 if b == FP32_BYTES else FP32_BYTES
    downs = [x for x in mlp if x.is_down]
    per_token = sum(ACTIVATION_WIDTHS[x.reads] * x.active * x.d_in * b for x in downs)
    per_token += max(x.d_in * (2 * b + cast_bytes_of) for x in downs)
    per_token += adapter_input_bytes(
        adapted, spec=spec, dtype_bytes=b, is_cpu=machine.device == "cpu"
    )
    summed = FP32_BYTES * sum(x.adapter_parameters(spec.rank_of(x)) for x in adapted)
    tile = (workload.mlp_chunk_tokens or 0) * per_token + summed
    tile += cast_bytes(adapted, spec=spec, dtype_bytes=b)
    output = workload.reads_output(mlp) * hidden * b
    is_norm_fused = set(layer.norms) == set(workload.kept_fused(layer, machine.device).norms)
    in_norm = FUSED_NORM_COPIES * b if is_norm_fused else NORM_COPIES[b] * FP32_BYTES
    in_attention = workload.num_tokens * _attention_gradients(layer.attention) * b
    later = max(output + hidden * (in_norm + b), hidden * b + in_attention, output + one.gradients)
    is_within = output + hidden * b + tile > later
    return replace(
        one,
        saved=one.saved + hidden * b,
        gradients=output + hidden * b if is_within else later,
        dora=max(one.dora, dora_bytes(adapted, spec=spec, dtype_bytes=b)),
        tile=tile if is_within else 0,
    )


def _attention_gradients(kind: Attention) -> int:
    """Return the features of gradients that are live at once in the backward of softmax attention.

    Those of its output and of queries, and of keys and values for all heads and for their own.
    """
    if not isinstance(kind, SoftmaxAttention):
        return 0
    both = kind.qk_dim + kind.v_dim
    repeated = kind.num_kv_heads * both if kind.num_kv_heads < kind.num_heads else 0
    return 2 * kind.num_heads * both + repeated


def _visit_bytes(
    facts: ModelFacts, machine: Machine, layer: LayerFacts, workload: Workload, *, is_padded: bool
) -> VisitBytes:
    tokens, b, spec = workload.num_tokens, workload.dtype_bytes, workload.adapter
    seq_len, adapted = workload.num_keys, adapted_linears(layer, spec)
    experts = [linear for linear in adapted if linear.group == "experts"]
    linears = [linear for linear in adapted if linear.group != "experts"]
    form = experts_form(machine.experts_implementation.value, is_adapted=bool(experts))
    fused = workload.kept_fused(layer, machine.device)
    is_cuda = machine.device == "cuda"
    saved = saved_bytes_per_token(
        facts,
        layer,
        fused=fused,
        seq_len=seq_len,
        dtype_bytes=b,
        is_masked=is_masked_by_images(facts, layer.window, workload)
        or (
            is_masked(layer.window, workload, is_padded=is_padded)
            and not workload.joins_rows(layer.attention, is_cuda=is_cuda)
        ),
        form=form,
        is_cpu=machine.device == "cpu",
    )
    scores = score_bytes_per_token(
        layer.attention, seq_len=seq_len, dtype_bytes=b, is_cpu=machine.device == "cpu"
    )
    gradients = gradient_bytes(
        facts,
        layer,
        seq_len=seq_len,
        dtype_bytes=b,
        form=form,
        fused=fused,
        adapted=adapted,
    )
    past = workload.micro_batch_size * spec.num_past * _past_features(layer.attention) * b
    return VisitBytes(
        saved=tokens * (saved - scores) + past,
        scores=tokens * scores,
        adapter_inputs=tokens * whole_input_bytes(layer, spec=spec, dtype_bytes=b)
        + tokens
        * adapter_input_bytes(adapted, spec=spec, dtype_bytes=b, is_cpu=machine.device == "cpu"),
        factors=method_bytes(linears, spec=spec)
        + factor_bytes(experts, spec=spec, dtype_bytes=b, form=form)
        + cast_bytes(linears, spec=spec, dtype_bytes=b),
        gradients=tokens * gradients + past,
        dora=dora_bytes(adapted, spec=spec, dtype_bytes=b),
        update=update_bytes(linears, spec=spec, num_tokens=tokens),
        own_input=tokens * _own_input_bytes(facts, fused, b),
    )


def _past_features(kind: Attention) -> int:
    """Return the features of a prefix's token in the keys and values of a visit, for all heads."""
    return kind.num_heads * (kind.qk_dim + kind.v_dim) if isinstance(kind, SoftmaxAttention) else 0


def is_masked(window: int | None, workload: Workload, *, is_padded: bool) -> bool:
    """Return whether a mask is materialized because it is not simply causal."""
    has_past = workload.adapter.num_past > 0
    return is_padded or has_past or (window is not None and window < workload.seq_len)


def is_masked_by_images(facts: ModelFacts, window: int | None, workload: Workload) -> bool:
    """Return whether rows with images have a mask in which the tokens of one see each other."""
    tower = facts.tower if workload.has_images else None
    return tower is not None and tower.is_masked(window)


def saved_bytes_per_token(
    facts: ModelFacts,
    layer: LayerFacts,
    *,
    seq_len: int,
    dtype_bytes: int,
    is_masked: bool,
    form: ExpertsForm,
    is_cpu: bool,
    fused: FusedParts = NOTHING,
) -> int:
    """Return what one layer saves for its backward, except the inputs of adapters.

    Frozen products save no input. Norms save theirs in fp32, fused ones in its dtype and a number
    per row (where no copy is made, the first norm's is the kept layer input itself); an MLP saves
    its activation's operands, of a fused one the gate and what it is multiplied by.
    """
    fused_features = sum(norm.num_features for norm in fused.norms)
    num_rows = sum(norm.num_features // norm.num_weights for norm in fused.norms)
    normed_bytes = (layer.normed_features - fused_features) * FP32_BYTES
    normed_bytes += fused_features * dtype_bytes + num_rows * FP32_BYTES
    normed_bytes -= _own_input_bytes(facts, fused, dtype_bytes)
    features = 0
    for linear in layer.linears:
        if linear.is_down and linear.group == "experts":
            features += linear.active * saved_features(linear, form)
        elif linear.is_down:
            widths = 2 if linear in fused.downs else ACTIVATION_WIDTHS[linear.reads]
            features += widths * linear.active * linear.d_in
    attention = _attention_bytes(
        layer.attention,
        seq_len=seq_len,
        dtype_bytes=dtype_bytes,
        is_masked=is_masked,
        is_cpu=is_cpu,
    )
    routing = 3 * layer.num_experts * FP32_BYTES
    return normed_bytes + features * dtype_bytes + attention + routing


def _own_input_bytes(facts: ModelFacts, fused: FusedParts, dtype_bytes: int) -> int:
    """Return the bytes per token of a layer's input, if its first norm saves it as it is."""
    is_saved = bool(fused.norms) or dtype_bytes == FP32_BYTES
    return facts.hidden_size * dtype_bytes if is_saved else 0


def _attention_bytes(
    kind: Attention, *, seq_len: int, dtype_bytes: int, is_masked: bool, is_cpu: bool
) -> int:
    """Return what attention saves per token, except its norms."""
    if isinstance(kind, SoftmaxAttention):
        return _softmax_bytes(
            kind, seq_len=seq_len, dtype_bytes=dtype_bytes, is_masked=is_masked, is_cpu=is_cpu
        )
    if isinstance(kind, DeltaAttention):
        return _delta_bytes(kind, dtype_bytes=dtype_bytes)
    return FP32_BYTES * (kind.kept_features or kind.width * (2 + kind.state_size))


def _softmax_bytes(
    kind: SoftmaxAttention, *, seq_len: int, dtype_bytes: int, is_masked: bool, is_cpu: bool
) -> int:
    """Return what softmax attention saves per token.

    A fused kernel saves queries, keys, values and its output; with a mask, keys and values are
    repeated to all heads. Without a fused kernel (soft caps, sinks, and on a CPU queries wider than
    values) keys and values are repeated too, and the scores are saved in place of the output: on a
    CPU in fp32, capped ones before and after the softmax. A view keeps its whole base tensor alive.
    """
    num_heads, qk_dim, v_dim = kind.num_heads, kind.qk_dim, kind.v_dim
    if kind.scores != "fused" or (is_cpu and not kind.is_even):
        element_bytes = dtype_bytes if kind.scores != "fused" else FP32_BYTES
        return num_heads * (2 * qk_dim + v_dim) * element_bytes + score_bytes_per_token(
            kind, seq_len=seq_len, dtype_bytes=dtype_bytes, is_cpu=is_cpu
        )
    num_kv_heads = num_heads if is_masked else kind.num_kv_heads
    features = (num_heads + num_kv_heads) * (qk_dim + v_dim)
    if kind.is_latent:  # values are slices of the tensor that keys come from
        features += num_heads * (qk_dim - kind.rotary_dim)
    if kind.is_fused:
        features += (num_heads + kind.num_kv_heads) * qk_dim
    if kind.has_output_gate:
        features += num_heads * (2 * v_dim + (qk_dim if dtype_bytes == FP32_BYTES else 0))
    return features * dtype_bytes


def score_bytes_per_token(kind: Attention, *, seq_len: int, dtype_bytes: int, is_cpu: bool) -> int:
    """Return what saved scores take per token; 0 if a fused kernel never materializes them."""
    if not isinstance(kind, SoftmaxAttention):
        return 0
    if kind.scores == "fused":
        is_written = is_cpu and not kind.is_even
        return kind.num_heads * seq_len * FP32_BYTES if is_written else 0
    score_bytes = dtype_bytes
    if kind.scores == "capped":
        score_bytes += dtype_bytes + (FP32_BYTES if dtype_bytes != FP32_BYTES else 0)
    return kind.num_heads * seq_len * score_bytes


def _delta_bytes(kind: DeltaAttention, *, dtype_bytes: int) -> int:
    """Return what a gated delta net saves per token, counted in transformers' own code.

    All of it is in fp32, except the convolved features and the gated output: products within
    chunks, the state after each chunk, and what queries, keys and values are turned into before.
    """
    k, v, c = kind.key_dim, kind.value_dim, DELTA_CHUNK_TOKENS
    is_cast = dtype_bytes != FP32_BYTES
    head = (8 if is_cast else 12) * k + (5 if is_cast else 6) * v + 5 * c + k * v // c
    others = 2 * kind.conv_features + (kind.num_value_heads * v if is_cast else 0)
    return FP32_BYTES * kind.num_value_heads * head + others * dtype_bytes


def adapter_input_bytes(
    adapted: tuple[Linear, ...], *, spec: AdapterSpec, dtype_bytes: int, is_cpu: bool
) -> int:
    """Return what low-rank branches save per token.

    Branches in the base's dtype save each input once, and `rank` features of it per linear. peft's
    are in fp32: in fp32 models linears that read the same tensor share it, otherwise it is cast for
    each of them. After a dropout each has an input of its own, and the mask: a byte per element on
    a GPU, on a CPU a factor in the input's dtype.
    Branches of experts save the hidden state without a cast, and `rank` features for each routed
    row. Of DoRA each output is saved before it is scaled; peft's scales both a linear's own and the
    branch's, in fp32.
    """
    inputs: dict[tuple[str, str], int] = {}
    for linear in adapted:
        if linear.group == "experts":
            rank = filled(spec.rank_of(linear), dtype_bytes)
            features = linear.active * rank + (0 if linear.is_down else linear.d_in)
            inputs[linear.group, linear.name] = features * dtype_bytes
            continue
        counts = spec.counts_of(linear)
        if counts is not None:
            inputs[linear.group, f"{linear.name}: saved"] = int(counts.saved.per_token)
            if counts.saves_input:
                key = (linear.group, "input" if linear.reads == "input" else linear.name)
                inputs[key] = linear.active * linear.d_in * dtype_bytes
            continue
        is_grouped = spec.are_branches_grouped
        is_shared = (is_grouped or dtype_bytes == FP32_BYTES) and not spec.reads_alone(linear)
        key = (linear.group, "input" if is_shared else linear.name)
        element_bytes = dtype_bytes if is_grouped else FP32_BYTES
        mask_bytes = (element_bytes if is_cpu else 1) if spec.has_dropout else 0
        inputs[key] = linear.active * linear.d_in * (element_bytes + mask_bytes)
        if is_grouped:
            inputs[linear.group, f"{linear.name}: low"] = spec.rank_of(linear) * dtype_bytes
    outputs = sum(linear.d_out for linear in adapted) if spec.is_dora else 0
    output_bytes = dtype_bytes + (0 if spec.are_branches_grouped else FP32_BYTES)
    return sum(inputs.values()) + output_bytes * outputs


def method_bytes(linears: Sequence[Linear], *, spec: AdapterSpec) -> int:
    """Return what other methods than LoRA save of whole weights, however many tokens there are."""
    counts = (spec.counts_of(linear) for linear in linears)
    return int(sum(max(0.0, one.saved.fixed) for one in counts if one is not None))


def update_bytes(linears: Sequence[Linear], *, spec: AdapterSpec, num_tokens: int) -> int:
    """Return the most that is live within one module of another method than LoRA."""
    counts = (spec.counts_of(linear) for linear in linears)
    live = (one.live.at(num_tokens) for one in counts if one is not None)
    return int(max(0.0, *live, 0.0)) if spec.method is not None else 0


def whole_input_bytes(layer: LayerFacts, *, spec: AdapterSpec, dtype_bytes: int) -> int:
    """Return what gradients of a layer's own weights read per token, if these train.

    That is each linear's input, once for those that read the same, and what norms scale.
    """
    if spec.whole is None:
        return 0
    inputs = {
        (x.group, "input" if x.reads == "input" else x.name): x.active * x.d_in
        for x in layer.linears
    }
    return dtype_bytes * (sum(inputs.values()) + layer.normed_features)


def cast_bytes(linears: Sequence[Linear], *, spec: AdapterSpec, dtype_bytes: int) -> int:
    """Return the bytes of A and of scaled B of linear layers, as a visit's products read them.

    With DoRA also B times what outputs are scaled by, and that.
    """
    if not spec.are_branches_grouped:
        return 0
    ranks = [(linear, spec.rank_of(linear)) for linear in linears]
    factors = sum(dtype_bytes * linear.adapter_parameters(rank) for linear, rank in ranks)
    if not spec.is_dora:
        return factors
    return factors + sum(linear.d_out * (dtype_bytes * rank + FP32_BYTES) for linear, rank in ranks)


def dora_bytes(adapted: tuple[Linear, ...], *, spec: AdapterSpec, dtype_bytes: int) -> int:
    """Return what is live while peft computes the norm of the widest linear's merged weight.

    We make no such weight; gradients that we scale are live when a visit takes less than its most.
    """
    if not spec.is_dora or spec.are_branches_grouped:
        return 0
    copies = DORA_WEIGHT_COPIES[dtype_bytes]
    return FP32_BYTES * max(x.d_in**2 + copies * x.num_weights for x in adapted)


def gradient_bytes(
    facts: ModelFacts,
    layer: LayerFacts,
    *,
    seq_len: int,
    dtype_bytes: int,
    form: ExpertsForm,
    fused: FusedParts = NOTHING,
    adapted: Sequence[Linear] = (),
) -> int:
    """Return the gradients per token that are live together with all saved activations.

    A fused activation's is live with both that it makes, while an adapter's input after it is freed
    before. Of materialized scores two gradients are live at once, before and after the softmax.
    """
    kind, widest = layer.attention, 0
    if isinstance(kind, SoftmaxAttention) and kind.scores != "fused":
        widest = 2 * kind.num_heads * seq_len * dtype_bytes
    for linear in layer.linears:
        if linear.is_down and linear.group == "experts":
            width = gradient_features(linear, form)
            widest = max(widest, linear.active * width * dtype_bytes)
        elif linear in fused.downs:
            widths = 2 if linear in adapted else 3
            widest = max(widest, widths * linear.d_in * dtype_bytes)
        elif linear.is_down:
            cast_bytes = 0 if dtype_bytes == FP32_BYTES else FP32_BYTES
            widest = max(widest, linear.d_in * (2 * dtype_bytes + cast_bytes))
    return facts.hidden_size * dtype_bytes + widest
