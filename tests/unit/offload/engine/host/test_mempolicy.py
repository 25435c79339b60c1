import ctypes
import errno
import mmap
import platform
from pathlib import Path

import pytest

from offload.engine.host.numa import _libnuma, _LinuxCalls, bind_memory

PAGE = mmap.PAGESIZE


class FakeCalls:
    """System calls that note what they are asked, and may refuse."""

    def __init__(self, *, mode: int = 0, refusals: dict[str, int] | None = None) -> None:
        self.preferred: list[tuple[int, int, int]] = []
        self._mode, self._refusals = mode, refusals or {}

    def inherited_mode(self) -> int:
        self._refuse("get")
        return self._mode

    def prefer(self, address: int, num_bytes: int, node: int) -> None:
        self._refuse("set")
        self.preferred.append((address, num_bytes, node))

    def _refuse(self, call: str) -> None:
        if call in self._refusals:
            raise OSError(self._refusals[call], "refused")


def test_memory_is_taken_from_the_node() -> None:
    calls = FakeCalls()
    done = bind_memory(4 * PAGE, 100, 1, calls=calls)
    assert done == "memory comes from NUMA node 1 while it has any free"
    assert calls.preferred == [(4 * PAGE, 100, 1)]


def test_without_a_node_no_call_is_made() -> None:
    calls = FakeCalls(refusals={"get": errno.EPERM, "set": errno.EPERM})
    assert bind_memory(0, 100, None, calls=calls) == (
        "memory comes from wherever the system takes it"
    )


@pytest.mark.parametrize("call", ["get", "set"])
@pytest.mark.parametrize(
    ("number", "text"),
    [
        (errno.EPERM, "Operation not permitted"),
        (errno.ENOSYS, "Function not implemented"),
        (errno.EINVAL, "Invalid argument"),  # the cpuset has no memory of that node
    ],
)
def test_a_refused_call_is_told_and_ends_nothing(call: str, number: int, text: str) -> None:
    done = bind_memory(0, 100, 1, calls=FakeCalls(refusals={call: number}))
    assert done == (
        f"memory could not be bound to NUMA node 1 ({text}):"
        " it comes from the node of the thread that fills it"
    )


@pytest.mark.parametrize(
    ("mode", "name"),
    [
        (2, "bind"),
        (3, "interleave"),
        (4, "local"),
        (2 | 1 << 15, "bind"),  # MPOL_F_STATIC_NODES
        (6, "number 6"),
    ],
)
def test_an_inherited_policy_stays(mode: int, name: str) -> None:
    calls = FakeCalls(mode=mode)
    done = bind_memory(0, 100, 1, calls=calls)
    assert done == f"memory follows the inherited policy ({name}), not NUMA node 1"
    assert calls.preferred == []


# ------------------------------------------------------------------------------ this machine


@pytest.mark.parametrize("has_libnuma", [True, False])
def test_this_kernel_takes_the_policy_or_the_reason_is_told(*, has_libnuma: bool) -> None:
    calls = _LinuxCalls(_libnuma() if has_libnuma else None)
    with mmap.mmap(-1, 4 * PAGE) as area:
        view = ctypes.c_char.from_buffer(area)
        address = ctypes.addressof(view)
        done = bind_memory(address, 4 * PAGE, 0, calls=calls)
        area.write(bytes(4 * PAGE))
        map_file = Path("/proc/self/numa_maps")
        lines = map_file.read_text().splitlines() if map_file.exists() else []
        del view
    policy = next((line.split()[1] for line in lines if line.startswith(f"{address:x} ")), "")
    if done == "memory comes from NUMA node 0 while it has any free":
        assert not lines or policy == "prefer:0"
    else:
        assert done.startswith(("memory could not be bound", "memory follows the inherited"))
        assert policy != "prefer:0"


def test_a_node_that_is_not_there_is_told() -> None:
    with mmap.mmap(-1, PAGE) as area:
        view = ctypes.c_char.from_buffer(area)
        done = bind_memory(ctypes.addressof(view), PAGE, 900)
        del view
    assert done.startswith(("memory could not be bound to NUMA node 900", "memory follows"))


def test_a_processor_whose_calls_are_not_known_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "vax")
    assert bind_memory(0, PAGE, 1, calls=_LinuxCalls(None)).startswith(
        "memory could not be bound to NUMA node 1 (Function not implemented)"
    )
