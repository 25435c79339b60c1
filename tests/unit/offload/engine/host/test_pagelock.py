"""Page-locked memory, and the node on which it is."""

import ctypes
import errno
import mmap
import os
import platform
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from offload.engine.host.cudart import CudaRuntime, loaded_runtime_path
from offload.engine.host.lock_trial import rehearse_lock
from offload.engine.host.numa import (
    HostPlace,
    _libnuma,
    _LinuxCalls,
    bind_memory,
    bind_thread,
    find_place,
    place_near,
    thread_on,
)
from offload.engine.host.pagelock import (
    CudaLocker,
    LockMode,
    largest_lockable,
    lock_ring,
    open_locker,
    page_lock,
)
from offload.errors import TransferError
from offload.plan.machine.machine import GIB
from offload.plan.schedule.schedule import NUM_STAGING, PIECE_BYTES
from tests.doubles import FakeLocker
from tests.unit.offload.engine.host.conftest import (
    HANGING_DEVICE,
    KILLING_DEVICE,
    MOST_BYTES,
    SPENT_DEVICE,
)

BUS_ID = "0000:81:00.0"
ALL_CPUS = frozenset(range(16))


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def tree(
    root: Path, *nodes: str, numa_node: str | None = None, local_cpulist: str | None = None
) -> Path:
    """Build a /sys with these nodes' CPU lists and one GPU."""
    for number, cpus in enumerate(nodes):
        write(root / f"sys/devices/system/node/node{number}/cpulist", f"{cpus}\n")
    write(root / "sys/devices/system/node/online", "0-1\n")
    device = root / "sys/bus/pci/devices" / BUS_ID
    if numa_node is not None:
        write(device / "numa_node", f"{numa_node}\n")
    if local_cpulist is not None:
        write(device / "local_cpulist", f"{local_cpulist}\n")
    return root


def found(
    root: Path, *, nvml_node: int | None = None, allowed_cpus: frozenset[int] = ALL_CPUS
) -> HostPlace:
    return find_place(BUS_ID, nvml_node=nvml_node, root=root, allowed_cpus=allowed_cpus)


def test_of_two_nodes_the_one_that_sys_names_is_taken(tmp_path: Path) -> None:
    place = found(tree(tmp_path, "0-3,8-11", "4-7,12-15", numa_node="1", local_cpulist="4-7,12-15"))
    assert (place.node, place.cpus) == (1, frozenset({4, 5, 6, 7, 12, 13, 14, 15}))
    assert place.reason == (
        "the GPU at 0000:81:00.0 is near NUMA node 1 (by /sys); its threads run on CPUs 4-7,12-15"
    )


def test_nvml_is_believed_before_sys(tmp_path: Path) -> None:
    place = found(tree(tmp_path, "0-7", "8-15", numa_node="1"), nvml_node=0)
    assert (place.node, place.cpus) == (0, frozenset(range(8)))
    assert "near NUMA node 0 (by NVML)" in place.reason


def test_a_node_of_nvml_that_has_no_cpus_is_not_believed(tmp_path: Path) -> None:
    place = found(tree(tmp_path, "0-7", "8-15", "", numa_node="1"), nvml_node=2)
    assert place.node == 1


def test_where_sys_names_no_node_the_local_cpus_tell_it(tmp_path: Path) -> None:
    place = found(tree(tmp_path, "0-7", "8-15", numa_node="-1", local_cpulist="8-11"))
    assert (place.node, place.cpus) == (1, frozenset(range(8, 16)))
    assert "near NUMA node 1 (by its local CPUs)" in place.reason


def test_local_cpus_of_several_nodes_bind_threads_but_no_memory(tmp_path: Path) -> None:
    root = tree(tmp_path, "0-3", "4-7", "8-15", numa_node="-1", local_cpulist="0-7")
    place = found(root)
    assert (place.node, place.cpus) == (None, frozenset(range(8)))
    assert "is near CPUs 0-7; its threads run on CPUs 0-7" in place.reason


