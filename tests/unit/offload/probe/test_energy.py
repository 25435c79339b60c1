"""Counters of energy that are made up: what is added up, what wraps, and what is not there."""

import threading
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from offload.probe.energy import (
    Counter,
    Counters,
    Meter,
    Part,
    Taken,
    by_part,
    find_counters,
    gpu_counter,
    processor_counters,
)


def says(*values: float) -> Callable[[], float]:
    left = iter(values)
    return lambda: next(left)


def meter(*found: Counter, missing: dict[Part, str] | None = None, poll_s: float = 60) -> Meter:
    return Meter(Counters(found=found, missing=missing or {}), poll_s=poll_s)


def counter(part: Part, *values: float, name: str = "a", range_j: float | None = None) -> Counter:
    return Counter(part=part, name=name, read_j=says(*values), range_j=range_j)


def test_what_a_window_takes_is_what_its_counters_rose_by() -> None:
    with meter(counter("GPU", 1000, 1250, 1300), counter("GPU", 5, 6, 8, name="b")) as opened:
        assert opened.taken().joules == {("GPU", "a"): 250, ("GPU", "b"): 1}
        assert opened.taken().joules == {("GPU", "a"): 50, ("GPU", "b"): 2}


def test_a_counter_that_begins_again_has_counted_to_its_range() -> None:
    with meter(counter("CPU", 90, 15, 20, range_j=100)) as opened:
        assert opened.taken().joules == {("CPU", "a"): 25}
        assert opened.taken().joules == {("CPU", "a"): 5}


def test_a_counter_that_begins_again_twice_in_a_window_is_read_in_between() -> None:
    values, read = [90.0, 50.0, 10.0], threading.Semaphore(0)
    left = iter(values)

    def read_j() -> float:
        value = next(left, last_j)
        read.release()
        return value

    last_j = 10.0
    one = Counter(part="CPU", name="a", read_j=read_j, range_j=100)
    with meter(one, poll_s=0.01) as opened:
        for _ in range(3):  # on opening, and twice by the meter itself
            assert read.acquire(timeout=30)
        last_j = 60.0
        total = opened.taken().joules["CPU", "a"]
    assert total == pytest.approx(60 + 60 + 50)


def test_a_counter_that_goes_back_or_falls_silent_is_given_up_in_words() -> None:
    with meter(counter("GPU", 10, 9), counter("CPU", 1, 3)) as opened:
        taken = opened.taken()
    assert taken.joules == {("CPU", "a"): 2}
    assert "went back" in taken.missing["GPU"]

    def silent() -> float:
        raise OSError("gone")

    with meter(Counter(part="GPU", name="a", read_j=silent)) as opened:
        taken = opened.taken()
    assert not taken.joules
    assert "gone" in taken.missing["GPU"]


def test_ranks_are_summed_and_a_counter_that_they_share_counts_once() -> None:
    ranks = [
        Taken(window_s=1, joules={("GPU", f"h {rank}"): 10.0 + rank, ("CPU", "h p"): 4.0})
        for rank in (0, 1)
    ]
    assert by_part(ranks) == {"GPU": 21, "CPU": 4}


def test_a_part_that_one_rank_cannot_measure_has_no_sum() -> None:
    ranks = [
        Taken(window_s=1, joules={("GPU", "a"): 10, ("CPU", "p"): 4}),
        Taken(window_s=1, joules={("CPU", "q"): 3}, missing={"GPU": "none"}),
    ]
    assert by_part(ranks) == {"CPU": 7}


class FakeNvmlError(Exception):
    pass


class FakeNvml:  # the names are the library's
    NVMLError = FakeNvmlError

    def __init__(self, values: Iterable[int | str]) -> None:
        self.values = iter(values)

    def nvmlInit(self) -> None:  # noqa: N802
        pass

    def nvmlDeviceGetHandleByPciBusId(self, bus_id: bytes) -> str:  # noqa: N802
        return bus_id.decode()

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: str) -> int:  # noqa: N802
        assert handle == "0000:81:00.0"
        value = next(self.values)
        if isinstance(value, str):
            raise FakeNvmlError(value)
        return value


def test_a_gpu_counts_millijoules() -> None:
    found = gpu_counter("0000:81:00.0", nvml=FakeNvml([5000, 7000]), host="h")
    assert (found.part, found.name, found.range_j) == ("GPU", "h 0000:81:00.0", None)
    assert found.read_j() == 7


@pytest.mark.parametrize(("value", "words"), [("Not Supported", "Not Supported"), (0, "is 0")])
def test_a_gpu_without_a_counter_is_refused_in_words(value: int | str, words: str) -> None:
    with pytest.raises(OSError, match=words):
        gpu_counter("0000:81:00.0", nvml=FakeNvml([value]), host="h")


def zone(root: Path, name: str, what: str, microjoules: int) -> Path:
    folder = root / name
    folder.mkdir()
    (folder / "name").write_text(f"{what}\n")
    (folder / "energy_uj").write_text(f"{microjoules}\n")
    (folder / "max_energy_range_uj").write_text("262143328850\n")
    return folder


def test_processors_count_packages_and_memory_but_no_part_twice(tmp_path: Path) -> None:
    zone(tmp_path, "intel-rapl:0", "package-0", 2_500_000)
    zone(tmp_path, "intel-rapl:0:0", "core", 1_000_000)
    zone(tmp_path, "intel-rapl:0:1", "dram", 500_000)
    zone(tmp_path, "intel-rapl:1", "psys", 9_000_000)
    found = processor_counters(tmp_path, host="h")
    assert [(one.name, one.read_j()) for one in found] == [
        ("h intel-rapl:0", 2.5),
        ("h intel-rapl:0:1", 0.5),
    ]
    assert found[0].range_j == pytest.approx(262143.32885)


def test_processors_without_a_counter_are_refused_in_words(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="has no counter"):
        processor_counters(tmp_path, host="h")


def test_a_counter_that_only_root_may_read_is_refused_in_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    zone(tmp_path, "intel-rapl:0", "package-0", 1)
    read = Path.read_text

    def refused(self: Path, *args: str, **kwargs: str) -> str:
        if self.name == "energy_uj":
            raise PermissionError(13, "Permission denied")
        return read(self, *args, **kwargs)

    monkeypatch.setattr(Path, "read_text", refused)
    with pytest.raises(OSError, match="only root may read it"):
        processor_counters(tmp_path, host="h")


def test_what_is_missing_is_said_for_each_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pynvml", None)
    monkeypatch.setattr("offload.probe.energy.RAPL", tmp_path)
    found = find_counters("0000:81:00.0", host="h")
    assert not found.found
    assert "nvidia-ml-py is not installed" in found.missing["GPU"]
    assert "has no counter" in found.missing["CPU"]
    assert set(find_counters(None, host="h").missing) == {"CPU"}
