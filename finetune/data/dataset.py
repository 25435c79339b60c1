"""The rows of a run as tokens: each source tokenised once, some rows held out, sources mixed.

The tokens of a source are in a store on disk (`finetune.data.encode_source`). What a run trains on
is a choice of its examples: those not held out, or of a mix, as many of each source as its weight
says. `Rows.data_hash` is a digest of the chosen tokens in their order, so it covers the choice.
"""

import hashlib
import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from finetune.data.chat_template import Prompted
from finetune.data.encode_source import NUM_NAMED, SourceRows, TokenStore, stored_tokens
from finetune.data.rows import (
    Compared,
    Conversation,
    RowForm,
    require_nothing_for_turns,
)
from finetune.data.sources import hub_name, open_source
from finetune.data.tokenize import IGNORE_INDEX, Encoder, Example, Fate, Imaging
from finetune.errors import DataError
from finetune.recipe.extensions import repeated_formats
from finetune.recipe.sections import DataSection, MixSource
from finetune.report.screen import Working, unseen

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from transformers import PreTrainedTokenizerBase

    from finetune.data.top_tokens import TopTokens


# ---------------------------------------------------------------------------------------------
# How many rows of each source an epoch has, and which: exact shares, the same in every epoch.
#
# An epoch is as short as it can be with every row of every source in it: the source that is largest
# for its weight is seen once, others as often as their share takes. `max_rows` makes it shorter.
# Counts are the shares of the epoch rounded by largest remainder, so that none is off by a row. A
# source that is seen 2.3 times is twice whole, and three tenths of it, drawn by the seed, once
# more.

MAX_EPOCH_ROWS = 100_000_000
_STREAM = 1
"""Keeps these draws apart from those of `shuffled`, which are of (seed, epoch)."""


def rows_per_source(
    sizes: Sequence[int], weights: Sequence[float], *, max_rows: int | None
) -> tuple[int, ...]:
    """Return how many rows of each source an epoch has.

    Args:
        sizes: Rows of each source, at least one.
        weights: The share of each is its weight over their sum; above 0.
        max_rows: Of the epoch; None: all are in it.

    Raises:
        DataError: The weights make an epoch of more rows than can be listed.
    """
    exact = [Fraction(str(weight)) for weight in weights]
    shares = [weight / sum(exact) for weight in exact]
    num_rows = max(math.floor(size / share) for size, share in zip(sizes, shares, strict=True))
    while any(n < size for n, size in zip(_rounded(shares, num_rows), sizes, strict=True)):
        num_rows += 1
    num_chosen = num_rows if max_rows is None else min(num_rows, max_rows)
    if num_chosen > max(MAX_EPOCH_ROWS, sum(sizes)):
        most = max(range(len(sizes)), key=lambda n: shares[n] * num_chosen / sizes[n])
        raise DataError(
            f"the weights of data.mix make an epoch of {num_chosen:,} rows, entry {most + 1} seen"
            f" {float(shares[most] * num_chosen / sizes[most]):,.0f} times",
            limit=f"an epoch has each row of all sources, and at most {MAX_EPOCH_ROWS:,} rows",
            hint="bring the weights nearer to the sources' sizes, or set `data.max_rows`",
        )
    return _rounded(shares, num_chosen)


def _rounded(shares: Sequence[Fraction], num_rows: int) -> tuple[int, ...]:
    """Round the shares of a number by largest remainder, the first of equal ones up."""
    whole = [math.floor(share * num_rows) for share in shares]
    by_rest = sorted(range(len(shares)), key=lambda n: (whole[n] - shares[n] * num_rows, n))
    for n in by_rest[: num_rows - sum(whole)]:
        whole[n] += 1
    return tuple(whole)


def drawn(num_rows: int, size: int, *, seed: int, source: int) -> "NDArray[np.int64]":
    """Return which of a source's rows an epoch has, in order; rows may be in it several times.

    Args:
        num_rows: How many.
        size: Rows of the source.
        seed: Of the run.
        source: Its number in the mix.
    """
    times, rest = divmod(num_rows, size)
    bits = np.random.MT19937(np.random.SeedSequence([seed, source, _STREAM]))
    once_more = np.random.RandomState(bits).permutation(size)[:rest]
    counts = np.full(size, times)
    counts[once_more] += 1
    return np.repeat(np.arange(size, dtype=np.int64), counts)


