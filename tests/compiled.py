"""Kernels as they would be launched, compiled for cards that are not there.

Triton specialises and compiles launches that were noted as in a run, for a driver that only
says which card it has. Its wheel brings the assembler, and the tool that reads back what was used.
"""

import importlib
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any, ParamSpec, TypeVar
from unittest import mock

from offload.engine.experts.launcher import MAX_SHARED_BYTES, REGISTERS

P = ParamSpec("P")
R = TypeVar("R")
KERNELS = "offload.engine.experts.kernels"
WIDE_BYTES = 16  # most that a thread reads at once
# Of a multiprocessor: shared memory in KiB, of which each program takes one more, and warps.
SHARED_KIB = {80: 164, 86: 100, 89: 100, 90: 228, 120: 100}
WARPS = {80: 64, 86: 48, 89: 48, 90: 64, 120: 48}
REGISTER_UNIT = 8  # of a thread


@dataclass(frozen=True, kw_only=True, slots=True)
class Launch:
    """A kernel and what it would be started with."""

    kernel: str
    grid: tuple[int, ...]
    arguments: Mapping[str, Any]

    @property
    def item_bytes(self) -> int:
        """The size of a value of what is multiplied."""
        sizes = {self.arguments[x].itemsize for x in ("matrices", "right") if x in self.arguments}
        return int(sizes.pop())


@dataclass(frozen=True, kw_only=True, slots=True)
class Access:
    """A line of a kernel that reads or writes the card's memory.

    Attributes:
        source: What the line says.
        lines: Its number, and those of the lines that called it.
        num_bytes: Fewest that a thread moves at once.
        is_async: Whether all of it is read ahead into shared memory, past the registers.
    """

    source: str
    lines: tuple[int, ...]
    num_bytes: int
    is_async: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Compiled:
    """What a kernel takes on a card.

    Attributes:
        launch: What was compiled.
        capability: Of the card, as 86.
        registers: Of a thread.
        spilled_bytes: Of a thread, for want of registers.
        shared_bytes: Of a program.
        accesses: To the card's memory, in the order of the code.
    """

    launch: Launch
    capability: int
    registers: int
    spilled_bytes: int
    shared_bytes: int
    accesses: tuple[Access, ...]

    @property
    def max_shared_bytes(self) -> int:
        """What a program may have on that card."""
        return MAX_SHARED_BYTES[self.capability]

    @property
    def num_programs(self) -> int:
        """How many run on a multiprocessor at once."""
        num_warps = self.launch.arguments["num_warps"]
        registers = -(-self.registers // REGISTER_UNIT) * REGISTER_UNIT * 32 * num_warps
        by_shared = SHARED_KIB[self.capability] * 1024 // (self.shared_bytes + 1024)
        return min(REGISTERS // registers, by_shared, WARPS[self.capability] // num_warps)

    @property
    def operands(self) -> dict[str, Access]:
        """The reads of both sides of the large product, by what the kernel calls them."""
        reads = [access for access in self.accesses if _operand(access)]
        first = min(access.lines[1:] for access in reads)  # a branch's product comes behind it
        same = [access for access in reads if access.lines[1:] == first]  # all, where none is named
        return {_operand(access): access for access in reversed(same)}

    @property
    def is_wide(self) -> bool:
        """Whether both sides are read ahead, by as few reads as there can be."""
        given = self.launch.arguments
        sides = {"x": ("M", "K"), "w": ("K", "N"), "a": ("M", "R"), "b": ("M", "N")}
        num_threads = 32 * given["num_warps"]
        for name, access in self.operands.items():
            high, wide = (given[f"BLOCK_{side}"] for side in sides[name])
            share_bytes = high * wide * self.launch.item_bytes // num_threads
            if not access.is_async or access.num_bytes < min(WIDE_BYTES, share_bytes):
                return False
        return len(self.operands) == 2


class _Driver:
    """What Triton asks of a GPU's driver to compile."""

    def __init__(self, capability: int) -> None:
        self._capability = capability

    def get_current_device(self) -> int:
        """Return what Triton keeps compiled kernels by."""
        return self._capability

    def get_current_stream(self, device: int) -> int:
        """Return a stream, which is not used."""
        return 0 * device

    def get_current_target(self) -> Any:
        """Return the card."""
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self._capability, 32)


def compile_for(
    capability: int, noted: Sequence[Launch], *, module: str = KERNELS
) -> list[Compiled]:
    """Compile launches of a module's kernels for a card; those that come to one program are one."""
    return able_to_compile(_compile_for, capability, noted, module)


def able_to_compile(function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Call a function where Triton compiles: here it may have been imported to interpret."""
    with mock.patch.dict("os.environ", TRITON_INTERPRET="0"):
        return _process().submit(function, *args, **kwargs).result()


@cache
def _process() -> ProcessPoolExecutor:
    return ProcessPoolExecutor(1, mp_context=get_context("spawn"))


def _compile_for(capability: int, noted: Sequence[Launch], module: str) -> list[Compiled]:
    from triton.runtime import driver

    found: dict[str, tuple[Launch, Any]] = {}
    kernels = importlib.import_module(module)
    with mock.patch.object(driver, "_active", _Driver(capability)):
        for launch in noted:
            made = getattr(kernels, launch.kernel).warmup(grid=launch.grid, **launch.arguments)
            found.setdefault(made.hash, (launch, made))
    path = Path(kernels.__file__ or "")
    return [_read(launch, made, capability, path) for launch, made in found.values()]


def _operand(access: Access) -> str:
    name, is_read, _ = access.source.partition(" = tl.load(")
    return name if is_read and name in {"x", "w", "a", "b"} else ""


def _read(launch: Launch, made: Any, capability: int, path: Path) -> Compiled:
    import triton

    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        command = [f"{tool}", "-res-usage", file.name]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    used = {name: int(number) for name, number in re.findall(r"([A-Z]+):(\d+)", said)}
    return Compiled(
        launch=launch,
        capability=capability,
        registers=used["REG"],
        spilled_bytes=used["STACK"] + used["LOCAL"],
        shared_bytes=used["SHARED"] + made.metadata.shared,
        accesses=tuple(_accesses(made.asm["ptx"], path)),
    )


def _accesses(ptx: str, path: Path) -> Iterator[Access]:
    """Find what moves data, by the line of the kernels' file that an instruction is of."""
    sources = path.read_text().splitlines()
    name = re.escape("/".join(path.parts[-2:]))  # Triton's cache may be of another checkout
    own = re.search(rf'\.file\s+(\d+) "[^"]*/{name}"', ptx)
    assert own is not None
    at: tuple[int, ...] = ()
    moves: dict[tuple[int, ...], list[tuple[int, bool]]] = {}
    for line in ptx.splitlines():
        if re.match(r"\s*\.loc", line):
            places = re.findall(rf"(?:\.loc|inlined_at)\s+{own[1]} (\d+)", line)
            at = tuple(int(place) for place in places)
        elif copied := re.search(r"cp\.async\.c[ag]\S* .*, 0x(\w+)", line):
            moves.setdefault(at, []).append((int(copied[1], 16), True))
        elif moved := re.search(r"(?:ld|st)\.global\S*?(?:\.v(\d))?\.b(\d+)", line):
            num_bytes = int(moved[1] or 1) * int(moved[2]) // 8
            moves.setdefault(at, []).append((num_bytes, False))
    for lines, found in moves.items():
        yield Access(
            source=sources[lines[0] - 1].strip(),
            lines=lines,
            num_bytes=min(num_bytes for num_bytes, _ in found),
            is_async=all(is_async for _, is_async in found),
        )
