"""Measures this machine into a `Machine`: the rates of a step, from small pieces of one.

Each rate comes from repeating one operation, eager and with its allocation, as a training step
issues it. The 20th percentile of the times is used, since other programs disturb it little. Torch
is imported only when something is measured. The probe has its own random generator, so a probe
before a run does not affect the run.
"""

import ctypes
import importlib
import os
import platform
import re
import shutil
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from importlib import metadata
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Literal

from offload.engine.host.limits import free_host_bytes, others_host_bytes, resident_bytes
from offload.errors import MachineError
from offload.plan.machine.machine import (
    DTYPE_BYTES,
    MEASURED,
    MIB,
    Dtype,
    Machine,
    Node,
    Rate,
    assumed_implementation,
)
from offload.probe.load import Watch
from offload.probe.rates import RateBench, timed_s, typical_s

LEAST_REHEARSED_BYTES, MAX_REHEARSED_BYTES = 256 * MIB, 4096 * MIB
RUN_LIBRARY = "peft"  # with what it imports, the last large one that a run needs
NO_GPU = "PyTorch sees no NVIDIA GPU on this machine"
NUM_CONTEXT_TRIALS, STEADY_BYTES = 3, 16 * MIB
HOLD_CONTEXT = (
    "import sys, torch; torch.zeros(1, device='cuda'); print(flush=True); sys.stdin.read()"
)


def process_bytes() -> int:
    """Import what a run needs, and return the memory of this process.

    What it has freed does not count, such as that of modules that were compiled when they were
    first imported: later tensors take its place.
    """
    from offload.engine.host.pagelock import trim_heap

    importlib.import_module(RUN_LIBRARY)
    trim_heap()
    return resident_bytes()


def cuda_context_bytes() -> int:
    """Measure a CUDA context's memory by starting one in another process."""
    import torch

    torch.zeros(1, device="cuda")
    return steady_bytes(_context_trial_bytes() for _ in range(NUM_CONTEXT_TRIALS))


def steady_bytes(trials: Iterable[tuple[int, int]]) -> int:
    """Return what a context takes, though others may take or free memory of the card meanwhile.

    Args:
        trials: What was taken while one started, and what was free again once it had ended. The
            first in which these agree counts; no other is asked for.
    """
    found: list[int] = []
    for taken, freed in trials:
        found += taken, freed
        if taken > 0 and abs(taken - freed) <= STEADY_BYTES:
            return taken
    return statistics.median_low([num_bytes for num_bytes in found if num_bytes > 0] or [0])


