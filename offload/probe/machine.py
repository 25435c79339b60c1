"""Measures this machine into a `Machine`: the rates of a step, from small pieces of one.

Each rate comes from repeating one operation, eager and with its allocation, as a training step
issues it. The 20th percentile of the times is used, since other programs disturb it little. Torch
is imported only when something is measured. The probe has its own random generator, so a probe
before a run does not affect the run.
"""

import platform
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal

from offload.engine.host.limits import free_host_bytes, resident_bytes
from offload.errors import MachineError
from offload.plan.machine.machine import (
    DTYPE_BYTES,
    MEASURED,
    Machine,
    Rate,
    assumed_implementation,
)
from offload.probe.memory import cuda_context_bytes, pinned_bytes, process_bytes
from offload.probe.rates import RateBench

PROBE_S = 5.0  # of a run's start, and of `sluice probe`
NUM_MEASUREMENTS = 12
NUM_ROUNDS = {"cpu": 2, "cuda": 1}

Measure = Callable[[], float]


def probe(*, device: str, dtype: str, seconds: float) -> Machine:
    """Measure this machine.

    On a CPU the h2d lane is a copy by another thread, so its duplex rate is that of a copy during
    compute, and device and host memory are the same memory.

    Args:
        device: cuda or cpu.
        dtype: bfloat16, float16 or float32: what the layers compute in.
        seconds: Time to measure for, shared evenly; starting torch or a CUDA context takes more.

    Raises:
        MachineError: No such device or dtype here, or the kernel does not report its free memory.
    """
    if dtype not in DTYPE_BYTES:
        raise MachineError(
            f"dtype '{dtype}' cannot be measured",
            limit=f"it must be {' or '.join(DTYPE_BYTES)}",
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
        share_s = seconds / NUM_MEASUREMENTS / NUM_ROUNDS[device]
        bench = RateBench(torch.device(device), getattr(torch, dtype), share_s)
        return _probe_cuda(bench, dtype) if device == "cuda" else _probe_cpu(bench, dtype)


def has_grouped_gemm(capability: tuple[int, int], dtype: str) -> bool:
    """Return whether torch's grouped products are one kernel; consumer Blackwell (12.0) has none.

    Source: pytorch aten/src/ATen/native/cuda/GroupedBlas.cpp, _grouped_mm_cuda.
    """
    return capability[0] in (9, 10) and dtype == "bfloat16"


def _probe_cpu(bench: RateBench, dtype: str) -> Machine:
    free_bytes, own_bytes = free_host_bytes(Path("/")), resident_bytes()
    machine = _machine(
        bench,
        name=f"{_processor_name()}, {bench.num_threads} thread{'s' * (bench.num_threads != 1)}",
        device="cpu",
        dtype=dtype,
        memory=_Memory(
            vram=free_bytes + own_bytes,
            ram=free_bytes + own_bytes,
            pinned=free_bytes,
            context=own_bytes,
        ),
        links=(
            bench.host_copy_bytes_per_s,
            bench.host_copy_beside_compute_bytes_per_s,
            bench.host_copy_bytes_per_s,
        ),
        is_grouped=False,
    )
    return replace(machine, context_bytes=process_bytes())


def _probe_cuda(bench: RateBench, dtype: str) -> Machine:
    import torch

    context_bytes = cuda_context_bytes()
    free_bytes, _ = torch.cuda.mem_get_info()
    ram_bytes = free_host_bytes(Path("/")) + resident_bytes()
    copy = bench.pinned_copy_bytes_per_s
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
            partial(copy, is_to_device=True, is_duplex=False),
            partial(copy, is_to_device=True, is_duplex=True),
            partial(copy, is_to_device=False, is_duplex=False),
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
    bench: RateBench,
    *,
    name: str,
    device: Literal["cuda", "cpu"],
    dtype: str,
    memory: _Memory,
    links: tuple[Measure, Measure, Measure],
    is_grouped: bool,
) -> Machine:
    rates = _rates(bench, links, is_grouped=is_grouped, num_rounds=NUM_ROUNDS[device])
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
        gemm_flops_per_s=rates["gemm"],
        expert_gemm_flops_per_s=rates["experts"],
        tall_gemm_flops_per_s=rates["tall"],
        tall_fp32_flops_per_s=rates["tall fp32"],
        attention_flops_per_s=rates["attention"],
        vector_flops_per_s=rates["fp32"],
        memory_bytes_per_s=rates["memory"],
        h2d_bytes_per_s=rates["h2d"],
        h2d_duplex_bytes_per_s=rates["duplex"],
        d2h_bytes_per_s=rates["d2h"],
        host_memory_bytes_per_s=rates["host memory"],
        launch_s=Rate(value=1 / rates["launches"].value, source=MEASURED),
    )


def _rates(
    bench: RateBench, links: tuple[Measure, Measure, Measure], *, is_grouped: bool, num_rounds: int
) -> dict[str, Rate]:
    """Measure each rate once per round and use the best, so that bursts of load do not spoil it.

    A GPU is used by this process alone, but a CPU's cores are shared.
    """
    import torch

    h2d, duplex, d2h = links
    measures: dict[str, Measure] = {
        "gemm": partial(bench.gemm_flops_per_s, bench.dtype),
        "experts": partial(bench.expert_flops_per_s, is_grouped=is_grouped),
        "tall": partial(bench.tall_flops_per_s, bench.dtype),
        "tall fp32": partial(bench.tall_flops_per_s, torch.float32),
        "attention": bench.attention_flops_per_s,
        "fp32": partial(bench.gemm_flops_per_s, torch.float32),
        "memory": bench.memory_bytes_per_s,
        "h2d": h2d,
        "duplex": duplex,
        "d2h": d2h,
        "host memory": bench.host_memory_bytes_per_s,
        "launches": bench.launches_per_s,
    }
    rounds = [{name: measure() for name, measure in measures.items()} for _ in range(num_rounds)]
    return {name: Rate(value=max(r[name] for r in rounds), source=MEASURED) for name in measures}


def _processor_name() -> str:
    path = Path("/proc/cpuinfo")
    for line in path.read_text().splitlines() if path.exists() else ():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()
