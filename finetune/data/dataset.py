"""The rows of a run as tokens: read, held out, and tokenised once, in workers if they are many."""

import hashlib
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from finetune.data.rows import Conversation, LossOn, read_conversations
from finetune.data.token_cache import cache_key, read_cache, write_cache
from finetune.data.tokenize import Example, encode
from finetune.data.workers import prepare_worker, process_context, worker_died
from finetune.errors import DataError
from finetune.recipe.sections import DataSection

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from transformers import PreTrainedTokenizerBase

# A worker process must first import its libraries; this pays off from some ten thousand rows on.
_MIN_ROWS_PER_WORKER = 20_000


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ExampleSet(Sequence[Example]):
    """The tokens of all rows in flat arrays: row i is `offsets[i]` to `offsets[i + 1]`.

    Tokens that end a row's answers are at `end_offsets[i]` to `end_offsets[i + 1]` of `end_ids`.
    """

    input_ids: "NDArray[np.int32]"
    labels: "NDArray[np.int32]"
    offsets: "NDArray[np.int64]"
    sources: tuple[str, ...]
    is_truncated: "NDArray[np.bool_]"
    end_ids: "NDArray[np.int32]"
    end_offsets: "NDArray[np.int64]"
    dropped: tuple[str, ...]
    is_from_cache: bool
    notes: tuple[str, ...]

    @property
    def num_truncated(self) -> int:
        """Count the rows that were cut and still have something to learn."""
        return int(self.is_truncated.sum())

    @property
    def num_dropped(self) -> int:
        """Count the rows that have no loss within seq_len."""
        return len(self.dropped)

    @property
    def lengths(self) -> tuple[int, ...]:
        """Return the number of tokens of each row."""
        return tuple(np.diff(self.offsets).tolist())

    @property
    def answer_ends(self) -> tuple[int, ...]:
        """Return the tokens that end answers: the most frequent of last answers first, then others.

        A template may end a row's last answer with a different token than earlier answers.
        """
        num_ends = np.diff(self.end_offsets)
        is_whole = ~self.is_truncated & (num_ends > 0)
        last = self.end_ids[self.end_offsets[1:][is_whole] - 1]
        counts = [Counter(last.tolist()), Counter(self.end_ids.tolist())]
        return tuple(dict.fromkeys(token for part in counts for token, _ in part.most_common()))

    def __len__(self) -> int:
        return len(self.sources)

    def __getitem__(self, index: int) -> Example:  # type: ignore[override]  # no slices
        row = range(len(self))[index]
        part = slice(self.offsets[row], self.offsets[row + 1])
        return Example(
            input_ids=self.input_ids[part],
            labels=self.labels[part],
            source=self.sources[row],
            is_truncated=bool(self.is_truncated[row]),
            end_ids=tuple(self.end_ids[self.end_offsets[row] : self.end_offsets[row + 1]].tolist()),
        )


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


