"""Answers of one row, which stay in one step: how they are grouped, compared and checked."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch

from finetune.data.dataset import Groups
from finetune.data.step_rows import StepRows
from finetune.data.tokenize import IGNORE_INDEX, Example, require_known_ids
from finetune.errors import DataError
from finetune.recipe.extensions import ObjectiveSection

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from transformers import PreTrainedTokenizerBase

    from finetune.data.dataset import Chosen, ExampleSet, Rows


def require_comparable(rows: "Rows", objective: ObjectiveSection) -> None:
    """Check that an objective finds in the rows what it compares.

    Raises:
        DataError: Answers are all desired or all not, or log-probabilities are missing.
    """
    groups = rows.train.groups
    if groups is None:
        return
    objective.require_values(groups.values)
    if len(groups.references) and not objective.precomputes_reference:
        raise DataError(
            "rows have log-probabilities of the reference, and objective.reference is not"
            " precomputed",
            limit="they would not be read",
            hint="`objective.reference: precomputed`, or leave their columns out by"
            " `data.ignored_columns`",
        )
    if objective.scores_mismatched and rows.held_out is not None and len(rows.held_out) < 2:
        raise DataError(
            "one row is held out",
            limit="each prompt is scored with the answer of another row",
            hint="hold out more: `data.eval_frac: 0.1`",
        )


def require_classes(rows: "Rows", num_classes: int, *, of_words: bool) -> None:
    """Check that each class is one of the head's.

    Args:
        rows: That are trained on, and held out.
        num_classes: Outputs of the head.
        of_words: Whether labels are the classes of words; otherwise each row has one.

    Raises:
        DataError: A number is too large, or all that is trained on has one class.
    """

    def classes_of(part: "Chosen") -> "NDArray[Any]":
        if not of_words:
            return part.tokens.store.values[part.examples]
        found = {int(label) for block in part.blocks("labels") for label in np.unique(block)}
        return np.array(sorted(found - {IGNORE_INDEX}), dtype=np.int64)

    for part in (*rows.train.parts, *(rows.held_out.parts if rows.held_out else ())):
        highest = int(classes_of(part).max(initial=0))
        if highest >= num_classes:
            raise DataError(
                f"{part.tokens.rows.source.path} has the class {highest}, and model.num_classes is"
                f" {num_classes}",
                limit="classes are numbered from 0",
                hint=f"`model.num_classes: {highest + 1}`",
            )
    found = {int(value) for part in rows.train.parts for value in classes_of(part)}
    if len(found) < 2:
        what = "words of all" if of_words else "all"
        raise DataError(
            f"{what} {len(rows.train):,} rows have the class {min(found)}",
            limit="a classifier learns to tell classes apart",
            hint="add rows of other classes",
        )


def require_known_rows(rows: "Rows", tokenizer: "PreTrainedTokenizerBase", num_tokens: int) -> None:
    """Check that a model has the tokens of rows, and the one that fills them up.

    Args:
        rows: That are trained on, and held out.
        tokenizer: Their tokenizer.
        num_tokens: Rows of the model's embedding.

    Raises:
        DataError: It lacks one.
    """
    require_known_ids([[tokenizer.pad_token_id]], tokenizer, num_tokens, where="what pads rows")
    for part in (*rows.train.parts, *(rows.held_out.parts if rows.held_out else ())):
        where = str(part.tokens.rows.source.path)
        require_known_ids(part.blocks("input_ids"), tokenizer, num_tokens, where=where)


def require_known_tokens(rows: "Rows", num_tokens: int) -> None:
    """Check that a teacher's tokens are tokens of the model.

    Args:
        rows: That are trained on, and held out.
        num_tokens: That the model predicts.

    Raises:
        DataError: Some are not.
    """
    for part in (*rows.train.parts, *(rows.held_out.parts if rows.held_out else ())):
        if not len(part.tokens.store.top_ids):
            continue
        highest = max(int(block.max()) for block in part.blocks("top_ids") if len(block))
        if highest >= num_tokens:
            raise DataError(
                f"`top_ids` of {part.tokens.rows.source.path} has the token {highest:,}, and the"
                f" model has {num_tokens:,}, from 0",
                limit="a teacher's tokens mean the same to it and to the model",
                hint="take a teacher with the same tokenizer",
            )


# ---------------------------------------------------------------------------------------------
# The rows of a step whose answers are compared: which belong together, and which are only scored.
#
# Rows that are only scored are KTO's mismatched ones: each prompt of the step with the answer of
# another, to estimate the KL divergence. As TRL's KTOTrainer does, row i has the answer of row i -
# 1, and the first that of the last. The order is that of the epoch, not of the micro-batches: the
# mismatched rows of a step are the same however it is cut. Their answers are cut at `seq_len`.
#
# Source: trl 1.16.0, trainer/kto_trainer.py, `add_kl_completion_ids`.

Parts = Sequence[Sequence[Any]]
"""Of each micro-batch, the places of its rows in the step."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Comparison:
    """What an objective compares."""

    groups: Groups  # the groups of the examples
    lengths: "NDArray[np.int64]"  # (examples) All their tokens
    # (examples) Tokens before the first that is learned, where rows are mismatched.
    prompt_lens: "NDArray[np.int64] | None"
    seq_len: int  # most tokens of a mismatched row
    has_sampler: bool  # whether rows have the log-probabilities that their tokens were sampled with
    # A teacher's likeliest tokens, of the token with most of them; 0 without a teacher.
    num_top: int
    has_classes: bool = False  # whether labels are the classes of words

    @classmethod
    def of(
        cls,
        rows: "ExampleSet",
        *,
        is_mismatched: bool,
        seq_len: int,
        has_classes: bool = False,
    ) -> Self | None:
        """Return what is compared among examples; None where they are not.

        Args:
            rows: The examples.
            is_mismatched: Whether each prompt is also scored with the answer of another row.
            seq_len: Most tokens of a row.
            has_classes: Whether labels are the classes of words.
        """
        groups = rows.groups
        if groups is None:
            return None
        return cls(
            groups=groups,
            lengths=np.asarray(rows.lengths, dtype=np.int64),
            prompt_lens=_prompt_lens(rows) if is_mismatched else None,
            seq_len=seq_len,
            has_sampler=all(len(part.tokens.store.logprobs) for part in rows.parts),
            num_top=max(map(_most_top, rows.parts)),
            has_classes=has_classes,
        )

    def of_same_kind(self, rows: "ExampleSet") -> "Comparison":
        """Return what is compared among other rows, in the same way."""
        is_mismatched = self.prompt_lens is not None
        found = Comparison.of(
            rows,
            is_mismatched=is_mismatched,
            seq_len=self.seq_len,
            has_classes=self.has_classes,
        )
        assert found is not None, "held-out rows have the format of the others"
        return found

    @property
    def group_size(self) -> int:
        """Rows of the smallest group."""
        return int(self.groups.sizes.min())

    def require_within(self, *, tokens_per_step: int | None, rows_per_step: int | None) -> None:
        """Check that each step has a group to compare, or two whose answers are exchanged.

        Args:
            tokens_per_step: Of a step that is given in tokens.
            rows_per_step: Of one that is given in rows.

        Raises:
            DataError: Some steps would have none, or only one.
        """
        num_groups = 1 if self.prompt_lens is None else 2
        limit = (
            "the answers of a row are compared, so that they are all in one step"
            if num_groups == 1
            else "each prompt is scored with the answer of another row of the step"
        )
        most = num_groups * int(self.groups.sizes.max())
        if rows_per_step is not None and most > rows_per_step:
            raise DataError(
                f"a step has {rows_per_step} sequences, and needs {most}",
                limit=limit,
                hint=f"`train.micro_batch_size` x `train.grad_accum_steps` of at least {most}",
            )
        tokens = np.add.reduceat(self.lengths, self.groups.offsets[:-1])
        most = num_groups * int(tokens.max())
        if tokens_per_step is not None and most > tokens_per_step:
            raise DataError(
                f"a step has {tokens_per_step} tokens, and needs {most} for the longest rows",
                limit=limit,
                hint=f"`train.tokens_per_step` of at least {most}",
            )

    def scored_lens(self, rows: Sequence[int]) -> tuple[int, ...]:
        """Return the tokens of a step's mismatched rows; there may be none."""
        if self.prompt_lens is None:
            return ()
        prompts = self.prompt_lens[list(rows)]
        answers = np.roll(self.lengths[list(rows)] - prompts, 1)
        return tuple(np.minimum(prompts + answers, self.seq_len).tolist())

    def scored(self, examples: "ExampleSet", rows: Sequence[int], place: int) -> Example:
        """Return the mismatched row of a place in a step.

        Args:
            examples: That the step is of.
            rows: Of the step.
            place: Among them; the row before it, or for the first the last, has the answer.
        """
        assert self.prompt_lens is not None
        own, other = rows[place], rows[place - 1]
        prompt, answer = examples[own], examples[other]
        num_prompt, at = self.prompt_lens[own], self.prompt_lens[other]
        no_label = np.full(num_prompt, IGNORE_INDEX, dtype=np.int32)
        ids = np.concatenate([prompt.input_ids[:num_prompt], answer.input_ids[at:]])
        labels = np.concatenate([no_label, answer.labels[at:]])
        return Example(
            input_ids=ids[: self.seq_len],
            labels=labels[: self.seq_len],
            source=prompt.source,
            is_truncated=len(ids) > self.seq_len,
        )

    def step_rows(
        self, examples: "ExampleSet", layout: "Layout", own: tuple[Sequence[int], Sequence[int]]
    ) -> StepRows:
        """Return what a rank's rows of a step are to each other, in the order of its micro-batches.

        Args:
            examples: That the step is of.
            layout: Of the step.
            own: The rank's micro-batches, and those of them that are only scored.
        """
        rows = np.asarray(layout.rows, dtype=np.int64)
        trained = [place for part in own[0] for place in layout.parts[part]]
        scored = [place for part in own[1] for place in layout.scored[part]]
        places = np.array([*trained, *scored], dtype=np.int64)
        references, sampler = self.groups.references, None
        own_rows = [examples[row] for row in rows[trained].tolist()]
        if self.has_sampler:
            sampler = torch.from_numpy(
                np.concatenate([_at_labels(x, x.logprobs) for x in own_rows])
            )
        top_ids_NK, top_logps_NK = self._teacher_of(own_rows)
        return StepRows(
            groups_R=torch.from_numpy(self.groups.numbers(rows)[places]),
            values_R=torch.from_numpy(self.groups.values[rows[places]]),
            num_trained=len(trained),
            reference_R=torch.from_numpy(references[rows[places]]) if len(references) else None,
            sampler_N=sampler,
            top_ids_NK=top_ids_NK,
            top_logps_NK=top_logps_NK,
            classes_N=self._classes_of(own_rows),
        )

    def _classes_of(self, examples: Sequence[Example]) -> torch.Tensor | None:
        """Return the classes at the label tokens of examples, where words have classes."""
        if not self.has_classes:
            return None
        found = [_at_labels(row, row.labels).astype(np.int64) for row in examples]
        return torch.from_numpy(np.concatenate(found))

    def _teacher_of(
        self, examples: Sequence[Example]
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Return the teacher's tokens (N, K) at the label tokens of examples, if there is one."""
        if not self.num_top:
            return None, None
        tables = []
        for one in examples:
            assert one.top is not None
            tables.append(one.top.table(_label_mask(one), self.num_top))
        ids, logprobs = (np.concatenate(column) for column in zip(*tables, strict=True))
        return torch.from_numpy(ids), torch.from_numpy(logprobs)


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """How a step is cut into micro-batches."""

    rows: tuple[int, ...]  # its rows, in the order of their epochs
    lens: tuple[int, ...]  # tokens of each
    parts: Parts  # the places of each micro-batch's rows among them
    scored_lens: tuple[int, ...] = ()  # tokens of each row that is only scored
    scored: Parts = ()  # the places of the rows that are only scored, by micro-batch

    def own_lens(self, own: Sequence[int], own_scored: Sequence[int]) -> list[list[int]]:
        """Return the tokens of each row of a rank's micro-batches, those only scored last."""
        return [
            *([self.lens[place] for place in self.parts[part]] for part in own),
            *([self.scored_lens[place] for place in self.scored[part]] for part in own_scored),
        ]


def made_up(
    parts: Sequence[Sequence[Example]], own: Sequence[int], comparison: Comparison
) -> StepRows:
    """Return a rank's rows of a step to rehearse, whose groups are made up.

    Args:
        parts: Of each micro-batch, its rows; all rows fill whole groups. Where rows are mismatched,
            as many are only scored as are trained on.
        own: The rank's micro-batches.
        comparison: What the step compares.
    """
    starts = np.cumsum([0, *map(len, parts)]).tolist()
    rows = torch.tensor([row for part in own for row in range(starts[part], starts[part + 1])])
    group_size = comparison.group_size
    size = max(group_size, 2)
    values = 1 - (rows % size) / (size - 1)
    times = 1 if comparison.prompt_lens is None else 2
    num_tokens = sum(row.num_loss_tokens for part in own for row in parts[part])
    num_top = comparison.num_top
    return StepRows(
        groups_R=(rows // group_size).repeat(times),
        values_R=values.repeat(times),
        num_trained=len(rows),
        reference_R=torch.zeros(len(rows), dtype=torch.float64)
        if len(comparison.groups.references)
        else None,
        sampler_N=torch.zeros(num_tokens) if comparison.has_sampler else None,
        top_ids_NK=torch.arange(num_top).expand(num_tokens, num_top) if num_top else None,
        top_logps_NK=torch.full((num_tokens, num_top), -math.log(num_top + 1)) if num_top else None,
        classes_N=torch.arange(num_tokens) % 2 if comparison.has_classes else None,
    )


def _prompt_lens(rows: "ExampleSet") -> "NDArray[np.int64]":
    """Return how many tokens come before the first that is learned; never the first of a row."""
    labels, offsets = rows.labels, rows.offsets
    has_loss = labels != IGNORE_INDEX
    has_loss[offsets[:-1]] = False
    learned = np.flatnonzero(has_loss)
    first = learned[np.searchsorted(learned, offsets[:-1])]
    return np.asarray(first - offsets[:-1])


def rehearsed_pieces(
    bins: Sequence[Sequence[tuple[int, int]]], *, group_size: int
) -> list[list[tuple[int, int]]]:
    """Return the rows of a largest step, by sequence, as rows that an objective can compare.

    Each has two tokens or more, of which the last is learned, and they fill whole groups.

    Args:
        bins: Of each sequence, rows and their tokens.
        group_size: Rows of a group.
    """
    pieces: list[list[tuple[int, int]]] = []
    for part in bins:
        kept = [(row, num) for row, num in part if num > 1] or [(part[0][0], 2)]
        num_left = max(0, sum(num for _, num in part) - sum(num for _, num in kept))
        kept[-1] = (kept[-1][0], kept[-1][1] + num_left)
        pieces.append(kept)
    while sum(map(len, pieces)) % group_size:
        widest = max(pieces, key=lambda part: max(num for _, num in part))
        row, num = widest.pop(max(range(len(widest)), key=lambda place: widest[place][1]))
        widest += [(row, num // 2), (row, num - num // 2)]
    return pieces


def end_of(example: Example, num_tokens: int) -> Example:
    """Return the last tokens of an example, which is repeated if it has fewer."""
    ids, labels = (
        np.resize(array[::-1], num_tokens)[::-1] for array in (example.input_ids, example.labels)
    )
    return replace(example, input_ids=ids, labels=labels)


def _at_labels(example: Example, values: "NDArray[Any] | None") -> "NDArray[Any]":
    """Return the values of its tokens that have a loss."""
    assert values is not None
    return np.asarray(values[_label_mask(example)])


def _label_mask(example: Example) -> "NDArray[np.bool_]":
    """Return which of its tokens have a loss; the first of a row is never predicted."""
    has_loss = np.asarray(example.labels != IGNORE_INDEX)
    has_loss[0] = False
    return has_loss


def _most_top(part: "Chosen") -> int:
    """Return the most tokens that a teacher has at a token; 0 if there is none."""
    return (
        max((int(block.max()) for block in part.blocks("top_counts")), default=0)
        if len(part.tokens.store.top_ids)
        else 0
    )
