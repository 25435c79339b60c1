"""Times pieces of a step on one device; `offload.probe.machine` turns them into rates.

Pieces are counted as the plan counts them, so a price is the time of what was timed, scaled.
"""

import ctypes
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from offload.plan.facts.linears import FP32_BYTES
from offload.plan.machine.machine import MIB, TALL_COLUMNS
from offload.plan.time.adapters import LORA_BACKWARD_OPS, LORA_OPS
from offload.plan.time.attention import FLASH_BACKWARD_FORWARDS, causal_flops
from offload.plan.time.pointwise import GATED, NORM, NORM_CASTS, NORM_WEIGHT

if TYPE_CHECKING:
    import torch

MIN_REPEATS = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """Sizes of the pieces.

    Products are (m, k, n), those of experts (experts, rows of each, k, n), those with few columns
    on one side (m, k), attention is (heads, tokens, head_dim).
    """

    gemm: tuple[int, int, int]
    experts: tuple[int, int, int, int]
    tall: tuple[int, int]
    attention: tuple[int, int, int]
    activation_bytes: int
    copy_bytes: int


CPU_SIZES = Sizes(
    gemm=(1024, 512, 1536),
    experts=(8, 64, 256, 512),
    tall=(1024, 512),
    attention=(4, 512, 64),
    activation_bytes=4 * MIB,
    copy_bytes=32 * MIB,
)
CUDA_SIZES = Sizes(
    gemm=(8192, 4096, 4096),
    experts=(32, 512, 2048, 1536),
    tall=(8192, 4096),
    attention=(32, 4096, 128),
    activation_bytes=256 * MIB,
    copy_bytes=256 * MIB,
)


