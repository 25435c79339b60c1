"""A micro-batch on the device: the model's inputs, and the token to predict at each position.

Where a loss reads the head's outputs at some tokens, a label is of its own token, not shifted.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn

import torch

from offload.errors import OffloadError

IGNORED = -100
ROW_LENS = "row_lens"
"""Key of a micro-batch of packed rows: how many tokens each has, in order."""
Batch = Mapping[str, torch.Tensor]
Shape = tuple[int, int, int, int]


@dataclass(frozen=True, kw_only=True, slots=True)
class LabelledBatch:
    """A micro-batch with the labels that the tail needs, on the compute device."""

    # input_ids (B, T) and optionally attention_mask, position_ids; or input_ids (1, T) of several
    # rows and row_lens, which stays on the host.
    inputs: Batch
    # Indices into the flattened (B * T) tokens that predict a next token, (N,); of labels that are
    # not shifted, those of the labelled tokens.
    positions: torch.Tensor
    next_tokens: torch.Tensor  # the labels of these positions, (N,)
    given_ids: torch.Tensor  # the tokens (B, T) as they were given, best on the host

    @property
    def num_label_tokens(self) -> int:
        """Tokens with a loss."""
        return self.positions.numel()

    def chunks(self, size: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Return positions and next tokens of at most `size` labels at a time."""
        return zip(self.positions.split(size), self.next_tokens.split(size), strict=True)

    @property
    def shape(self) -> Shape:
        """What the memory of its visits grows with."""
        lens = self.inputs[ROW_LENS].tolist() if ROW_LENS in self.inputs else []
        num_sequences, num_tokens = self.inputs["input_ids"].shape
        return shape_of(num_sequences, num_tokens, lens)

    @property
    def rows(self) -> tuple[tuple[int, int], ...]:
        """How many rows of how many tokens attention sees."""
        if ROW_LENS in self.inputs:
            return tuple((1, length) for length in self.inputs[ROW_LENS].tolist())
        num_rows, num_tokens = self.inputs["input_ids"].shape
        return ((num_rows, num_tokens),)


def shape_of(num_sequences: int, num_tokens: int, lens: Sequence[int]) -> Shape:
    """Return what the memory of a visit grows with.

    Args:
        num_sequences: Number of sequences of a micro-batch.
        num_tokens: Number of tokens of each sequence.
        lens: Tokens of each row that is packed into one; none if rows are not packed.

    Returns:
        Sequences, tokens of each, rows, and pairs of tokens that see each other.
    """
    if not lens:
        return num_sequences, num_tokens, num_sequences, num_sequences * num_tokens**2
    return num_sequences, num_tokens, len(lens), sum(length**2 for length in lens)


@dataclass(frozen=True, kw_only=True, slots=True)
class Vocabulary:
    """How many tokens a model can read and predict; None where unknown."""

    num_read: int | None
    num_predicted: int | None


def checked_batches(micro_batches: object, vocabulary: Vocabulary) -> list[Batch]:
    """Return the micro-batches of a step as a list, each as `checked_batch` returns it.

    Args:
        micro_batches: The caller's argument.
        vocabulary: Of the model.

    Raises:
        OffloadError: They are not valid input for a step.
    """
    if isinstance(micro_batches, Mapping) or not isinstance(micro_batches, Iterable):
        _refuse(
            f"micro_batches is a {type(micro_batches).__name__}",
            "a step takes a list of micro-batches",
            "`engine.forward_backward([batch])`",
        )
    batches = [
        checked_batch(batch, vocabulary, f"micro-batch {m}")
        for m, batch in enumerate(micro_batches)
    ]
    if not batches:
        _refuse("micro_batches is empty", "a step takes one or more", "look at what makes the rows")
    for m, batch in enumerate(batches):
        if "labels" not in batch:
            _refuse(
                f"micro-batch {m} has no `labels`",
                "the loss is that of the tokens with a label",
                '`batch["labels"] = batch["input_ids"]`, and -100 where a token has no loss',
            )
    return batches


def checked_scored(
    scored: Sequence[Batch], vocabulary: Vocabulary, *, has_objective: bool
) -> list[Batch]:
    """Return micro-batches that are only scored as a list, each as `checked_batch` returns it.

    Raises:
        OffloadError: They are not valid, or there is no objective to read their scores.
    """
    if scored and not has_objective:
        _refuse(
            f"scored has {len(scored)} micro-batches, and there is no objective",
            "rows that are not trained on are scored for an objective's loss",
            "`objective=...`, or leave `scored` away",
        )
    return checked_batches(scored, vocabulary) if scored else []


