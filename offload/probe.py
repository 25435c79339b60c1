"""Measures this machine into a `Machine`: the rates that a step meets, from small pieces of one.

Each rate comes from repeating one operation, eager and with its allocation, as a training step
issues it; of the times the 20th percentile counts, which other programs disturb little. Torch is
imported only when something is measured. Random numbers come from a generator of the probe's own,
so a probe before a run changes nothing in it.
"""

import ctypes
import platform
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from offload.capacity import cuda_context_bytes, free_host_bytes, pinned_bytes, resident_bytes
from offload.errors import MachineError
from offload.plan.costs import NORM_FP32_PASSES
from offload.plan.expert_passes import SWIGLU_PASSES
from offload.plan.machine import Machine, Rate, assumed_implementation
from offload.plan.parts import FP32_BYTES

if TYPE_CHECKING:
    import torch

MIB = 2**20
DTYPES = ("bfloat16", "float32")
NUM_MEASUREMENTS = 10
MIN_REPEATS = 3
SMALL_OPS = 200


@dataclass(frozen=True, kw_only=True, slots=True)
class _Sizes:
    """Sizes of the pieces: products are (m, k, n), attention is (heads, tokens, head_dim)."""

    gemm: tuple[int, int, int]
    expert_gemm: tuple[int, int, int]
    attention: tuple[int, int, int]
    activation_bytes: int
    copy_bytes: int


_CPU_SIZES = _Sizes(
    gemm=(1024, 512, 1536),
    expert_gemm=(64, 256, 512),
    attention=(4, 512, 64),
    activation_bytes=4 * MIB,
    copy_bytes=32 * MIB,
)
_CUDA_SIZES = _Sizes(
    gemm=(8192, 4096, 4096),
    expert_gemm=(512, 2048, 1536),
    attention=(32, 4096, 128),
    activation_bytes=256 * MIB,
    copy_bytes=256 * MIB,
)


def probe(*, device: str, dtype: str, seconds: float) -> Machine:
    """Measure this machine.

    On a CPU the h2d lane is a copy by another thread, so its duplex rate is that of a copy beside
    computing, and device and host memory are the same memory.

    Args:
        device: cuda or cpu.
        dtype: bfloat16 or float32: what the layers compute in.
        seconds: Time to measure for, shared evenly; starting torch or a CUDA context comes on top.

    Raises:
        MachineError: No such device or dtype here, or the kernel does not tell its free memory.
    """
    if dtype not in DTYPES:
        raise MachineError(
            f"dtype '{dtype}' cannot be measured",
            limit=f"it must be {' or '.join(DTYPES)}",
            hint="`--dtype bfloat16`, or `model.dtype: bfloat16` in a recipe",
        )
    import torch

    if device == "cuda" and not torch.cuda.is_available():
        raise MachineError(
            "device 'cuda' cannot be measured: torch sees no CUDA device",
            limit="a driver and a CUDA build of torch are needed",
            hint="`offload.device: cpu`",
        )
    if device not in ("cuda", "cpu"):
        raise MachineError(
            f"device '{device}' cannot be measured",
            limit="it must be cuda or cpu",
            hint="`offload.device: cpu`",
        )
    with torch.no_grad():
        share_s = seconds / NUM_MEASUREMENTS
        if device == "cuda":
            return _probe_cuda(_Bench(torch.device("cuda"), getattr(torch, dtype), share_s), dtype)
        return _probe_cpu(_Bench(torch.device("cpu"), getattr(torch, dtype), share_s), dtype)


def has_grouped_gemm(capability: tuple[int, int], dtype: str) -> bool:
    """Tell whether torch's grouped products are one kernel; consumer Blackwell (12.0) has none.

    Source: pytorch aten/src/ATen/native/cuda/GroupedBlas.cpp, _grouped_mm_cuda.
    """
    return capability[0] in (9, 10) and dtype == "bfloat16"


def _probe_cpu(bench: "_Bench", dtype: str) -> Machine:
    free_bytes, own_bytes = free_host_bytes(Path("/")), resident_bytes()
    copy = bench.host_copy_bytes_per_s()
    return _machine(
        bench,
        name=f"{_processor_name()}, {bench.num_threads} threads",
        device="cpu",
        dtype=dtype,
        memory=_Memory(
            vram=free_bytes + own_bytes,
            ram=free_bytes + own_bytes,
            pinned=free_bytes,
            context=own_bytes,
        ),
        links=(copy, bench.host_copy_beside_compute_bytes_per_s(), copy),
        is_grouped=False,
    )