def test_a_device_that_is_local_to_all_cpus_is_bound_nowhere(tmp_path: Path) -> None:
    place = found(tree(tmp_path, "0-7", "8-15", numa_node="-1", local_cpulist="0-15"))
    assert (place.node, place.cpus) == (None, frozenset())
    assert place.reason.endswith("the GPU at 0000:81:00.0 is near none of the 2, by NVML or /sys")


@pytest.mark.parametrize("numa_node", [None, "", "what"])
def test_missing_or_odd_files_of_the_device_bind_nothing(
    tmp_path: Path, numa_node: str | None
) -> None:
    place = found(tree(tmp_path, "0-7", "8-15", numa_node=numa_node))
    assert (place.node, place.cpus) == (None, frozenset())


def test_on_one_node_nothing_is_bound(tmp_path: Path) -> None:
    place = found(tree(tmp_path, "0-15", numa_node="0"), nvml_node=0)
    assert (place.node, place.cpus) == (None, frozenset())
    assert place.reason == "nothing is bound to a NUMA node: this machine has one"


def test_a_second_node_of_memory_alone_is_no_second_place(tmp_path: Path) -> None:
    assert found(tree(tmp_path, "0-15", "", numa_node="0")).node is None


def test_without_node_files_nothing_is_bound(tmp_path: Path) -> None:
    place = found(tmp_path)
    assert place.reason == "nothing is bound to a NUMA node: the system tells of none"


def test_only_allowed_cpus_of_the_node_are_used(tmp_path: Path) -> None:
    root = tree(tmp_path, "0-7", "8-15", numa_node="1")
    assert found(root, allowed_cpus=frozenset({2, 9, 10})).cpus == {9, 10}


def test_a_cpu_set_without_the_nodes_cpus_leaves_threads_alone_and_takes_its_memory(
    tmp_path: Path,
) -> None:
    place = found(tree(tmp_path, "0-7", "8-15", numa_node="1"), allowed_cpus=frozenset({0, 1}))
    assert (place.node, place.cpus) == (1, frozenset())
    assert place.reason.endswith("this process may not run on CPUs 8-15, so threads are not bound")


def test_a_cpu_as_device_is_bound_nowhere_and_says_so() -> None:
    place = place_near(torch.device("cpu"))
    assert (place.node, place.cpus) == (None, frozenset())
    assert not place.reason


# --------------------------------------------------------------------------------- threads


def test_a_thread_runs_on_its_cpus_inside_the_block_and_on_all_after_it() -> None:
    before = os.sched_getaffinity(0)
    one = {min(before)}
    with thread_on(one) as done:
        assert os.sched_getaffinity(0) == one
    assert os.sched_getaffinity(0) == before
    assert done == f"the thread runs on CPUs {min(before)}"


def test_only_the_calling_thread_is_bound() -> None:
    before = os.sched_getaffinity(0)
    bound, release = threading.Event(), threading.Event()

    def work() -> None:
        bind_thread({min(before)})
        bound.set()
        release.wait(30)

    worker = threading.Thread(target=work)
    worker.start()
    assert bound.wait(30)
    assert worker.native_id is not None
    seen = os.sched_getaffinity(worker.native_id), os.sched_getaffinity(0)
    release.set()
    worker.join(30)
    assert seen == ({min(before)}, before)


def test_a_thread_is_set_free_when_the_block_fails() -> None:
    before = os.sched_getaffinity(0)
    with pytest.raises(KeyError), thread_on({min(before)}):
        raise KeyError
    assert os.sched_getaffinity(0) == before


def test_without_cpus_a_thread_is_left_alone() -> None:
    before = os.sched_getaffinity(0)
    with thread_on(frozenset()) as done:
        assert os.sched_getaffinity(0) == before
    assert done == "the thread runs on any CPU"


