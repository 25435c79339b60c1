"""The rows of a run: read, held out, and tokenised."""

import hashlib
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from finetune.data.batches import PAD_TO_MULTIPLE_OF, BatchOrder, padded, plan_batches
from finetune.data.dataset import ExampleSet, load_examples, split_held_out
from finetune.data.rows import Conversation, read_conversations
from finetune.errors import DataError
from finetune.recipe.sections import DataSection, TrainSection

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

NUM_STEPS_LOOKED_AT, NUM_TYPICAL = 50, 12


@dataclass(frozen=True, kw_only=True, slots=True)
class Rows:
    """What is trained on, and what is held out.

    Attributes:
        train: Tokens of the training rows.
        held_out: Tokens of the held-out rows, None if there are none.
        held_out_rows: The same as conversations, for samples.
        unused_columns: Columns that are read from no row, except those that the recipe ignores.
    """

    train: ExampleSet
    held_out: ExampleSet | None
    held_out_rows: tuple[Conversation, ...]
    unused_columns: tuple[str, ...]

    @property
    def notes(self) -> tuple[str, ...]:
        """What a user should know about the rows: unused columns, cut, dropped, cached."""
        unused = (f"Columns that are not used: {', '.join(self.unused_columns)}",)
        cut = self.train.notes + (self.held_out.notes if self.held_out else ())
        return (unused if self.unused_columns else ()) + cut

    @property
    def data_hash(self) -> str:
        """Digest of the training tokens, which must be the same when a run is resumed."""
        digest = hashlib.sha256(self.train.input_ids.tobytes())
        digest.update(self.train.labels.tobytes())
        digest.update(self.train.offsets.tobytes())
        return digest.hexdigest()


def load_rows(
    data: DataSection,
    tokenizer: "PreTrainedTokenizerBase",
    *,
    seq_len: int,
    seed: int,
    cache_dir: Path,
) -> Rows:
    """Read and tokenise what the recipe names.

    Raises:
        DataError: A file is missing or empty, or rows are bad; each is named by file and line.
    """
    rows = _read(data, data.path)
    held_out = _read(data, data.eval_path) if data.eval_path is not None else []
    unused = _unused_columns(rows + held_out, data)
    if data.eval_frac is not None:
        rows, held_out = split_held_out(rows, eval_frac=data.eval_frac, seed=seed)

    def tokens(conversations: list[Conversation]) -> ExampleSet:
        return load_examples(
            conversations,
            tokenizer,
            seq_len=seq_len,
            loss_on=data.loss_on,
            num_workers=data.num_workers,
            cache_dir=cache_dir,
        )

    return Rows(
        train=tokens(rows),
        held_out=tokens(held_out) if held_out else None,
        held_out_rows=tuple(held_out),
        unused_columns=unused,
    )


def _unused_columns(rows: Sequence[Conversation], data: DataSection) -> tuple[str, ...]:
    """Return the unused columns, in the order of the rows.

    Raises:
        DataError: The recipe ignores a column that no row has, or that is used.
    """
    unused = dict.fromkeys(key for row in rows for key in row.unused)
    for name in data.ignored_columns:
        if name not in unused:
            raise DataError(
                f"data.ignored_columns names {name}, and no row holds an unused column {name}",
                limit=f"the columns that are not used are {', '.join(unused) or 'none'}",
                hint=f"leave {name} out of `data.ignored_columns`",
            )
    return tuple(name for name in unused if name not in data.ignored_columns)


def _read(data: DataSection, path: str) -> list[Conversation]:
    return read_conversations(
        path=path,
        data_format=data.format,
        prompt_column=data.prompt_column,
        completion_column=data.completion_column,
        messages_column=data.messages_column,
        system=data.system,
        ignored=data.ignored_columns,
        loss_on=data.loss_on,
    )


def row_order(train: TrainSection, examples: ExampleSet) -> BatchOrder:
    """Return which rows each step trains on."""
    num_steps = train.steps
    if num_steps is None:
        assert train.epochs is not None
        num_steps = math.ceil(train.epochs * len(examples) / train.global_batch_size)
    return plan_batches(
        examples.lengths,
        micro_batch_size=train.sequences,
        num_micro_batches=train.num_micro_batches,
        num_steps=num_steps,
        seed=train.seed,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class StepSizes:
    """How large micro-batches are.

    Attributes:
        typical_steps: A step whose tokens, padding included, are the median, and then those nearest
            to it by size, larger and smaller ones in turn.
        typical_width: Mean width of the first one's micro-batches, in tokens.
        label_tokens: Mean number of its tokens with a loss, per micro-batch.
        largest_width: Width of the widest micro-batch of the run.
        most_label_tokens: Most tokens with a loss that a micro-batch can have.
    """

    typical_steps: tuple[int, ...]
    typical_width: int
    label_tokens: int
    largest_width: int
    most_label_tokens: int

    @classmethod
    def of(cls, order: BatchOrder, examples: ExampleSet) -> "StepSizes":
        """Measure the first steps of an order."""
        looked_at = range(min(order.num_steps, NUM_STEPS_LOOKED_AT))
        widths = {step: _widths(order, order.step(step)) for step in looked_at}
        by_size = sorted(looked_at, key=lambda step: sum(widths[step]))
        middle = (len(by_size) - 1) // 2
        typical = by_size[middle]
        labels_of_rows = [example.num_loss_tokens for example in examples]
        labels = [labels_of_rows[i] for part in order.step(typical) for i in part]
        return cls(
            typical_steps=_outwards(by_size, middle)[:NUM_TYPICAL],
            typical_width=round(statistics.mean(widths[typical])),
            label_tokens=round(sum(labels) / order.num_micro_batches),
            largest_width=max(_widths(order, order.longest_step())),
            most_label_tokens=sum(sorted(labels_of_rows, reverse=True)[: order.micro_batch_size]),
        )


def _outwards(ordered: Sequence[int], middle: int) -> tuple[int, ...]:
    """Return the middle element, then its neighbours on alternating sides."""
    places = sorted(range(len(ordered)), key=lambda place: (abs(place - middle), -place))
    return tuple(ordered[place] for place in places)


def _widths(order: BatchOrder, step: Sequence[Sequence[int]]) -> list[int]:
    return [padded(max(order.lengths[i] for i in part), PAD_TO_MULTIPLE_OF) for part in step]