# ---------------------------------------------------------------------------------------------
# Which rows are held out: single rows, or of joined documents a stretch of whole ones.
#
# A row of joined documents may hold parts of several, and a document may go on in the next row. So
# that no document is on both sides, a stretch of rows is held out, at a place that the seed draws;
# rows before it that go on with a trained document are left out, as are rows after it that go on
# with one of its own.


def sides_of(
    tokens: "Tokens", mask: "NDArray[np.bool_]", *, end_id: int, seed: int
) -> "tuple[NDArray[np.int64], NDArray[np.int64]]":
    """Return the rows of a source to train on and those to hold out.

    Args:
        tokens: Of the source.
        mask: Rows that were drawn to be held out; of joined documents, how many.
        end_id: The token that ends a document.
        seed: Draws the place of documents.

    Raises:
        DataError: A document fills one of the sides.
    """
    store, num_held_out = tokens.store, int(mask.sum())
    if not store.report.num_documents or not num_held_out:
        return np.flatnonzero(~mask), np.flatnonzero(mask)
    num_rows, path = len(store), tokens.rows.source.path
    generator = np.random.RandomState(np.random.MT19937(np.random.SeedSequence([seed, 0])))
    first = int(generator.randint(0, num_rows - num_held_out + 1))
    start = _next_start(store, first, end_id)
    if start == num_rows:  # the last document has begun before: take the stretch at the beginning
        first = start = 0
    held_out = np.arange(start, min(start + num_held_out, num_rows))
    after = np.arange(_next_start(store, start + len(held_out), end_id), num_rows)
    trained = np.concatenate([np.arange(first), after])
    if not len(trained):
        raise DataError(
            f"data.eval_frac holds out {num_held_out} of {num_rows} rows of {path}, and no whole"
            " document fits on each side",
            limit="a document is trained on or held out, not both, and documents are joined in rows"
            " of `train.seq_len` tokens",
            hint="raise `data.eval_frac`, cut the documents, or name a file by `data.eval_path`",
        )
    return trained, held_out


def _ends(store: "TokenStore", row: int, end_id: int) -> "tuple[bool, bool]":
    """Return whether any document ends in a row, and whether the row ends with one."""
    ids = store.input_ids[store.offsets[row] : store.offsets[row + 1]]
    return bool((ids == end_id).any()), bool(ids[-1] == end_id)


def _next_start(store: "TokenStore", row: int, end_id: int) -> int:
    """Return the first row, from `row`, that has no part of a document of the rows before it."""
    if row == 0 or row == len(store) or _ends(store, row - 1, end_id)[1]:
        return row
    while row < len(store) and not _ends(store, row, end_id)[0]:
        row += 1
    return min(row + 1, len(store))


_BLOCK = 2**16
_TEACHER = ("top_counts", "top_ids", "top_logprobs")


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Tokens:
    """The tokens of a source."""

    rows: SourceRows
    store: TokenStore
    is_from_cache: bool

    def name(self, row: int) -> str:
        """Return where a row is, in words."""
        file, number = self.store.places[row].tolist()
        return self.rows.source.name((file, number))


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Chosen:
    """Some examples of a source."""

    tokens: Tokens  # the tokens of the source
    # Their numbers in the store, in order; one may be there several times.
    examples: "NDArray[np.int64]"
    row_ids: "NDArray[np.int64]"  # the rows that they were chosen of, used or dropped

    @property
    def is_whole_store(self) -> bool:
        """Whether it is every example once, so that arrays need no copy."""
        num = len(self.tokens.store)
        return len(self.examples) == num and bool((self.examples == np.arange(num)).all())

    @property
    def lengths(self) -> "NDArray[np.int64]":
        """Tokens of each example."""
        offsets = self.tokens.store.offsets
        return np.asarray(offsets[self.examples + 1] - offsets[self.examples])

    @property
    def num_apart(self) -> int:
        """Count the rows with several examples, of one answer, that are not parts of a long one."""
        store = self.tokens.store
        if len(store.values):
            return 0
        rows = store.rows[self.examples]
        several = np.unique(rows[1:][rows[1:] == rows[:-1]])
        return int(np.count_nonzero(store.fates[several] != Fate.SPLIT))

    def blocks(self, name: str) -> "Iterator[NDArray[Any]]":
        """Give an array of the examples' tokens, end to end, `_BLOCK` of them at a time."""
        store = self.tokens.store
        array: NDArray[Any] = {
            "input_ids": store.input_ids,
            "labels": store.labels,
            "logprobs": store.logprobs,
            "top_counts": store.top_counts,
            "top_ids": store.top_ids,
            "top_logprobs": store.top_logprobs,
        }[name]
        offsets = store.top_offsets if name in ("top_ids", "top_logprobs") else store.offsets
        is_whole = self.is_whole_store
        for at in range(0, len(self.examples), _BLOCK):
            examples = self.examples[at : at + _BLOCK]
            if is_whole:
                yield array[offsets[examples[0]] : offsets[examples[-1] + 1]]
            else:
                yield _gathered(array, offsets, examples)

    @property
    def images(self) -> "NDArray[np.void]":
        """Keys of the examples' images, in order."""
        store = self.tokens.store
        return _gathered(store.image_keys, store.image_offsets, self.examples)

    @property
    def image_tokens(self) -> "NDArray[np.int32]":
        """How many tokens each of these images has."""
        store = self.tokens.store
        return _gathered(store.image_tokens, store.image_offsets, self.examples)

    def with_fate(self, fate: Fate) -> "NDArray[np.int64]":
        """Return the rows with a fate."""
        return np.asarray(self.row_ids[self.tokens.store.fates[self.row_ids] == fate])


