"""Rates and capacities of a machine, each with its source: measured, published, or assumed."""

import difflib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from reprlib import repr as shown
from types import UnionType
from typing import Any, Literal, get_args

from offload.errors import MachineError
from offload.plan.machine.cards import CARDS, Card, Line, Pcie

MIB, GIB = 2**20, 2**30
MEASURED = "measured"  # the source of rates that were measured on this machine
# Beyond any machine, while a float still holds products of a few.
MIN_RATE, MAX_RATE, MAX_BYTES = 1e-15, 1e30, 2**60

# Expert kernels, by the names of transformers; `triton` is this project's own.
ExpertsImplementation = Literal["eager", "grouped_mm", "triton"]
Dtype = Literal["bfloat16", "float16", "float32"]
Tier = Literal["ram", "disk"]
"""Where what waits outside of device memory is."""
DTYPE_BYTES: Mapping[str, Literal[2, 4]] = {"bfloat16": 2, "float16": 2, "float32": 4}


@dataclass(frozen=True, kw_only=True, slots=True)
class Rate:
    """A number per second (of `launch_s`: seconds), and where it comes from."""

    value: float
    source: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Implementation:
    """The expert kernels, and the reason for the choice."""

    value: ExpertsImplementation
    source: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Node:
    """A NUMA node: host memory with its local processors."""

    number: int  # the system's number of the node
    num_cpus: int  # processors that this process may use
    ram_bytes: int  # all of its memory
    is_near: bool  # whether it is the nearest one to the device
    copy_bytes_per_s: Rate  # bytes that one of its threads copies within it


@dataclass(frozen=True, kw_only=True, slots=True)
class Network:
    """What connects the ranks of a run."""

    world_size: int  # the ranks that it was measured between
    latency_s: Rate  # seconds of adding up a few gradients, words about them included
    bytes_per_s: Rate  # bytes that each rank sends while it adds up many, and receives as many


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """One device with its host.

    On a CPU, device memory is the host's: both capacities name the same bytes.

    Attributes:
        name: The machine's name in reports.
        device: The device that layers compute on.
        dtype: The weights' dtype that the rates of matrix products are for.
        vram_bytes: Device memory that a process may use, its context included.
        ram_bytes: Host memory that a process may use.
        desktop_bytes: Device memory in addition to that, of a desktop and other programs.
        system_bytes: Host memory in addition to that, of the system and other programs.
        pinned_bytes: Host memory that may be page-locked.
        context_bytes: Device memory used before the first tensor: the CUDA context, or the process.
        has_grouped_gemm: Whether torch's grouped products run as one kernel instead of a loop.
        experts_implementation: The expert kernels.
        gemm_flops_per_s: Large matrix products.
        expert_gemm_flops_per_s: Products of routed rows with their experts' matrices, with these
            expert kernels.
        tall_gemm_flops_per_s: Products with 16 columns or rows on one side, as in low-rank
            branches, forward and backward.
        tall_fp32_flops_per_s: Products with 16 columns or rows on one side in fp32, the dtype of
            adapters.
        attention_flops_per_s: Causal attention, forward and backward. On a GPU the lower triangle
            is counted, on a CPU the blocks that its kernel computes.
        vector_flops_per_s: Arithmetic and large products in fp32.
        memory_bytes_per_s: Norms and activations in device memory, reads and writes together.
        h2d_bytes_per_s: Host to device while the other direction is idle.
        h2d_duplex_bytes_per_s: Host to device while the other direction (a CPU: compute) is busy.
        d2h_bytes_per_s: Device to host.
        host_memory_bytes_per_s: Large new tensors in host memory, reads and writes together.
        launch_s: Seconds to issue one operation of a layer.
        disk_bytes_per_s: Reads of a file that bypass the page cache, as stores are read; None if
            not measured.
        nodes: The host's NUMA nodes; empty if not measured.
        network: The network between the ranks that measured it; None if there was one.
        others_frac: The share of the processors' time that other programs took while this was
            measured; None if it was little.
    """

    name: str
    device: Literal["cuda", "cpu"]
    dtype: str
    vram_bytes: int
    ram_bytes: int
    desktop_bytes: int
    system_bytes: int
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
    network: Network | None = None
    others_frac: float | None = None

    @property
    def installed_bytes(self) -> int:
        """All host memory, that of other programs included."""
        return self.ram_bytes + self.system_bytes

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
        values = asdict(self)
        for name in _OPTIONAL:  # as files of machines that have none
            if values[name] is None:
                del values[name]
        return json.dumps(values, indent=2) + "\n"

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
        if isinstance(values, dict):
            values = dict.fromkeys(_OPTIONAL) | values
        machine: Machine = _parsed("machine", values, cls)
        return machine


