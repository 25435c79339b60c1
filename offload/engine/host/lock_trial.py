"""Tries a page lock in another process, where a failure does no harm.

How much may be locked is documented nowhere: WSL2 allows 1 to 2 GiB, containers have their own
limits, and some drivers fail in ways that break the CUDA context or end the process. So each size
is tried first in a child process, which briefly has its own context (some hundred MB of device
memory). If the memory has a file descriptor, the child maps the same memory and needs no second
copy.

Run as a program, this file is that child. It does not import torch, so it starts quickly.
"""

import contextlib
import ctypes
import mmap
import os
import signal
import subprocess
import sys
from pathlib import Path

from offload.engine.host.cudart import CudaRuntime

_LOCKED, _REFUSED, _UNTRIED = 0, 3, 4
_KILLED_S = 5.0
_ROOT = Path(__file__).parents[3]


def rehearse_lock(
    *,
    runtime: Path,
    device_index: int,
    num_bytes: int,
    fd: int | None,
    timeout_s: float,
    program: tuple[str, ...] = (sys.executable, "-m", "offload.engine.host.lock_trial"),
) -> str | None:
    """Try to page-lock a number of bytes in a child process, and wait for it.

    Args:
        runtime: From `loaded_runtime_path`.
        device_index: The CUDA device.
        num_bytes: How many bytes.
        fd: The memory to lock, from its start; None allocates new memory, which must be free, as
            does what is more than the descriptor has.
        timeout_s: The child is killed after this time.
        program: The child's program.

    Returns:
        Why so much cannot be locked. None if it worked, or if the child could not get a context
        (a GPU in exclusive mode), which says nothing about locks.
    """
    command = [*program, str(runtime), str(device_index), str(num_bytes)]
    child = subprocess.Popen(
        [*command, str(-1 if fd is None else fd)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        pass_fds=[] if fd is None else [fd],
        cwd=_ROOT,
    )
    try:
        output, errors = child.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        return f"no answer within {timeout_s:.0f} s"
    finally:
        _end(child)
    if child.returncode in (_LOCKED, _UNTRIED):
        return None
    if child.returncode == _REFUSED:
        return output.strip()
    if child.returncode < 0:
        return f"the process that tried it was ended by {signal.Signals(-child.returncode).name}"
    last_line = errors.strip().rpartition("\n")[2]
    return f"the process that tried it failed with exit status {child.returncode}: {last_line}"


def _end(child: "subprocess.Popen[str]") -> None:
    """Kill a child that still runs; do not wait for one that the kernel does not release yet."""
    if child.poll() is None:
        child.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(_KILLED_S)
    for pipe in (child.stdout, child.stderr):
        if pipe is not None:
            pipe.close()


def _main(path: str, device_index: int, num_bytes: int, fd: int) -> int:
    with contextlib.suppress(OSError):  # out of memory should kill this, not the run
        Path("/proc/self/oom_score_adj").write_text("1000")
    try:
        cuda = CudaRuntime(ctypes.CDLL(path))
    except (OSError, AttributeError):  # only torch's own loader finds it
        return _UNTRIED
    if cuda.open_device(device_index) is not None:
        return _UNTRIED
    try:
        areas = _mapped(fd, num_bytes)
    except OSError:  # a read-only descriptor, or no memory: unrelated to locks
        return _UNTRIED
    for area in areas:
        refusal = cuda.register(ctypes.addressof(ctypes.c_char.from_buffer(area)), len(area))
        if refusal is not None:
            sys.stdout.write(refusal)
            return _REFUSED
    return _LOCKED


def _mapped(fd: int, num_bytes: int) -> list[mmap.mmap]:
    """Map the memory of a descriptor; for what is to be locked besides, new memory."""
    shared_bytes = 0 if fd < 0 else min(num_bytes, os.fstat(fd).st_size)
    sizes = {fd: shared_bytes} if shared_bytes else {}
    if num_bytes > shared_bytes:
        sizes[-1] = num_bytes - shared_bytes
    return [mmap.mmap(source, size) for source, size in sizes.items()]


if __name__ == "__main__":
    sys.exit(_main(sys.argv[1], *map(int, sys.argv[2:5])))