def _gathered(
    array: "NDArray[Any]", offsets: "NDArray[np.int64]", examples: "NDArray[np.int64]"
) -> "NDArray[Any]":
    """Return the parts of an array that examples have, end to end."""
    starts = offsets[examples]
    lengths = offsets[examples + 1] - starts
    ends = np.cumsum(lengths)
    if len(ends) == 0:
        return array[:0]
    places = np.repeat(starts - ends + lengths, lengths) + np.arange(ends[-1])
    return np.asarray(array[places])


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ExampleSet:
    """Examples of one or several sources, in the order of the sources."""

    parts: tuple[Chosen, ...]  # the part of each source
    notes: tuple[str, ...] = ()  # what a user should know about them

    @property
    def groups(self) -> "Groups | None":
        """The groups of examples that are compared; None where none are.

        Raises:
            DataError: Some rows have log-probabilities, and others do not.
        """
        return Groups.of(self)

    @property
    def input_ids(self) -> "NDArray[np.int32]":
        """The tokens of all examples, end to end."""
        return self._flat("input_ids")

    @property
    def labels(self) -> "NDArray[np.int32]":
        """The same tokens, or -100 for no loss."""
        return self._flat("labels")

    @property
    def offsets(self) -> "NDArray[np.int64]":
        """Where each example starts in them, and the last one ends."""
        return np.concatenate([[0], np.cumsum(self._lengths())])

    @property
    def lengths(self) -> tuple[int, ...]:
        """Return the number of tokens of each example."""
        return tuple(self._lengths().tolist())

    @property
    def loss_tokens(self) -> "NDArray[np.int64]":
        """Return the number of tokens of each example that have a loss."""
        counts = [np.empty(0, np.int64)]
        for part in self.parts:
            every = part.lengths
            for number, labels in enumerate(part.blocks("labels")):
                ends = np.cumsum(every[number * _BLOCK : (number + 1) * _BLOCK])
                has_loss = labels != IGNORE_INDEX
                has_loss[[0, *ends[:-1]]] = False  # the first token is never predicted
                counts.append(np.diff(np.cumsum(has_loss, dtype=np.int64)[ends - 1], prepend=0))
        return np.concatenate(counts)

    @property
    def is_truncated(self) -> "NDArray[np.bool_]":
        """Whether each example was cut at its right."""
        return np.concatenate(
            [part.tokens.store.is_truncated[part.examples] for part in self.parts]
        )

    @property
    def sources(self) -> tuple[str, ...]:
        """Where the row of each example is, in words."""
        return tuple(
            part.tokens.name(row)
            for part in self.parts
            for row in part.tokens.store.rows[part.examples].tolist()
        )

    @property
    def dropped(self) -> tuple[str, ...]:
        """The rows without an example, in words."""
        fates = (
            Fate.NOTHING_LEFT,
            Fate.TOO_LONG,
            Fate.NOT_TRAINED,
            Fate.ALIKE,
            Fate.CUT_IMAGE,
        )
        return tuple(
            part.tokens.name(row)
            for part in self.parts
            for row in part.row_ids[np.isin(part.tokens.store.fates[part.row_ids], fates)].tolist()
        )

    @property
    def is_from_cache(self) -> bool:
        """Whether nothing had to be tokenised."""
        return all(part.tokens.is_from_cache for part in self.parts)

    @property
    def answer_ends(self) -> tuple[int, ...]:
        """Return the tokens that end answers: the most frequent of last answers first, then others.

        A template may end a row's last answer with a different token than earlier answers.
        """
        counts: list[Counter[int]] = [Counter(), Counter()]
        for part in self.parts:
            store = part.tokens.store
            num_ends = store.end_offsets[part.examples + 1] - store.end_offsets[part.examples]
            is_whole = ~store.is_truncated[part.examples] & (num_ends > 0)
            last = store.end_ids[store.end_offsets[part.examples[is_whole] + 1] - 1]
            ends = _gathered(store.end_ids, store.end_offsets, part.examples)
            for count, found in zip(counts, (last, ends), strict=True):
                count.update(dict(zip(*map(np.ndarray.tolist, _first_counts(found)), strict=True)))
        return tuple(dict.fromkeys(token for count in counts for token, _ in count.most_common()))

    def digest(self) -> str:
        """Digest the tokens, their labels, where each example starts, and what is compared."""
        digest = hashlib.sha256()
        for name in ("input_ids", "labels"):
            for part in self.parts:
                for block in part.blocks(name):
                    digest.update(np.ascontiguousarray(block).data)
        digest.update(self.offsets.tobytes())
        groups = self.groups
        for array in () if groups is None else (groups.offsets, groups.values, groups.references):
            digest.update(array.tobytes())
        for part in self.parts:
            for block in part.blocks("logprobs") if len(part.tokens.store.logprobs) else ():
                digest.update(np.ascontiguousarray(block).data)
            for name in _TEACHER if len(part.tokens.store.top_ids) else ():
                for block in part.blocks(name):
                    digest.update(np.ascontiguousarray(block).data)
            digest.update(part.images.tobytes())
        return digest.hexdigest()

    def __len__(self) -> int:
        return sum(len(part.examples) for part in self.parts)

    def __iter__(self) -> Iterator[Example]:
        return (self[index] for index in range(len(self)))

    def __getitem__(self, index: int) -> Example:
        number = range(len(self))[index]
        ends = list(accumulate(len(part.examples) for part in self.parts))
        which = bisect_right(ends, number)
        part = self.parts[which]
        store = part.tokens.store
        example = int(part.examples[number - (ends[which - 1] if which else 0)])
        tokens = slice(int(store.offsets[example]), int(store.offsets[example + 1]))
        end_ids = store.end_ids[store.end_offsets[example] : store.end_offsets[example + 1]]
        return Example(
            input_ids=np.asarray(store.input_ids[tokens]),
            labels=np.asarray(store.labels[tokens]),
            source=part.tokens.name(int(store.rows[example])),
            is_truncated=bool(store.is_truncated[example]),
            end_ids=tuple(end_ids.tolist()),
            value=float(store.values[example]) if len(store.values) else None,
            reference=float(store.references[example]) if len(store.references) else None,
            logprobs=np.asarray(store.logprobs[tokens]) if len(store.logprobs) else None,
            top=_top_of(store, example, tokens) if len(store.top_ids) else None,
            images=_images_of(store, example),
        )

    def _lengths(self) -> "NDArray[np.int64]":
        return np.concatenate([np.empty(0, np.int64), *(part.lengths for part in self.parts)])

    def _flat(self, name: str) -> "NDArray[np.int32]":
        blocks = [block for part in self.parts for block in part.blocks(name)]
        return np.concatenate([np.empty(0, np.int32), *blocks])


