"""The time of low-rank branches, in addition to the products that they are added to.

A product with few columns is one pass over its long side, however few they are: kernels compute at
least 16. So a machine has a separate rate for 16 columns; further columns cost as much as in large
products. A branch of rank r is two such products: in fp32 where peft computes it, otherwise in the
weights' dtype.
"""

from collections.abc import Sequence

from offload.plan.facts.facts import (
    AdapterSpec,
    MethodCounts,
    PassCounts,
    num_norms,
    num_scaled,
    num_sums,
    sum_rows,
)
from offload.plan.facts.linears import FP32_BYTES, Linear
from offload.plan.machine.machine import TALL_COLUMNS, Rate
from offload.plan.time.expert_passes import BranchPasses
from offload.plan.time.pricer import SUM_PASSES, Pricer
from offload.plan.time.roofline import VisitWork, Work

LORA_OPS, LORA_BACKWARD_OPS = 6, 11
# Of peft's DoRA: fp32 passes over a merged weight, for its norm, and over each branch's output.
DORA_WEIGHT_PASSES, DORA_OUTPUT_PASSES, DORA_OPS = 9, 8, 14


def branches(at: Pricer, adapted: Sequence[Linear], *, left_out: Sequence[Linear]) -> VisitWork:
    """Price all branches of a layer.

    Args:
        at: Prices a micro-batch.
        adapted: The layer's linears with branches.
        left_out: Its linears whose outputs a recompute leaves out.
    """
    spec, linears = at.workload.adapter, [x for x in adapted if x.group != "experts"]
    total = VisitWork()
    if spec.has_dropout and spec.method is None:
        total = sum((_dropout(at, linear) for linear in linears), start=total)
    if spec.are_branches_grouped:
        for group in _groups(linears, spec):
            total = total + _grouped(at, group, left_out)
        linears = []
    if spec.method is not None:
        return sum((_by_peft(at, spec.counts_of(linear)) for linear in linears), start=total)
    for linear in linears:
        total = total + linear_branch(at, linear)
    experts = (linear for linear in adapted if linear.group == "experts")
    return sum((expert_branch(at, linear, left_out) for linear in experts), start=total)


def _by_peft(at: Pricer, counts: MethodCounts | None) -> VisitWork:
    """Price an adapter of another method than LoRA, from counts of its module's operations."""
    assert counts is not None
    forward, backward = _counted(at, counts.forward), _counted(at, counts.backward)
    return VisitWork(forward=forward, recompute=forward, backward=backward)


def _counted(at: Pricer, counts: PassCounts) -> Work:
    tokens, machine = at.workload.num_tokens, at.machine
    fp32, half = counts.fp32_flops.at(tokens), counts.half_flops.at(tokens)
    is_fp32 = at.workload.dtype_bytes == FP32_BYTES
    fp32_rate = machine.gemm_flops_per_s if is_fp32 else machine.vector_flops_per_s
    seconds = fp32 / fp32_rate.value + half / machine.gemm_flops_per_s.value
    return Work(compute_s=seconds, flops=fp32 + half) + at.traffic(
        counts.num_bytes.at(tokens), num_ops=counts.num_ops
    )


def _dropout(at: Pricer, linear: Linear) -> VisitWork:
    """Price the dropout before a branch, and the sum of the gradients by its input.

    On a GPU one kernel reads the input, and writes its result and a byte of mask per element; on a
    CPU factors of 0 or 1 / (1 - p) are drawn, scaled and multiplied with the input.
    """
    b, is_cpu = at.workload.dtype_bytes, at.machine.device == "cpu"
    element_bytes = b if at.workload.adapter.are_branches_grouped else FP32_BYTES
    forward, backward = 2 * element_bytes + 1, 2 * element_bytes + 1
    if is_cpu:
        forward, backward = 7 * element_bytes, 3 * element_bytes
    elements = at.workload.num_tokens * linear.d_in
    once = at.traffic(elements * forward, num_ops=3 if is_cpu else 1)
    # the frozen product's gradient does not start from the branch's: both are added up afterwards
    summed = SUM_PASSES * b - b
    back = at.traffic(elements * (backward + summed), num_ops=2)
    return VisitWork(forward=once, recompute=once, backward=back)


