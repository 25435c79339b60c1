"""Bindings to NVIDIA's management library: GPUs, their links, and the NUMA node nearest to one.

Source: NVML reference, groups nvmlSystemQueries, nvmlDeviceQueries and nvmlAffinity.
"""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

_SUCCESS, _TOO_SMALL = 0, 7  # NVML_ERROR_INSUFFICIENT_SIZE
_SCOPE_NODE = 0  # NVML_AFFINITY_SCOPE_NODE
_BITS = 8 * ctypes.sizeof(ctypes.c_ulong)
_NUM_WORDS = 1024 // _BITS  # a Linux kernel has at most 1024 nodes
_NAME_BYTES = 96  # NVML_DEVICE_NAME_V2_BUFFER_SIZE


@dataclass(frozen=True, kw_only=True, slots=True)
class Link:
    """A PCIe link: its generation and lanes, and the maximum of card and slot."""

    generation: int  # current; an idle card lowers it
    width: int  # lanes that were negotiated
    max_generation: int  # the maximum that card and slot support
    max_width: int  # the maximum that card and slot support


@dataclass(frozen=True, kw_only=True, slots=True)
class Gpu:
    """A GPU as the driver reports it."""

    name: str  # name of the card
    capability: tuple[int, int]  # its architecture: (8, 9) is sm_89
    memory_bytes: int  # total memory
    used_bytes: int  # memory in use, the driver's own included
    num_processes: int | None  # processes that compute on it; None if NVML does not report it
    # The link to the host; None if NVML reports none, as in some virtual machines.
    link: Link | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Driver:
    """The driver and its GPUs."""

    version: str  # like 570.86.10
    cuda: tuple[int, int]  # the newest CUDA version that it supports, like (12, 8)
    gpus: tuple[Gpu, ...]  # the GPUs in the driver's order


def nearest_node(bus_id: str, library: Any = None) -> int | None:
    """Return the node whose memory NVML reports as ideal for a GPU; None unless it is one node.

    Args:
        bus_id: The GPU, like 0000:81:00.0.
        library: An object with NVML's functions; None loads the driver's library.
    """
    with _opened(library) as nvml:
        gpu, words = ctypes.c_void_p(), (ctypes.c_ulong * _NUM_WORDS)()
        is_told = (
            nvml is not None
            and _ask(nvml, "nvmlDeviceGetHandleByPciBusId_v2", bus_id.encode(), ctypes.byref(gpu))
            and _ask(nvml, "nvmlDeviceGetMemoryAffinity", gpu, _NUM_WORDS, words, _SCOPE_NODE)
        )
    nodes = [n for n in range(_NUM_WORDS * _BITS) if words[n // _BITS] >> n % _BITS & 1]
    return nodes[0] if is_told and len(nodes) == 1 else None


def find_driver(library: Any = None) -> Driver | None:
    """Return the driver and its GPUs; None if there is none, or it does not respond.

    Args:
        library: As for `nearest_node`.
    """
    with _opened(library) as nvml:
        version = ctypes.create_string_buffer(_NAME_BYTES)
        if nvml is None or not _ask(nvml, "nvmlSystemGetDriverVersion", version, _NAME_BYTES):
            return None
        cuda = _number(nvml, "nvmlSystemGetCudaDriverVersion_v2") or 0
        found = (_gpu(nvml, i) for i in range(_number(nvml, "nvmlDeviceGetCount_v2") or 0))
        return Driver(
            version=version.value.decode(errors="replace"),
            cuda=(cuda // 1000, cuda % 1000 // 10),
            gpus=tuple(gpu for gpu in found if gpu is not None),
        )


@contextmanager
def _opened(library: Any) -> Iterator[Any]:
    """Yield the initialised library; None if no driver responds."""
    try:
        library = library or ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        library = None
    if library is None or not _ask(library, "nvmlInit_v2"):
        yield None
        return
    try:
        yield library
    finally:
        library.nvmlShutdown()


def _ask(nvml: Any, function: str, *arguments: Any) -> bool:
    """Call a function; return whether it exists (old drivers may lack it) and succeeded."""
    try:
        return bool(getattr(nvml, function)(*arguments) == _SUCCESS)
    except AttributeError:
        return False


def _number(nvml: Any, function: str, *arguments: Any) -> int | None:
    """Return the number that a function writes to its last argument; None if it fails."""
    found = ctypes.c_uint()
    return found.value if _ask(nvml, function, *arguments, ctypes.byref(found)) else None


def _gpu(nvml: Any, index: int) -> Gpu | None:
    """Return a GPU; None for one that does not respond."""
    gpu, name = ctypes.c_void_p(), ctypes.create_string_buffer(_NAME_BYTES)
    major, minor, memory = ctypes.c_int(), ctypes.c_int(), _Memory()
    if not (
        _ask(nvml, "nvmlDeviceGetHandleByIndex_v2", index, ctypes.byref(gpu))
        and _ask(nvml, "nvmlDeviceGetName", gpu, name, _NAME_BYTES)
        and _ask(nvml, "nvmlDeviceGetMemoryInfo", gpu, ctypes.byref(memory))
    ):
        return None
    _ask(
        nvml,
        "nvmlDeviceGetCudaComputeCapability",
        gpu,
        ctypes.byref(major),
        ctypes.byref(minor),
    )
    return Gpu(
        name=name.value.decode(errors="replace"),
        capability=(major.value, minor.value),
        memory_bytes=memory.total,
        used_bytes=memory.used,
        num_processes=_num_processes(nvml, gpu),
        link=_link(nvml, gpu),
    )


def _num_processes(nvml: Any, gpu: ctypes.c_void_p) -> int | None:
    """Count a GPU's compute processes: given an empty buffer, NVML reports their number."""
    num = ctypes.c_uint(0)
    try:
        status = nvml.nvmlDeviceGetComputeRunningProcesses_v3(gpu, ctypes.byref(num), None)
    except AttributeError:
        return None
    return num.value if status in (_SUCCESS, _TOO_SMALL) else None


def _link(nvml: Any, gpu: ctypes.c_void_p) -> Link | None:
    functions = {
        "generation": "nvmlDeviceGetCurrPcieLinkGeneration",
        "width": "nvmlDeviceGetCurrPcieLinkWidth",
        "max_generation": "nvmlDeviceGetMaxPcieLinkGeneration",
        "max_width": "nvmlDeviceGetMaxPcieLinkWidth",
    }
    known = {field: value for field, f in functions.items() if (value := _number(nvml, f, gpu))}
    return Link(**known) if len(known) == len(functions) else None


class _Memory(ctypes.Structure):
    """NVML's nvmlMemory_t."""

    _fields_ = (
        ("total", ctypes.c_ulonglong),
        ("free", ctypes.c_ulonglong),
        ("used", ctypes.c_ulonglong),
    )
