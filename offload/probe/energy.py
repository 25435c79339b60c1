"""Energy that a run takes, by the counters of its GPU and of the host's processors.

A GPU counts millijoules since its driver was loaded (NVML, nvmlDeviceGetTotalEnergyConsumption;
Volta and newer). Processors count microjoules (/sys/class/powercap, "RAPL"), which only root may
read on most systems; such a counter begins again at its `max_energy_range_uj`, after some minutes
at full load, so it is read twice a minute. Both count all that their part draws, whoever uses it,
and what it draws when idle. Neither counts the rest of the machine, nor the losses of its power
supply.
"""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

Part = Literal["GPU", "CPU"]
RAPL = Path("/sys/class/powercap")
POLL_S = 30.0
LEAST_WINDOW_S = 1.0  # counters are refreshed some 10 to 50 times a second


@dataclass(frozen=True, kw_only=True, slots=True)
class Counter:
    """A running total of energy."""

    part: Part  # what it counts the energy of
    name: str  # a name that no other counter of any machine has
    # Returns the total in joules; raises OSError if it does not respond.
    read_j: Callable[[], float]
    range_j: float | None = None  # the total at which it begins again; None if it never does


@dataclass(frozen=True, kw_only=True, slots=True)
class Counters:
    """The counters that were found, and why there is none of a part that a run uses."""

    found: tuple[Counter, ...]
    missing: Mapping[Part, str]


@dataclass(frozen=True, kw_only=True, slots=True)
class Taken:
    """Energy of a window of time."""

    window_s: float  # how long it was
    # The energy by counter: its part and its name.
    joules: Mapping[tuple[Part, str], float] = field(default_factory=dict)
    # Parts whose energy is not known, and why.
    missing: Mapping[Part, str] = field(default_factory=dict)


def by_part(taken: Sequence[Taken]) -> dict[Part, float]:
    """Return joules by part, of the same window on several ranks.

    A counter that several ranks read counts once. A part that one of them could not measure is left
    out: the sum of the others would be too small.
    """
    missing = {part for one in taken for part in one.missing}
    every = {key: joules for one in taken for key, joules in one.joules.items()}
    sums: dict[Part, float] = {}
    for (part, _), joules in every.items():
        if part not in missing:
            sums[part] = sums.get(part, 0.0) + joules
    return sums


class Meter:
    """Adds up what counters count while it is open."""

    def __init__(self, counters: Counters, *, poll_s: float = POLL_S) -> None:
        """Take the counters; those that begin again are read every `poll_s` seconds too."""
        self._counters = {(one.part, one.name): one for one in counters.found}
        self._missing: dict[Part, str] = dict(counters.missing)
        self._last_j: dict[tuple[Part, str], float] = {}
        self._sum_j: dict[tuple[Part, str], float] = {}
        self._poll_s, self._begin_s = poll_s, 0.0
        self._lock, self._closed = threading.Lock(), threading.Event()
        self._poller = threading.Thread(target=self._poll, name="energy", daemon=True)

    def __enter__(self) -> Self:
        """Begin to count."""
        self._read()
        self._sum_j.clear()
        self._begin_s = time.perf_counter()
        if any(one.range_j is not None for one in self._counters.values()):
            self._poller.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Stop reading."""
        self._closed.set()
        if self._poller.is_alive():
            self._poller.join()

    def taken(self) -> Taken:
        """Return the energy since the last call, or since the meter was opened."""
        self._read()
        with self._lock:
            joules, self._sum_j = self._sum_j, {}
            begin_s, self._begin_s = self._begin_s, time.perf_counter()
            window_s = self._begin_s - begin_s
            return Taken(window_s=window_s, joules=joules, missing=dict(self._missing))

    def _poll(self) -> None:
        while not self._closed.wait(self._poll_s):
            self._read()

    def _read(self) -> None:
        with self._lock:
            for key, counter in list(self._counters.items()):
                try:
                    self._add(key, counter, counter.read_j())
                except OSError as error:
                    self._give_up(counter.part, f"its counter stopped responding: {error}")

    def _add(self, key: tuple[Part, str], counter: Counter, now_j: float) -> None:
        rise_j = now_j - self._last_j.get(key, now_j)
        if rise_j < 0 and counter.range_j is None:
            raise OSError("it went back")
        self._last_j[key] = now_j
        self._sum_j[key] = (
            self._sum_j.get(key, 0.0) + rise_j + (counter.range_j or 0) * (rise_j < 0)
        )

    def _give_up(self, part: Part, why: str) -> None:
        """Count a part no longer: what is left of it would be taken for all."""
        self._missing[part] = why
        for key in [key for key in self._counters if key[0] == part]:
            del self._counters[key]
            self._sum_j.pop(key, None)


# ----------------------------------------------------------------------------------- what there is


def find_counters(bus_id: str | None, *, host: str) -> Counters:
    """Look for the counters of a GPU and of the processors.

    Args:
        bus_id: The GPU, like 0000:81:00.0; None if none computes.
        host: The machine's name.
    """
    found, missing = list[Counter](), dict[Part, str]()
    looks: list[tuple[Part, Callable[[], Sequence[Counter]]]] = [
        ("CPU", lambda: processor_counters(RAPL, host=host))
    ]
    if bus_id is not None:
        from offload.engine.host.nvml import energy_meter  # not where plans alone are made

        looks.insert(0, ("GPU", lambda: [gpu_counter(f"{host} {bus_id}", energy_meter(bus_id))]))
    for part, look in looks:
        try:
            found += look()
        except OSError as error:
            missing[part] = str(error)
    return Counters(found=tuple(found), missing=missing)


def gpu_counter(name: str, read_j: Callable[[], float]) -> Counter:
    """Return the counter of a GPU.

    Args:
        name: Name of the machine and the GPU.
        read_j: Reads it.

    Raises:
        OSError: The card has none; the message says so.
    """
    counter = Counter(part="GPU", name=name, read_j=read_j)
    if not counter.read_j():
        raise OSError("NVML counts no energy of this card: its counter is 0")
    return counter


def processor_counters(root: Path, *, host: str) -> list[Counter]:
    """Return the counters of processor packages and, where they are separate, of their memory.

    A package's count has that of its cores in it, so parts of it are left out.

    Args:
        root: Where the zones are.
        host: The machine's name.

    Raises:
        OSError: There is none that may be read; the message says so.
    """
    found = []
    for zone in sorted(root.glob("intel-rapl:*")):
        try:
            name = (zone / "name").read_text().strip()
            if not name.startswith(("package", "dram")):
                continue
            counter = _zone_counter(zone, name=f"{host} {zone.name}")
            counter.read_j()
        except PermissionError:
            raise OSError(f"{zone / 'energy_uj'} is not readable: only root may read it") from None
        found.append(counter)
    if not found:
        raise OSError(f"{root} has no counter of processors, as in most containers")
    return found


def _zone_counter(zone: Path, *, name: str) -> Counter:
    def read_j() -> float:
        try:
            return int((zone / "energy_uj").read_text()) / 1e6
        except ValueError as error:
            raise OSError(f"{zone / 'energy_uj'}: {error}") from None

    try:
        range_j = int((zone / "max_energy_range_uj").read_text()) / 1e6
    except ValueError as error:
        raise OSError(f"{zone / 'max_energy_range_uj'}: {error}") from None
    return Counter(part="CPU", name=name, read_j=read_j, range_j=range_j)