def _groups(linears: Sequence[Linear], spec: AdapterSpec) -> list[list[Linear]]:
    """Divide the linears of a layer into those that read one input."""
    groups: dict[tuple[str, str], list[Linear]] = {}
    for linear in linears:
        key = (linear.group, linear.name if spec.reads_alone(linear) else "input")
        groups.setdefault(key, []).append(linear)
    return list(groups.values())


def _grouped(at: Pricer, group: Sequence[Linear], left_out: Sequence[Linear]) -> VisitWork:
    """Price the branches of linears that read one input, in the base's dtype.

    Forward: one narrow product reads the input; the product of each B is written, and read by the
    frozen one that adds to it; a recompute does not compute those that are left out. Backward: each
    output's gradient is read twice, for A x and for B; the input is read for A, its gradient is
    written, and each base product adds to it. A and B are joined and cast; the gradients of B are
    scaled, and both are cast and added up.
    """
    spec, tokens, b = at.workload.adapter, at.workload.num_tokens, at.workload.dtype_bytes
    ranks = [spec.rank_of(linear) for linear in group]
    d_in, num, is_cast = group[0].d_in, len(group), b != FP32_BYTES
    inputs = _narrow(at, tokens * d_in, sum(ranks))
    outputs = [
        _narrow(at, tokens * linear.d_out, rank) for linear, rank in zip(group, ranks, strict=True)
    ]
    a = d_in * sum(ranks)
    b_factors = sum(x.d_out * rank for x, rank in zip(group, ranks, strict=True))
    cast_bytes = FP32_BYTES + b if is_cast else 0
    joined_bytes = 2 * FP32_BYTES if num > 1 else 0
    shared = inputs + at.traffic(
        a * (joined_bytes + cast_bytes + b) + b_factors * cast_bytes,
        num_ops=1 + (num > 1) + is_cast + num * is_cast,
    )
    added = [
        work + at.traffic(b * linear.d_out * (tokens + rank), num_ops=1)
        for linear, rank, work in zip(group, ranks, outputs, strict=True)
    ]
    scaled = [_scaled(at, linear, rank) for linear, rank in zip(group, ranks, strict=True)]
    added = [work + one.forward for work, one in zip(added, scaled, strict=True)]
    computed = [work for x, work in zip(group, added, strict=True) if x not in left_out]
    backward = at.traffic(
        b * tokens * d_in * num
        + a * (2 * b + cast_bytes + 3 * FP32_BYTES)
        + b_factors * (2 * b + cast_bytes + 5 * FP32_BYTES),
        num_ops=2 + is_cast + num * (5 + is_cast),
    )
    backward = sum((work.times(2) for work in (inputs, *outputs)), start=backward)
    backward = sum((one.backward for one in scaled), start=backward)
    call = Work(num_calls=1)
    return VisitWork(
        forward=sum(added, start=shared) + call,
        recompute=sum(computed, start=shared) + call,
        backward=backward + call,
    )


def _scaled(at: Pricer, linear: Linear, rank: int) -> VisitWork:
    """Price what DoRA does with the output of a linear in each micro-batch.

    Forward: a pass scales the frozen product as it is added to the branch's. Backward: a pass
    scales its gradient, another multiplies that with the product in fp32 and adds it up; the
    gradient of B is multiplied with B, and scaled.
    """
    if not at.workload.adapter.is_dora:
        return VisitWork()
    tokens, b, d_out = at.workload.num_tokens, at.workload.dtype_bytes, linear.d_out
    device, elements = at.machine.device, tokens * d_out
    scaled, sums = num_scaled(tokens, d_out, device), num_sums(tokens, d_out, device)
    once = at.traffic(2 * b * elements + scaled * FP32_BYTES * d_out, num_ops=scaled)
    rows = min(tokens, sum_rows(d_out, device))
    num_bytes = (2 * b + 2 * FP32_BYTES) * elements + 2 * FP32_BYTES * rows * d_out
    num_bytes += d_out * (12 * FP32_BYTES + rank * (5 * FP32_BYTES + b))
    summed = at.traffic(num_bytes, num_ops=sums + 8)  # with that of the magnitudes, to those before
    return VisitWork(forward=once, recompute=once, backward=once + summed)


