"""Which part of the host is near the GPU, and how to keep a thread there.

On a machine with several NUMA nodes the GPU is attached to one of them. A copy from another node's
memory, or one issued by a thread on another node's CPUs, crosses the link between the sockets. So
the weights should be on the GPU's node (see `offload.engine.host.numa`), and the threads that
feed it should run there. This module finds that node; on a machine with one node there is nothing
to choose, and it reports that.

NVML reports the node of the nearest host memory. (Not by `nvmlDeviceGetNumaNodeId`, which is the
node of the GPU's own memory on systems that count it as one.) Otherwise /sys is read: `numa_node`
of the PCI device, or, if that is -1 for none, `local_cpulist`.
"""

import contextlib
import ctypes
import errno
import mmap
import os
import platform
import re
import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from offload.engine.host.nvml import nearest_node

# ---------------------------------------------------------------------------------------------
# Sets the NUMA node for the pages of a mapping, before they are first touched.
#
# The policy is "preferred", not "bind": a slab larger than the node's free memory spills over to
# the next node, where a binding would end the process. A policy that the process inherited, from
# `numactl` or a job scheduler, is deliberate and stays. Containers often forbid the call; then
# pages go to the node of the thread that fills them, so it should run there (`numa.thread_on`).

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


@dataclass(frozen=True, kw_only=True, slots=True)
class HostPlace:
    """The host memory and CPUs to use for a device."""

    node: int | None  # the NUMA node to take memory from; None leaves it to the system
    cpus: frozenset[int]  # the CPUs to run threads on; empty leaves it to the system
    reason: str  # what was found and why, for the user


def place_near(torch_device: torch.device) -> HostPlace:
    """Find the place on this machine that is nearest to a device."""
    bus_id = bus_id_of(torch_device)
    if bus_id is None:
        return _anywhere("")
    return find_place(
        bus_id,
        nvml_node=nearest_node(bus_id),
        root=Path("/"),
        allowed_cpus=frozenset(os.sched_getaffinity(0)),
    )


def bus_id_of(torch_device: torch.device) -> str | None:
    """Return where a GPU is, like 0000:81:00.0; None for a CPU."""
    if torch_device.type != "cuda":
        return None
    properties = torch.cuda.get_device_properties(torch_device)
    return (
        f"{properties.pci_domain_id:04x}"  # type: ignore[attr-defined] # torch's stub lacks these
        f":{properties.pci_bus_id:02x}"  # type: ignore[attr-defined]
        f":{properties.pci_device_id:02x}.0"  # type: ignore[attr-defined]
    )


def find_place(
    bus_id: str, *, nvml_node: int | None, root: Path, allowed_cpus: frozenset[int]
) -> HostPlace:
    """Find the place nearest to a PCI device.

    Args:
        bus_id: The device, like 0000:81:00.0.
        nvml_node: The node that NVML reports; None if it reports none.
        root: Where /sys is found.
        allowed_cpus: CPUs that the process may run on: cgroups and `taskset` limit them.
    """
    nodes = nodes_of(root)
    if len(nodes) < 2:
        found = "this machine has one" if nodes else "the system tells of none"
        return _anywhere(f"nothing is bound to a NUMA node: {found}")
    device = root / "sys/bus/pci/devices" / bus_id
    local_cpus = _cpus(device / "local_cpulist")
    node, source = nvml_node, "NVML"
    if node not in nodes:
        node, source = _number(device / "numa_node"), "/sys"
    if node not in nodes:
        around = (node for node in sorted(nodes) if local_cpus and local_cpus <= nodes[node])
        node, source = next(around, None), "its local CPUs"
    if node is None:
        is_told = local_cpus and not local_cpus >= frozenset().union(*nodes.values())
        if not is_told:
            return _anywhere(
                f"nothing is bound to a NUMA node: the GPU at {bus_id} is near none of"
                f" the {len(nodes)}, by NVML or /sys"
            )
        near, where = local_cpus, f"the GPU at {bus_id} is near CPUs {_shown(local_cpus)}"
    else:
        near, where = nodes[node], f"the GPU at {bus_id} is near NUMA node {node} (by {source})"
    cpus = near & allowed_cpus
    then = (
        f"its threads run on CPUs {_shown(cpus)}"
        if cpus
        else f"this process may not run on CPUs {_shown(near)}, so threads are not bound"
    )
    return HostPlace(node=node, cpus=cpus, reason=f"{where}; {then}")


def bind_thread(cpus: Collection[int]) -> str:
    """Run the calling thread on these CPUs from now on; return a sentence on what was done.

    Threads and processes that it starts later inherit this. For a lane's own thread.

    Args:
        cpus: From `HostPlace`; empty leaves the thread alone.
    """
    if not cpus:
        return "the thread runs on any CPU"
    try:
        os.sched_setaffinity(threading.get_native_id(), cpus)
    except OSError as error:  # the process was limited to other CPUs since they were found
        return f"the thread could not be bound to CPUs {_shown(cpus)}: {error.strerror}"
    return f"the thread runs on CPUs {_shown(cpus)}"


@contextmanager
def thread_on(cpus: Collection[int]) -> Iterator[str]:
    """Run the calling thread on these CPUs inside the block; yield a sentence on what was done.

    For a thread that belongs to the caller: use it around the fill of the slab and around each
    pass, not from attach to detach. Threads and processes started inside inherit it and keep it: a
    data worker started between two passes may use every CPU, while autograd's thread, started
    inside the first pass, stays near the GPU that it feeds. Existing threads, such as OpenMP's, are
    not moved.

    Args:
        cpus: From `HostPlace`; empty leaves the thread alone.
    """
    thread = threading.get_native_id()
    before = os.sched_getaffinity(thread)
    try:
        yield bind_thread(cpus)
    finally:
        if cpus:
            with contextlib.suppress(OSError):
                os.sched_setaffinity(thread, before)


def _anywhere(reason: str) -> HostPlace:
    return HostPlace(node=None, cpus=frozenset(), reason=reason)


def nodes_of(root: Path) -> dict[int, frozenset[int]]:
    """Return the CPUs of each node that has any; memory-only nodes cannot run threads."""
    nodes = {}
    for folder in (root / "sys/devices/system/node").glob("node[0-9]*"):
        cpus = _cpus(folder / "cpulist")
        if cpus:
            nodes[int(folder.name.removeprefix("node"))] = cpus
    return nodes


def _number(path: Path) -> int | None:
    text = _text(path)
    return int(text) if re.fullmatch(r"-?\d+", text) else None


def _cpus(path: Path) -> frozenset[int]:
    """Read a list of CPUs as the kernel writes it: 0-3,8-11."""
    cpus: set[int] = set()
    for first, last in re.findall(r"(\d+)(?:-(\d+))?", _text(path)):
        cpus.update(range(int(first), int(last or first) + 1))
    return frozenset(cpus)


def _shown(cpus: Collection[int]) -> str:
    """Write CPUs as the kernel does."""
    starts = [cpu for cpu in sorted(cpus) if cpu - 1 not in cpus]
    ends = [cpu for cpu in sorted(cpus) if cpu + 1 not in cpus]
    runs = zip(starts, ends, strict=True)
    return ",".join(f"{start}" if start == end else f"{start}-{end}" for start, end in runs)


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:  # the file is missing or hidden: not known
        return ""
