"""Examples that belong together: the answers of one row, which are always in one step."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from finetune.data.tokenize import IGNORE_INDEX
from finetune.errors import DataError
from finetune.recipe.objective_section import ObjectiveSection

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from finetune.data.dataset import Chosen, ExampleSet, Rows


_COLUMNS = {
    "references": "log-probabilities of the reference",
    "logprobs": "log-probabilities of the sampler",
}


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Groups:
    """The groups of examples; those of a group are next to each other.

    Attributes:
        offsets: (groups + 1): group g has the examples from `offsets[g]` to `offsets[g + 1]`.
        values: (examples): see `Example.value`.
        references: (examples) in nats; see `Example.reference`; none where rows have none.
    """

    offsets: "NDArray[np.int64]"
    values: "NDArray[np.float64]"
    references: "NDArray[np.float64]"

    @classmethod
    def of(cls, rows: "ExampleSet") -> Self | None:
        """Return the groups of examples; None where no answers are compared.

        Raises:
            DataError: Some rows have log-probabilities, and others do not.
        """
        stores = [part.tokens.store for part in rows.parts]
        if not any(len(store.values) for store in stores):
            return None
        for name in ("references", "logprobs"):
            given = [len(getattr(store, name)) for store in stores]
            full = [len(s.values if name == "references" else s.input_ids) for s in stores]
            if any(given) and given != full:
                raise DataError(
                    f"some rows have {_COLUMNS[name]}, and others have none",
                    limit="they are compared over the rows of a step: all rows have them, or none",
                    hint="add them to all rows, or `data.ignored_columns` with their columns",
                )
        return cls(
            offsets=offsets(np.concatenate([is_first(part) for part in rows.parts])),
            values=np.concatenate([p.tokens.store.values[p.examples] for p in rows.parts]),
            references=np.concatenate(
                [np.empty(0, np.float64)]
                + [
                    p.tokens.store.references[p.examples]
                    for p in rows.parts
                    if stores[0].references.size
                ]
            ),
        )

    @property
    def sizes(self) -> "NDArray[np.int64]":
        """Examples of each group."""
        return np.diff(self.offsets)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def numbers(self, rows: "NDArray[np.int64]") -> "NDArray[np.int64]":
        """Return the group of each of some rows, which are whole groups one after the other."""
        is_start = np.zeros(self.offsets[-1], dtype=np.bool_)
        is_start[self.offsets[:-1]] = True
        return np.asarray(is_start[rows].cumsum() - 1)

    def size_in(self, rows_per_step: int) -> int:
        """Return the rows of each group, where all have as many and fill steps without a rest.

        Raises:
            DataError: They do not.
        """
        sizes = np.unique(self.sizes).tolist()
        if len(sizes) > 1 or rows_per_step % sizes[0]:
            answers = (
                " or ".join(map(str, sizes)) if len(sizes) < 4 else f"{sizes[0]} to {sizes[-1]}"
            )
            raise DataError(
                f"a row has {answers} answers, and a step {rows_per_step} sequences",
                limit="unpacked steps have equal numbers of sequences, and the answers of a row are"
                " in one step",
                hint="`data.packing: on`"
                if len(sizes) > 1
                else "make `train.micro_batch_size` x `train.grad_accum_steps` a multiple of"
                f" {sizes[0]}",
            )
        return int(sizes[0])


def require_comparable(rows: "Rows", objective: ObjectiveSection) -> None:
    """Check that an objective finds in the rows what it compares.

    Raises:
        DataError: Answers are all desired or all not, or log-probabilities are missing.
    """
    groups = Groups.of(rows.train)
    if groups is None:
        return
    if objective.method == "kto":
        num, num_desired = len(groups.values), int(np.count_nonzero(groups.values))
        if num_desired in (0, num):
            raise DataError(
                f"the labels of all {num} rows are {'true' if num_desired else 'false'}",
                limit="KTO learns from answers that are desired and others that are not",
                hint="add rows with the other label; desired answers alone are learned by"
                " `objective.method: sft`",
            )
    if len(groups.references) and objective.reference != "precomputed":
        raise DataError(
            "rows have log-probabilities of the reference, and objective.reference is"
            f" {objective.reference}",
            limit="they would not be read",
            hint="`objective.reference: precomputed`, or leave their columns out by"
            " `data.ignored_columns`",
        )
    if objective.scores_mismatched and rows.held_out is not None and len(rows.held_out) < 2:
        raise DataError(
            "one row is held out",
            limit="KTO scores each prompt with the answer of another row",
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


def is_first(part: "Chosen") -> "NDArray[np.bool_]":
    """Return which of the examples begin a group; where none are compared, each is its own."""
    store = part.tokens.store
    if not len(store.values):
        return np.ones(len(part.examples), dtype=np.bool_)
    begins = np.concatenate([[True], store.rows[1:] != store.rows[:-1]])
    return np.asarray(begins[part.examples])


def offsets(begins: "NDArray[np.bool_]") -> "NDArray[np.int64]":
    """Return where groups begin, and where the last one ends."""
    return np.append(np.flatnonzero(begins), len(begins)).astype(np.int64)
