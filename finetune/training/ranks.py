"""The processes of a run, one per device, and how they share a step.

Each rank trains on its own micro-batches; the gradients are added up once per step, and all ranks
make the same update. Ranks share a step and do not enlarge it: with N ranks a step has the same
rows, the same loss and, except for the order of summation, the same gradients as with one.

The main rank, of all machines, writes the run's directory. The first rank of each machine fills its
slab, writes its store and its cache of tokens.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from fractions import Fraction
from types import TracebackType
from typing import TYPE_CHECKING, Self, TypeVar

from finetune.errors import FinetuneError, RankError, RunFailedError, file_error
from finetune.recipe.recipe import Recipe, differences
from offload.errors import SluiceError
from offload.plan.shares import apportioned

if TYPE_CHECKING:
    import torch
    from torch import nn

    from finetune.run.checkpoint import NamedTensors
    from offload.plan.plan import Plan

T = TypeVar("T")

# What is there is compared by itself, or is the main rank's alone.
OF_A_MACHINE = (
    *("model.path:", "model.config:", "model.tokenizer:", "adapter.init_from:"),
    *("model.revision:", "model.tokenizer_revision:", "data.revision:", "data.eval_revision:"),
    *("data.path:", "data.mix:", "data.eval_path:", "data.num_workers:"),
    *("output.name:", "output.dir:", "report."),
)


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
    def failing_together(self, *, is_step: bool = False) -> Iterator[None]:
        """Fail on all ranks if one fails in this context, in which no rank waits for others.

        Args:
            is_step: See `exchange`.

        Raises:
            RunFailedError: There are several ranks, and one has failed.
        """
        failure: SluiceError | None = None
        try:
            yield
        except (SluiceError, OSError) as error:
            if self.num == 1 or isinstance(error, RankError):
                raise
            where = f"rank {self.index}"
            failure = file_error(error, where) if isinstance(error, OSError) else error
        own = None if failure is None else (failure.what, failure.limit, failure.hint)
        for found in self.exchange(own, is_step=is_step):
            if found is not None:
                raise RunFailedError(found[0], limit=found[1], hint=found[2]) from failure

    @contextmanager
    def in_collectives(self, *, is_step: bool) -> Iterator[None]:
        """Run collectives of a library in this context, in which each rank waits for all others.

        A collective that fails or takes too long ends this rank.

        Args:
            is_step: See `exchange`.

        Raises:
            RankError: Another rank is gone.
        """
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
        """Add up a vector over the ranks, in rank order, so that all get the same bits.

        With several ranks it waits for the device.
        """
        if self.num == 1:
            return own
        every = self.exchange(own.tolist(), is_step=True)
        return own.new_tensor([sum(one) for one in zip(*every, strict=True)])

    def require_same(self, what: str, digest: Callable[[], str]) -> None:
        """Check that all ranks have the same of something.

        Raises:
            FinetuneError: They have not.
        """
        first, *others = self.exchange(digest() if self.num > 1 else "")
        unlike = [str(rank) for rank, found in enumerate(others, 1) if found != first]
        if unlike:
            raise FinetuneError(
                f"{what} on rank {', '.join(unlike)} are not those on rank 0",
                limit="ranks train one model on one order of rows, the same to the bit",
                hint="give all ranks the same files, package versions and kind of card;"
                " `--resume` continues from the newest checkpoint",
            )


class FromMain:
    """Tensors that the main rank has, by name; all ranks ask for the same ones in the same order.

    A checkpoint of a model's own weights and states is as large as all of it, so no process
    receives it at once: each takes what it needs of one tensor before it asks for the next.
    """

    def __init__(self, tensors: "NamedTensors | None", *, ranks: Ranks) -> None:
        """Take what the main rank has; None on others."""
        self._tensors, self._ranks = tensors or {}, ranks

    def __getitem__(self, name: str) -> "torch.Tensor":
        """Return a tensor in memory of its own, or as the main rank has it; it is a collective.

        Raises:
            RankError: A rank has failed, or is gone.
        """
        return self._ranks.from_main(lambda: self._tensors[name])


def with_others(plan: "Plan", ranks: Ranks) -> "Plan":
    """Return a rank's plan with what it waits for; ranks that are planned alike wait for none."""
    if plan.request.own_micro_batches is None:
        return plan
    every = ranks.exchange(plan.as_other)
    return replace(plan, others=every[: ranks.index] + every[ranks.index + 1 :])


def require_same_settings(ranks: Ranks, recipes: Mapping[str, Recipe], *, is_resume: bool) -> None:
    """Check that all ranks were started alike; paths may differ by machine.

    Args:
        ranks: The processes.
        recipes: By the name of the run, as this rank was given them; of a single one by any.
        is_resume: Whether its command continues a run.

    Raises:
        FinetuneError: They were not.
    """
    (first, is_first), *others = ranks.exchange((dict(recipes), is_resume))
    for rank, (theirs, resumes) in enumerate(others, 1):
        found = [f"runs {', '.join(first)} -> {', '.join(theirs)}"]
        if list(first) == list(theirs):
            every = (one for name in first for one in differences(first[name], theirs[name]))
            found = [one for one in dict.fromkeys(every) if not one.startswith(OF_A_MACHINE)]
        if resumes != is_first:
            found.append("`--resume` is given to one of them")
        if found:
            raise FinetuneError(
                f"settings on rank {rank} are not those on rank 0: {'; '.join(found)}",
                limit="ranks train one model on one order of rows, the same to the bit",
                hint="start the same command with the same recipe on each machine",
            )


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
