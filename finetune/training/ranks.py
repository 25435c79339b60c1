"""The processes of a run, one per device, and how they share a step.

Each rank trains on its own micro-batches; the gradients are added up once per step, and all ranks
make the same update. Ranks share a step and do not enlarge it: with N ranks a step has the same
rows, the same loss and, except for the order of summation, the same gradients as with one.

The main rank, of all machines, writes the run's directory. The first rank of each machine fills its
slab, writes its store and its cache of tokens.
"""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from fractions import Fraction
from types import TracebackType
from typing import TYPE_CHECKING, Self, TypeVar

from offload.errors import SluiceError
from offload.plan.shares import apportioned

if TYPE_CHECKING:
    import torch
    from torch import nn

T = TypeVar("T")


class Ranks:
    """A run of one process, without communication.

    All ranks call the same methods in the same order. A rank that fails inside `with ranks:` ends
    the others at their next call.
    """

    num = 1
    index = 0
    local_index = 0
    nodes: tuple[int, ...] = (0,)
    """The machine of each rank."""
    is_restart = False
    """Whether the launcher has started the ranks again after they had begun a run."""
    run_errors: "tuple[type[SluiceError | OSError], ...]" = (SluiceError, OSError)
    """By these a run fails alone: one that shares its steps with others leaves them."""

    @property
    def is_main(self) -> bool:
        """Return whether this is the rank that writes files and prints."""
        return self.index == 0

    @property
    def is_first_here(self) -> bool:
        """Return whether this is the rank that fills what its machine has once."""
        return self.nodes.index(self.nodes[self.index]) == self.index

    @property
    def num_machines(self) -> int:
        """Return on how many machines the ranks are."""
        return len(set(self.nodes))

    @property
    def most_local(self) -> int:
        """Return the ranks of the machine that has most of them."""
        return max(map(self.nodes.count, self.nodes))

    def note_begun(self) -> None:
        """Let processes that the launcher starts after these continue the run."""

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Disconnect from the others, or report to them why this rank fails."""

    def exchange(self, value: T, *, is_step: bool = False) -> tuple[T, ...]:
        """Return the values of all ranks, in rank order.

        Args:
            value: This rank's.
            is_step: Whether all ranks have begun a step together, so that each is due within its
                time limit.

        Raises:
            RankError: A rank has failed, or is gone.
        """
        return (value,)

    def from_main(self, make: Callable[[], T]) -> T:
        """Return the result of `make` on the main rank, on all ranks."""
        return self.exchange(make() if self.is_main else None)[0]  # type: ignore[return-value]

    def from_first_here(self, make: Callable[[], T]) -> T:
        """Return the result of `make` on the first rank of this machine, on all its ranks."""
        every = self.exchange(make() if self.is_first_here else None)
        return every[self.nodes.index(self.nodes[self.index])]  # type: ignore[return-value]

    @contextmanager
    def first_here_first(self) -> Iterator[None]:
        """Let the first rank of each machine go first; the others find its results in a cache."""
        if not self.is_first_here:
            self.exchange(None)
        yield
        if self.is_first_here:
            self.exchange(None)

    @contextmanager
    def failing_together(self) -> Iterator[None]:
        """Fail on all ranks if one fails in this context, in which no rank waits for others.

        Raises:
            RunFailedError: There are several ranks, and one has failed.
        """
        yield

    @contextmanager
    def in_collectives(self, *, is_step: bool) -> Iterator[None]:
        """Run collectives of a library in this context, in which each rank waits for all others.

        A rank that fails there leaves, and so do those that wait for it. Nothing ends a library's
        wait for a rank that has stopped: then this process ends with the cause on stderr.

        Args:
            is_step: See `exchange`.

        Raises:
            RankError: Another rank is gone.
        """
        yield

    def arrive(self) -> None:
        """Note that this rank has come to another collective; who has not come there is late."""

    def mark(self) -> None:
        """Note that this rank has done a unit of work; one that does none for long is lost."""

    @contextmanager
    def following(self, count: Callable[[], int]) -> Iterator[None]:
        """Take a count that only grows for units of this rank's work, in this context."""
        yield

    def sum_gradients(self, parameters: "Sequence[nn.Parameter]", *, dtype: "torch.dtype") -> None:
        """Add up the gradients of all ranks, in place.

        A rank without a gradient counts as zero; if no rank has one, there is none afterwards.

        Args:
            parameters: Whose gradients.
            dtype: The type of what is sent; sums are fp32, each in the order of the ranks, so
                that its bits depend on nothing else.
        """

    def send_from_main(self, tensors: "Sequence[torch.Tensor]") -> None:
        """Replace tensors by those of the main rank."""

    def sum_losses(self, loss: float) -> float:
        """Return the sum of the losses of all ranks, at the end of a step."""
        return loss

    def add_up(self, own: "torch.Tensor") -> "torch.Tensor":
        """Add up a vector over the ranks, in rank order, so that all get the same bits."""
        return own

    def require_same(self, what: str, digest: Callable[[], str]) -> None:
        """Check that all ranks have the same of something.

        Raises:
            FinetuneError: They have not.
        """

    def require_same_weights(self, parameters: "Mapping[str, torch.Tensor]", *, step: int) -> None:
        """Check that what trains is the same on all ranks, to the bit.

        Raises:
            FinetuneError: They have drifted apart.
        """


def is_joined() -> bool:
    """Return whether this process is one of several that are connected."""
    distributed = sys.modules.get("torch.distributed")
    return distributed is not None and bool(distributed.is_initialized())


def micro_batches_by_shares(
    num_micro_batches: int, *, index: int, shares: Sequence[int]
) -> tuple[int, ...]:
    """Return which micro-batches of a step a rank takes, in proportion to the ranks' shares.

    The step is sorted by size. Those of each rank are spread evenly over it, so its tokens are
    about in proportion too. Equal shares are dealt out as `own_micro_batches` does.
    """
    if len(set(shares)) == 1:
        return own_micro_batches(num_micro_batches, index=index, num=len(shares))
    counts = apportioned(num_micro_batches, shares)
    places = sorted(
        (Fraction(2 * place + 1, count), rank)
        for rank, count in enumerate(counts)
        for place in range(count)
    )
    return tuple(number for number, (_, rank) in enumerate(places) if rank == index)


def own_micro_batches(num_micro_batches: int, *, index: int, num: int) -> tuple[int, ...]:
    """Return which micro-batches of a step a rank takes, of a step sorted by size.

    They are dealt out in rounds, back and forth: the rank that gets the largest of one round gets
    the smallest of the next. So the ranks' numbers of micro-batches differ by at most one, and
    their tokens by no more than the largest micro-batch has. The last round runs forwards, so that
    no rank has more micro-batches than the main one, whose times are shown.
    """
    last_round = (num_micro_batches - 1) // num
    own = []
    for number in range(num_micro_batches):
        deal, place = divmod(number, num)
        is_forth = (last_round - deal) % 2 == 0
        if index == (place if is_forth else num - 1 - place):
            own.append(number)
    return tuple(own)