def _images_of(store: TokenStore, example: int) -> tuple[tuple[bytes, int], ...]:
    """Return key and number of tokens of each image of an example."""
    own = slice(int(store.image_offsets[example]), int(store.image_offsets[example + 1]))
    keys = (bytes(key) for key in store.image_keys[own])
    return tuple(zip(keys, store.image_tokens[own].tolist(), strict=True))


def _top_of(store: TokenStore, example: int, tokens: slice) -> "TopTokens":
    """Return the teacher's tokens of an example."""
    from finetune.data.top_tokens import TopTokens

    tops = slice(int(store.top_offsets[example]), int(store.top_offsets[example + 1]))
    return TopTokens(
        counts=np.asarray(store.top_counts[tokens]),
        ids=np.asarray(store.top_ids[tops]),
        logprobs=np.asarray(store.top_logprobs[tops]),
    )


def _first_counts(tokens: "NDArray[np.int32]") -> "tuple[NDArray[Any], NDArray[Any]]":
    """Return tokens in the order of their first place, and how often each is there."""
    found, first, counts = np.unique(tokens, return_index=True, return_counts=True)
    order = np.argsort(first)
    return found[order], counts[order]


_COLUMNS = {
    "references": "log-probabilities of the reference",
    "logprobs": "log-probabilities of the sampler",
}


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Groups:
    """The groups of examples; those of a group are next to each other."""

    # (groups + 1): group g has the examples from `offsets[g]` to `offsets[g + 1]`.
    offsets: "NDArray[np.int64]"
    values: "NDArray[np.float64]"  # (examples): see `Example.value`
    # (examples) in nats; see `Example.reference`; none where rows have none.
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


