"""The steps of a run: which rows each trains on, and this rank's share of them."""

from dataclasses import dataclass

from finetune.data.batches import BatchOrder, StepLoader, StepShare, collate
from finetune.data.dataset import ExampleSet
from finetune.data.load import StepSizes, row_order
from finetune.recipe.sections import TrainSection
from finetune.training.ranks import Ranks, own_micro_batches


@dataclass(frozen=True, kw_only=True, slots=True)
class Steps:
    """All steps of a run, as one rank sees them.

    Attributes:
        rows: What is trained on.
        order: Which rows each step trains on.
        sizes: How large micro-batches are.
        micro_batch_ids: Which micro-batches of a step are this rank's.
        pad_token_id: Token that pads rows.
    """

    rows: ExampleSet
    order: BatchOrder
    sizes: StepSizes
    micro_batch_ids: tuple[int, ...]
    pad_token_id: int

    @classmethod
    def of(
        cls, train: TrainSection, rows: ExampleSet, *, pad_token_id: int, ranks: Ranks
    ) -> "Steps":
        """Return the steps that these settings make of the rows."""
        order = row_order(train, rows)
        return cls(
            rows=rows,
            order=order,
            sizes=StepSizes.of(order, rows),
            micro_batch_ids=own_micro_batches(
                order.num_micro_batches, index=ranks.index, num=ranks.num
            ),
            pad_token_id=pad_token_id,
        )

    @property
    def num(self) -> int:
        """How many there are."""
        return self.order.num_steps

    @property
    def largest_tokens(self) -> int:
        """Tokens of the largest micro-batch, padding included."""
        return self.order.micro_batch_size * self.sizes.largest_width

    def longest(self) -> StepShare:
        """Return this rank's share of a step with all the widest micro-batches."""
        return self._share(self.order.longest_step())

    def typical(self) -> list[StepShare]:
        """Return this rank's shares of steps of the median size, and those nearest to it."""
        return [self._share(self.order.step(step)) for step in self.sizes.typical_steps]

    def loader(self, *, first_step: int, num_workers: int) -> StepLoader:
        """Return this rank's batches of the steps from `first_step` on, made by workers."""
        return StepLoader(
            self.rows,
            self.order,
            micro_batch_ids=self.micro_batch_ids,
            start_step=first_step,
            pad_token_id=self.pad_token_id,
            num_workers=num_workers,
        )

    def _share(self, step: tuple[tuple[int, ...], ...]) -> StepShare:
        own = (
            collate([self.rows[row] for row in step[i]], pad_token_id=self.pad_token_id)
            for i in self.micro_batch_ids
        )
        return StepShare.of(
            step, self.rows, micro_batches=own, micro_batch_ids=self.micro_batch_ids
        )