def test_cpus_that_are_not_there_are_told_and_end_nothing() -> None:
    before = os.sched_getaffinity(0)
    absent = 1_000_000
    with thread_on({absent}) as done:
        assert os.sched_getaffinity(0) == before
    assert done == f"the thread could not be bound to CPUs {absent}: {os.strerror(errno.EINVAL)}"


# ---------------------------------------------------------------------------------------- mempolicy


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


# ----------------------------------------------------------------------------------------- pagelock


RING_BYTES = NUM_STAGING * PIECE_BYTES
ADDRESS = 16 * PAGE


def test_what_is_locked_after_the_slab_is_left_room() -> None:
    for limit, mode in ((25 * GIB, LockMode.PINNED), (25 * GIB - 1, LockMode.STAGED)):
        lock = page_lock(ADDRESS, 24 * GIB, GIB, FakeLocker(limit), others_bytes=GIB)
        assert lock.mode is mode
        assert lock.num_bytes == (24 * GIB if mode is LockMode.PINNED else RING_BYTES)


def test_all_of_the_slab_is_locked_where_that_is_allowed() -> None:
    locker = FakeLocker(100 * GIB)
    lock = page_lock(ADDRESS, 24 * GIB, GIB, locker)
    assert (lock.mode, lock.num_bytes, lock.buffers) == (LockMode.PINNED, 24 * GIB, ())
    assert lock.reason == (
        "all 24.00 GiB of layers are page-locked: copies are asynchronous and run at the link's"
        " rate"
    )
    assert (locker.rehearsed, locker.locked) == ([24 * GIB], {ADDRESS: 24 * GIB})
    lock.release()
    assert locker.locked == {}