def _narrow(at: Pricer, num_elements: float, rank: int) -> Work:
    """Price a product of `rank` columns in the base's dtype, whose long side has these elements."""
    flops = 2.0 * num_elements * rank
    is_fp32 = at.workload.dtype_bytes == FP32_BYTES
    machine = at.machine
    large = machine.gemm_flops_per_s
    sides = long_sides(
        num_elements,
        rank,
        tall=machine.tall_fp32_flops_per_s if is_fp32 else machine.tall_gemm_flops_per_s,
        large=large,
    )
    return Work(compute_s=flops / large.value, flops=flops) + sides


def long_sides(num_elements: float, rank: int, *, tall: Rate, large: Rate) -> Work:
    """Price the extra time of products with `rank` columns over the rate of large ones."""
    whole_s = TALL_COLUMNS / tall.value + max(0, rank - TALL_COLUMNS) / large.value
    return Work(memory_s=2 * num_elements * max(0.0, whole_s - rank / large.value))


def linear_branch(at: Pricer, linear: Linear) -> VisitWork:
    """Price the branch of one linear layer as peft computes it; operations include its products.

    Forward: the input is cast, the branch's output scaled, added to that of the frozen product, and
    the sum cast. Backward: the output's gradient is cast for either side and scaled; that of the
    branch's input is cast, and added to that of the frozen product.
    """
    b, tokens, is_dora = (
        at.workload.dtype_bytes,
        at.workload.num_tokens,
        at.workload.adapter.is_dora,
    )
    cast_bytes = b + FP32_BYTES if b != FP32_BYTES else 0
    output_bytes = cast_bytes + 4 * FP32_BYTES + b
    dora_bytes = DORA_OUTPUT_PASSES * FP32_BYTES if is_dora else 0
    there = linear.d_in * cast_bytes + linear.d_out * (output_bytes + dora_bytes)
    back = linear.d_in * (cast_bytes + SUM_PASSES * b)
    back += linear.d_out * (2 * cast_bytes + 2 * FP32_BYTES + 2 * dora_bytes)
    products = _fp32_products(at, linear)
    forward = products + at.traffic(tokens * there, num_ops=LORA_OPS)
    backward = products.times(2) + at.traffic(tokens * back, num_ops=LORA_BACKWARD_OPS)
    return VisitWork(forward=forward, recompute=forward, backward=backward)


def _fp32_products(at: Pricer, linear: Linear) -> Work:
    """Price both products of a branch in fp32, without launches."""
    machine, spec = at.machine, at.workload.adapter
    rank, tokens = spec.rank_of(linear), at.workload.num_tokens
    features = linear.d_in + linear.d_out
    flops = 2.0 * tokens * rank * features
    products = Work(compute_s=flops / machine.vector_flops_per_s.value, flops=flops)
    sides = long_sides(
        tokens * features,
        rank,
        tall=machine.tall_fp32_flops_per_s,
        large=machine.vector_flops_per_s,
    )
    return products + sides