def _probe_cuda(bench: "_Bench", dtype: str) -> Machine:
    import torch

    context_bytes = cuda_context_bytes()
    free_bytes, _ = torch.cuda.mem_get_info()
    ram_bytes = free_host_bytes(Path("/")) + resident_bytes()
    return _machine(
        bench,
        name=torch.cuda.get_device_name(),
        device="cuda",
        dtype=dtype,
        memory=_Memory(
            vram=free_bytes + context_bytes,
            ram=ram_bytes,
            pinned=pinned_bytes(ram_bytes),
            context=context_bytes,
        ),
        links=(
            bench.pinned_copy_bytes_per_s(is_to_device=True, is_duplex=False),
            bench.pinned_copy_bytes_per_s(is_to_device=True, is_duplex=True),
            bench.pinned_copy_bytes_per_s(is_to_device=False, is_duplex=False),
        ),
        is_grouped=has_grouped_gemm(torch.cuda.get_device_capability(), dtype),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Memory:
    vram: int
    ram: int
    pinned: int
    context: int


def _machine(
    bench: "_Bench",
    *,
    name: str,
    device: Literal["cuda", "cpu"],
    dtype: str,
    memory: _Memory,
    links: tuple[float, float, float],
    is_grouped: bool,
) -> Machine:
    sizes, (h2d, h2d_duplex, d2h) = bench.sizes, links
    return Machine(
        name=name,
        device=device,
        dtype=dtype,
        vram_bytes=memory.vram,
        ram_bytes=memory.ram,
        pinned_bytes=memory.pinned,
        context_bytes=memory.context,
        has_grouped_gemm=is_grouped,
        experts_implementation=assumed_implementation(device=device, has_grouped_gemm=is_grouped),
        gemm_flops_per_s=_measured(bench.gemm_flops_per_s(sizes.gemm, bench.dtype)),
        expert_gemm_flops_per_s=_measured(bench.gemm_flops_per_s(sizes.expert_gemm, bench.dtype)),
        attention_flops_per_s=_measured(bench.attention_flops_per_s()),
        vector_flops_per_s=_measured(bench.fp32_flops_per_s()),
        memory_bytes_per_s=_measured(bench.memory_bytes_per_s()),
        h2d_bytes_per_s=_measured(h2d),
        h2d_duplex_bytes_per_s=_measured(h2d_duplex),
        d2h_bytes_per_s=_measured(d2h),
        host_memory_bytes_per_s=_measured(bench.host_memory_bytes_per_s()),
        launch_s=_measured(bench.launch_s()),
    )


def _measured(value: float) -> Rate:
    return Rate(value=value, source="measured")


# ---------------------------------------------------------------------------------------------
# Rates


class _Bench:
    """Times pieces of a step on one device."""

    def __init__(self, device: "torch.device", dtype: "torch.dtype", share_s: float) -> None:
        import torch

        self._device = device
        self._share_s = share_s
        self._is_cuda = device.type == "cuda"
        self._generator = torch.Generator(device).manual_seed(0)
        self.dtype = dtype
        self.sizes = _CUDA_SIZES if self._is_cuda else _CPU_SIZES
        self.num_threads = torch.get_num_threads()

    def gemm_flops_per_s(self, shape: tuple[int, int, int], dtype: "torch.dtype") -> float:
        """Run the three products of an MLP, whose results stand beside each other in memory."""
        m, k, n = shape
        rows, gate, up, down = (
            self._random(dtype, *size) for size in ((m, k), (n, k), (n, k), (k, n))
        )

        def run() -> object:
            wide, other = rows @ gate.T, rows @ up.T
            return wide @ down.T, other

        return 3 * 2 * m * k * n / self._time_s(run)

    def fp32_flops_per_s(self) -> float:
        import torch

        return self.gemm_flops_per_s(self.sizes.gemm, torch.float32)

    def attention_flops_per_s(self) -> float:
        from torch.nn.functional import scaled_dot_product_attention as attend

        heads, tokens, dim = self.sizes.attention
        q, k, v = (self._random(self.dtype, 1, heads, tokens, dim) for _ in range(3))
        flops = 4 * heads * dim * tokens * tokens / 2
        return flops / self._time_s(lambda: attend(q, k, v, is_causal=True))

    def memory_bytes_per_s(self) -> float:
        """Run what is not a product in a layer, a norm and a SwiGLU, and count as the plan does."""
        import torch

        width = self.sizes.gemm[1]
        num_elements = self.sizes.activation_bytes // 4
        hidden = self._random(torch.float32, num_elements // width, width)
        weight = torch.ones(width, device=self._device)

        def run() -> object:
            scale = torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + 1e-6)
            normed = weight * (hidden * scale)
            return torch.nn.functional.silu(normed) * hidden

        num_passes = NORM_FP32_PASSES + SWIGLU_PASSES
        return num_passes * FP32_BYTES * hidden.numel() / self._time_s(run)

    def host_memory_bytes_per_s(self) -> float:
        """Add two tensors too large for caches; the sum is new memory, as the head's logits are."""
        import torch

        num_bytes = _CPU_SIZES.copy_bytes
        left, right = torch.ones(num_bytes // 4), torch.ones(num_bytes // 4)
        times_s = _repeated(lambda: _timed(lambda: left + right), self._share_s)
        return 3 * num_bytes / _typical_s(times_s)

    def launch_s(self) -> float:
        import torch

        small = torch.ones(8, device=self._device)

        def run() -> None:
            for _ in range(SMALL_OPS):
                small.mul(1.0)

        return self._time_s(run) / SMALL_OPS

    def host_copy_bytes_per_s(self) -> float:
        return _Copier(self.sizes.copy_bytes).bytes_per_s(self._share_s, beside=None)

    def host_copy_beside_compute_bytes_per_s(self) -> float:
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

        share_s = self._share_s if is_to_device else 0.0  # no plan uses d2h: a few copies tell it
        return size / _typical_s(_repeated(run, share_s))

    def _random(self, dtype: "torch.dtype", *shape: int) -> "torch.Tensor":
        import torch

        return torch.randn(shape, generator=self._generator, device=self._device).to(dtype)

    def _time_s(self, run: Callable[[], object]) -> float:
        timed = _timed_on_cuda if self._is_cuda else _timed
        return _typical_s(_repeated(lambda: timed(run), self._share_s))


def _timed(run: Callable[[], object]) -> float:
    start_s = time.perf_counter()
    run()
    return time.perf_counter() - start_s


def _timed_on_cuda(run: Callable[[], object]) -> float:
    import torch

    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    run()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3


def _repeated(run: Callable[[], float], share_s: float) -> list[float]:
    """Run once to warm up, then until the time is over, and return each run's seconds."""
    run()
    times_s: list[float] = []
    end_s = time.perf_counter() + share_s
    while len(times_s) < MIN_REPEATS or time.perf_counter() < end_s:
        times_s.append(run())
    return times_s


def _typical_s(times_s: list[float]) -> float:
    return sorted(times_s)[len(times_s) // 5]


class _Copier:
    """Copies between two host buffers on a thread of its own, as the CPU's h2d lane does."""

    def __init__(self, num_bytes: int) -> None:
        import torch

        self._num_bytes = num_bytes
        self._source = torch.ones(num_bytes, dtype=torch.uint8)
        self._target = torch.zeros(num_bytes, dtype=torch.uint8)

    def bytes_per_s(self, share_s: float, *, beside: Callable[[], object] | None) -> float:
        """Return the rate, beside what the calling thread repeats meanwhile; joins the thread."""
        times_s: list[float] = []

        def copy() -> None:  # as the engine's copy lane does it
            ctypes.memmove(self._target.data_ptr(), self._source.data_ptr(), self._source.nbytes)

        def work() -> None:
            times_s.extend(_repeated(lambda: _timed(copy), share_s))

        thread = threading.Thread(target=work, name="sluice-probe")
        thread.start()
        while beside is not None and thread.is_alive():
            beside()
        thread.join()
        return self._num_bytes / _typical_s(times_s)


def _processor_name() -> str:
    path = Path("/proc/cpuinfo")
    for line in path.read_text().splitlines() if path.exists() else ():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()
