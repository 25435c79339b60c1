"""Measures the host apart from its device: memory by NUMA node, and the disk.

Separate from `offload.probe.machine`, whose rates a run needs within seconds: this writes a file.
"""

import ctypes
import os
import re
import shutil
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from tempfile import NamedTemporaryFile

from offload.plan.machine.machine import MIB, Machine, Node, Rate

FILE_BYTES = 512 * MIB
RUN_FILE_BYTES = 128 * MIB  # before a run, which has to wait for it to be written
COPY_BYTES = 64 * MIB
PIECE_BYTES = 64 * MIB
MIN_REPEATS = 3


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
    from offload.engine.host.mapping import aligned_empty
    from offload.engine.host.reads import FileReader

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
    """Run once to warm up, then until the time is over; use the 20th percentile of the times."""
    run()
    times_s: list[float] = []
    end_s = time.perf_counter() + seconds
    while len(times_s) < MIN_REPEATS or time.perf_counter() < end_s:
        start_s = time.perf_counter()
        run()
        times_s.append(time.perf_counter() - start_s)
    return Rate(value=num_bytes / sorted(times_s)[len(times_s) // 5], source="measured")
