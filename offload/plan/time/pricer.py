"""The primitives of costs: matrix products, and passes over memory."""

from dataclasses import dataclass

from offload.plan.facts.facts import ModelFacts
from offload.plan.facts.linears import FP32_BYTES, Linear
from offload.plan.facts.workload import Workload
from offload.plan.machine.machine import EAGER_FRAC, FUSED_FRAC, MEASURED, Machine
from offload.plan.time.expert_passes import Way, tile_rows, way_of
from offload.plan.time.roofline import Work, gemm

# glibc's mmap threshold grows up to this (mallopt(3), DEFAULT_MMAP_THRESHOLD_MAX).
MAPPED_BYTES = 32 * 2**20
SUM_PASSES = 3  # of a sum of two tensors: both are read, the result is written
# A loop over experts waits for the host at each of them. By others' figures a layer's products then
# take 4.2 times as long as grouped ones (prefill of huggingface.co/datasets/docs-benchmarks/
# experts-backends: 269.9 and 64.3 ms), 3 to 4 (OpenSenseNova/SenseNova-U1/pull/284) and more than 5
# in training (axolotl-ai-cloud/axolotl/pull/3260). Assumed until a run measures it.
LOOP_SLOWDOWN = 4.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Pricer:
    """Puts operations of one micro-batch on one machine's roofline."""

    machine: Machine
    facts: ModelFacts
    workload: Workload

    @property
    def way(self) -> Way:
        """The memory passes of experts, outside their products."""
        b = self.workload.dtype_bytes
        return way_of(
            self.machine.experts_implementation.value,
            is_adapted=self.workload.adapter.experts,
            is_ours=self.machine.device == "cpu" and b < FP32_BYTES,
            dtype_bytes=b,
        )

    def gemm(self, m: int, k: int, n: int) -> Work:
        """One matrix product, in a single kernel."""
        roof = gemm(self.machine, m=m, k=k, n=n, dtype_bytes=self.workload.dtype_bytes)
        is_compute = roof.compute_s >= roof.memory_s
        product = Work(
            compute_s=roof.compute_s if is_compute else 0.0,
            memory_s=0.0 if is_compute else roof.memory_s,
            flops=2.0 * m * k * n,
            num_ops=1,
        )
        return product + self.cold(k * n * self.workload.dtype_bytes)

    def cold(self, num_bytes: float) -> Work:
        """Reads of weights from memory, which on a CPU do not overlap with arithmetic."""
        is_cpu = self.machine.device == "cpu"
        return Work(memory_s=num_bytes / self.machine.h2d_bytes_per_s.value if is_cpu else 0.0)

    def traffic(self, num_bytes: float, *, num_ops: float, is_fused: bool = False) -> Work:
        """Reads and writes of device memory, by eager operators or by a kernel that fuses them."""
        rate = self.machine.memory_bytes_per_s.value
        if is_fused and self.machine.device == "cuda":
            rate *= FUSED_FRAC / EAGER_FRAC
        return Work(memory_s=num_bytes / rate, num_ops=num_ops)

    def new_memory(self, num_bytes: float, *, num_ops: float, tensor_bytes: int) -> Work:
        """Traffic of new tensors; a CPU's allocator maps large ones anew each time."""
        at = self.machine
        is_mapped = at.device == "cpu" and tensor_bytes >= MAPPED_BYTES
        rate = at.host_memory_bytes_per_s if is_mapped else at.memory_bytes_per_s
        return Work(memory_s=num_bytes / rate.value, num_ops=num_ops)

    def tiled(self, rows: float, num_experts: float) -> float:
        """Return routed rows and the empty ones of tiles: on average half a tile of each expert.

        torch has one kernel for grouped products on the cards that have the large tiles.
        """
        if not self.way.is_tiled:
            return rows
        per_expert = round(rows / num_experts)
        height = tile_rows(per_expert, is_large=self.machine.has_grouped_gemm)
        return rows + min(num_experts, rows) * height / 2

    def experts(self, linear: Linear) -> Work:
        """Grouped product: each expert's matrix is read once, each routed row uses one matrix."""
        rows = self.workload.num_tokens * linear.active
        flops = 2.0 * rows * linear.d_in * linear.d_out
        num_bytes = linear.num_weights + rows * (linear.d_in + linear.d_out)
        at = self.machine
        compute_s = flops / at.expert_gemm_flops_per_s.value
        compute_s *= self.tiled(rows, linear.num_experts) / rows
        is_measured = at.expert_gemm_flops_per_s.source == MEASURED
        if at.loops_over_experts and at.device == "cuda" and not is_measured:
            compute_s *= LOOP_SLOWDOWN
        traffic_s = num_bytes * self.workload.dtype_bytes / at.memory_bytes_per_s.value
        is_compute = compute_s >= traffic_s
        return Work(
            compute_s=compute_s if is_compute else 0.0,
            memory_s=0.0 if is_compute else traffic_s,
            flops=flops,
            num_ops=self.expert_launches(linear),
        ) + self.cold(linear.num_weights * self.workload.dtype_bytes)

    def expert_launches(self, linear: Linear) -> int:
        """Launches of one product of rows with their experts' matrices."""
        rows = self.workload.num_tokens * linear.active
        return min(linear.num_experts, rows) if self.machine.loops_over_experts else 1

    def matmul(self, linear: Linear) -> Work:
        """A linear layer, or that of all experts."""
        if linear.group == "experts":
            return self.experts(linear)
        one = self.gemm(self.workload.num_tokens, linear.d_in, linear.d_out)
        return one.times(linear.active)

    def added_up(self, num_elements: int, *, num_tensors: int) -> Work:
        """A new gradient is written and read, and added to one in fp32."""
        element_bytes = 2 * self.workload.dtype_bytes + 2 * FP32_BYTES
        return self.traffic(num_elements * element_bytes, num_ops=2 * num_tensors)
