"""The plan of sampling answers between the steps of a run: batches, passes over the layers, time.

Each new token is one pass over all layers. Its rows are in groups: the answers of a prompt, which
have one length and a key-value cache together. All groups compute a layer while its weights are in
their slot, so a pass takes the longer of its loads, which do not depend on the groups, and of what
all groups compute. Of few rows that is not arithmetic: a GPU reads the layer's weights from its
memory anew for each group, and the host issues the operators anew for each group.

Caches are in device memory next to what of a step stays there. Groups that do not fit together are
sampled one batch after another, and each batch has passes of its own.

Prices are those of a training step (`offload.plan.time`), but for two parts that few rows change.

Products. One with few rows is one pass over its weights, however few: the rate of products with 16
rows (`offload.plan.time.adapters`) is that of such a pass on a GPU. A CPU computes few rows in the
time of their arithmetic, or reads the weights at the rate of its memory. Of E experts, of which
each token takes k, T tokens reach E * (1 - (1 - k / E) ** T): each is left out by a token with
probability 1 - k / E, if all are equally likely.

Token mixing. A new token's keys and values are joined to the cache, which copies it (`DynamicLayer`
of transformers: torch.cat), and attention reads the copy: three passes. A delta rule reads and
writes a state of fixed size.

What a round does once is left out: the checks of a first pass, and drawing tokens from logits, but
for the passes over them that scoring has.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from offload.errors import DoesNotFitError
from offload.plan.facts.facts import LayerFacts
from offload.plan.facts.linears import (
    FP32_BYTES,
    DeltaAttention,
    Linear,
    SoftmaxAttention,
    has_fused_kernel,
)
from offload.plan.facts.workload import Workload
from offload.plan.machine.machine import GIB, TALL_COLUMNS
from offload.plan.memory.memory import (
    SLOTS,
    MemoryTerm,
    cache_bytes,
    free_bytes,
    layer_cache_bytes,
)
from offload.plan.plan import Plan
from offload.plan.schedule.op import Kind, Lane, Line, Route
from offload.plan.schedule.schedule import (
    MIN_SLOTS,
    PIECE_BYTES,
    Ring,
    Schedule,
    forward_schedule,
    slots_bytes,
    warm_ring,
)
from offload.plan.schedule.simulate import Pieces, merged_s
from offload.plan.step import load_sizes
from offload.plan.time.attention import (
    ATTENTION_OPS,
    DELTA_OPS,
    SCORE_OPS,
    SCORE_PASSES,
    attention_work,
)
from offload.plan.time.costs import (
    FRONT_OPS,
    Costs,
    frozen_products,
    layer_work,
    price,
    score_work,
    with_norms,
)
from offload.plan.time.pricer import Pricer
from offload.plan.time.roofline import Work

CACHE_PASSES, CACHE_OPS = 3, 2  # joined: read and written; read by attention. Keys, and values
# Host time besides that of operators, in which it would issue so many: the Python of a layer's
# modules and of its visit; before the layers the model's own forward, in which they are recorded,
# and after them that forward with its norm and head. Measured on a CPU: 0.28, 0.5 and 0.65 ms
# where an operator takes 4.6 us (tests/bench/LOG.md).
VISIT_OPS, AROUND_OPS = 60, {Kind.FRONT: 110, Kind.TAIL: 140}

Limit = Literal["link", "disk", "memory", "compute", "launches"]
"""What most of a pass's time goes to; `memory` is the device's own."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingRequest:
    """What a round samples."""

    num_prompts: int  # prompts
    num_answers: int  # answers of each prompt
    prompt_tokens: int  # tokens of a typical prompt
    longest_prompt: int  # tokens of the longest prompt
    new_tokens: int  # tokens of an answer, at most
    # Whether prompts of one length are one group; all are then taken to have one length.
    groups_share: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingPlan:
    """How a round samples, if every answer has all of its tokens."""

    groups_per_batch: int  # prompts whose answers are sampled together
    num_batches: int  # batches, one after another
    cache_bytes: int | None  # caches of a full batch at their largest; None if not known
    prefill_s: float  # seconds of a full batch's pass over its prompts
    pass_s: float  # seconds of a full batch's pass for one token of each row, caches half full
    sample_s: float  # seconds of all batches
    tokens_per_s: float  # new tokens of all rows in a second
    loads_per_pass: int  # layers that each pass copies to the device
    limited_by: Limit  # what most of `pass_s` goes to