# ---------------------------------------------------------------------------------------------
# What a user should know about the rows: what was joined, skipped, cut and dropped.
#
# Held-out rows that are training rows too: the loss on them does not show what was learned. Rows
# are equal if their tokens and images are. Few rows are read to find out: those that agree with a
# held-out one in length and in some tokens spread over it.

_NUM_PLACES = 8  # of the tokens that are compared first
REMARKS = {
    "special": "hold special tokens in their text, which are read as real ones",
    "trailing": "end with turns after their last answer, which are left out",
    "rating": "have ratings by which the rejected answer is the better one",
}
"""Kinds of remarks, in words; those on prompts are said once for all sources."""


def source_notes(rows: "SourceRows", store: "TokenStore") -> list[str]:
    """Say what of a source is not among its rows."""
    path, report = rows.source.path, store.report
    notes = [*rows.source.notes]
    if report.num_documents:
        notes.append(f"{path}: {report.num_documents:,} documents, joined")
    if report.num_duplicates:
        notes.append(f"{report.num_duplicates:,} rows of {path} were dropped as duplicates")
    if report.skipped:
        bad = [f"{rows.source.name((file, line))}: {what}" for file, line, what in report.skipped]
        notes.append(f"{len(bad)} bad rows of {path} were skipped:\n  " + "\n  ".join(bad[:10]))
    return notes


def choice_notes(parts: Sequence["Chosen"], encoder: "Encoder") -> list[str]:
    """Report what was cut, split and dropped.

    Raises:
        DataError: Nothing is left, or a row is too long and the recipe asks for an error.
    """
    seq_len = encoder.seq_len
    num_rows = sum(len(part.row_ids) for part in parts)
    found = {fate: _with_fate(parts, fate) for fate in Fate}
    if encoder.too_long == "error" and found[Fate.TOO_LONG][0]:
        num, named = found[Fate.TOO_LONG]
        raise DataError(
            f"{num} of {num_rows} rows have more than {seq_len} tokens: {named}",
            limit="`data.too_long` is error",
            hint="raise `train.seq_len`, or `data.too_long: truncate`, `drop` or `split`",
        )
    num_cut = found[Fate.CUT][0]
    notes = [f"{num_cut} of {num_rows} rows were cut to {seq_len} tokens"] if num_cut else []
    whys = {
        Fate.SPLIT: f"were split into parts of at most {seq_len} tokens",
        Fate.NOTHING_LEFT: f"were dropped: their answers start beyond {seq_len} tokens",
        Fate.TOO_LONG: f"were dropped: they have more than {seq_len} tokens",
        Fate.NOT_TRAINED: "were dropped: none of their turns is trained",
        Fate.CUT_IMAGE: f"were dropped: within {seq_len} tokens an image would be cut off",
        Fate.ALIKE: f"were dropped: within {seq_len} tokens their answers are the same",
    }
    for fate, why in whys.items():
        num, named = found[fate]
        if num:
            notes.append(f"{num} of {num_rows} rows {why} ({named})")
    num_apart = sum(part.num_apart for part in parts)
    if num_apart:
        notes.append(
            f"{num_apart} of {num_rows} rows are learned in several texts: the template writes"
            " earlier turns otherwise once later ones follow"
        )
    if not any(len(part.examples) for part in parts):
        if found[Fate.NOT_TRAINED][0] == num_rows:
            raise DataError(
                f"none of the {num_rows} rows has a turn that is trained",
                limit="at least one row must have something to learn",
                hint="leave out `train: false` in the turns to learn",
            )
        raise DataError(
            f"none of the {num_rows} rows has an answer within {seq_len} tokens",
            limit="at least one row must have something to learn",
            hint=f"raise `train.seq_len` above {seq_len}",
        )
    return notes


def _with_fate(parts: Sequence["Chosen"], fate: Fate) -> tuple[int, str]:
    """Count the rows with a fate, and name the first ones."""
    found = [(part, part.with_fate(fate)) for part in parts]
    num = sum(len(rows) for _, rows in found)
    first = [part.tokens.name(row) for part, rows in found for row in rows[:NUM_NAMED].tolist()]
    return num, ", ".join(first[:NUM_NAMED]) + (", ..." if num > NUM_NAMED else "")


