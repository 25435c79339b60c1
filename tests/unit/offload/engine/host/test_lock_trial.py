import ctypes
import mmap
import os
import sys
from pathlib import Path

import pytest

from offload.engine.host.cudart import CudaRuntime, loaded_runtime_path
from offload.engine.host.lock_trial import rehearse_lock
from tests.unit.offload.engine.host.conftest import (
    HANGING_DEVICE,
    KILLING_DEVICE,
    MOST_BYTES,
    SPENT_DEVICE,
)

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
