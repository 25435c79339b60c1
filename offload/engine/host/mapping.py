"""Uint8 tensors over mapped memory: page-aligned and of exactly the requested size."""

import ctypes
import mmap
import warnings

import torch


def aligned_empty(num_bytes: int) -> torch.Tensor:
    """Return page-aligned memory, uint8 (num_bytes,), whose pages are allocated on first touch.

    torch aligns to 64 bytes; reads that bypass the page cache need whole disk blocks.
    """
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    return torch.frombuffer(mmap.mmap(-1, max(1, num_bytes), flags=flags), dtype=torch.uint8)[
        :num_bytes
    ]


def map_file(descriptor: int, num_bytes: int, *, is_writable: bool) -> torch.Tensor:
    """Return the bytes of a file, uint8 (num_bytes,), shared with every process that maps it.

    Writing to a read-only tensor ends the process, since its memory belongs to another one.
    The descriptor may be closed afterwards; the mapping lives as long as any view of it.
    """
    prot = mmap.PROT_READ | (mmap.PROT_WRITE if is_writable else 0)
    memory = mmap.mmap(descriptor, max(1, num_bytes), flags=mmap.MAP_SHARED, prot=prot)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch warns that it has no read-only tensors
        return torch.frombuffer(memory, dtype=torch.uint8)[:num_bytes]


def trim_heap() -> None:
    """Give the whole pages of freed memory back to the system; does nothing without glibc.

    malloc keeps freed blocks of up to 32 MiB. Small long-lived blocks are then placed inside them,
    the next large one no longer fits, and the heap grows with each tensor that comes and goes.
    """
    library = ctypes.CDLL(None)
    if hasattr(library, "malloc_trim"):
        library.malloc_trim(0)