def dora_norm(at: Pricer, linear: Linear) -> Work:
    """Price peft's norm of a merged weight, for which A and B pass an identity."""
    spec = at.workload.adapter
    if not spec.is_dora or spec.are_branches_grouped:
        return Work()
    rank = spec.rank_of(linear)
    flops = 2.0 * linear.d_in * rank * (linear.d_in + linear.d_out)
    passes = linear.d_in**2 + DORA_WEIGHT_PASSES * linear.num_weights
    arithmetic = Work(compute_s=flops / at.machine.vector_flops_per_s.value, flops=flops)
    return arithmetic + at.new_memory(
        FP32_BYTES * passes, num_ops=DORA_OPS, tensor_bytes=FP32_BYTES * linear.num_weights
    )


def visit_norm(at: Pricer, linear: Linear) -> Work:
    """Price the norm of a merged weight as we compute it, in a layer's visit upwards.

    In chunks of rows W is cast to fp32, the product of B and A is added to it, and it is read.
    """
    spec, b, machine = at.workload.adapter, at.workload.dtype_bytes, at.machine
    if not spec.is_dora or not spec.are_branches_grouped:
        return Work()
    rank, num_weights = spec.rank_of(linear), linear.num_weights
    chunks = num_norms(linear.d_out, linear.d_in, machine.device)
    num_bytes = num_weights * (b + 4 * FP32_BYTES) + chunks * FP32_BYTES * linear.d_in * rank
    num_bytes += linear.d_out * (rank + 1) * FP32_BYTES
    flops = 2.0 * num_weights * rank
    product = Work(compute_s=flops / machine.vector_flops_per_s.value, flops=flops)
    return product + at.traffic(num_bytes, num_ops=3 * chunks)


def visit_scale(at: Pricer, linear: Linear) -> Work:
    """Price magnitudes over norms, and B times these, once in each visit, up and down."""
    spec, b = at.workload.adapter, at.workload.dtype_bytes
    if not spec.is_dora or not spec.are_branches_grouped:
        return Work()
    is_cast = b != FP32_BYTES
    element_bytes = 2 * FP32_BYTES + (b + FP32_BYTES) * is_cast
    num_bytes = linear.d_out * (spec.rank_of(linear) * element_bytes + 6 * FP32_BYTES)
    return at.traffic(num_bytes, num_ops=3 + is_cast)


def expert_branch(at: Pricer, linear: Linear, left_out: Sequence[Linear] = ()) -> VisitWork:
    """Price its products; A and B are read in fp32, cast to the weights' dtype and reread.

    A recompute that leaves out the projection still computes A x, which the gradient of B reads.
    """
    machine, way = at.machine, at.way
    rank, b = at.workload.adapter.rank_of(linear), at.workload.dtype_bytes
    rows, num_factors = at.workload.num_tokens * linear.active, linear.adapter_parameters(rank)

    def products(features: float) -> Work:
        flops = 2.0 * rows * rank * features
        product = Work(compute_s=flops / machine.expert_gemm_flops_per_s.value, flops=flops)
        if not way.branch_sides:
            return product
        elements = way.branch_sides * rows * features
        tall, large = machine.tall_gemm_flops_per_s, machine.gemm_flops_per_s
        return product + long_sides(elements, rank, tall=tall, large=large)

    def passed(passes: BranchPasses, factor_bytes: float) -> Work:
        features = passes.d_in * linear.d_in + passes.d_out * linear.d_out
        num_ops = passes.launches.of(min(linear.num_experts, rows))
        num_ops += passes.num_products * at.expert_launches(linear)
        of_rows = at.traffic(rows * features * b, num_ops=num_ops, is_fused=way.is_fused)
        return of_rows + at.traffic(num_factors * factor_bytes, num_ops=0)

    both, cast_bytes = products(linear.d_in + linear.d_out), FP32_BYTES + 2 * b
    gradient_bytes = way.factor_passes * b + way.factor_fp32_passes * FP32_BYTES
    whole = both + passed(way.branch_forward, cast_bytes)
    inner = products(linear.d_in) + passed(way.branch_inner, cast_bytes)
    return VisitWork(
        forward=whole,
        recompute=inner if linear in left_out else whole,
        backward=both.times(2) + passed(way.branch_backward, gradient_bytes),
    )
