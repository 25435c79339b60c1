"""Sets the NUMA node for the pages of a mapping, before they are first touched.

The policy is "preferred", not "bind": a slab larger than the node's free memory spills over to the
next node, where a binding would end the process. A policy that the process inherited, from
`numactl` or a job scheduler, is deliberate and stays. Containers often forbid the call; then pages
go to the node of the thread that fills them, so it should run there (`numa.thread_on`).
"""

import ctypes
import errno
import mmap
import os
import platform
from typing import Protocol

_DEFAULT, _PREFERRED = 0, 1
_MODES = {1: "preferred", 2: "bind", 3: "interleave", 4: "local", 5: "preferred-many"}
_MODE_BITS = 0xFFF  # above them are flags
_WORD_BITS = 8 * ctypes.sizeof(ctypes.c_ulong)
_SYSCALLS = {  # asm/unistd_64.h and asm-generic/unistd.h
    ("mbind", "x86_64"): 237,
    ("get_mempolicy", "x86_64"): 239,
    ("mbind", "aarch64"): 235,
    ("get_mempolicy", "aarch64"): 236,
}


class PolicyCalls(Protocol):
    """The two system calls; each raises OSError when the system refuses."""

    def inherited_mode(self) -> int:
        """Return the mode of the calling thread's policy, 0 for the default."""

    def prefer(self, address: int, num_bytes: int, node: int) -> None:
        """Take the pages of a range from `node` while it has any."""


def bind_memory(
    address: int, num_bytes: int, node: int | None, *, calls: PolicyCalls | None = None
) -> str:
    """Take the pages of a mapping from one NUMA node, and return a sentence on what was done.

    Call it before anything is written there: existing pages stay where they are. It never ends a
    run; if the policy cannot be set, the sentence says why.

    Args:
        address: Start of the mapping, on a page boundary.
        num_bytes: Its length.
        node: From `HostPlace`; None leaves the memory alone.
        calls: The system calls; None for this machine's.
    """
    assert address % mmap.PAGESIZE == 0
    if node is None:
        return "memory comes from wherever the system takes it"
    calls = _LinuxCalls(_libnuma()) if calls is None else calls
    try:
        mode = calls.inherited_mode() & _MODE_BITS
        if mode != _DEFAULT:
            name = _MODES.get(mode, f"number {mode}")
            return f"memory follows the inherited policy ({name}), not NUMA node {node}"
        calls.prefer(address, num_bytes, node)
    except OSError as error:
        return (
            f"memory could not be bound to NUMA node {node} ({os.strerror(error.errno or 0)}):"
            " it comes from the node of the thread that fills it"
        )
    return f"memory comes from NUMA node {node} while it has any free"


def _libnuma() -> ctypes.CDLL | None:
    try:
        return ctypes.CDLL("libnuma.so.1", use_errno=True)
    except OSError:
        return None


class _LinuxCalls:
    """The system calls, through libnuma if it is installed, else by number."""

    def __init__(self, libnuma: ctypes.CDLL | None) -> None:
        self._libnuma = libnuma
        self._libc = ctypes.CDLL(None, use_errno=True)

    def inherited_mode(self) -> int:
        mode = ctypes.c_int()
        self._call("get_mempolicy", ctypes.byref(mode), None, 0, None, 0)
        return mode.value

    def prefer(self, address: int, num_bytes: int, node: int) -> None:
        num_words = node // _WORD_BITS + 1
        nodes = (ctypes.c_ulong * num_words)()
        nodes[node // _WORD_BITS] = 1 << node % _WORD_BITS
        num_bits = num_words * _WORD_BITS + 1  # the kernel reads one bit less than this
        self._call("mbind", address, num_bytes, _PREFERRED, nodes, num_bits, 0)

    def _call(self, name: str, *args: object) -> None:
        full = [ctypes.c_ulong(a) if isinstance(a, int) else a for a in args]
        number = _SYSCALLS.get((name, platform.machine()))
        if self._libnuma is not None:
            status = self._libnuma[name](*full)
        elif number is not None:
            status = self._libc.syscall(ctypes.c_long(number), *full)
        else:
            raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
        if status != 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