_OPTIONAL = ("network", "others_frac")


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


def _parsed(label: str, value: Any, kind: Any) -> Any:
    """Return a value of a machine's file as a type of its fields; the label names it in errors."""
    if kind == tuple[Node, ...]:
        if not isinstance(value, list):
            raise _bad_file(f"{label} is {shown(value)}, not a list")
        return tuple(_parsed(f"one of {label}", node, Node) for node in value)
    if isinstance(kind, UnionType):
        kind, _ = get_args(kind)
        if value is None:
            return None
    if kind in (Machine, Rate, Implementation, Node, Network):
        types = {field.name: field.type for field in fields(kind)}
        _check_keys(value, types, label)
        assert isinstance(value, dict)
        labels = {n: f"'{n}'" if kind is Machine else f"the {n} of {label}" for n in types}
        return kind(**{name: _parsed(labels[name], x, types[name]) for name, x in value.items()})
    if names := get_args(kind):
        is_right, wanted = value in names, f"{', '.join(names[:-1])} or {names[-1]}"
    elif kind is float:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        is_right, wanted = is_number and MIN_RATE < value < MAX_RATE, "a number above 0"
    else:
        is_right = type(value) is kind and (kind is not int or 0 <= value <= MAX_BYTES)
        wanted = {int: "a whole number of bytes", bool: "true or false", str: "text"}[kind]
    if not is_right:
        raise _bad_file(f"{label} is {shown(value)}, not {wanted}")
    return float(value) if kind is float else value


# ---------------------------------------------------------------------------------------------
# Named cards

