"""A data set as tokens: made once, in workers when it is large, and kept in a cache."""

import hashlib
import json
import os
import zipfile
import zlib
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from finetune.data.rows import Conversation, LossOn
from finetune.data.tokenize import Example, check_is_fast, encode
from finetune.data.workers import prepare_worker, process_context, worker_died
from finetune.errors import DataError

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from transformers import PreTrainedTokenizerBase

_CACHE_VERSION = 2
# A worker process must first import its libraries; this pays off from some ten thousand rows on.
_MIN_ROWS_PER_WORKER = 20_000
_CACHED = (
    *("kept", "input_ids", "labels", "offsets"),
    *("is_truncated", "end_ids", "end_offsets"),
)


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
    key = _cache_key(conversations, tokenizer, seq_len=seq_len, loss_on=loss_on)
    file = cache_dir / f"tokens-{key}.npz"
    notes: list[str] = []
    arrays = _read_cache(file, notes=notes)
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
        _write_cache(file, arrays, notes=notes)
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


def _cache_key(
    conversations: Sequence[Conversation],
    tokenizer: "PreTrainedTokenizerBase",
    *,
    seq_len: int,
    loss_on: LossOn,
) -> str:
    """Digest all that the tokens depend on."""
    check_is_fast(tokenizer)
    special = {name: str(token) for name, token in tokenizer.special_tokens_map.items()}
    settings = [_CACHE_VERSION, seq_len, loss_on, tokenizer.chat_template, special]
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode())
    digest.update(tokenizer.backend_tokenizer.to_str().encode())
    for row in conversations:
        turns = [(message.role, message.content) for message in row.messages]
        digest.update(json.dumps(turns).encode() + b"\n")
    return digest.hexdigest()[:32]


def _read_cache(file: Path, *, notes: list[str]) -> "dict[str, NDArray[Any]] | None":
    """Return the arrays of a cache file, or None with a note if it is torn."""
    try:
        with file.open("rb") as stream, np.load(stream, allow_pickle=False) as stored:
            return {name: stored[name] for name in _CACHED}
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return None
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        notes.append(f"the token cache {file} was torn ({type(error).__name__}); it was rebuilt")
        return None


def _write_cache(file: Path, arrays: "dict[str, NDArray[Any]]", *, notes: list[str]) -> None:
    """Write a cache file under another name and move it into place once it is on the disk.

    The other name is unique to the process, because two runs may start on the same rows at once.
    A cache only saves time, so failing to write it is a note, not an error.
    """
    draft = file.with_name(f".{file.name}.{os.getpid()}.tmp")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with draft.open("wb") as out:
            np.savez(out, allow_pickle=False, **arrays)
            out.flush()
            os.fsync(out.fileno())
        draft.replace(file)
    except OSError as error:
        with suppress(OSError):
            draft.unlink(missing_ok=True)
        notes.append(
            f"the token cache {file} cannot be written: {error.strerror};"
            " the next run will make the tokens again"
        )


@lru_cache(maxsize=4)
def shuffled(num_rows: int, *, seed: int, epoch: int) -> "NDArray[np.int64]":
    """Return a permutation of the rows; RandomState, since numpy promises to keep its stream."""
    bits = np.random.MT19937(np.random.SeedSequence([seed, epoch]))
    return np.random.RandomState(bits).permutation(num_rows)