def overlap_notes(train: "Sequence[Chosen]", held_out: "Sequence[Chosen]") -> list[str]:
    """Count the held-out rows that are training rows too, and name the first ones."""
    same = dict[bytes, str]()
    known = [_marks(part) for part in held_out]
    if not any(map(len, known)):
        return []
    wanted = np.concatenate(known)
    for part in train:
        likely = np.flatnonzero(np.isin(_marks(part), wanted))
        for content, name in _rows(part, likely):
            same.setdefault(content, name)
    found = [
        (name, same[content])
        for part in held_out
        if same
        for content, name in _rows(part, np.arange(len(part.examples)))
        if content in same
    ]
    if not found:
        return []
    num_rows = sum(len(part.examples) for part in held_out)
    named = ", ".join(f"{one} is {other}" for one, other in found[:NUM_NAMED])
    return [
        f"{len(found)} of {num_rows} held-out rows are training rows too, so that their loss does"
        f" not measure what was learned ({named}{', ...' if len(found) > NUM_NAMED else ''})"
    ]


def _marks(part: "Chosen") -> "NDArray[np.uint64]":
    """Return a number for each example, equal for equal ones."""
    lengths, store = part.lengths, part.tokens.store
    starts = store.offsets[part.examples]
    marks = lengths.astype(np.uint64)
    for number in range(_NUM_PLACES):
        places = starts + np.maximum(lengths - 1, 0) * number // (_NUM_PLACES - 1)
        tokens = store.input_ids[places].astype(np.uint64)
        marks = marks * np.uint64(0x9E3779B97F4A7C15) + tokens  # wraps at 64 bits
    return marks


def _rows(part: "Chosen", numbers: "NDArray[np.int64]") -> "Iterator[tuple[bytes, str]]":
    """Give the tokens with the images, and the place, of some examples."""
    store = part.tokens.store
    for example in part.examples[numbers].tolist():
        ids = store.input_ids[store.offsets[example] : store.offsets[example + 1]]
        keys = b"".join(key for key, _ in _images_of(store, example))
        yield ids.tobytes() + keys, part.tokens.name(int(store.rows[example]))


def remark_notes(tokens: "Tokens") -> list[str]:
    """Say how many rows of a source there is something to say about, and name the first ones."""
    report, source = tokens.store.report, tokens.rows.source
    num_rows = report.num_documents or len(tokens.store.fates)
    return [
        f"{num:,} of {num_rows:,} rows of {source.path} {REMARKS[kind]} ("
        + ", ".join(f"{source.name((file, line))}: {detail}" for file, line, detail in first)
        + (", ...)" if num > len(first) else ")")
        for kind, (num, first) in report.remarks.items()
        if kind in REMARKS
    ]


# ---------------------------------------------------------------------------------------------
# All rows of a run.


@dataclass(frozen=True, kw_only=True, slots=True)
class HeldOutRows:
    """The held-out rows as conversations, read again when they are asked for."""

    # Each source's rows, and the places of those that are held out.
    parts: tuple[tuple[SourceRows, frozenset[tuple[int, int]]], ...] = ()

    def __iter__(self) -> Iterator[Conversation]:
        for rows, places in self.parts:
            form, named = rows.opened()
            for place, name, raw in named:
                if place in places:
                    row = form.read(name, raw)
                    row = row.best if isinstance(row, Compared) else row
                    assert isinstance(row, Conversation)
                    yield row


@dataclass(frozen=True, kw_only=True, slots=True)
class Rows:
    """What is trained on, and what is held out."""

    train: ExampleSet  # tokens of the training rows
    held_out: ExampleSet | None  # tokens of the held-out rows, None if there are none
    held_out_rows: Iterable[Conversation]  # the held-out rows as conversations, for samples
    prompted: Prompted  # which prompts answers are trained after
    # What a user should know about the rows: unused columns, cut, dropped, cached.
    notes: tuple[str, ...]

    @property
    def has_images(self) -> bool:
        """Whether any row has an image."""
        every = [self.train, *([] if self.held_out is None else [self.held_out])]
        return any(len(part.images) for one in every for part in one.parts)

    @property
    def data_hash(self) -> str:
        """Digest of the training tokens, which must be the same when a run is resumed."""
        return self.train.digest()