# The share of the datasheet that large products reach, by torch.matmul of up to 10,240 x 10,240 on
# owners' cards (github.com/zzc0721/torch-performance-test-data, database.md). In bf16 a GeForce
# reaches 1.08 (RTX 3090), 1.08 (4070 SUPER), 0.97 to 1.05 (4090) and 1.13 (5090), at a clock that a
# long run may not hold: 0.93 is the least that is known of a 4090. Others reach 0.75 (B200), 0.80
# (H100), 0.85 (A100) and 0.83 (RTX PRO 6000). In fp32 without TF32: 0.66 (4090 and 5090) to 0.69
# (3090), 0.61 (RTX PRO 6000), 0.98 (A100).
GEMM_FRACS: Mapping[Line, float] = {"consumer": 0.93, "workstation": 0.8, "server": 0.8}
FP32_GEMM_FRACS: Mapping[Line, float] = {"consumer": 0.66, "workstation": 0.61, "server": 0.8}
# The share of memory bandwidth: assumed for eager operators between the 0.4 and 0.65 that they
# reach, and for kernels that fuse their passes 0.65, until a probe measures them; for a product's
# one pass over its long side that of large copies, 0.72 (H100) to 0.78 (RTX 5090) and more.
EAGER_FRAC, FUSED_FRAC, COPY_FRAC = 0.55, 0.65, 0.8
# Memory that a process cannot have. nvidia-smi lists 0.995 of what a card is sold with, or more
# (8,151 of 8,192 MiB for an RTX 5060); this is assumed where no list was found. CUDA has 346 MiB
# less than that on an RTX 4090 (23.65 GiB in out-of-memory messages), 469 on an H100 (79.19) and
# 494 on an RTX 5090 (31.36). A card with a display and no job had 133 to 2,102 MiB in use in 28
# lists of nvidia-smi on Linux and WSL2 (public repositories on GitHub, searched for bus ids that
# are followed by "On |"): 715 in the median, at most 1,492 in nine of ten, and 1,536 is left to it.
LISTED_FRAC = 0.995
DRIVER_BYTES, DESKTOP_BYTES = 512 * MIB, 1536 * MIB
# RAM that a process cannot have of what is installed. Of 64 GiB Linux has 62.6 to 62.8 (MemTotal in
# 20 such files of public repositories), and of that an idle system 0.9 to 2.6 (`free` in 8 more).
# What other programs take on top of it, a browser say, is known only when a machine is measured.
SYSTEM_BYTES = 4 * GIB
# Triton's expert kernels, with branches and gates: 299 of the 814 TFLOP/s of large products, by the
# kernel times of an H200's profile (tests/bench/results: 30B-A3B, 8,192 tokens), where an eighth of
# what they multiply is empty rows of tiles. The trial of a run replaces it.
EXPERT_FRAC = 0.37 * 9 / 8
# Seconds to issue an operation, Python and autograd included: the probe found 24 and 27 us on an
# H200's host, a virtual server. Half of that is assumed of a desktop: issuing is one thread's work,
# and one of its cores does about twice as much in a second as a server's.
SERVER_LAUNCH_S = 27e-6
_LAUNCHES: Mapping[bool, Rate] = {
    True: Rate(value=SERVER_LAUNCH_S, source="as an H200's host measures"),
    False: Rate(value=SERVER_LAUNCH_S / 2, source="assumed: half of what an H200's host measures"),
}
# The others are assumptions until a probe replaces them.
ATTENTION_FRAC = 0.6
DUPLEX_FRAC = 51 / 56
CONTEXT_BYTES = GIB * 3 // 4
WORKSTATION_RAM_BYTES = 64 * GIB
SERVER_RAM_BYTES = 256 * GIB
HOST_MEMORY_BYTES_PER_S = 60e9
TALL_COLUMNS = 16  # columns of the products that tall rates are measured with
NVME_BYTES_PER_S = 6e9
FP32_FRAC = 0.25  # of the 16-bit rate, if not published: that of a workstation card
GIVEN, MEASURED_BY_OTHERS = "given", "measured by others"

_LINKS: Mapping[Pcie, Rate] = {
    (3, 16): Rate(value=12.5e9, source="assumed: PCIe 3.0 x16"),
    (4, 8): Rate(value=12.5e9, source="assumed: PCIe 4.0 x8"),
    (4, 16): Rate(value=25e9, source="assumed: PCIe 4.0 x16"),
    (5, 8): Rate(value=28e9, source="assumed: PCIe 5.0 x8"),
    (5, 16): Rate(value=56e9, source="assumed: PCIe 5.0 x16, as an RTX 5090 measures"),
}
_OTHER_MAKERS = {
    "AMD": r"amd|radeon|instinct|rx\d|mi\d",
    "Intel": r"intel|arc|gaudi",
    "Apple": r"apple|mac|m\d(pro|max|ultra)?$",
}
CARD_KEYS = ("memory_gib", "memory_gb_per_s", "half_tflops", "link_gb_per_s")


