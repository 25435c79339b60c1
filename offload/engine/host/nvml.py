"""A door to NVIDIA's management library: the NUMA node that is nearest to a GPU."""

import ctypes
from typing import Any

_SUCCESS = 0
_SCOPE_NODE = 0  # NVML_AFFINITY_SCOPE_NODE
_BITS = 8 * ctypes.sizeof(ctypes.c_ulong)
_NUM_WORDS = 1024 // _BITS  # a Linux kernel has at most 1024 nodes


def nearest_node(bus_id: str, library: Any = None) -> int | None:
    """Return the node whose memory NVML calls ideal for a GPU, or None if it names no single one.

    Args:
        bus_id: The GPU, like 0000:81:00.0.
        library: An object with NVML's functions; None loads the driver's library.
    Source: NVML reference, group nvmlAffinity, nvmlDeviceGetMemoryAffinity.
    """
    try:
        library = library or ctypes.CDLL("libnvidia-ml.so.1")
        if library.nvmlInit_v2() != _SUCCESS:
            return None
        try:
            return _ask(library, bus_id)
        finally:
            library.nvmlShutdown()
    except (OSError, AttributeError):  # no driver here, or one older than the function
        return None


def _ask(library: Any, bus_id: str) -> int | None:
    gpu = ctypes.c_void_p()
    words = (ctypes.c_ulong * _NUM_WORDS)()
    status = library.nvmlDeviceGetHandleByPciBusId_v2(bus_id.encode(), ctypes.byref(gpu))
    if status == _SUCCESS:
        status = library.nvmlDeviceGetMemoryAffinity(gpu, _NUM_WORDS, words, _SCOPE_NODE)
    nodes = [n for n in range(_NUM_WORDS * _BITS) if words[n // _BITS] >> n % _BITS & 1]
    return nodes[0] if status == _SUCCESS and len(nodes) == 1 else None