def plan_sampling(plan: Plan, request: SamplingRequest) -> SamplingPlan:
    """Predict a round of sampling with what a training plan leaves on the device.

    A batch of answers with M tokens is one pass over its prompts, of one row each, and M - 1 passes
    of one token, whose caches grow evenly. Where it is not known what a layer keeps of a token, all
    prompts are one batch.

    Args:
        plan: The plan of a step.
        request: The answers that are sampled between two steps.

    Raises:
        DoesNotFitError: The caches of one prompt's answers do not fit next to the slots.
    """
    together, full_bytes = _admitted(plan, request)
    num_batches = math.ceil(request.num_prompts / together)
    last = request.num_prompts - (num_batches - 1) * together
    prefill, one = _batch(plan, request, together)
    last_prefill, last_one = _batch(plan, request, last)
    prefills_s = (num_batches - 1) * prefill.seconds + last_prefill.seconds
    passes_s = (num_batches - 1) * one.seconds + last_one.seconds
    sample_s = prefills_s + (request.new_tokens - 1) * passes_s
    num_tokens = request.num_prompts * request.num_answers * request.new_tokens
    return SamplingPlan(
        groups_per_batch=together,
        num_batches=num_batches,
        cache_bytes=full_bytes,
        prefill_s=prefill.seconds,
        pass_s=one.seconds,
        sample_s=sample_s,
        tokens_per_s=num_tokens / sample_s,
        loads_per_pass=one.schedule.num_loads,
        limited_by=one.limited_by,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class PassPlan:
    """One pass over the layers, after another pass."""

    seconds: float  # predicted seconds
    num_loads: int  # layers that it copies to the device
    limited_by: Limit  # what most of its time goes to


def plan_pass(
    plan: Plan, *, num_groups: int, num_rows: int, num_past: int, num_tokens: int = 1
) -> PassPlan:
    """Predict one pass over the layers, after another pass.

    Args:
        plan: The plan of a step.
        num_groups: Equal groups that pass each layer together.
        num_rows: Rows of each.
        num_past: Tokens of each row that are in its cache; 0 for a pass over prompts.
        num_tokens: Tokens of each row that are computed.
    """
    one = _Pass(
        plan=plan,
        num_groups=num_groups,
        num_rows=num_rows,
        num_past=num_past,
        num_tokens=num_tokens,
    )
    return PassPlan(
        seconds=one.seconds, num_loads=one.schedule.num_loads, limited_by=one.limited_by
    )


def pass_seconds(
    plan: Plan, *, num_groups: int, num_rows: int, num_past: int, num_tokens: int = 1
) -> float:
    """Return the seconds of `plan_pass`; the arguments are the same."""
    return plan_pass(
        plan,
        num_groups=num_groups,
        num_rows=num_rows,
        num_past=num_past,
        num_tokens=num_tokens,
    ).seconds


def reached_experts(num_experts: int, *, active: int, num_tokens: int) -> float:
    """Return how many experts some tokens are sent to, on average, if all are equally likely."""
    return num_experts * (1 - (1 - active / num_experts) ** num_tokens)


def _batch(plan: Plan, request: SamplingRequest, num_prompts: int) -> tuple["_Pass", "_Pass"]:
    """Return a batch's pass over its prompts, and the one in the middle of its answers.

    A prompt is one row, whose cache is repeated for its answers.
    """
    num_groups = 1 if request.groups_share else num_prompts
    num_rows = num_prompts // num_groups
    prefill = _Pass(
        plan=plan,
        num_groups=num_groups,
        num_rows=num_rows,
        num_past=0,
        num_tokens=request.prompt_tokens,
    )
    num_past = request.prompt_tokens + request.new_tokens // 2
    rows = num_rows * request.num_answers
    return prefill, replace(prefill, num_rows=rows, num_past=num_past, num_tokens=1)


# ---------------------------------------------------------------------------------------------
# Memory


def _admitted(plan: Plan, request: SamplingRequest) -> tuple[int, int | None]:
    """Return the prompts that are sampled together, and what their caches take.

    They are as many in each batch as in the fewest batches that fit.

    Raises:
        DoesNotFitError: Not even one does.
    """
    row_bytes = _row_bytes(plan, request)
    if row_bytes is None:
        return request.num_prompts, None
    prompt_bytes = request.num_answers * row_bytes
    num_fitting = free_bytes(plan.device_memory, _limit_bytes(plan)) // prompt_bytes
    if not num_fitting:
        raise _too_small(plan, request, prompt_bytes)
    num_batches = math.ceil(request.num_prompts / num_fitting)
    together = math.ceil(request.num_prompts / num_batches)  # a last batch of few costs as much
    return together, together * prompt_bytes


def _limit_bytes(plan: Plan) -> int:
    budget, vram = plan.request.vram_budget_bytes, plan.machine.vram_bytes
    return vram if budget is None else min(vram, budget)


def _row_bytes(plan: Plan, request: SamplingRequest) -> int | None:
    return cache_bytes(
        plan.facts,
        prompt_tokens=request.longest_prompt,
        new_tokens=request.new_tokens,
        dtype_bytes=plan.request.typical.dtype_bytes,
    )


def _too_small(plan: Plan, request: SamplingRequest, prompt_bytes: int) -> DoesNotFitError:
    free = free_bytes(plan.device_memory, _limit_bytes(plan))
    return DoesNotFitError(
        f"the key-value caches of one prompt's {request.num_answers} answers, of"
        f" {request.longest_prompt:,} tokens and {request.new_tokens:,} new ones, take"
        f" {prompt_bytes / GIB:.2f} GiB",
        limit=f"{free / GIB:.2f} GiB of device memory is free next to {plan.num_slots} slots on"
        f" {plan.machine.name}",
        hint=_nearest_fit(plan, request, prompt_bytes),
    )


def _nearest_fit(plan: Plan, request: SamplingRequest, prompt_bytes: int) -> str:
    """Name the nearest change that fits: slots first, which leave the training as it is."""
    for num_slots in range(plan.num_slots - 1, MIN_SLOTS - 1, -1):
        if prompt_bytes <= _free_with(plan, num_slots):
            return f"`offload.num_slots: {num_slots}`"
    fewest = min(plan.num_slots, MIN_SLOTS)
    free = _free_with(plan, fewest)
    slots = f" with `offload.num_slots: {fewest}`" if fewest < plan.num_slots else ""
    num_answers = free // (prompt_bytes // request.num_answers)
    if num_answers > 1:
        return f"`objective.num_answers: {num_answers}`{slots}"
    low, high = 0, request.new_tokens
    while high - low > 1:
        middle = (low + high) // 2
        shorter = _row_bytes(plan, replace(request, new_tokens=middle))
        assert shorter is not None
        low, high = (middle, high) if request.num_answers * shorter <= free else (low, middle)
    if low:
        return f"`objective.max_new_tokens: {low}`{slots}"
    return "shorter prompts, or a machine with more memory"


def _free_with(plan: Plan, num_slots: int) -> int:
    """Return what would be free with other slots."""
    slot_bytes = max(layer.weight_bytes for layer in plan.costs.layers)
    size = slots_bytes(num_slots, slot_bytes, plan.costs.head_bytes)
    terms = [
        MemoryTerm(name=SLOTS, num_bytes=size) if term.name == SLOTS else term
        for term in plan.device_memory
    ]
    return free_bytes(terms, _limit_bytes(plan))


# ---------------------------------------------------------------------------------------------
# Time


@dataclass(frozen=True, kw_only=True)
class _Pass:
    """One pass over the layers of equal groups, from the slots as another pass leaves them."""

    plan: Plan
    num_groups: int
    num_rows: int  # rows of a group
    num_past: int  # tokens of a row in its cache
    num_tokens: int  # tokens of a row that are computed

    @cached_property
    def seconds(self) -> float:
        """Predicted seconds."""
        lines = self.schedule.lines
        durations_s = [self._line_s(line) for line in lines]
        return merged_s(self.schedule, durations_s, num_micro_batches=self.num_groups)

    @cached_property
    def schedule(self) -> Schedule:
        """The program of one group; slots hold what a pass before it left there."""
        plan = self.plan
        sizes = load_sizes(plan.facts, self._load, plan.costs)
        sizes = replace(sizes, piece_bytes=max(sizes.layer_bytes), head_bytes=plan.costs.head_bytes)

        def after(ring: Ring) -> Schedule:
            return forward_schedule(sizes, ring=ring, num_micro_batches=1)

        return after(after(warm_ring(plan.num_slots)).ring_after)

    @property
    def limited_by(self) -> Limit:
        """What most of the time goes to, of what happens at once."""
        work = Work()
        link_s, read_s, decode_s = 0.0, 0.0, 0.0
        for line in self.schedule.lines:
            op, one_s = line.ops[0], self._line_s(line)
            if op.kind is Kind.DECODE and not isinstance(one_s, tuple):
                decode_s += one_s
            elif op.lane is Lane.H2D:
                pieces = one_s if isinstance(one_s, tuple) else ((0.0, one_s),)
                read_s += sum(piece[0] for piece in pieces)
                link_s += sum(piece[1] for piece in pieces)
            elif op.kind in (Kind.FRONT, Kind.TAIL):
                work += self._outside[op.kind]
            elif op.kind is Kind.FORWARD:
                work += self._works[op.layer_index]
        work = work.times(self.num_groups)
        moved_s = max(link_s, read_s)
        memory_s, host_s = work.memory_s + decode_s, work.host_s(self.plan.machine)
        if moved_s >= max(work.compute_s + memory_s, host_s):
            return "disk" if self._waits_for_disk(link_s, read_s) else "link"
        if host_s > work.compute_s + memory_s:
            return "launches"
        return "compute" if work.compute_s > memory_s else "memory"

    def _waits_for_disk(self, link_s: float, read_s: float) -> bool:
        is_read_at_once = self.plan.machine.device == "cpu"
        return self.plan.request.is_on_disk and (is_read_at_once or read_s > link_s)

    @cached_property
    def _load(self) -> Workload:
        return replace(
            self.plan.request.typical,
            micro_batch_size=self.num_rows,
            seq_len=self.num_tokens,
            label_tokens=self.num_rows,  # the head computes the last token of each row
            packed_tokens=None,
        )

    @cached_property
    def _at(self) -> Pricer:
        return Pricer(machine=self.plan.machine, facts=self.plan.facts, workload=self._load)

    @cached_property
    def _works(self) -> Sequence[Work]:
        """What each layer computes for a group."""
        facts = self.plan.facts
        kinds = {layer: self._layer_work(layer) for layer in set(facts.layers)}
        return [kinds[layer] for layer in facts.layers]

    def _layer_work(self, layer: LayerFacts) -> Work:
        at, kind = self._at, layer.attention
        work = layer_work(at, layer).visits.forward + frozen_products(at, layer).times(-1)
        work += sum((_product(at, linear) for linear in layer.linears), start=Work())
        work += Work(num_ops=VISIT_OPS)
        if not self.num_past:
            return work
        causal = attention_work(
            kind,
            at.machine,
            num_tokens=self._load.num_tokens,
            seq_len=self.num_tokens,
            dtype_bytes=self._load.dtype_bytes,
        )
        return work + causal.times(-1) + self._cached_attention(layer)

    def _cached_attention(self, layer: LayerFacts) -> Work:
        """Price token mixing with a cache: passes over it, and what it computes."""
        at, kind, rows = self._at, layer.attention, self.num_rows
        num_keys, b = self.num_past + self.num_tokens, self._load.dtype_bytes
        is_cuda = at.machine.device == "cuda"
        rate = at.machine.memory_bytes_per_s if is_cuda else at.machine.host_memory_bytes_per_s
        if isinstance(kind, DeltaAttention):
            state = layer_cache_bytes(kind, num_tokens=num_keys, num_new=1, dtype_bytes=b)
            assert state is not None
            flops = 6.0 * rows * kind.num_value_heads * kind.key_dim * kind.value_dim
            return Work(
                compute_s=flops / at.machine.vector_flops_per_s.value,
                memory_s=2 * rows * state / rate.value,
                flops=flops,
                num_ops=DELTA_OPS,
            )
        if not isinstance(kind, SoftmaxAttention):  # a state of fixed size
            return attention_work(
                kind, at.machine, num_tokens=rows * self.num_tokens, seq_len=1, dtype_bytes=b
            )
        num_seen = num_keys if kind.window is None else min(num_keys, kind.window)
        width = kind.num_kv_heads * (kind.qk_dim + kind.v_dim)
        passes = 1 if kind.reads_shared else CACHE_PASSES
        num_bytes = passes * rows * num_seen * width * b
        num_ops = ATTENTION_OPS + CACHE_OPS
        if not has_fused_kernel(kind, is_cuda=is_cuda):
            num_scores = kind.num_heads * rows * self.num_tokens * num_seen
            num_bytes += SCORE_PASSES * num_scores * b
            num_ops += SCORE_OPS - ATTENTION_OPS
        flops = 4.0 * kind.width * rows * self.num_tokens * num_seen
        return Work(
            compute_s=flops / at.machine.attention_flops_per_s.value,
            memory_s=num_bytes / rate.value,
            flops=flops,
            num_ops=num_ops,
        )

    @cached_property
    def _outside(self) -> dict[Kind, Work]:
        """What is computed for a group before the layers and after them."""
        at, load, facts = self._at, self._load, self.plan.facts
        tokens, hidden, num_outputs = load.label_tokens, facts.hidden_size, facts.num_outputs
        embedded_bytes = 2 * load.num_tokens * hidden * load.dtype_bytes
        head = Linear(name="head", group="mlp", d_in=hidden, d_out=num_outputs)
        tail = score_work(at, is_fused=False) + at.gemm(tokens, hidden, num_outputs).times(-1)
        return {
            Kind.FRONT: at.traffic(embedded_bytes, num_ops=FRONT_OPS + AROUND_OPS[Kind.FRONT]),
            Kind.TAIL: tail
            + _product(at, head, num_rows=tokens)
            + Work(num_ops=AROUND_OPS[Kind.TAIL]),
        }

    @cached_property
    def _costs(self) -> Costs:
        """The prices of the ops; rates of copies are those measured in a step, if one was."""
        plan, machine = self.plan, self.plan.machine
        known = plan.costs
        priced = price(
            plan.facts, machine, self._load, num_disk_readers=plan.request.num_disk_readers
        )
        layers = zip(known.layers, self._works, strict=True)
        priced = replace(
            priced,
            layers=tuple(replace(cost, forward_s=work.seconds(machine)) for cost, work in layers),
            speeds=known.speeds if known.grade == "calibrated" else priced.speeds,
        )
        num = self.num_groups
        return with_norms(priced, plan.facts, machine, self._load, num_micro_batches=num)

    def _line_s(self, line: Line) -> float | Pieces:
        """Return the seconds of a line, of a staged load those of its pieces."""
        op, costs, machine = line.ops[0], self._costs, self.plan.machine
        if op.kind is Kind.FRONT:
            return self._outside[op.kind].seconds(machine)
        if op.kind is Kind.TAIL:
            return self._outside[op.kind].awaited_s(machine)
        if op.kind is Kind.FORWARD:
            return costs.layers[op.layer_index].forward_s
        if op.kind is Kind.DECODE:
            return costs.layers[op.layer_index].decode_s
        pieces = [
            part.num_bytes for one in line.ops for part in one.pieces(one.num_bytes, PIECE_BYTES)
        ]
        copies = list(map(costs.speed(Route.LOAD).seconds, pieces))
        if op.kind is Kind.LOAD and self.plan.schedule.is_staged:
            return tuple(zip(map(costs.speed(Route.READ).seconds, pieces), copies, strict=True))
        return sum(copies)


def _product(at: Pricer, linear: Linear, *, num_rows: int | None = None) -> Work:
    """Price a product of some rows with a matrix, or with those of the experts that they reach.

    It takes the longer of its arithmetic and of one pass over the weights.

    Args:
        at: Prices a group.
        linear: The matrix, or the experts'.
        num_rows: Rows; None for all tokens of the group.
    """
    machine, b = at.machine, at.workload.dtype_bytes
    tokens = at.workload.num_tokens if num_rows is None else num_rows
    num_matrices, rows = float(linear.active), tokens * linear.active
    num_launches, rate = num_matrices, machine.gemm_flops_per_s
    if linear.group == "experts":
        rate = machine.expert_gemm_flops_per_s
        num_matrices = reached_experts(linear.num_experts, active=linear.active, num_tokens=tokens)
        num_launches = num_matrices if machine.loops_over_experts else 1.0
    weights = num_matrices * linear.d_in * linear.d_out
    flops = 2.0 * rows * linear.d_in * linear.d_out
    compute_s = flops / rate.value
    memory_s = weights * b / machine.memory_bytes_per_s.value
    if machine.device == "cuda":
        is_fp32 = b == FP32_BYTES
        tall = machine.tall_fp32_flops_per_s if is_fp32 else machine.tall_gemm_flops_per_s
        memory_s = 2 * TALL_COLUMNS * weights / tall.value
    is_compute = compute_s >= memory_s
    return Work(
        compute_s=compute_s if is_compute else 0.0,
        memory_s=0.0 if is_compute else memory_s,
        flops=flops,
        num_ops=num_launches,
    ) + at.cold(weights * b)
