"""GPUs as NVIDIA's management library reports them: their links, node of memory, and energy.

The library comes with the driver, and its bindings (nvidia-ml-py) are Python alone: without a
driver `nvmlInit` fails, and there is no GPU. Functions that a driver is too old for, or that a card
does not support, fail one by one.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pynvml

_WORD_BITS = 64
_NUM_WORDS = 1024 // _WORD_BITS  # a Linux kernel has at most 1024 nodes


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


def nearest_node(bus_id: str, nvml: Any = pynvml) -> int | None:
    """Return the node whose memory NVML reports as ideal for a GPU; None unless it is one node.

    Args:
        bus_id: The GPU, like 0000:81:00.0.
        nvml: The module pynvml, or one like it.
    """
    try:
        with _opened(nvml):
            gpu = nvml.nvmlDeviceGetHandleByPciBusId(bus_id.encode())
            words = nvml.nvmlDeviceGetMemoryAffinity(
                gpu, _NUM_WORDS, pynvml.NVML_AFFINITY_SCOPE_NODE
            )
    except pynvml.NVMLError:
        return None
    bits = range(_NUM_WORDS * _WORD_BITS)
    nodes = [n for n in bits if words[n // _WORD_BITS] >> n % _WORD_BITS & 1]
    return nodes[0] if len(nodes) == 1 else None


def find_driver(nvml: Any = pynvml) -> Driver | None:
    """Return the driver and its GPUs; None if there is none, or it does not respond.

    Args:
        nvml: The bindings, as `nearest_node` takes them.
    """
    try:
        with _opened(nvml):
            cuda = _known(nvml.nvmlSystemGetCudaDriverVersion_v2) or 0
            found = (_known(_gpu, nvml, index) for index in range(nvml.nvmlDeviceGetCount()))
            return Driver(
                version=nvml.nvmlSystemGetDriverVersion(),
                cuda=(cuda // 1000, cuda % 1000 // 10),
                gpus=tuple(gpu for gpu in found if gpu is not None),
            )
    except pynvml.NVMLError:
        return None


def energy_meter(bus_id: str, nvml: Any = pynvml) -> Callable[[], float]:
    """Return what reads the joules of a GPU since its driver was loaded; NVML stays open for it.

    Args:
        bus_id: The GPU's PCI address, as `nearest_node` takes it.
        nvml: The bindings, as `nearest_node` takes them.

    Raises:
        OSError: There is no driver, or the GPU has no counter, which only reading it shows.
    """

    def read_j() -> float:
        try:
            return float(nvml.nvmlDeviceGetTotalEnergyConsumption(gpu)) / 1e3
        except pynvml.NVMLError as error:
            raise OSError(f"NVML gives no energy of this card ({error})") from None

    try:
        nvml.nvmlInit()
        gpu = nvml.nvmlDeviceGetHandleByPciBusId(bus_id.encode())
    except pynvml.NVMLError as error:
        raise OSError(f"NVML does not respond ({error})") from None
    return read_j


@contextmanager
def _opened(nvml: Any) -> Iterator[None]:
    nvml.nvmlInit()
    try:
        yield
    finally:
        nvml.nvmlShutdown()


def _known(ask: Callable[..., Any], *arguments: Any) -> Any:
    """Return an answer; None where there is none."""
    try:
        return ask(*arguments)
    except pynvml.NVMLError:
        return None


def _gpu(nvml: Any, index: int) -> Gpu:
    gpu = nvml.nvmlDeviceGetHandleByIndex(index)
    memory = nvml.nvmlDeviceGetMemoryInfo(gpu)
    processes = _known(nvml.nvmlDeviceGetComputeRunningProcesses, gpu)
    return Gpu(
        name=nvml.nvmlDeviceGetName(gpu),
        capability=nvml.nvmlDeviceGetCudaComputeCapability(gpu),
        memory_bytes=memory.total,
        used_bytes=memory.used,
        num_processes=None if processes is None else len(processes),
        link=_known(_link, nvml, gpu),
    )


def _link(nvml: Any, gpu: Any) -> Link | None:
    figures = (
        nvml.nvmlDeviceGetCurrPcieLinkGeneration(gpu),
        nvml.nvmlDeviceGetCurrPcieLinkWidth(gpu),
        nvml.nvmlDeviceGetMaxPcieLinkGeneration(gpu),
        nvml.nvmlDeviceGetMaxPcieLinkWidth(gpu),
    )
    names = ("generation", "width", "max_generation", "max_width")
    return Link(**dict(zip(names, figures, strict=True))) if all(figures) else None
