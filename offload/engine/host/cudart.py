"""The CUDA runtime that torch loaded, by ctypes, for page locks.

Torch binds `cudaHostRegister` but not `cudaGetLastError`, and a failed lock leaves its error set:
the next kernel launch would be reported as out of memory. The error belongs to one runtime library
and one thread, so it must be cleared in the same library that torch uses. That is found through
`libc10_cuda.so`, which torch has loaded and which depends on it: symbol lookup in a library
includes its dependencies.
"""

import ctypes
from pathlib import Path
from typing import Any

_SUCCESS = 0


class CudaRuntime:
    """Four functions of the runtime; a failure is returned as text, and its error is cleared."""

    def __init__(self, library: Any) -> None:
        """Wrap a loaded library, or an object with the same functions."""
        self._library = library
        library.cudaGetErrorString.restype = ctypes.c_char_p

    def open_device(self, index: int) -> str | None:
        """Start a context on a device for this thread if there is none yet."""
        status = self._library.cudaSetDevice(ctypes.c_int(index))
        if status == _SUCCESS:  # before CUDA 12, setting the device started nothing
            status = self._library.cudaFree(ctypes.c_void_p())
        return self._failure(status)

    def register(self, address: int, num_bytes: int) -> str | None:
        """Page-lock a range; this allocates pages that were not touched yet."""
        return self._failure(
            self._library.cudaHostRegister(
                ctypes.c_void_p(address), ctypes.c_size_t(num_bytes), ctypes.c_uint(0)
            )
        )

    def unregister(self, address: int) -> str | None:
        """Unlock the range that was registered at this address."""
        return self._failure(self._library.cudaHostUnregister(ctypes.c_void_p(address)))

    def _failure(self, status: int) -> str | None:
        if status == _SUCCESS:
            return None
        self._library.cudaGetLastError()
        text: bytes = self._library.cudaGetErrorString(ctypes.c_int(status))
        return f"{text.decode()}, CUDA error {status}"


def loaded_runtime_path(maps: Path = Path("/proc/self/maps")) -> Path | None:
    """Return the library through which torch's CUDA runtime is reached, once torch has loaded it.

    Args:
        maps: The kernel's list of what is mapped into this process.
    """
    for line in maps.read_text().splitlines() if maps.exists() else ():
        _, _, name = line.partition("/")
        path = Path("/" + name)
        if path.name.startswith("libc10_cuda"):
            return path
    return None
