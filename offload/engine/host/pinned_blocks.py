"""Blocks of host memory for transfers to and from the device."""

import torch

from offload.engine.host.mapping import aligned_empty
from offload.engine.host.pagelock import Locker
from offload.engine.host.slab import BeforeTouch
from offload.errors import TransferError
from offload.plan.facts.layer_layout import to_pages
from offload.plan.machine.machine import GIB


class HostBlocks:
    """Page-aligned memory at its exact size, page-locked for a GPU."""

    def __init__(
        self, *, locker: Locker | None, before_touch: BeforeTouch, is_anywhere: bool
    ) -> None:
        """Allocate nothing yet.

        Args:
            locker: What page-locks; None if no device needs it.
            before_touch: Called with address and size of each block, before its first use.
            is_anywhere: Whether memory is as good wherever it is on this machine.
        """
        self._locker = locker
        self._before_touch = before_touch
        self._is_anywhere = is_anywhere
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

    def hold(self, values: torch.Tensor) -> torch.Tensor:
        """Return the bytes of a contiguous tensor where they are, or a copy of them, uint8.

        They stay where they are if nothing else is in their memory, it may be anywhere, and the
        system page-locks it. So a large tensor is not there twice for a moment.

        Raises:
            TransferError: The system refuses to page-lock the copy.
        """
        own = values.view(-1).view(torch.uint8)
        is_alone = values.untyped_storage().nbytes() <= to_pages(values.nbytes)
        is_alone &= values.storage_offset() == 0  # torch asks whether that place is locked
        if values.device.type == "cpu" and is_alone and self._is_anywhere and self._locks(own):
            return own
        return self.allocate(values.nbytes).copy_(own)

    def _locks(self, block: torch.Tensor) -> bool:
        """Page-lock memory that is in use already, if it has to be; return whether it is fit."""
        address = block.data_ptr()
        if self._locker is None or not block.nbytes:
            return True
        if self._locker.register(address, block.nbytes) is not None:
            return False
        self._locked.add(address)
        return True

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