def named_machine(
    name: str,
    *,
    dtype: Dtype = "bfloat16",
    ram_bytes: int | None = None,
    link_bytes_per_s: float | None = None,
    is_headless: bool = False,
) -> Machine:
    """Return a known card in a workstation or server; case, spaces and dashes do not matter.

    Args:
        name: Such as rtx3060, "RTX 5090" or "RTX 3060 8 GB".
        dtype: What layers compute in.
        ram_bytes: Host memory that is installed, if not the assumed 64 GiB (server cards: 256).
        link_bytes_per_s: Host to device, if the slot is narrower than the card's link.
        is_headless: Whether no desktop uses the card; none uses a server card.

    Raises:
        MachineError: No such card (the error lists the nearest names), or it has no such dtype.
    """
    key = _card_key(name)
    if key is None:
        _refuse_other_maker(name)
        nearest = difflib.get_close_matches(_plain(name), CARDS, n=3, cutoff=0.0)
        raise MachineError(
            f"no machine is called '{name}'",
            limit=f"known are {', '.join(CARDS)}",
            hint=f"nearest: `{'`, `'.join(nearest)}`; or measure yours: `sluice probe --save FILE`",
        )
    card = CARDS[key]
    if dtype == "bfloat16" and not card.has_bf16:
        raise MachineError(
            f"{key} does not compute in bfloat16",
            limit="cards before Ampere have 16-bit products of float16 only",
            hint="`model.dtype: float16` or `float32`, or a card such as rtx3060 or l4",
        )
    link = _LINKS[card.pcie]
    if card.measured_link_gb_per_s is not None:
        link = Rate(value=card.measured_link_gb_per_s * 1e9, source=MEASURED_BY_OTHERS)
    is_server = card.line == "server"
    return _machine(
        key,
        card,
        dtype=dtype,
        ram_bytes=ram_bytes or (SERVER_RAM_BYTES if is_server else WORKSTATION_RAM_BYTES),
        is_headless=is_headless or is_server,
        link=link if link_bytes_per_s is None else Rate(value=link_bytes_per_s, source=GIVEN),
        word="datasheet",
    )


def half_dtype(name: str) -> Dtype:
    """Return the 16-bit type that a named card computes in; of anything else bfloat16."""
    key = _card_key(name)
    return "float16" if key is not None and not CARDS[key].has_bf16 else "bfloat16"


def board_w(machine: Machine) -> int | None:
    """Return the watts that a machine's card draws at most, by its maker; None if not known."""
    is_described = machine.gemm_flops_per_s.source.startswith(GIVEN)
    key = None if machine.device == "cpu" or is_described else _card_key(machine.name)
    return None if key is None else CARDS[key].board_w


def described_machine(
    name: str,
    text: str,
    *,
    dtype: Dtype = "bfloat16",
    ram_bytes: int | None = None,
    is_headless: bool = False,
) -> Machine:
    """Return a card described by four numbers; everything else is assumed.

    Args:
        name: Its name.
        text: A JSON object of `CARD_KEYS`: GiB, GB/s, TFLOP/s of dense 16-bit products that are
            accumulated in fp32, and GB/s from host to device.
        dtype: What layers compute in.
        ram_bytes: Host memory that is installed, if it is not the assumed 64 GiB.
        is_headless: Whether no desktop uses the card.

    Raises:
        MachineError: The text is not these four numbers.
    """
    values = json.loads(text)
    numbers = {key: values.get(key) for key in CARD_KEYS}
    wrong = [*(key for key in values if key not in CARD_KEYS)] + [
        key
        for key, value in numbers.items()
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e6
    ]
    if wrong:
        raise MachineError(
            f"the card file of {name} has {wrong[0]}: {json.dumps(values.get(wrong[0]))}",
            limit=f"it holds four numbers above 0: {', '.join(CARD_KEYS)}",
            hint='`{"memory_gib": 24, "memory_gb_per_s": 936, "half_tflops": 71,'
            ' "link_gb_per_s": 25}` is an RTX 3090',
        )
    card = Card(
        memory_gib=numbers["memory_gib"],
        half_tflops=numbers["half_tflops"],
        fp32_tflops=numbers["half_tflops"] * FP32_FRAC,
        memory_gb_per_s=numbers["memory_gb_per_s"],
        pcie=(4, 16),
        line="workstation",
        sheet=GIVEN,
    )
    return _machine(
        name,
        card,
        dtype=dtype,
        ram_bytes=ram_bytes or WORKSTATION_RAM_BYTES,
        is_headless=is_headless,
        link=Rate(value=numbers["link_gb_per_s"] * 1e9, source=GIVEN),
        word=GIVEN,
    )


def is_described(text: str) -> bool:
    """Return whether a file is a card of four numbers and not the output of `probe --save`."""
    try:
        values = json.loads(text)
    except (ValueError, RecursionError):
        return False
    return (
        isinstance(values, dict)
        and not {"device", "gemm_flops_per_s"} & set(values)
        and any(key in values for key in CARD_KEYS)
    )