class RateBench:
    """Times pieces of a step on one device."""

    def __init__(self, device: "torch.device", dtype: "torch.dtype", share_s: float) -> None:
        import torch

        self._device = device
        self._share_s = share_s
        self._is_cuda = device.type == "cuda"
        self._generator = torch.Generator(device).manual_seed(0)
        self.dtype = dtype
        self.sizes = CUDA_SIZES if self._is_cuda else CPU_SIZES
        self.num_threads = torch.get_num_threads()
        # glibc keeps what is freed only once it has seen a block of almost 32 MiB go (mallopt(3):
        # M_MMAP_THRESHOLD). A run's tensors see to that; before it, small tensors cost page faults,
        # and the same norms took 20 times as long in one probe as in the next.
        torch.empty(31 * MIB, dtype=torch.uint8)

    def gemm_flops_per_s(self, dtype: "torch.dtype") -> float:
        """Run the three products of an MLP, whose results are in memory at the same time."""
        m, k, n = self.sizes.gemm
        rows, gate, up, down = (
            self._random(dtype, *size) for size in ((m, k), (n, k), (n, k), (k, n))
        )

        def run() -> object:
            wide, other = rows @ gate.T, rows @ up.T
            return wide @ down.T, other

        return 3 * 2 * m * k * n / self._time_s(run)

    def tall_flops_per_s(self, dtype: "torch.dtype") -> float:
        """Run a low-rank branch's two products, and the four of its backward."""
        (m, k), r = self.sizes.tall, TALL_COLUMNS
        x, a, b, g = (self._random(dtype, *size) for size in ((m, k), (r, k), (k, r), (m, k)))

        def run() -> object:
            h = x @ a.T
            y, dh = h @ b.T, g @ b
            return y, g.T @ h, dh @ a, dh.T @ x

        return 6 * 2 * m * k * r / self._time_s(run)

    def expert_flops_per_s(self, *, is_grouped: bool) -> float:
        """Run one projection of a mixture: one kernel for all experts, or one product each."""
        import torch

        num, rows, k, n = self.sizes.experts
        x, weights = self._random(self.dtype, num * rows, k), self._random(self.dtype, num, n, k)
        ends = torch.arange(rows, num * rows + 1, rows, dtype=torch.int32, device=self._device)
        parts = x.split(rows)

        def run() -> object:
            if is_grouped:
                return torch.nn.functional.grouped_mm(x, weights.transpose(1, 2), offs=ends)
            return [part @ weights[i].T for i, part in enumerate(parts)]

        return 2 * num * rows * k * n / self._time_s(run)

    def attention_flops_per_s(self) -> float:
        """Run causal attention of one sequence, and its backward, which is often the slower."""
        import torch
        from torch.nn.functional import scaled_dot_product_attention as attend

        heads, tokens, dim = self.sizes.attention
        q, k, v = (
            self._random(self.dtype, 1, heads, tokens, dim).requires_grad_() for _ in range(3)
        )
        gradient = torch.ones_like(q)

        def run() -> object:
            return torch.autograd.grad(attend(q, k, v, is_causal=True), (q, k, v), gradient)

        flops = causal_flops(width=heads * dim, seq_len=tokens, is_cpu=not self._is_cuda)
        with torch.enable_grad():
            return (1 + FLASH_BACKWARD_FORWARDS) * flops / self._time_s(run)

    def memory_bytes_per_s(self) -> float:
        """Run a layer's operations other than products as models do: a norm with casts, SwiGLU.

        Casts and products with a vector take a card longer per byte than passes over one type.
        """
        import torch

        width, b = self.sizes.gemm[1], self.dtype.itemsize
        num_elements = self.sizes.activation_bytes // FP32_BYTES
        hidden = self._random(self.dtype, num_elements // width, width)
        weight = torch.ones(width, device=self._device, dtype=self.dtype)

        def run() -> object:
            wide = hidden.to(torch.float32)
            wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
            return torch.nn.functional.silu(weight * wide.to(self.dtype)) * hidden

        element_bytes = NORM.forward * FP32_BYTES + (NORM_WEIGHT.forward + GATED.forward) * b
        if b != FP32_BYTES:
            element_bytes += NORM_CASTS.forward * (b + FP32_BYTES)
        return element_bytes * hidden.numel() / self._time_s(run)

    def host_memory_bytes_per_s(self) -> float:
        """Add two tensors too large for caches; the sum is new memory, as the head's logits are."""
        import torch

        num_bytes = CPU_SIZES.copy_bytes
        left, right = torch.ones(num_bytes // 4), torch.ones(num_bytes // 4)
        return 3 * num_bytes / typical_s(lambda: timed_s(lambda: left + right), self._share_s)

    def launches_per_s(self) -> float:
        """Train a norm, an adapted linear layer and a gate on one token, by the host's clock."""
        import torch
        from torch.nn.functional import linear, silu

        width, rank = 8, 2
        x, weight, base, a, b = (
            torch.ones(size, device=self._device, dtype=dtype).requires_grad_(trains)
            for size, dtype, trains in (
                ((1, 1, width), self.dtype, True),
                ((width,), self.dtype, False),
                ((width, width), self.dtype, False),
                ((rank, width), torch.float32, True),
                ((width, rank), torch.float32, True),
            )
        )

        def run() -> None:
            wide = x.to(torch.float32)
            wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
            normed = weight * wide.to(self.dtype)
            branch = linear(linear(normed.to(a.dtype), a), b) * 2.0
            out = (linear(normed, base) + branch).to(self.dtype)
            out = x + silu(out) * normed
            torch.autograd.backward(out, torch.ones_like(out))

        with torch.enable_grad():
            seconds = typical_s(lambda: timed_s(run), self._share_s)
        parts = (NORM, NORM_WEIGHT, NORM_CASTS, GATED)
        others = sum(one.forward_ops + one.backward_ops for one in parts)
        return (2 + LORA_OPS + LORA_BACKWARD_OPS + others) / seconds

    def host_copy_bytes_per_s(self) -> float:
        """Copy within host memory by another thread."""
        return _Copier(self.sizes.copy_bytes).bytes_per_s(self._share_s, beside=None)

    def host_copy_beside_compute_bytes_per_s(self) -> float:
        """Copy within host memory while the calling thread computes products."""
        m, k, n = self.sizes.gemm
        left, right = self._random(self.dtype, m, k), self._random(self.dtype, n, k)
        copier = _Copier(self.sizes.copy_bytes)
        return copier.bytes_per_s(self._share_s, beside=lambda: left @ right.T)

    def pinned_copy_bytes_per_s(self, *, is_to_device: bool, is_duplex: bool) -> float:
        """Time copies on a stream of their own; duplex has a copy the other way on another stream.

        1. Warm up: the copy back starts first and is long enough to cover the timed one.
        2. The timed copy runs between two events of its stream.
        3. The host waits for both streams' last events.
        """
        import torch

        size = self.sizes.copy_bytes
        hosts = [torch.empty(size, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        devices = [torch.empty(size, dtype=torch.uint8, device=self._device) for _ in range(2)]
        ahead, back = torch.cuda.Stream(), torch.cuda.Stream()

        def run() -> float:
            start, end, last = (torch.cuda.Event(enable_timing=True) for _ in range(3))
            if is_duplex:
                with torch.cuda.stream(back):
                    for _ in range(3):
                        hosts[1].copy_(devices[1], non_blocking=True)
            with torch.cuda.stream(ahead):
                start.record()
                if is_to_device:
                    devices[0].copy_(hosts[0], non_blocking=True)
                else:
                    hosts[0].copy_(devices[0], non_blocking=True)
                end.record()
            last.record(back)
            end.synchronize()
            last.synchronize()
            return float(start.elapsed_time(end)) / 1e3

        share_s = self._share_s if is_to_device else 0.0  # no plan uses d2h: a few copies suffice
        return size / typical_s(run, share_s)

    def _random(self, dtype: "torch.dtype", *shape: int) -> "torch.Tensor":
        import torch

        return torch.randn(shape, generator=self._generator, device=self._device).to(dtype)

    def _time_s(self, run: Callable[[], object]) -> float:
        """Return the device's time, to which launches add none: in a step the host is ahead."""
        from offload.engine.streams import seconds_of

        return typical_s(lambda: seconds_of(run, self._device), self._share_s)


def timed_s(run: Callable[[], object]) -> float:
    """Return the seconds that a call takes, by the host's clock."""
    start_s = time.perf_counter()
    run()
    return time.perf_counter() - start_s


def typical_s(run: Callable[[], float], seconds: float) -> float:
    """Run once to warm up, then until the time is over; return the 20th percentile of the times.

    Args:
        run: Returns the seconds that it took.
        seconds: How long to repeat it.
    """
    run()
    times_s: list[float] = []
    end_s = time.perf_counter() + seconds
    while len(times_s) < MIN_REPEATS or time.perf_counter() < end_s:
        times_s.append(run())
    return sorted(times_s)[len(times_s) // 5]


class _Copier:
    """Copies between two host buffers on its own thread, like the CPU's h2d lane."""

    def __init__(self, num_bytes: int) -> None:
        import torch

        self._num_bytes = num_bytes
        self._source = torch.ones(num_bytes, dtype=torch.uint8)
        self._target = torch.zeros(num_bytes, dtype=torch.uint8)

    def bytes_per_s(self, share_s: float, *, beside: Callable[[], object] | None) -> float:
        """Return the rate while the calling thread repeats `beside`; joins the thread."""
        copies_s: list[float] = []

        def copy() -> None:  # as the engine's copy lane does it
            ctypes.memmove(self._target.data_ptr(), self._source.data_ptr(), self._source.nbytes)

        def work() -> None:
            copies_s.append(typical_s(lambda: timed_s(copy), share_s))

        thread = threading.Thread(target=work, name="sluice-probe")
        thread.start()
        while beside is not None and thread.is_alive():
            beside()
        thread.join()
        return self._num_bytes / copies_s[0]
