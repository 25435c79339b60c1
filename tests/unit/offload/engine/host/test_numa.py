import ctypes
import errno
import os
import threading
from pathlib import Path

import pytest
import torch

from offload.engine.host.numa import HostPlace, bind_thread, find_place, place_near, thread_on
from offload.engine.host.nvml import nearest_node

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


# ------------------------------------------------------------------------------------ NVML


class FakeNvml:
    """A driver's library that knows one GPU and the nodes of its nearest memory."""

    def __init__(self, nodes: set[int], *, init_status: int = 0, status: int = 0) -> None:
        self.num_open = 0
        self._nodes, self._init_status, self._status = nodes, init_status, status

    def nvmlInit_v2(self) -> int:  # noqa: N802 - NVML's names
        self.num_open += self._init_status == 0
        return self._init_status

    def nvmlShutdown(self) -> int:  # noqa: N802
        self.num_open -= 1
        return 0

    def nvmlDeviceGetHandleByPciBusId_v2(self, bus_id: bytes, handle: object) -> int:  # noqa: N802
        return 0 if bus_id == BUS_ID.encode() else 6  # NVML_ERROR_NOT_FOUND

    def nvmlDeviceGetMemoryAffinity(  # noqa: N802
        self, _gpu: object, num_words: int, words: "ctypes.Array[ctypes.c_ulong]", scope: int
    ) -> int:
        assert (num_words, scope) == (len(words), 0)
        for node in self._nodes:
            words[node // 64] |= 1 << node % 64
        return self._status


@pytest.mark.parametrize("node", [0, 1, 63, 64])
def test_nvml_names_the_node(node: int) -> None:
    library = FakeNvml({node})
    assert nearest_node(BUS_ID, library) == node
    assert library.num_open == 0


@pytest.mark.parametrize(
    "library",
    [
        FakeNvml({0, 1}),
        FakeNvml(set()),
        FakeNvml({1}, init_status=9),
        FakeNvml({1}, status=3),  # NVML_ERROR_NOT_SUPPORTED
    ],
)
def test_several_nodes_or_none_or_a_failed_call_name_no_node(library: FakeNvml) -> None:
    assert nearest_node(BUS_ID, library) is None
    assert library.num_open == 0


def test_an_unknown_gpu_has_no_node() -> None:
    assert nearest_node("0000:99:00.0", FakeNvml({1})) is None


def test_a_library_without_the_function_names_no_node() -> None:
    assert nearest_node(BUS_ID, ctypes.CDLL(None)) is None
