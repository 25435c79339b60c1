"""Blocks of host memory for transfers to and from the device."""

import torch

from offload.engine.host.mapping import aligned_empty
from offload.engine.host.pagelock import Locker
from offload.engine.host.slab import BeforeTouch
from offload.errors import TransferError
from offload.plan.machine.machine import GIB


class HostBlocks:
    """Page-aligned memory at its exact size, page-locked for a GPU."""

    def __init__(self, *, locker: Locker | None, before_touch: BeforeTouch) -> None:
        """Allocate nothing yet.

        Args:
            locker: What page-locks; None if no device needs it.
            before_touch: Called with address and size of each block, before its first use.
        """
        self._locker = locker
        self._before_touch = before_touch
        self._locked: set[int] = set()

    def allocate(self, num_bytes: int) -> torch.Tensor:
        """Return a new block, uint8.

        Raises:
            TransferError: The system refuses to page-lock it.
        """
        block = aligned_empty(num_bytes)
        if not num_bytes:
            return block
        self._before_touch(block.data_ptr(), num_bytes)
        if self._locker is not None:
            refusal = self._locker.register(block.data_ptr(), num_bytes)
            if refusal is not None:
                raise TransferError(
                    f"page-locking {num_bytes / GIB:.2f} GiB of host memory failed: {refusal}",
                    limit="what the device copies to must be page-locked",
                    hint="raise the limit (`ulimit -l unlimited`; on WSL2 Windows sets it), or keep"
                    ' what it copies there: `stash="device"`, `sent_graphs=0`, `sent_outputs=0`,'
                    ' `embeddings="device"`, `head="device"`',
                )
            self._locked.add(block.data_ptr())
        return block

    def free(self, block: torch.Tensor) -> None:
        """Unlock a block that no copy uses; its memory is freed with its last view.

        Blocks must be freed through this call: otherwise CUDA would treat memory that is mapped
        at the same address later as locked.
        """
        self._unlock(block.data_ptr())

    def close(self) -> None:
        """Unlock all blocks. The memory of each is freed with its last view."""
        for address in tuple(self._locked):
            self._unlock(address)

    def _unlock(self, address: int) -> None:
        if self._locker is not None and address in self._locked:
            self._locked.remove(address)
            self._locker.unregister(address)