def load_rows(
    data: DataSection,
    tokenizer: "PreTrainedTokenizerBase",
    *,
    seq_len: int,
    seed: int,
    cache_dir: Path,
    working: Working = unseen,
    formats: tuple[str, ...] = (),
    imaging: Imaging | None = None,
) -> Rows:
    """Read and tokenise what the recipe names.

    Args:
        data: The recipe's section.
        tokenizer: Of the model.
        seq_len: Most tokens of a row.
        seed: Of what is held out, and of a mix.
        cache_dir: Where tokens are kept.
        working: Shows the progress of tokenising.
        formats: The formats that the objective reads; of rows that are repeated if there are none.
        imaging: Makes tokens of images; None where the model sees none.

    Raises:
        DataError: A file is missing or empty, or rows are bad; each is named by file and line.
    """
    encoder = Encoder(
        tokenizer=tokenizer,
        seq_len=seq_len,
        loss_on=data.loss_on,
        too_long=data.too_long,
        empty_think=data.empty_think,
        imaging=imaging,
    )
    notes: list[str] = []

    def tokens(source: MixSource, *, max_rows: int | None) -> Tokens:
        rows = source_rows(data, source, max_rows=max_rows, formats=formats)
        num_workers = 0 if data.num_workers == 0 else None
        store, is_from_cache = stored_tokens(
            rows,
            encoder,
            num_workers=num_workers,
            cache_dir=cache_dir,
            notes=notes,
            working=working,
        )
        notes.extend(source_notes(rows, store))
        return Tokens(rows=rows, store=store, is_from_cache=is_from_cache)

    most = None if data.mix else data.max_rows
    sources = [tokens(one, max_rows=one.max_rows or most) for one in data.sources]
    if all(one.store.report.num_documents for one in sources):
        require_nothing_for_turns(data)
    every = [np.arange(len(one.store.fates)) for one in sources]
    held_out = list[Chosen]()
    if data.eval_path is not None:
        revision = revision_of_eval(data)
        others = tokens(MixSource(path=data.eval_path, revision=revision), max_rows=None)
        held_out = [examples_of(others, np.arange(len(others.store.fates)))]
    notes += [line for one in sources for line in remark_notes(one)]
    unused = _unused_columns([*sources, *(part.tokens for part in held_out)], data)
    if data.eval_frac is not None:
        num_rows = sum(map(len, every))
        is_held_out = held_out_mask(num_rows, eval_frac=data.eval_frac, seed=seed)
        masks = np.split(is_held_out, np.cumsum([len(rows) for rows in every])[:-1])
        sides = [
            sides_of(one, mask, end_id=tokenizer.eos_token_id, seed=seed)
            for one, mask in zip(sources, masks, strict=True)
        ]
        held_out = [examples_of(one, rows) for one, (_, rows) in zip(sources, sides, strict=True)]
        every = [rows for rows, _ in sides]
    chosen = [examples_of(one, rows) for one, rows in zip(sources, every, strict=True)]
    notes += overlap_notes(chosen, held_out)
    notes += choice_notes(chosen, encoder)
    if data.mix:
        chosen, mix_notes = _mixed(chosen, data, seed=seed)
        notes += mix_notes
    held_out_notes = choice_notes(held_out, encoder) if held_out else []
    first = [f"Columns that are not used: {', '.join(unused)}"] if unused else []
    return Rows(
        train=ExampleSet(parts=tuple(chosen)),
        held_out=ExampleSet(parts=tuple(held_out)) if held_out else None,
        held_out_rows=HeldOutRows(parts=tuple(_places(part) for part in held_out)),
        prompted=_prompted(sources, encoder),
        notes=(*first, *notes, *held_out_notes),
    )


def _prompted(sources: Sequence[Tokens], encoder: Encoder) -> Prompted:
    """Return which prompts the rows of all sources are trained after."""
    counts = Counter[str]()
    for one in sources:
        counts.update({kind: num for kind, (num, _) in one.store.report.remarks.items()})
    num_rows = sum(len(one.store.fates) for one in sources)
    return Prompted.of(encoder.switch, counts, num_rows=num_rows)


def revision_of_eval(data: DataSection) -> str | None:
    """Return the revision of held-out rows on the hub: that of the others in one repository."""
    is_same = data.path and data.eval_path and hub_name(data.path) == hub_name(data.eval_path)
    return data.eval_revision or (data.revision if is_same else None)


