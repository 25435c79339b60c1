"""Blocks of host memory that the link can copy to and from."""

import mmap

import torch

from offload.errors import TransferError
from offload.plan.machine import GIB


class HostBlocks:
    """Page-aligned memory at its exact size, page-locked for a GPU."""

    def __init__(self, *, is_locked: bool) -> None:
        """Take nothing yet.

        Args:
            is_locked: Whether blocks are registered with CUDA.
        """
        self._is_locked = is_locked
        self._blocks: list[torch.Tensor] = []

    def allocate(self, num_bytes: int) -> torch.Tensor:
        """Return a new block, uint8.

        Raises:
            TransferError: The system does not let it be page-locked.
        """
        memory = mmap.mmap(-1, max(1, num_bytes))
        block = torch.frombuffer(memory, dtype=torch.uint8)[:num_bytes]
        if self._is_locked and num_bytes:
            status = int(torch.cuda.cudart().cudaHostRegister(block.data_ptr(), num_bytes, 0))
            if status != 0:
                raise TransferError(
                    f"page-locking {num_bytes / GIB:.2f} GiB of host memory failed"
                    f" (CUDA error {status})",
                    limit="what the link copies to must be page-locked",
                    hint="raise the limit (`ulimit -l unlimited`; on WSL2 it is 1 to 2 GiB)",
                )
            self._blocks.append(block)
        return block

    def close(self) -> None:
        """Unlock all blocks. Their memory is freed with the last view of it."""
        while self._blocks:
            torch.cuda.cudart().cudaHostUnregister(self._blocks.pop().data_ptr())