def test_a_limit_below_the_slab_leaves_a_ring_of_locked_buffers() -> None:
    locker = FakeLocker(2 * GIB)
    lock = page_lock(ADDRESS, 24 * GIB, GIB, locker)
    assert (lock.mode, lock.num_bytes) == (LockMode.STAGED, RING_BYTES)
    assert locker.rehearsed == [24 * GIB, 12 * GIB, 6 * GIB, 3 * GIB, 3 * GIB // 2]
    assert lock.reason == (
        f"page-locking 24.00 GiB of layers was refused (no {24 * GIB}), of 1.50 GiB not:"
        " a thread puts them through 4 page-locked buffers of 64.00 MiB, which reads and writes"
        " each byte once more in host memory; to lock all, raise the limit: `ulimit -l unlimited`,"
        " in Docker `--ulimit memlock=-1`; on WSL2 Windows sets it"
    )
    assert [buffer.numel() for buffer in lock.buffers] == [PIECE_BYTES] * NUM_STAGING
    assert locker.locked == {lock.buffers[0].data_ptr(): RING_BYTES}
    lock.release()
    assert locker.locked == {}


def test_staging_buffers_are_no_larger_than_the_largest_layer_in_whole_pages() -> None:
    lock = page_lock(ADDRESS, GIB, 5 * PAGE + 1, FakeLocker(100 * PAGE))
    assert [buffer.numel() for buffer in lock.buffers] == [6 * PAGE] * NUM_STAGING
    assert all(buffer.data_ptr() % PAGE == 0 for buffer in lock.buffers)


def test_the_last_rung_is_just_the_ring() -> None:
    locker = FakeLocker(RING_BYTES)
    assert page_lock(ADDRESS, 2 * GIB, GIB, locker).mode is LockMode.STAGED
    assert locker.rehearsed == [2 * GIB, GIB, GIB // 2, RING_BYTES]


def test_where_not_even_a_ring_can_be_locked_copies_are_pageable() -> None:
    locker = FakeLocker(0)
    lock = page_lock(ADDRESS, 24 * GIB, GIB, locker)
    assert (lock.mode, lock.num_bytes, lock.buffers) == (LockMode.PAGEABLE, 0, ())
    assert lock.reason.startswith(
        f"page-locking 24.00 GiB of layers was refused (no {24 * GIB}):"
        " the driver copies them in small pieces, well below the link's rate"
    )
    lock.release()


def test_a_lock_that_fails_after_its_rehearsal_is_no_end_but_the_next_rung() -> None:
    locker = FakeLocker(2 * GIB, most_rehearsed_bytes=100 * GIB)
    lock = page_lock(ADDRESS, 24 * GIB, GIB, locker)
    assert lock.mode is LockMode.STAGED
    assert f"was refused (not {24 * GIB}): a thread puts" in lock.reason


def test_a_ring_that_fails_after_its_rehearsal_leaves_pageable_copies() -> None:
    locker = FakeLocker(0, most_rehearsed_bytes=2 * GIB)
    lock = page_lock(ADDRESS, 24 * GIB, GIB, locker)
    assert lock.mode is LockMode.PAGEABLE
    assert f"of 1.50 GiB not; 0.25 GiB to stage through was refused (not {RING_BYTES})" in (
        lock.reason
    )


def test_a_slab_smaller_than_a_ring_is_locked_or_pageable() -> None:
    assert page_lock(ADDRESS, PAGE, PAGE, FakeLocker(PAGE)).mode is LockMode.PINNED
    assert page_lock(ADDRESS, PAGE, PAGE, FakeLocker(0)).mode is LockMode.PAGEABLE


def test_layers_on_disk_need_a_ring_alone() -> None:
    locker = FakeLocker(GIB)
    lock = lock_ring(3 * GIB, "layers lie on disk", locker)
    assert (lock.mode, lock.num_bytes) == (LockMode.STAGED, RING_BYTES)
    assert lock.reason == (
        "layers lie on disk: a thread puts them through 4 page-locked buffers of 64.00 MiB"
    )
    assert locker.rehearsed == [RING_BYTES]
    lock.release()
    assert locker.locked == {}


@pytest.mark.parametrize("most_rehearsed_bytes", [0, GIB])
def test_layers_on_disk_whose_ring_is_refused_are_copied_from_pageable_buffers(
    most_rehearsed_bytes: int,
) -> None:
    locker = FakeLocker(0, most_rehearsed_bytes=most_rehearsed_bytes)
    lock = lock_ring(GIB, "layers lie on disk", locker)
    assert (lock.mode, lock.buffers) == (LockMode.PAGEABLE, ())
    assert lock.reason.startswith("layers lie on disk; 0.25 GiB to stage through was refused (no")


def test_a_ring_for_a_cpu_is_not_needed() -> None:
    assert lock_ring(GIB, "layers lie on disk", None).mode is LockMode.NOT_NEEDED


def test_memory_that_does_not_unlock_is_an_error_with_its_reason() -> None:
    lock = page_lock(ADDRESS, GIB, GIB, FakeLocker(GIB))
    lock.release()
    with pytest.raises(TransferError, match="could not be unlocked: not registered; it must be"):
        lock.release()


def test_a_cpu_needs_no_lock_and_says_so() -> None:
    locker = open_locker(torch.device("cpu"), fd=None)
    lock = page_lock(ADDRESS, GIB, GIB, locker)
    assert (lock.mode, lock.num_bytes) == (LockMode.NOT_NEEDED, 0)
    assert not lock.reason
    lock.release()


@pytest.mark.parametrize("most_bytes", [0, 3, 4, 7, 8, 100])
def test_the_largest_size_that_works_is_found(most_bytes: int) -> None:
    sizes = [64, 32, 16, 8, 4, 3]
    worked_bytes, refusal = largest_lockable(64, 3, FakeLocker(most_bytes))
    assert worked_bytes == next((size for size in sizes if size <= most_bytes), 0)
    assert refusal == ("" if most_bytes >= 64 else "no 64")


@pytest.fixture
def cuda_locker(fake_runtime: Path) -> Callable[[int | None], CudaLocker]:
    """A real child and a made-up runtime; -1 stands for no device, in torch too."""
    return lambda fd: CudaLocker(
        runtime=CudaRuntime(ctypes.CDLL(str(fake_runtime))),
        path=fake_runtime,
        device_index=-1,
        fd=fd,
    )


def test_a_slab_is_rehearsed_in_a_child_and_then_locked_here(
    cuda_locker: Callable[[int | None], CudaLocker],
) -> None:
    fd = os.memfd_create("slab")
    os.ftruncate(fd, MOST_BYTES)
    memory = mmap.mmap(fd, MOST_BYTES)
    slab = torch.frombuffer(memory, dtype=torch.uint8)
    lock = page_lock(slab.data_ptr(), MOST_BYTES, PAGE, cuda_locker(fd))
    assert lock.mode is LockMode.PINNED
    assert slab[0] == 2  # once by the child, whose lock ended with it, and once here
    lock.release()
    assert slab[0] == 1
    os.close(fd)


@pytest.mark.thorough
def test_a_slab_over_the_limit_is_staged_for_real(
    cuda_locker: Callable[[int | None], CudaLocker],
) -> None:
    slab = torch.zeros(4 * MOST_BYTES, dtype=torch.uint8)
    lock = page_lock(slab.data_ptr(), slab.numel(), PAGE, cuda_locker(None))
    assert lock.mode is LockMode.STAGED
    assert "was refused (out of memory, CUDA error 2), of 1.00 MiB not" in lock.reason
    assert lock.buffers[0][0] == 1
    lock.release()


# --------------------------------------------------------------------------------------- lock trial


TIMEOUT_S = 60.0


def rehearsed(
    runtime: Path,
    *,
    num_bytes: int = MOST_BYTES,
    device_index: int = 0,
    fd: int | None = None,
    timeout_s: float = TIMEOUT_S,
) -> str | None:
    return rehearse_lock(
        runtime=runtime,
        device_index=device_index,
        num_bytes=num_bytes,
        fd=fd,
        timeout_s=timeout_s,
    )


# -------------------------------------------------------------------- a child, a made-up runtime


def test_a_size_that_works_has_nothing_against_it(fake_runtime: Path) -> None:
    assert rehearsed(fake_runtime) is None


def test_a_size_that_is_refused_comes_with_the_runtimes_words(fake_runtime: Path) -> None:
    refusal = rehearsed(fake_runtime, num_bytes=MOST_BYTES + 1)
    assert refusal == "out of memory, CUDA error 2"


def test_the_child_locks_the_very_memory_of_the_descriptor(fake_runtime: Path) -> None:
    fd = os.memfd_create("slab")
    os.ftruncate(fd, MOST_BYTES)
    with mmap.mmap(fd, MOST_BYTES) as memory:
        assert rehearsed(fake_runtime, fd=fd) is None
        assert memory[0] == 1
    os.close(fd)


def test_more_than_the_descriptor_has_is_locked_as_well(fake_runtime: Path) -> None:
    """Of a head on the host: it is locked after the layers, which alone are shared."""
    fd = os.memfd_create("slab")
    os.ftruncate(fd, MOST_BYTES)
    with mmap.mmap(fd, MOST_BYTES) as memory:
        assert rehearsed(fake_runtime, fd=fd, num_bytes=MOST_BYTES + 100) is None
        assert memory[0] == 1
        refusal = rehearsed(fake_runtime, fd=fd, num_bytes=2 * MOST_BYTES + 1)
        assert refusal == "out of memory, CUDA error 2"
    os.close(fd)


def test_a_card_that_gives_a_child_no_context_says_nothing_about_locks(fake_runtime: Path) -> None:
    assert rehearsed(fake_runtime, device_index=SPENT_DEVICE, num_bytes=2 * MOST_BYTES) is None


def test_a_runtime_that_a_child_cannot_load_says_nothing_about_locks(tmp_path: Path) -> None:
    assert rehearsed(tmp_path / "libcudart.so") is None


def test_memory_that_a_child_cannot_map_says_nothing_about_locks(
    fake_runtime: Path, tmp_path: Path
) -> None:
    path = tmp_path / "slab"
    path.write_bytes(bytes(2 * MOST_BYTES))
    with path.open("rb") as file:  # for reading only
        assert rehearsed(fake_runtime, num_bytes=2 * MOST_BYTES, fd=file.fileno()) is None


def test_a_child_that_the_driver_ends_is_a_refusal(fake_runtime: Path) -> None:
    refusal = rehearsed(fake_runtime, device_index=KILLING_DEVICE)
    assert refusal == "the process that tried it was ended by SIGKILL"


def test_a_child_that_hangs_is_killed_and_is_a_refusal(fake_runtime: Path) -> None:
    refusal = rehearsed(fake_runtime, device_index=HANGING_DEVICE, timeout_s=1.0)
    assert refusal == "no answer within 1 s"


# ------------------------------------------------------------------------- a child that is a script


def scripted(*program: str, timeout_s: float = TIMEOUT_S) -> str | None:
    return rehearse_lock(
        runtime=Path("none"),
        device_index=0,
        num_bytes=1,
        fd=None,
        timeout_s=timeout_s,
        program=program,
    )


def test_a_child_that_crashes_is_a_refusal_with_its_last_words() -> None:
    assert scripted(sys.executable, "-c", "raise ValueError('a broken driver')") == (
        "the process that tried it failed with exit status 1: ValueError: a broken driver"
    )


def test_a_child_that_is_killed_is_a_refusal() -> None:
    assert scripted("sh", "-c", "kill -KILL $$") == (
        "the process that tried it was ended by SIGKILL"
    )


def test_a_hanging_child_is_gone_afterwards(tmp_path: Path) -> None:
    note = tmp_path / "pid"
    refusal = scripted("sh", "-c", f"echo $$ > {note}; exec sleep 600", timeout_s=1.0)
    assert refusal == "no answer within 1 s"
    with pytest.raises(ProcessLookupError):
        os.kill(int(note.read_text()), 0)


# ---------------------------------------------------------------------------- the runtime's errors


def test_a_failed_lock_leaves_no_error_behind(fake_runtime: Path) -> None:
    library = ctypes.CDLL(str(fake_runtime))
    runtime = CudaRuntime(library)
    with mmap.mmap(-1, 2 * MOST_BYTES) as area:
        view = ctypes.c_char.from_buffer(area)
        address = ctypes.addressof(view)
        assert runtime.register(address, 2 * MOST_BYTES) == "out of memory, CUDA error 2"
        assert library.cudaGetLastError() == 0
        assert runtime.register(address, MOST_BYTES) is None
        assert runtime.unregister(address) is None
        assert runtime.unregister(address) == "other, CUDA error 713"
        assert library.cudaGetLastError() == 0
        del view


def test_the_runtime_is_reached_through_the_library_that_torch_loaded(tmp_path: Path) -> None:
    maps = tmp_path / "maps"
    maps.write_text(
        "7f00-7f01 r-xp 00000000 00:00 0\n"
        "7f01-7f02 r-xp 00000000 08:01 12    /opt/a b/torch/lib/libc10.so\n"
        "7f02-7f03 r-xp 00000000 08:01 13    /opt/a b/torch/lib/libc10_cuda.so\n"
    )
    assert loaded_runtime_path(maps) == Path("/opt/a b/torch/lib/libc10_cuda.so")
    maps.write_text("7f00-7f01 r-xp 00000000 00:00 0\n")
    assert loaded_runtime_path(maps) is None
    assert loaded_runtime_path(tmp_path / "nothing") is None


def test_a_function_is_found_in_what_a_library_depends_on() -> None:
    """What `loaded_runtime_path` rests on, with libraries that every machine has."""
    import _ctypes

    assert ctypes.CDLL(_ctypes.__file__).getpid() == os.getpid()