def _context_trial_bytes() -> tuple[int, int]:
    import torch

    before_bytes, _ = torch.cuda.mem_get_info()
    with subprocess.Popen(
        [sys.executable, "-c", HOLD_CONTEXT], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        assert other.stdout is not None
        is_ready = bool(other.stdout.readline())
        during_bytes, _ = torch.cuda.mem_get_info()
        other.communicate()
    if not is_ready:
        raise MachineError(
            f"a second process got no CUDA context (exit status {other.returncode})",
            limit="its size is measured by starting one",
            hint="look at `nvidia-smi`: the card may be in exclusive mode or full",
        )
    after_bytes, _ = torch.cuda.mem_get_info()
    return before_bytes - during_bytes, after_bytes - during_bytes


def pinned_bytes(ram_bytes: int) -> int:
    """Return how much can be page-locked: try some sizes; above them only memory limits it."""
    import torch

    from offload.engine.host.pagelock import largest_lockable, open_locker

    locker = open_locker(torch.device("cuda"), fd=None)
    assert locker is not None
    most_bytes = min(MAX_REHEARSED_BYTES, ram_bytes // 2)
    worked_bytes, _ = largest_lockable(most_bytes, LEAST_REHEARSED_BYTES, locker)
    return ram_bytes if worked_bytes == most_bytes else worked_bytes


# ---------------------------------------------------------------------------------------------
# Measures the host apart from its device: memory by NUMA node, and the disk.
#
# Separate from `offload.probe.machine`, whose rates a run needs within seconds: this writes a file.

FILE_BYTES = 512 * MIB
RUN_FILE_BYTES = 128 * MIB  # before a run, which has to wait for it to be written
COPY_BYTES = 64 * MIB
PIECE_BYTES = 64 * MIB


def with_host(machine: Machine, *, folder: Path, seconds: float) -> Machine:
    """Return a machine with its nodes and the disk below a folder.

    Args:
        machine: As it was probed.
        folder: Where stores would be kept; a file is written there and removed.
        seconds: Time to measure for, shared evenly; writing the file takes additional time.
    """
    nodes = _nodes(machine, Path("/"), seconds=seconds / 2)
    rate = disk_rate(folder, seconds=seconds / 2, file_bytes=FILE_BYTES)
    return replace(machine, nodes=nodes, disk_bytes_per_s=rate)


def disk_rate(folder: Path, *, seconds: float, file_bytes: int) -> Rate | None:
    """Read a new file as stores are read: bypassing the page cache, several reads in flight.

    Args:
        folder: Where to write it; it is removed again.
        seconds: Time to read for.
        file_bytes: Its size, whole pieces.

    Returns:
        None if it cannot be written, or would be read from the page cache.
    """
    from offload.engine.host.pagelock import aligned_empty
    from offload.engine.host.store import FileReader

    with ExitStack() as stack:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if shutil.disk_usage(folder).free < 2 * file_bytes:
                return None
            file = stack.enter_context(
                NamedTemporaryFile(dir=folder, prefix="probe-", suffix=".tmp")
            )
            piece = os.urandom(8 * MIB)  # some drives store nothing for zeros
            for _ in range(file_bytes // len(piece)):
                file.write(piece)
            file.flush()
            os.fsync(file.fileno())
        except OSError:
            return None
        reader = FileReader(Path(file.name))
        try:
            if reader.mode != "direct":
                return None
            target, offset = aligned_empty(PIECE_BYTES), 0

            def read() -> None:
                nonlocal offset
                reader.read_into(offset, target)
                offset = (offset + PIECE_BYTES) % file_bytes

            return _measured(PIECE_BYTES, read, seconds)
        finally:
            reader.close()


def _nodes(machine: Machine, root: Path, *, seconds: float) -> tuple[Node, ...]:
    """Measure each node with its own thread, whose first touch allocates the memory there."""
    import torch

    from offload.engine.host.numa import nodes_of, place_near, thread_on

    near = place_near(torch.device(machine.device)).node
    allowed = os.sched_getaffinity(0)
    usable = {number: cpus & allowed for number, cpus in nodes_of(root).items()}
    usable = {number: cpus for number, cpus in usable.items() if cpus}
    nodes = []
    for number, cpus in sorted(usable.items()):
        with thread_on(cpus):
            rate = _copy_rate(seconds / len(usable))
        info = root / f"sys/devices/system/node/node{number}/meminfo"
        total = re.search(r"MemTotal:\s+(\d+) kB", info.read_text())
        nodes.append(
            Node(
                number=number,
                num_cpus=len(cpus),
                ram_bytes=1024 * int(total[1]) if total else 0,
                is_near=len(usable) == 1 or number == near,
                copy_bytes_per_s=rate,
            )
        )
    return tuple(nodes)


def _copy_rate(seconds: float) -> Rate:
    source, target = (
        ctypes.create_string_buffer(COPY_BYTES),
        ctypes.create_string_buffer(COPY_BYTES),
    )
    ctypes.memset(source, 1, COPY_BYTES)
    return _measured(COPY_BYTES, lambda: ctypes.memmove(target, source, COPY_BYTES), seconds)


def _measured(num_bytes: int, run: Callable[[], object], seconds: float) -> Rate:
    return Rate(value=num_bytes / typical_s(lambda: timed_s(run), seconds), source=MEASURED)


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
    watch = Watch()
    with torch.no_grad():
        share_s = seconds / NUM_MEASUREMENTS / NUM_ROUNDS[device]
        bench = RateBench(torch.device(device), getattr(torch, dtype), share_s)
        machine = _probe_cuda(bench, dtype) if device == "cuda" else _probe_cpu(bench, dtype)
    return replace(machine, others_frac=watch.others_frac())


def half_dtype_of(capability: tuple[int, int] | None) -> Dtype:
    """Return the 16-bit type that a GPU computes in: bfloat16 from Ampere on.

    Args:
        capability: CUDA's, or None of a CPU.
    """
    return "float16" if capability is not None and capability < (8, 0) else "bfloat16"


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
        vram_bytes=free_bytes + own_bytes,
        ram_bytes=free_bytes + own_bytes,
        desktop_bytes=0,
        pinned_bytes=free_bytes,
        context_bytes=own_bytes,
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
    free_bytes, total_bytes = torch.cuda.mem_get_info()
    ram_bytes = free_host_bytes(Path("/")) + resident_bytes()
    copy = bench.pinned_copy_bytes_per_s
    return _machine(
        bench,
        name=device_name("cuda"),
        device="cuda",
        dtype=dtype,
        vram_bytes=free_bytes + context_bytes,
        ram_bytes=ram_bytes,
        desktop_bytes=max(0, total_bytes - free_bytes - context_bytes),
        pinned_bytes=pinned_bytes(ram_bytes),
        context_bytes=context_bytes,
        links=(
            partial(copy, is_to_device=True, is_duplex=False),
            partial(copy, is_to_device=True, is_duplex=True),
            partial(copy, is_to_device=False, is_duplex=False),
        ),
        is_grouped=has_grouped_gemm(torch.cuda.get_device_capability(), dtype),
    )


def _machine(  # noqa: PLR0913 - what a machine has, but for its rates
    bench: RateBench,
    *,
    name: str,
    device: Literal["cuda", "cpu"],
    dtype: str,
    vram_bytes: int,
    ram_bytes: int,
    desktop_bytes: int,
    pinned_bytes: int,
    context_bytes: int,
    links: tuple[Measure, Measure, Measure],
    is_grouped: bool,
) -> Machine:
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
    rounds = [{n: measure() for n, measure in measures.items()} for _ in range(NUM_ROUNDS[device])]
    rates = {n: Rate(value=max(r[n] for r in rounds), source=MEASURED) for n in measures}
    return Machine(
        name=name,
        device=device,
        dtype=dtype,
        vram_bytes=vram_bytes,
        ram_bytes=ram_bytes,
        desktop_bytes=desktop_bytes,
        system_bytes=others_host_bytes(Path("/")),
        pinned_bytes=pinned_bytes,
        context_bytes=context_bytes,
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


def device_name(kind: str) -> str:
    """Return the name of the current device: of a card for `cuda`, of the processor for `cpu`."""
    import torch

    return torch.cuda.get_device_name() if kind == "cuda" else _processor_name()


def _processor_name() -> str:
    path = Path("/proc/cpuinfo")
    for line in path.read_text().splitlines() if path.exists() else ():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()


def installed_version(package: str) -> str | None:
    """Return a package's version, without importing it."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
