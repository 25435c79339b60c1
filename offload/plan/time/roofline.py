"""FLOPs, bytes and their time: the formulas, without a model.

An operation takes as long as the slower of its arithmetic and its memory traffic. If a published
count differs from the exact one, both are here under their own names.
"""

from dataclasses import dataclass
from typing import Literal

from offload.plan.facts.facts import LayerFacts, ModelFacts
from offload.plan.facts.linears import FP32_BYTES, seen_tokens
from offload.plan.machine.machine import Machine

Bound = Literal["compute", "memory", "launch"]
# A function of our own, its part of autograd's graph and its launcher are code of Python: the host
# issues so many of torch's operators in that time. Measured on a CPU: 45 to 56 us for a fused norm
# whose kernel does nothing, 7.4 for an operator of the model's code.
OPS_PER_CALL = 6


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """Operations one after another."""

    compute_s: float = 0.0  # their arithmetic time
    memory_s: float = 0.0  # their traffic time
    flops: float = 0.0  # their arithmetic
    num_ops: float = 0  # their number
    num_calls: float = 0  # the number of functions of our own that issue some of them

    def __add__(self, other: "Work") -> "Work":
        return Work(
            compute_s=self.compute_s + other.compute_s,
            memory_s=self.memory_s + other.memory_s,
            flops=self.flops + other.flops,
            num_ops=self.num_ops + other.num_ops,
            num_calls=self.num_calls + other.num_calls,
        )

    def times(self, factor: float) -> "Work":
        """Return the same operations that many times."""
        return Work(
            compute_s=self.compute_s * factor,
            memory_s=self.memory_s * factor,
            flops=self.flops * factor,
            num_ops=self.num_ops * factor,
            num_calls=self.num_calls * factor,
        )

    def host_s(self, machine: Machine) -> float:
        """Return the time in which the host issues them."""
        return (self.num_ops + OPS_PER_CALL * self.num_calls) * machine.launch_s.value

    def seconds(self, machine: Machine) -> float:
        """Return their time: a GPU overlaps them with launches, on a CPU the two add up."""
        work_s, host_s = self.compute_s + self.memory_s, self.host_s(machine)
        return max(work_s, host_s) if machine.device == "cuda" else work_s + host_s

    def awaited_s(self, machine: Machine) -> float:
        """Return their time where the host issues them only once the device has nothing left."""
        return self.compute_s + self.memory_s + self.host_s(machine)

    def bound(self, machine: Machine) -> Bound:
        """Return what most of their time goes to; a GPU overlaps its work with launches."""
        larger_s = max(self.compute_s, self.memory_s)
        work_s = self.compute_s + self.memory_s if machine.device == "cuda" else larger_s
        if self.host_s(machine) > work_s:
            return "launch"
        return "compute" if self.compute_s == larger_s else "memory"


@dataclass(frozen=True, kw_only=True, slots=True)
class VisitWork:
    """Operations of a layer's visits, for one micro-batch."""

    forward: Work = Work()  # operations of a forward without a graph
    recompute: Work = Work()  # operations of a forward with one
    backward: Work = Work()  # operations of the backward after it
    again: Work = Work()  # operations that a backward repeats if the graph was kept

    def __add__(self, other: "VisitWork") -> "VisitWork":
        return VisitWork(
            forward=self.forward + other.forward,
            recompute=self.recompute + other.recompute,
            backward=self.backward + other.backward,
            again=self.again + other.again,
        )


Count = Literal["causal", "lecture", "lecture_full"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Roofline:
    """An operation's time in memory traffic and in arithmetic."""

    memory_s: float
    compute_s: float

    @property
    def time_s(self) -> float:
        """The longer of the two."""
        return max(self.memory_s, self.compute_s)


def elementwise(
    machine: Machine, *, num_elements: int, num_passes: int, dtype_bytes: int
) -> Roofline:
    """Price one operation per element; `num_passes` counts the tensors read and written."""
    return Roofline(
        memory_s=num_elements * num_passes * dtype_bytes / machine.memory_bytes_per_s.value,
        compute_s=num_elements / machine.vector_flops_per_s.value,
    )


def gemm(
    machine: Machine, *, m: int, k: int, n: int, dtype_bytes: int, flops_per_s: float | None = None
) -> Roofline:
    """Price (m, k) @ (k, n), by default at the rate of large products."""
    rate = machine.gemm_flops_per_s.value if flops_per_s is None else flops_per_s
    return Roofline(
        memory_s=(m * k + k * n + m * n) * dtype_bytes / machine.memory_bytes_per_s.value,
        compute_s=2 * m * k * n / rate,
    )


def attention_flops(
    *, num_tokens: int, context_tokens: int, width: int, count: Count, window: int | None = None
) -> float:
    """Count QK^T and PV over all heads.

    "causal" is exact up to the diagonal: 4 * width for each pair of a query and a key that it sees.
    "lecture" is 3 * width for each token and context token: two products and the scaling, halved by
    causality. "lecture_full" is the same without the half.

    Args:
        num_tokens: Queries; those of several sequences of context_tokens add up.
        context_tokens: Keys that the last query of a sequence sees, without a window.
        width: Heads times head dimension.
        count: Which count.
        window: Keys that a query of a sliding layer sees; exact counts only.
    """
    if count == "lecture":
        return 3.0 * width * num_tokens * context_tokens
    if count == "lecture_full":
        return 6.0 * width * num_tokens * context_tokens
    return 4.0 * width * num_tokens * seen_tokens(context_tokens, window)


def unfused_softmax_bytes(*, num_heads: int, seq_len: int, dtype_bytes: int) -> int:
    """Count the traffic of a softmax over stored scores: read once, write once."""
    return 2 * num_heads * seq_len * seq_len * dtype_bytes


def layer_elementwise_bytes(
    *, num_tokens: int, hidden_size: int, mlp_width: int, dtype_bytes: int
) -> int:
    """Count the traffic of 2 norms, 2 residual additions and 1 SwiGLU, each as one kernel."""
    norms, additions, swiglu = 2 * 2 * hidden_size, 2 * 3 * hidden_size, 3 * mlp_width
    return num_tokens * (norms + additions + swiglu) * dtype_bytes


def layer_flops(
    facts: ModelFacts, layer: LayerFacts, *, num_tokens: int, context_tokens: int, count: Count
) -> float:
    """Count the frozen products and attention of one layer's forward.

    The "lecture" counts use the hidden size as attention's width, and ignore the router.
    """
    weights = sum(
        linear.active * linear.d_in * linear.d_out
        for linear in layer.linears
        if count == "causal" or linear.group != "router"
    )
    products = 2.0 * num_tokens * weights
    if count == "causal":
        return products + num_tokens * layer.attention.flops_per_token(context_tokens)
    return products + attention_flops(
        num_tokens=num_tokens, context_tokens=context_tokens, width=facts.hidden_size, count=count
    )


# ---------------------------------------------------------------------------------------------
# What if: other options for storing a layer


def all_reduce_bytes(*, num_parameters: int, num_cards: int) -> float:
    """Count what a ring moves through each link to add up gradients, which are in fp32."""
    return 2 * (num_cards - 1) / num_cards * FP32_BYTES * num_parameters


def tensor_parallel_bytes(*, num_tokens: int, hidden_size: int, dtype_bytes: int) -> int:
    """Count what splitting a layer in two moves per forward: 2 gathers, 2 reduce-scatters."""
    return 4 * num_tokens * hidden_size * dtype_bytes