def checked_batch(batch: object, vocabulary: Vocabulary, name: str = "the batch") -> Batch:
    """Return a micro-batch without its None entries, its labels as int64.

    Args:
        batch: The caller's batch; best on the host, where reading its tokens costs no
            synchronisation.
        vocabulary: Of the model.
        name: Its name in error messages.

    Raises:
        OffloadError: It is not a dict of tensors of the same rows and tokens, or the model does not
            know a token.
    """
    if not isinstance(batch, Mapping):
        _refuse(f"{name} is a {type(batch).__name__}", *_DICT)
    given = {key: value for key, value in batch.items() if value is not None}
    for key, value in given.items():
        if not isinstance(value, torch.Tensor):
            _refuse(f"`{key}` of {name} is a {type(value).__name__}", *_DICT)
    if "input_ids" not in given:
        _refuse(f"{name} has no `input_ids`", *_DICT)
    _require_shapes(given, name)
    for key in ("input_ids", "labels"):
        if key in given and given[key].dtype not in (torch.int64, torch.int32):
            _refuse(
                f"`{key}` of {name} is of {given[key].dtype}",
                "tokens are int64 or int32",
                f'`batch["{key}"].long()`',
            )
    if "labels" in given:
        given["labels"] = given["labels"].long()
    _require_known_tokens(given, vocabulary, name)
    return given


def _require_shapes(given: Batch, name: str) -> None:
    """Check that there are tokens, each with one label and one entry of a 2-D mask."""
    shape = given["input_ids"].shape
    if len(shape) != 2 or not shape.numel():
        _refuse(
            f"`input_ids` of {name} is {tuple(shape)}",
            "it holds (rows, tokens), at least one of each",
            "leave an empty micro-batch away; `input_ids.unsqueeze(0)` for a single row",
        )
    if "labels" in given and given["labels"].shape != shape:
        _refuse(
            f"`labels` of {name} is {tuple(given['labels'].shape)}, `input_ids` {tuple(shape)}",
            "each token has a label, -100 for none",
            "one label per token, not shifted: the engine shifts them",
        )
    mask = given.get("attention_mask")
    if mask is not None and mask.ndim == 2 and mask.shape != shape:
        _refuse(
            f"`attention_mask` of {name} is {tuple(mask.shape)}, `input_ids` {tuple(shape)}",
            "it has one place per token",
            "1 for a token and 0 for padding; leave it away where nothing is padded",
        )
    _require_rows(given, name)
    positions = given.get("position_ids")
    if positions is not None and (
        positions.ndim < 2
        or positions.shape[-1] != shape[1]
        or positions.shape[-2] not in (1, shape[0])
    ):
        _refuse(
            f"`position_ids` of {name} is {tuple(positions.shape)}, `input_ids` {tuple(shape)}",
            "it ends in (rows, tokens), or in (1, tokens) for all rows alike",
            "`position_ids.unsqueeze(0)` for a single row; leave it away for 0, 1, 2, ...",
        )


def _require_rows(given: Batch, name: str) -> None:
    """Check that packed rows are of one sequence, fill it, and bring nothing that they replace."""
    row_lens, shape = given.get(ROW_LENS), given["input_ids"].shape
    if row_lens is None:
        return
    if row_lens.ndim != 1 or row_lens.dtype not in (torch.int64, torch.int32):
        _refuse(
            f"`row_lens` of {name} is {tuple(row_lens.shape)} of {row_lens.dtype}",
            "it holds the tokens of each packed row, one number for each",
            "`torch.tensor([len(row) for row in rows])`",
        )
    lens = row_lens.tolist()
    if shape[0] != 1 or min(lens, default=0) < 1 or sum(lens) != shape[1]:
        _refuse(
            f"`row_lens` of {name} is {lens}, `input_ids` {tuple(shape)}",
            "packed rows are one sequence, (1, tokens), and fill it: each has a token or more",
            "`torch.cat(rows).unsqueeze(0)` for the tokens, without padding",
        )
    for key in ("attention_mask", "position_ids"):
        if key in given:
            _refuse(
                f"{name} has `row_lens` and `{key}`",
                "each packed row has the positions and the mask that it has alone",
                f"leave `{key}` away",
            )


def _require_known_tokens(given: Batch, vocabulary: Vocabulary, name: str) -> None:
    """Check that the model has an embedding for each token, and a logit for each label."""
    num_read, num_predicted = vocabulary.num_read, vocabulary.num_predicted
    unknown = _first_outside(given["input_ids"], num_read)
    if unknown is not None:
        _refuse(
            f"`input_ids` of {name} holds {unknown}",
            f"the model's input embedding has {num_read} tokens, from 0",
            "use the tokenizer of this model, or `model.resize_token_embeddings(len(tokenizer))`"
            " before `offload.attach`",
        )
    if "labels" not in given:
        return
    labels = given["labels"][:, 1:]  # no token predicts the first
    unknown = _first_outside(labels.masked_fill(labels == IGNORED, 0), num_predicted)
    if unknown is not None:
        _refuse(
            f"`labels` of {name} holds {unknown}",
            f"the model predicts {num_predicted} tokens, from 0; {IGNORED} is no label",
            f"{IGNORED} where a token has no loss, else the token itself",
        )