def source_rows(
    data: DataSection,
    source: MixSource,
    *,
    max_rows: int | None,
    formats: tuple[str, ...] = (),
) -> SourceRows:
    """Return the first rows of a source of the recipe; what it leaves out is as in `data`.

    Raises:
        DataError: There is no such source.
    """
    columns = data.columns if source.columns is None else source.columns
    form = RowForm(
        path=source.path,
        data_format=source.format or data.format,
        columns={str(name): column for name, column in columns.items()},
        system=source.system or data.system,
        ignored=data.ignored_columns,
        loss_on=data.loss_on,
        allow_downloads=data.allow_downloads,
        formats=formats or repeated_formats(),
    )
    return SourceRows(
        source=open_source(source.path, revision=source.revision),
        form=form,
        max_rows=max_rows,
        drop_duplicates=data.drop_duplicates,
        skip_bad=data.skip_bad,
    )


def _unused_columns(tokens: Sequence[Tokens], data: DataSection) -> tuple[str, ...]:
    """Return the unused columns, in the order of the rows.

    Raises:
        DataError: The recipe ignores a column that no row has, or that is used.
    """
    unused = dict.fromkeys(key for one in tokens for key in one.store.report.unused)
    for name in data.ignored_columns:
        if name not in unused:
            raise DataError(
                f"data.ignored_columns names {name}, and no row holds an unused column {name}",
                limit=f"the columns that are not used are {', '.join(unused) or 'none'}",
                hint=f"leave {name} out of `data.ignored_columns`",
            )
    return tuple(name for name in unused if name not in data.ignored_columns)


def held_out_mask(num_rows: int, *, eval_frac: float, seed: int) -> "NDArray[np.bool_]":
    """Return which of the rows are held out.

    Raises:
        DataError: There are too few rows to leave one on either side.
    """
    num_held_out = max(1, round(num_rows * eval_frac))
    if num_held_out >= num_rows:
        raise DataError(
            f"data.eval_frac {eval_frac} holds out {num_held_out} of {num_rows} rows",
            limit="at least one row must remain to train on",
            hint="lower `data.eval_frac`, or name a file by `data.eval_path`",
        )
    mask = np.zeros(num_rows, dtype=np.bool_)
    mask[shuffled(num_rows, seed=seed, epoch=0)[:num_held_out]] = True
    return mask


def examples_of(tokens: Tokens, row_ids: "NDArray[np.int64]") -> Chosen:
    """Return the examples of some rows."""
    is_taken = np.zeros(len(tokens.store.fates), dtype=np.bool_)
    is_taken[row_ids] = True
    examples = np.flatnonzero(is_taken[tokens.store.rows])
    return Chosen(tokens=tokens, examples=examples, row_ids=row_ids)


def _places(part: Chosen) -> tuple[SourceRows, frozenset[tuple[int, int]]]:
    store = part.tokens.store
    if store.report.num_documents:
        return part.tokens.rows, frozenset()
    return part.tokens.rows, frozenset(map(tuple, store.places[part.row_ids].tolist()))


def _mixed(
    parts: Sequence[Chosen], data: DataSection, *, seed: int
) -> tuple[list[Chosen], list[str]]:
    """Return as many examples of each source as its weight says, and say how many."""
    groups = [offsets(is_first(part)) for part in parts]
    sizes = [len(one) - 1 for one in groups]
    for part, size in zip(parts, sizes, strict=True):
        if size == 0:
            raise DataError(
                f"{part.tokens.rows.source.path} has no rows left to train on",
                limit="each source of `data.mix` must give some rows",
                hint="leave it out of `data.mix`, or hold out fewer rows",
            )
    counts = rows_per_source(sizes, [one.weight for one in data.mix], max_rows=data.max_rows)
    mixed, notes = [], list[str]()
    for number, (part, size, count) in enumerate(zip(parts, sizes, counts, strict=True)):
        chosen = drawn(count, size, seed=seed, source=number)
        examples = _gathered(part.examples, groups[number], chosen)
        mixed.append(Chosen(tokens=part.tokens, examples=examples, row_ids=part.row_ids))
        share = 100 * count / sum(counts)
        notes.append(
            f"{part.tokens.rows.source.path}: {count:,} of an epoch's {sum(counts):,} rows"
            f" ({share:.1f} %), {count / size:.2f} times its {size:,}"
        )
    return mixed, notes


@lru_cache(maxsize=4)
def shuffled(num_rows: int, *, seed: int, epoch: int) -> "NDArray[np.int64]":
    """Return a permutation of the rows; RandomState, since numpy promises to keep its stream."""
    bits = np.random.MT19937(np.random.SeedSequence([seed, epoch]))
    return np.random.RandomState(bits).permutation(num_rows)
