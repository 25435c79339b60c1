"""The ranks of a machine that update a model's weights together, in memory that all of them map.

Weights are there once, in the slab, and so are optimizer states and the low halves of masters. Each
layer has one owner among the ranks, which alone updates it. So has each weight around the layers,
of which this memory has the copy that is updated; an embedding in RAM is there once, and all look
tokens up in it. Next to the states is a number for each of these parts: that of the last update
that its owner has made. Whoever needs a part waits for it.

A rank cannot begin a part's next update while another one still loads the layer, or looks tokens
up: it first needs the norm of the next step's gradients, to which all ranks come once their loads
and lookups have ended.

The owner writes the number after the weights, and x86 processors let others see the two in this
order. So does an exchange of a step's norms, for whatever was written before.
"""

import os
from collections.abc import Sequence
from itertools import accumulate, pairwise

import torch

from finetune.errors import FinetuneError
from finetune.training.ranks import Ranks
from offload.engine.host.slab import SlabHandle, new_block, open_block
from offload.plan.facts.codec import aligned

NUMBER_BYTES = torch.int64.itemsize


class Owners:
    """The owners of a model's parts on this machine, and the memory of their updates.

    Attributes:
        states: By part, the memory of its states, uint8, zeros at first.
    """

    def __init__(
        self,
        owned: frozenset[int],
        *,
        state_bytes: Sequence[int],
        names: Sequence[str],
        ranks: Ranks,
    ) -> None:
        """Map memory together with the other ranks of this machine.

        Args:
            owned: The parts that this rank updates: layers, and what follows them.
            state_bytes: Of each part, what its update keeps here.
            names: Of the parts, for errors.
            ranks: All of them, on all machines.

        Raises:
            FinetuneError: There is no memory that processes can share.
        """
        node = ranks.nodes[ranks.index]
        self._every = ranks.exchange(owned)
        every = enumerate(self._every)
        self._owner = {i: r for r, parts in every if ranks.nodes[r] == node for i in parts}
        self._ranks, self._names, self._gives_up = ranks, tuple(names), False
        offsets = [*accumulate(state_bytes, initial=aligned(NUMBER_BYTES * len(state_bytes)))]
        memory = _shared(offsets[-1], ranks)
        numbers = memory[: NUMBER_BYTES * len(state_bytes)].view(torch.int64)
        self._numbers = numbers.numpy()
        self.states = tuple(memory[start:end] for start, end in pairwise(offsets))

    def of(self, part: int) -> frozenset[int]:
        """Return the ranks that update a part, one of each machine."""
        return frozenset(rank for rank, parts in enumerate(self._every) if part in parts)

    def note_updated(self, layer: int, number: int) -> None:
        """See `OtherOwners`."""
        self._numbers[layer] = number

    def await_updated(self, layer: int, number: int) -> None:
        """See `OtherOwners`.

        Raises:
            RankError: The owner is gone, or does not come to it.
            FinetuneError: This process has given up.
        """
        numbers = self._numbers

        def is_updated() -> bool:
            return bool(numbers[layer] >= number)

        self._ranks.wait_until(lambda: self._gives_up or is_updated(), rank=self._owner[layer])
        if not is_updated():
            raise FinetuneError(
                f"{self._names[layer]} has not been updated by the process that has it",
                limit="this one has failed and waits for no other",
                hint="see its error; `--resume` continues from the newest checkpoint",
            )

    def give_up(self) -> None:
        """See `OtherOwners`."""
        self._gives_up = True


def _shared(num_bytes: int, ranks: Ranks) -> torch.Tensor:
    """Return memory that the ranks of this machine share, uint8, zeros."""
    own = new_block(num_bytes) if ranks.is_first_here else None

    def handle() -> SlabHandle | None:
        if own is None or own.descriptor is None:
            return None
        return SlabHandle(
            pid=os.getpid(), descriptor=own.descriptor, num_bytes=num_bytes, layout=""
        )

    found = ranks.from_first_here(handle)
    if own is not None and ranks.nodes.count(ranks.nodes[ranks.index]) == 1:
        block = own
    elif found is None:
        raise no_shared_memory()
    else:
        block = own if own is not None else open_block(found, is_writable=True)
    ranks.exchange(None)  # all have mapped it
    if block.descriptor is not None:
        os.close(block.descriptor)
    return block.memory


def no_shared_memory() -> FinetuneError:
    """Return the error for several processes on a machine that can share no memory."""
    return FinetuneError(
        "weights of the model train in several processes, which can share no memory here",
        limit="each updates some layers for all, in memory of memfd_create",
        hint="allow memfd_create in the container, or start one process",
    )
