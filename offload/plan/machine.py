"""Rates and capacities of a machine, each with its source: measured, published, or assumed."""

import difflib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from reprlib import repr as shown
from typing import Any, Literal, get_args

from offload.errors import MachineError

GIB = 2**30
MEASURED = "measured"  # the source of what was, on this machine
# Beyond any machine, while a float still holds products of a few.
MIN_RATE, MAX_RATE, MAX_BYTES = 1e-15, 1e30, 2**60

# Ways to multiply experts' rows, as transformers calls them; `triton` is this project's own.
ExpertsImplementation = Literal["eager", "grouped_mm", "triton"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Rate:
    """A number per second (of `launch_s`: seconds), and where it comes from."""

    value: float
    source: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Implementation:
    """How the rows of experts are multiplied, and why so."""

    value: ExpertsImplementation
    source: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Node:
    """Host memory with the processors beside it (NUMA).

    Attributes:
        number: As the system counts.
        num_cpus: Processors, as many as this process may use.
        ram_bytes: All of its memory.
        is_near: Whether it is the nearest one to the device.
        copy_bytes_per_s: Bytes that one of its threads copies within it.
    """

    number: int
    num_cpus: int
    ram_bytes: int
    is_near: bool
    copy_bytes_per_s: Rate


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """One device with its host.

    On a CPU, device memory is the host's: both capacities name the same bytes.

    Attributes:
        name: What the machine is called in reports.
        device: Where layers compute.
        dtype: Type of the weights for which the rates of matrix products hold.
        vram_bytes: Device memory that a process may use, its context included.
        ram_bytes: Host memory that a process may use.
        pinned_bytes: Host memory that may be page-locked.
        context_bytes: Device memory gone before the first tensor: the CUDA context, or the process.
        has_grouped_gemm: Whether torch's grouped products run as one kernel, and not as a loop.
        experts_implementation: How the rows of experts are multiplied.
        gemm_flops_per_s: Large matrix products.
        expert_gemm_flops_per_s: Products of routed rows with their experts' matrices, in the way
            that torch multiplies them here.
        tall_gemm_flops_per_s: Products with 16 columns or rows on one side, as low-rank branches
            have them, forward and backward.
        tall_fp32_flops_per_s: The same in fp32, as adapters are kept.
        attention_flops_per_s: Causal attention, forward and backward: of a card the lower triangle
            is counted, of a CPU the blocks that its kernel computes.
        vector_flops_per_s: Arithmetic and large products in fp32.
        memory_bytes_per_s: Norms and activations in device memory, reads and writes together.
        h2d_bytes_per_s: Host to device, the other direction idle.
        h2d_duplex_bytes_per_s: Host to device while the other direction (a CPU: compute) is busy.
        d2h_bytes_per_s: Device to host.
        host_memory_bytes_per_s: Large new tensors in host memory, reads and writes together.
        launch_s: Seconds that it takes to issue one operation of a layer.
        disk_bytes_per_s: Reads of a file past the page cache, as stores are read; None where nobody
            has looked.
        nodes: The host's memory in parts; empty where nobody has looked.
    """

    name: str
    device: Literal["cuda", "cpu"]
    dtype: str
    vram_bytes: int
    ram_bytes: int
    pinned_bytes: int
    context_bytes: int
    has_grouped_gemm: bool
    experts_implementation: Implementation
    gemm_flops_per_s: Rate
    expert_gemm_flops_per_s: Rate
    tall_gemm_flops_per_s: Rate
    tall_fp32_flops_per_s: Rate
    attention_flops_per_s: Rate
    vector_flops_per_s: Rate
    memory_bytes_per_s: Rate
    h2d_bytes_per_s: Rate
    h2d_duplex_bytes_per_s: Rate
    d2h_bytes_per_s: Rate
    host_memory_bytes_per_s: Rate
    launch_s: Rate
    disk_bytes_per_s: Rate | None = None
    nodes: tuple[Node, ...] = ()

    @property
    def is_measured(self) -> bool:
        """Whether every rate was measured on this machine."""
        rates = (getattr(self, field.name) for field in fields(self) if field.type is Rate)
        return all(rate.source == MEASURED for rate in rates)

    @property
    def loops_over_experts(self) -> bool:
        """Whether each expert's product is a launch of its own, as in a loop."""
        way = self.experts_implementation.value
        return way == "eager" or (way == "grouped_mm" and not self.has_grouped_gemm)

    def to_json(self) -> str:
        """Write the machine so that `from_json` returns an equal one."""
        return json.dumps(asdict(self), indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str) -> "Machine":
        """Read a machine.

        Raises:
            MachineError: Not JSON, or a key is unknown, missing or of the wrong type.
        """
        try:
            values = json.loads(text)
        except (ValueError, RecursionError) as error:  # not JSON, a number too long, or too deep
            raise _bad_file(f"it is not JSON that can be read: {error}") from None
        types = {field.name: field.type for field in fields(cls)}
        _check_keys(values, types, "machine")
        return cls(**{key: _parsed(key, value, types[key]) for key, value in values.items()})


def _bad_file(why: str) -> MachineError:
    return MachineError(
        f"the machine file cannot be read: {why}",
        limit="it holds what `probe --save` writes",
        hint="measure again: `sluice probe --save FILE`",
    )


def _check_keys(values: object, known: Mapping[str, object], what: str) -> None:
    if not isinstance(values, dict):
        raise _bad_file(f"{what} is {shown(values)}, not an object")
    for key in values:
        if key not in known:
            nearest = difflib.get_close_matches(key[:80], known, n=1, cutoff=0.0)[0]
            raise _bad_file(f"{what} has an unknown key '{key[:80]}' (nearest: '{nearest}')")
    for key in known:
        if key not in values:
            raise _bad_file(f"{what} has no key '{key}'")


def _parsed(key: str, value: object, kind: object) -> Any:
    if kind == Rate | None:
        return None if value is None else _parsed(key, value, Rate)
    if kind == tuple[Node, ...]:
        return _parsed_nodes(key, value)
    if kind in (Rate, Implementation):
        _check_keys(value, {"value": float, "source": str}, f"'{key}'")
        assert isinstance(value, dict)
        found, source = value["value"], value["source"]
        if not isinstance(source, str):
            raise _bad_file(f"the source of '{key}' is {shown(source)}, not text")
        if kind is Implementation:
            return Implementation(value=_chosen(key, found, ExpertsImplementation), source=source)
        is_number = isinstance(found, int | float) and not isinstance(found, bool)
        if not is_number or not MIN_RATE < found < MAX_RATE:
            raise _bad_file(f"the value of '{key}' is {shown(found)}, not a number above 0")
        return Rate(value=float(found), source=source)
    if key == "device":
        return _chosen(key, value, kind)
    assert kind in (int, bool, str)
    is_far = kind is int and isinstance(value, int) and not 0 <= value <= MAX_BYTES
    if type(value) is not kind or is_far:
        wanted = {int: "a whole number of bytes", bool: "true or false", str: "text"}[kind]
        raise _bad_file(f"'{key}' is {shown(value)}, not {wanted}")
    return value


def _parsed_nodes(key: str, value: object) -> tuple[Node, ...]:
    if not isinstance(value, list):
        raise _bad_file(f"'{key}' is {shown(value)}, not a list")
    types = {field.name: field.type for field in fields(Node)}
    nodes = []
    for one in value:
        _check_keys(one, types, f"one of '{key}'")
        nodes.append(Node(**{name: _parsed(name, of, types[name]) for name, of in one.items()}))
    return tuple(nodes)


def _chosen(key: str, value: object, choices: object) -> Any:
    names = get_args(choices)
    if value not in names:
        raise _bad_file(f"'{key}' is {shown(value)}, not {', '.join(names[:-1])} or {names[-1]}")
    return value


# ---------------------------------------------------------------------------------------------
# Named cards

# Shares of the datasheet that large kernels reach: 80 % of dense bf16 peak on H100 and H200, 70 to
# 90 % of memory bandwidth. The others are assumptions until a probe replaces them.
GEMM_FRAC = 0.8
MEMORY_FRAC = 0.8
EXPERT_FRAC = 0.7
ATTENTION_FRAC = 0.6
DUPLEX_FRAC = 51 / 56
LAUNCH_S = 7e-6
CONTEXT_BYTES = GIB * 3 // 4
WORKSTATION_RAM_BYTES = 64 * GIB
SERVER_RAM_BYTES = 256 * GIB
HOST_MEMORY_BYTES_PER_S = 60e9
TALL_COLUMNS = 16  # with which tall rates are measured
NVME_BYTES_PER_S = 6e9

_PCIE4 = Rate(value=25e9, source="assumed: PCIe 4.0 x16")
_PCIE4_X8 = Rate(value=12.5e9, source="assumed: PCIe 4.0 x8")
_PCIE5 = Rate(value=56e9, source="assumed: PCIe 5.0 x16, as an RTX 5090 measures")
_PCIE5_X8 = Rate(value=28e9, source="assumed: PCIe 5.0 x8")


@dataclass(frozen=True, kw_only=True, slots=True)
class _Card:
    """Datasheet figures: dense bf16 with fp32 accumulation, and fp32, in FLOP/s."""

    vram_gib: float
    bf16: float
    fp32: float
    memory: float
    link: Rate
    measured_gemm: float | None = None
    measured_memory: float | None = None
    measured_vector: float | None = None
    ram_bytes: int = WORKSTATION_RAM_BYTES
    has_grouped_gemm: bool = False


_CARDS: Mapping[str, _Card] = {
    "rtx3060": _Card(vram_gib=12, bf16=25.5e12, fp32=12.7e12, memory=360e9, link=_PCIE4),
    "rtx3090": _Card(vram_gib=24, bf16=71e12, fp32=35.6e12, memory=936e9, link=_PCIE4),
    "rtx4060ti": _Card(vram_gib=16, bf16=44.1e12, fp32=22.1e12, memory=288e9, link=_PCIE4_X8),
    "rtx4070": _Card(vram_gib=12, bf16=58.3e12, fp32=29.1e12, memory=504e9, link=_PCIE4),
    "rtx4080": _Card(vram_gib=16, bf16=97.5e12, fp32=48.7e12, memory=717e9, link=_PCIE4),
    "rtx4090": _Card(vram_gib=24, bf16=165.2e12, fp32=82.6e12, memory=1008e9, link=_PCIE4),
    "rtx5060ti": _Card(vram_gib=16, bf16=47.4e12, fp32=23.7e12, memory=448e9, link=_PCIE5_X8),
    "rtx5070": _Card(vram_gib=12, bf16=61.7e12, fp32=30.9e12, memory=672e9, link=_PCIE5),
    "rtx5080": _Card(vram_gib=16, bf16=112.6e12, fp32=56.3e12, memory=960e9, link=_PCIE5),
    "rtx5090": _Card(
        vram_gib=32,
        bf16=209.5e12,
        fp32=104.8e12,
        memory=1792e9,
        link=Rate(value=56e9, source="measured by others"),
        measured_gemm=238e12,
        measured_memory=1.4e12,
    ),
    "a100": _Card(
        vram_gib=80,
        bf16=312e12,
        fp32=19.5e12,
        memory=2039e9,
        link=_PCIE4,
        ram_bytes=SERVER_RAM_BYTES,
    ),
    "h100": _Card(
        vram_gib=80,
        bf16=989e12,
        fp32=67e12,
        memory=3350e9,
        link=_PCIE5,
        measured_gemm=800e12,
        measured_memory=2.4e12,
        measured_vector=25e12,
        ram_bytes=SERVER_RAM_BYTES,
        has_grouped_gemm=True,
    ),
    "h200": _Card(
        vram_gib=140,
        bf16=989e12,
        fp32=67e12,
        memory=4800e9,
        link=_PCIE5,
        ram_bytes=SERVER_RAM_BYTES,
        has_grouped_gemm=True,
    ),
}
CARD_NAMES = tuple(_CARDS)


def named_machine(
    name: str, *, ram_bytes: int | None = None, link_bytes_per_s: float | None = None
) -> Machine:
    """Return a known card in a workstation or server; case, spaces and dashes do not matter.

    Args:
        name: Such as rtx3060 or "RTX 5090".
        ram_bytes: Host memory, where it is not the assumed 64 GiB (server cards: 256).
        link_bytes_per_s: Host to device, where the slot is narrower than the card's link.

    Raises:
        MachineError: No such card; the nearest names are given.
    """
    plain = "".join(letter for letter in name.lower() if letter not in " -_")
    key = next((known for known in (plain, f"rtx{plain}") if known in _CARDS), None)
    if key is None:
        nearest = difflib.get_close_matches(plain, CARD_NAMES, n=3, cutoff=0.0)
        raise MachineError(
            f"no machine is called '{name}'",
            limit=f"known are {', '.join(CARD_NAMES)}",
            hint=f"nearest: `{'`, `'.join(nearest)}`; or measure yours: `sluice probe --save FILE`",
        )
    host_bytes = _CARDS[key].ram_bytes if ram_bytes is None else ram_bytes
    return _machine(key, _CARDS[key], host_bytes, link_bytes_per_s)


def _machine(name: str, card: _Card, ram_bytes: int, link_bytes_per_s: float | None) -> Machine:
    gemm = _published(card.measured_gemm, card.bf16, GEMM_FRAC)
    vector = _published(card.measured_vector, card.fp32, GEMM_FRAC)
    memory = _published(card.measured_memory, card.memory, MEMORY_FRAC)
    link = card.link
    if link_bytes_per_s is not None:
        link = Rate(value=link_bytes_per_s, source="given")
    return Machine(
        name=name,
        device="cuda",
        dtype="bfloat16",
        vram_bytes=int(card.vram_gib * GIB),
        ram_bytes=ram_bytes,
        pinned_bytes=ram_bytes,
        context_bytes=CONTEXT_BYTES,
        has_grouped_gemm=card.has_grouped_gemm,
        experts_implementation=assumed_implementation(
            device="cuda", has_grouped_gemm=card.has_grouped_gemm
        ),
        gemm_flops_per_s=gemm,
        expert_gemm_flops_per_s=_share(gemm, EXPERT_FRAC, "GEMM"),
        tall_gemm_flops_per_s=_tall(gemm, memory, num_bytes=2),
        tall_fp32_flops_per_s=_tall(vector, memory, num_bytes=4),
        attention_flops_per_s=_share(gemm, ATTENTION_FRAC, "GEMM"),
        vector_flops_per_s=vector,
        memory_bytes_per_s=memory,
        h2d_bytes_per_s=link,
        h2d_duplex_bytes_per_s=_share(link, DUPLEX_FRAC, "h2d"),
        d2h_bytes_per_s=link,
        host_memory_bytes_per_s=Rate(value=HOST_MEMORY_BYTES_PER_S, source="assumed"),
        launch_s=Rate(value=LAUNCH_S, source="assumed"),
        disk_bytes_per_s=Rate(value=NVME_BYTES_PER_S, source="assumed: PCIe 4.0 NVMe"),
    )


def assumed_implementation(*, device: str, has_grouped_gemm: bool) -> Implementation:
    """Return the way that is taken for the fastest one before a run has measured any."""
    if device == "cpu":
        return Implementation(value="eager", source="a loop is the fastest on a CPU")
    return Implementation(
        value="grouped_mm" if has_grouped_gemm else "triton",
        source="assumed until a run measures it",
    )


def _published(measured: float | None, datasheet: float, frac: float) -> Rate:
    if measured is not None:
        return Rate(value=measured, source="measured by others")
    return Rate(value=datasheet * frac, source=f"datasheet x {frac}")


def _tall(gemm: Rate, memory: Rate, *, num_bytes: int) -> Rate:
    """Return the rate of products that pass their long side once, beside their arithmetic."""
    seconds_per_flop = 1 / gemm.value + num_bytes / (2 * TALL_COLUMNS * memory.value)
    return Rate(value=1 / seconds_per_flop, source="assumed: GEMM, and one pass over the long side")


def _share(rate: Rate, frac: float, of: str) -> Rate:
    return Rate(value=rate.value * frac, source=f"assumed: {frac:.2g} x {of}")