def _refuse_other_maker(name: str) -> None:
    """Refuse a device of another maker, for which no card is the nearest.

    Raises:
        MachineError: It is one.
    """
    for maker, pattern in _OTHER_MAKERS.items():
        if re.match(pattern, _plain(name)):
            raise MachineError(
                f"'{name}' is a device of {maker}",
                limit="training runs on NVIDIA cards, by CUDA, or on the CPU",
                hint="`--machine rtx4090` or another NVIDIA card; `sluice probe --save FILE`"
                " measures the CPU of this machine",
            )


def _card_key(name: str) -> str | None:
    known = {_plain(key): key for key in CARDS}
    known |= {f"{_plain(key)}{card.memory_gib:g}gb": key for key, card in CARDS.items()}
    plain = _plain(name)
    return known.get(plain) or known.get(f"rtx{plain}")


def _plain(name: str) -> str:
    """Return a card's name for comparison: without spaces, dashes and its maker's words."""
    text = "".join(letter for letter in name.lower() if letter not in " -_")
    for word in ("nvidia", "geforce", "tesla"):
        text = text.removeprefix(word)
    for word in ("generation", "blackwell"):
        text = text.removesuffix(word)
    return text


def _machine(
    name: str,
    card: Card,
    *,
    dtype: Dtype,
    ram_bytes: int,
    is_headless: bool,
    link: Rate,
    word: str,
) -> Machine:
    desktop_bytes = 0 if is_headless else DESKTOP_BYTES
    gemm_frac, fp32_frac = GEMM_FRACS[card.line], FP32_GEMM_FRACS[card.line]
    half = _published(card.measured_gemm_tflops, card.half_tflops, gemm_frac, 1e12, word)
    vector = _published(card.measured_fp32_tflops, card.fp32_tflops, fp32_frac, 1e12, word)
    if word == GIVEN:
        vector = _share(half, FP32_FRAC, "16-bit rate")
    copy = _published(card.measured_memory_gb_per_s, card.memory_gb_per_s, COPY_FRAC, 1e9, word)
    memory = _published(None, card.memory_gb_per_s, EAGER_FRAC, 1e9, word)
    num_bytes = DTYPE_BYTES[dtype]
    gemm = vector if dtype == "float32" else half
    return Machine(
        name=name,
        device="cuda",
        dtype=dtype,
        vram_bytes=_process_bytes(card) - desktop_bytes,
        ram_bytes=usable_ram_bytes(ram_bytes),
        desktop_bytes=desktop_bytes,
        system_bytes=ram_bytes - usable_ram_bytes(ram_bytes),
        pinned_bytes=usable_ram_bytes(ram_bytes),
        context_bytes=CONTEXT_BYTES,
        has_grouped_gemm=card.has_grouped_gemm,
        experts_implementation=assumed_implementation(
            device="cuda", has_grouped_gemm=card.has_grouped_gemm
        )
        if card.has_bf16
        else Implementation(value="eager", source="assumed: the kernels need Ampere"),
        gemm_flops_per_s=gemm,
        expert_gemm_flops_per_s=_share(gemm, EXPERT_FRAC, "GEMM"),
        tall_gemm_flops_per_s=_tall(gemm, copy, num_bytes=num_bytes),
        tall_fp32_flops_per_s=_tall(vector, copy, num_bytes=4),
        attention_flops_per_s=_share(gemm, ATTENTION_FRAC, "GEMM")
        if card.measured_attention_tflops is None or dtype == "float32"
        else Rate(value=card.measured_attention_tflops * 1e12, source=MEASURED_BY_OTHERS),
        vector_flops_per_s=vector,
        memory_bytes_per_s=memory,
        h2d_bytes_per_s=link,
        h2d_duplex_bytes_per_s=_share(link, DUPLEX_FRAC, "h2d"),
        d2h_bytes_per_s=link,
        host_memory_bytes_per_s=Rate(value=HOST_MEMORY_BYTES_PER_S, source="assumed"),
        launch_s=_LAUNCHES[card.line == "server"],
        disk_bytes_per_s=Rate(value=NVME_BYTES_PER_S, source="assumed: PCIe 4.0 NVMe"),
    )


