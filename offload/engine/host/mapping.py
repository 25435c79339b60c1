"""Uint8 tensors over mapped memory: page-aligned and of exactly the size that was asked for."""

import ctypes
import mmap
import warnings

import torch


def aligned_empty(num_bytes: int) -> torch.Tensor:
    """Return page-aligned memory, uint8 (num_bytes,), whose pages take room as they are touched.

    torch aligns to 64 bytes; reads that pass the page cache by need whole disk blocks.
    """
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    return torch.frombuffer(mmap.mmap(-1, max(1, num_bytes), flags=flags), dtype=torch.uint8)[
        :num_bytes
    ]


def map_file(descriptor: int, num_bytes: int, *, is_writable: bool) -> torch.Tensor:
    """Return the bytes of a file, uint8 (num_bytes,), shared with all who map it.

    Writing to a tensor that is not writable ends the process: what it shows belongs to others.
    The descriptor may be closed afterwards; the mapping lives as long as a view of it.
    """
    prot = mmap.PROT_READ | (mmap.PROT_WRITE if is_writable else 0)
    memory = mmap.mmap(descriptor, max(1, num_bytes), flags=mmap.MAP_SHARED, prot=prot)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch has no read-only tensors, and says so
        return torch.frombuffer(memory, dtype=torch.uint8)[:num_bytes]


def trim_heap() -> None:
    """Give the whole pages of freed memory back to the system; does nothing without glibc.

    malloc keeps freed blocks of up to 32 MiB. Small blocks that live on settle inside of them, the
    next large one no longer fits, and the heap grows with each tensor that comes and goes.
    """
    library = ctypes.CDLL(None)
    if hasattr(library, "malloc_trim"):
        library.malloc_trim(0)