def _first_outside(tokens: torch.Tensor, num_tokens: int | None) -> int | None:
    """Return the lowest or highest token if it is outside of [0, num_tokens), else None."""
    if num_tokens is None or not tokens.numel():
        return None
    low, high = torch.stack(tokens.aminmax()).tolist()
    if low < 0:
        return int(low)
    return int(high) if high >= num_tokens else None


_DICT = (
    "a micro-batch is a dict of tensors: `input_ids` and `labels`, and where they are needed"
    " `attention_mask` and `position_ids`, or `row_lens`",
    '`{"input_ids": ids, "labels": labels}`, each a torch tensor of (rows, tokens)',
)


def _refuse(what: str, limit: str, hint: str) -> NoReturn:
    raise OffloadError(what, limit=limit, hint=hint)


def with_labels(
    batch: Batch, torch_device: torch.device, *, is_shifted: bool = True
) -> LabelledBatch:
    """Shift the labels, find the labelled tokens, and move everything to the device.

    `batch` should be on the host, where finding the labelled tokens costs no synchronisation. With
    `is_shifted` false, a label is of its own token.
    """
    next_BT = _labels(batch, is_shifted=is_shifted)
    positions = (next_BT != IGNORED).nonzero().flatten()
    return LabelledBatch(
        inputs=to_device({k: v for k, v in batch.items() if k != "labels"}, torch_device),
        positions=positions.to(torch_device, non_blocking=True),
        next_tokens=next_BT[positions].to(torch_device, non_blocking=True),
        given_ids=batch["input_ids"],
    )


def _labels(batch: Batch, *, is_shifted: bool) -> torch.Tensor:
    if not is_shifted:
        return batch["labels"].flatten()
    next_BT = torch.nn.functional.pad(batch["labels"][:, 1:], (0, 1), value=IGNORED).flatten()
    if ROW_LENS in batch:  # the last token of a row does not predict the first of the next
        next_BT[batch[ROW_LENS].long().cumsum(0) - 1] = IGNORED
    return next_BT


def rows_of_labels(
    batches: Sequence[Batch], *, is_shifted: bool = True
) -> tuple[torch.Tensor, int]:
    """Return the row of each label token, counted through all batches, and how many rows they have.

    `batches` should be on the host, and `is_shifted` is as for `with_labels`.

    Raises:
        OffloadError: A row has no label, so that it has no score.
    """
    rows: list[torch.Tensor] = []
    num_rows = 0
    for m, batch in enumerate(batches):
        positions = (_labels(batch, is_shifted=is_shifted) != IGNORED).nonzero().flatten()
        num_own, num_tokens = batch["input_ids"].shape
        row_N = positions // num_tokens
        if ROW_LENS in batch:
            ends = batch[ROW_LENS].long().cumsum(0).to(positions.device)
            num_own, row_N = len(ends), torch.searchsorted(ends, positions, right=True)
        empty = (torch.bincount(row_N, minlength=num_own) == 0).nonzero().flatten().tolist()
        if empty:
            _refuse(
                f"row {empty[0]} of micro-batch {m} has no token with a label",
                "an objective scores each row by its labels, after the first token",
                "look at `labels`: the prompt may be all that was left; leave such rows away",
            )
        rows.append(row_N + num_rows)
        num_rows += num_own
    return torch.cat(rows), num_rows


def to_device(batch: Batch, torch_device: torch.device) -> dict[str, torch.Tensor]:
    """Move a batch's tensors to the device, but for the lengths of packed rows."""
    return {
        name: tensor if name == ROW_LENS else tensor.to(torch_device, non_blocking=True)
        for name, tensor in batch.items()
    }


def require_labels(num_label_tokens: int, num_micro_batches: int) -> None:
    """Check that a step has at least one label.

    Raises:
        OffloadError: It has none.
    """
    if num_label_tokens == 0:
        raise OffloadError(
            f"none of the {num_micro_batches} micro-batches has a token with a label",
            limit="a step needs at least one label that is not -100, after the first token",
            hint="look at `labels`: the prompt may be all that was left",
        )


def require_divisor(num_label_tokens: int | None) -> None:
    """Check the number that the sum of the losses is divided by.

    Raises:
        OffloadError: It is not valid.
    """
    if num_label_tokens is not None and not num_label_tokens > 0:
        raise OffloadError(
            f"num_label_tokens is {num_label_tokens}",
            limit="the sum of the losses is divided by it: at least 1",
            hint="leave it away, or give the number of label tokens of all processes",
        )


def require_an_id_each(num_ids: int, num_micro_batches: int) -> None:
    """Check that each micro-batch has an id.

    Raises:
        OffloadError: The numbers of ids and micro-batches differ.
    """
    if num_ids != num_micro_batches:
        raise OffloadError(
            f"micro_batch_ids has {num_ids} numbers for {num_micro_batches} micro-batches",
            limit="each micro-batch has one, which its dropout is drawn by",
            hint="leave it away to number them from 0",
        )