def _process_bytes(card: Card) -> int:
    """Return the memory of a card without the driver's."""
    total_bytes = int(LISTED_FRAC * card.memory_gib * GIB)
    if card.listed_mib is not None:
        total_bytes = card.listed_mib * MIB
    return total_bytes - DRIVER_BYTES


def usable_ram_bytes(installed_bytes: int) -> int:
    """Return the RAM that a process may use of what is installed, on a machine without a job."""
    return max(0, installed_bytes - SYSTEM_BYTES)


def assumed_implementation(*, device: str, has_grouped_gemm: bool) -> Implementation:
    """Return the expert kernels that are assumed to be the fastest before a run measures them."""
    if device == "cpu":
        return Implementation(value="eager", source="a loop is the fastest on a CPU")
    return Implementation(
        value="grouped_mm" if has_grouped_gemm else "triton",
        source="assumed until a run measures it",
    )


def _published(
    measured: float | None, published: float, frac: float, unit: float, word: str
) -> Rate:
    if measured is not None:
        return Rate(value=measured * unit, source=MEASURED_BY_OTHERS)
    return Rate(value=published * unit * frac, source=f"{word} x {frac}")


def _tall(gemm: Rate, memory: Rate, *, num_bytes: int) -> Rate:
    """Return the rate of products that read their long side once, in addition to arithmetic."""
    seconds_per_flop = 1 / gemm.value + num_bytes / (2 * TALL_COLUMNS * memory.value)
    return Rate(value=1 / seconds_per_flop, source="assumed: GEMM, and one pass over the long side")


def _share(rate: Rate, frac: float, of: str) -> Rate:
    return Rate(value=rate.value * frac, source=f"assumed: {frac:.2g} x {of}")


# ---------------------------------------------------------------------------------------------
# What connects the GPUs of a machine, for plans of cards that are not here.
#
# How much of NVLink collectives reach is assumed until it is measured.

REACHED_FRAC = 0.8
NVLINK, PCIE = "nvlink", "pcie"
# Between processes: a few words, and the first bytes of a sum.
LATENCY = Rate(value=1e-3, source="assumed")


def with_interconnect(machine: Machine, name: str, *, world_size: int) -> Machine:
    """Return a machine whose cards are connected so.

    Args:
        machine: One of the cards, with its host.
        name: `nvlink`; `pcie`, the link that loads weights too; or each direction in GB/s.
        world_size: How many cards.

    Raises:
        MachineError: It is none of these, or the card is not known to have it.
    """
    if name == PCIE:
        link = machine.h2d_duplex_bytes_per_s
        rate = replace(link, source=f"assumed: a copy, {link.source}")
    elif name == NVLINK:
        sheets = {name: card.nvlink_gb_per_s for name, card in CARDS.items()}
        sheet = sheets.get(machine.name)
        if sheet is None:
            raise MachineError(
                f"--interconnect nvlink, but no NVLink is known of {machine.name}",
                limit=f"known are {', '.join(name for name in CARDS if sheets[name])}",
                hint="`--interconnect pcie`, or the rate of each direction in GB/s",
            )
        rate = Rate(
            value=REACHED_FRAC * sheet * 1e9,
            source=f"assumed: {REACHED_FRAC:.0%} of NVLink's {sheet:g} GB/s each way",
        )
    else:
        rate = Rate(value=_given(name) * 1e9, source="given")
    network = Network(world_size=world_size, latency_s=LATENCY, bytes_per_s=rate)
    return replace(machine, network=network)


def _given(name: str) -> float:
    try:
        found = float(name)
    except ValueError:
        found = 0.0
    if not 1e-3 <= found <= 1e6:
        raise MachineError(
            f"--interconnect {name}",
            limit="it is nvlink, pcie, or what each direction carries in GB/s",
            hint="`--interconnect nvlink`, or `--interconnect 25`",
        )
    return found