def load_examples(
    conversations: Sequence[Conversation],
    tokenizer: "PreTrainedTokenizerBase",
    *,
    seq_len: int,
    loss_on: LossOn,
    num_workers: int,
    cache_dir: Path,
) -> ExampleSet:
    """Tokenise all rows, or take them from the cache; large data sets use worker processes.

    The cache file is named by a digest of the rows, the tokenizer and the settings, and written
    whole or not at all. Rows with no loss within `seq_len` are left out, and named in the notes.

    Raises:
        DataError: The template does not fit, or no row is left.
    """
    key = cache_key(conversations, tokenizer, seq_len=seq_len, loss_on=loss_on)
    file = cache_dir / f"tokens-{key}.npz"
    notes: list[str] = []
    arrays = read_cache(file, notes=notes)
    is_from_cache = arrays is not None
    if arrays is None:
        examples = encode_all(
            conversations,
            tokenizer,
            seq_len=seq_len,
            loss_on=loss_on,
            num_workers=min(num_workers, len(conversations) // _MIN_ROWS_PER_WORKER),
        )
        arrays = _flatten(examples)
        write_cache(file, arrays, notes=notes)
    sources = [conversation.source for conversation in conversations]
    kept: list[int] = arrays["kept"].tolist()
    dropped = tuple(sources[row] for row in sorted(set(range(len(sources))) - set(kept)))
    notes += _summary(arrays, dropped, num_rows=len(sources), seq_len=seq_len)
    return ExampleSet(
        input_ids=arrays["input_ids"],
        labels=arrays["labels"],
        offsets=arrays["offsets"],
        sources=tuple(sources[row] for row in kept),
        is_truncated=arrays["is_truncated"],
        end_ids=arrays["end_ids"],
        end_offsets=arrays["end_offsets"],
        dropped=dropped,
        is_from_cache=is_from_cache,
        notes=tuple(notes),
    )


def split_held_out(
    conversations: Sequence[Conversation], *, eval_frac: float, seed: int
) -> tuple[list[Conversation], list[Conversation]]:
    """Split rows into those to train on and those held out, both in their old order.

    Raises:
        DataError: There are too few rows to leave one on either side.
    """
    num_rows = len(conversations)
    num_held_out = max(1, round(num_rows * eval_frac))
    if num_held_out >= num_rows:
        raise DataError(
            f"data.eval_frac {eval_frac} holds out {num_held_out} of {num_rows} rows",
            limit="at least one row must remain to train on",
            hint="lower `data.eval_frac`, or name a file by `data.eval_path`",
        )
    held_out = set(shuffled(num_rows, seed=seed, epoch=0)[:num_held_out].tolist())
    train = [row for index, row in enumerate(conversations) if index not in held_out]
    return train, [conversations[index] for index in sorted(held_out)]


def _summary(
    arrays: "dict[str, NDArray[Any]]", dropped: Sequence[str], *, num_rows: int, seq_len: int
) -> list[str]:
    """Report what was cut and dropped, and raise if nothing is left."""
    notes = []
    if num_truncated := int(arrays["is_truncated"].sum()):
        notes.append(f"{num_truncated} of {num_rows} rows were cut to {seq_len} tokens")
    if dropped:
        named = ", ".join(dropped[:3]) + (", ..." if len(dropped) > 3 else "")
        notes.append(
            f"{len(dropped)} of {num_rows} rows were dropped: their answers start beyond"
            f" {seq_len} tokens ({named})"
        )
    if len(dropped) == num_rows:
        raise DataError(
            f"none of the {num_rows} rows has an answer within {seq_len} tokens",
            limit="at least one row must have something to learn",
            hint=f"raise `train.seq_len` above {seq_len}",
        )
    return notes


def encode_all(
    conversations: Sequence[Conversation],
    tokenizer: "PreTrainedTokenizerBase",
    *,
    seq_len: int,
    loss_on: LossOn,
    num_workers: int,
) -> list[Example]:
    """Encode rows in worker processes; 0 is this process.

    Raises:
        DataError: A row cannot be encoded, or a worker died.
    """
    if num_workers == 0:
        return [encode(row, tokenizer, seq_len=seq_len, loss_on=loss_on) for row in conversations]
    share = -(-len(conversations) // num_workers)
    parts = [conversations[at : at + share] for at in range(0, len(conversations), share)]
    examples: list[Example] = []
    with ProcessPoolExecutor(
        num_workers, mp_context=process_context(), initializer=prepare_worker
    ) as pool:
        jobs = [pool.submit(_encode_part, part, tokenizer, seq_len, loss_on) for part in parts]
        for job in jobs:
            encoded = _result(job)
            if isinstance(encoded, _Refusal):
                pool.shutdown(cancel_futures=True)
                raise DataError(encoded.what, limit=encoded.limit, hint=encoded.hint)
            examples += encoded
    return examples


def _result(job: Future["list[Example] | _Refusal"]) -> "list[Example] | _Refusal":
    """Wait for a worker; one that was killed is an error, not a hang."""
    try:
        return job.result()
    except BrokenProcessPool as error:
        raise worker_died("tokenising", error) from error


@dataclass(frozen=True, kw_only=True, slots=True)
class _Refusal:
    """A DataError in transit between processes: exceptions with keywords cannot be pickled."""

    what: str
    limit: str
    hint: str


def _encode_part(
    rows: Sequence[Conversation],
    tokenizer: "PreTrainedTokenizerBase",
    seq_len: int,
    loss_on: LossOn,
) -> list[Example] | _Refusal:
    """Encode a worker's share."""
    try:
        return [encode(row, tokenizer, seq_len=seq_len, loss_on=loss_on) for row in rows]
    except DataError as error:
        return _Refusal(what=error.what, limit=error.limit, hint=error.hint)


def _flatten(examples: Sequence[Example]) -> "dict[str, NDArray[Any]]":
    """Lay the rows that have a loss end to end."""
    kept = [index for index, example in enumerate(examples) if example.num_loss_tokens]
    rows = [examples[index] for index in kept]
    none = np.empty(0, dtype=np.int32)
    return {
        "kept": np.array(kept, dtype=np.int64),
        "input_ids": np.concatenate([none, *(row.input_ids for row in rows)]),
        "labels": np.concatenate([none, *(row.labels for row in rows)]),
        "offsets": np.cumsum([0, *(len(row.input_ids) for row in rows)], dtype=np.int64),
        "is_truncated": np.array([row.is_truncated for row in rows], dtype=np.bool_),
        "end_ids": np.array([token for row in rows for token in row.end_ids], dtype=np.int32),
        "end_offsets": np.cumsum([0, *(len(row.end_ids) for row in rows)], dtype=np.int64),
    }


@lru_cache(maxsize=4)
def shuffled(num_rows: int, *, seed: int, epoch: int) -> "NDArray[np.int64]":
    """Return a permutation of the rows; RandomState, since numpy promises to keep its stream."""
    bits = np.random.MT19937(np.random.SeedSequence([seed, epoch]))
    return np.random.RandomState(bits).permutation(num_rows)
