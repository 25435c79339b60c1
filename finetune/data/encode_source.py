"""Turn a source into tokens on disk: rows in order, encoded in one process per core, once.

Rows are handed to the workers in chunks as they were read, and their tokens come back in order, so
that memory holds a few chunks however many rows there are. Nothing depends on the number of
workers. Small sources are encoded in this process, which is faster than to start another.
"""

import atexit
import hashlib
import itertools
import json
import os
import re
import shutil
import tempfile
import zlib
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np

from finetune.data.rows import (
    LossOn,
    Row,
    RowForm,
    bad_rows,
    no_rows,
)
from finetune.data.sources import Place, Raw, Source
from finetune.data.tokenize import (
    Encoder,
    Example,
    Fate,
    check_is_fast,
)
from finetune.errors import DataError, RowError
from finetune.processes import prepare_worker, process_context
from finetune.report.screen import Work, Working

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from transformers import PreTrainedTokenizerBase


def num_cores() -> int:
    """Return how many processors this process may use."""
    return len(os.sched_getaffinity(0))


def worker_died(doing: str, error: Exception) -> DataError:
    """Return the error for a worker that was killed."""
    return DataError(
        f"a data worker died while {doing}: {error}",
        limit="each worker needs memory for the tokens of the data set",
        hint="`data.num_workers: 0` prepares the data in the main process",
    )


# ---------------------------------------------------------------------------------------------
# A source's tokens on disk: written as rows are tokenised, then memory-mapped.
#
# A folder per source, named by a digest of all that its tokens depend on: the bytes of the source,
# how its rows are read, the tokenizer, and how they are encoded. It holds one file per array and a
# list of them with their checksums. It is written under another name and renamed when it is whole.
# Opening it reads every byte once, to check the sums; pages are dropped again when memory is short.

_CACHE_VERSION = 10
_BLOCK_BYTES = 2**22
_LIST = "arrays.json"
_ARRAYS: "Mapping[str, np.typing.DTypeLike]" = {
    "input_ids": np.int32,
    "labels": np.int32,
    "offsets": np.int64,
    "end_ids": np.int32,
    "end_offsets": np.int64,
    "rows": np.int64,
    "is_truncated": np.bool_,
    "fates": np.int8,
    "places": np.int64,
    "values": np.float64,
    "references": np.float64,
    "logprobs": np.float32,
    "top_counts": np.int32,
    "top_ids": np.int32,
    "top_logprobs": np.float32,
    "top_offsets": np.int64,
    "image_keys": "V16",
    "image_tokens": np.int32,
    "image_offsets": np.int64,
}
"""Of each array, the type; see `TokenStore`."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TokenStore:
    """The tokens of a source's rows; example i is `offsets[i]` to `offsets[i + 1]`."""

    folder: Path  # where it is
    input_ids: "NDArray[np.int32]"  # tokens of all examples, end to end
    labels: "NDArray[np.int32]"  # the tokens, or -100 where there is no loss
    offsets: "NDArray[np.int64]"  # (examples + 1)
    # Tokens that end answers; those of example i are at `end_offsets[i]` on.
    end_ids: "NDArray[np.int32]"
    end_offsets: "NDArray[np.int64]"  # (examples + 1)
    # (examples): the row that each is of; a row may be in several examples, or in none.
    rows: "NDArray[np.int64]"
    is_truncated: "NDArray[np.bool_]"  # (examples): whether it was cut at its right
    fates: "NDArray[np.int8]"  # (rows): what became of each, a `Fate`
    places: "NDArray[np.int64]"  # (rows, 2): where it is in the source: file, and line or index
    # (examples) of rows that compare answers, else none; see `Example.value`.
    values: "NDArray[np.float64]"
    # (examples) where rows have them, else none; see `Example.reference`.
    references: "NDArray[np.float64]"
    # The log-probabilities of all tokens, end to end, where rows have them, else none.
    logprobs: "NDArray[np.float32]"
    # The number of a teacher's likeliest tokens at each token; none where rows have no teacher.
    top_counts: "NDArray[np.int32]"
    # These tokens, end to end; those of example i are at `top_offsets[i]` on.
    top_ids: "NDArray[np.int32]"
    top_logprobs: "NDArray[np.float32]"  # their log-probabilities
    top_offsets: "NDArray[np.int64]"  # (examples + 1) where rows have a teacher
    # Keys of the images of all examples, 16 bytes each; those of example i are at
    # `image_offsets[i]` on.
    image_keys: "NDArray[np.void]"
    image_tokens: "NDArray[np.int32]"  # how many tokens each has
    image_offsets: "NDArray[np.int64]"  # (examples + 1)
    report: "StoreReport"  # what the source had besides rows that are used

    def __len__(self) -> int:
        return len(self.rows)

    def __reduce__(self) -> tuple[Any, tuple[Path]]:
        """Let another process map the files again, in place of a copy of them."""
        return _opened, (self.folder,)


@dataclass(frozen=True, kw_only=True, slots=True)
class StoreReport:
    """What a source had besides rows that are used."""

    # `place: problem` of bad rows that the recipe allows.
    skipped: tuple[tuple[int, int, str], ...] = ()
    num_duplicates: int = 0  # rows that were in the source before
    # Columns that are read from no row -> 0, kept in the order of the rows.
    unused: tuple[str, ...] = ()
    num_documents: int = 0  # documents that were joined; 0 for rows
    # Path, size and time of change of the files of images.
    files: tuple[tuple[str, int, int], ...] = ()
    # The number of each kind of remark on rows, with place and detail of the first.
    remarks: Mapping[str, tuple[int, tuple[tuple[int, int, str], ...]]] = field(
        default_factory=dict
    )


def cache_key(
    source_digest: str, form: RowForm, encoder: Encoder, settings: Mapping[str, object]
) -> str:
    """Digest all that the tokens depend on."""
    tokenizer = encoder.tokenizer
    check_is_fast(tokenizer)
    special = {name: str(token) for name, token in tokenizer.special_tokens_map.items()}
    facts = {
        "version": _CACHE_VERSION,
        "source": source_digest,
        "format": form.data_format,
        "formats": form.formats,
        "columns": dict(form.columns),
        "system": form.system,
        "ignored": form.ignored,
        "seq_len": encoder.seq_len,
        "loss_on": encoder.loss_on,
        "too_long": encoder.too_long,
        "empty_think": encoder.empty_think,
        # the paths of images start at the folder of their rows
        "imaging": encoder.imaging and [encoder.imaging.digest, str(Path(form.path).absolute())],
        "template": tokenizer.chat_template,
        "special": special,
        **settings,
    }
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode())
    digest.update(tokenizer.backend_tokenizer.to_str().encode())
    return digest.hexdigest()[:32]


def open_store(folder: Path, *, notes: list[str]) -> TokenStore | None:
    """Return a store whose files are whole; None if there is none, with a note if it is torn."""
    try:
        store = _opened(folder, is_checked=True)
        changed = [path for path, *known in store.report.files if stat_of(path) != tuple(known)]
        if changed:
            notes.append(
                f"{changed[0]} has changed since its row was tokenised: all rows are again"
            )
            return None
        return store
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        if folder.is_dir():
            notes.append(f"the token cache {folder} was torn (a file is missing); it was rebuilt")
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        notes.append(f"the token cache {folder} was torn ({error}); it was rebuilt")
        return None


def stat_of(path: str) -> tuple[int, int]:
    """Return a file's size and the time of its last write in ns; -1 where it is not there.

    The time is that of its inode, which no program can set back.
    """
    try:
        found = Path(path).stat()
    except OSError:
        return -1, -1
    return found.st_size, found.st_ctime_ns


def _checksum(file: Path) -> int:
    """Return the checksum of a file, read in blocks: mapped pages would count as the run's own."""
    checksum = 0
    with file.open("rb") as content:
        while block := content.read(_BLOCK_BYTES):
            checksum = zlib.crc32(block, checksum)
    return checksum


def _opened(folder: Path, *, is_checked: bool = False) -> TokenStore:
    listed = json.loads((folder / _LIST).read_text())
    arrays: dict[str, NDArray[Any]] = {}
    for name, dtype in _ARRAYS.items():
        num_bytes, checksum = listed["arrays"][name]
        file = folder / f"{name}.bin"
        if file.stat().st_size != num_bytes:
            raise ValueError(f"{file.name} has {file.stat().st_size} bytes")
        arrays[name] = np.memmap(file, dtype, "r") if num_bytes else np.empty(0, dtype)
        if is_checked and _checksum(file) != checksum:
            raise ValueError(f"{file.name} has another checksum")
    arrays["places"] = arrays["places"].reshape(-1, 2)
    report = listed["report"]
    return TokenStore(
        folder=folder,
        report=StoreReport(
            skipped=tuple((file, line, what) for file, line, what in report["skipped"]),
            num_duplicates=report["num_duplicates"],
            unused=tuple(report["unused"]),
            num_documents=report["num_documents"],
            files=tuple((path, size, changed) for path, size, changed in report["files"]),
            remarks={
                kind: (num, tuple((file, line, what) for file, line, what in first))
                for kind, (num, first) in report["remarks"].items()
            },
        ),
        **arrays,
    )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Part:
    """The tokens of some rows, as `TokenStore` holds them; offsets and rows start at 0."""

    input_ids: "NDArray[np.int32]"
    labels: "NDArray[np.int32]"
    lengths: Sequence[int]
    end_ids: Sequence[int]
    num_ends: Sequence[int]
    rows: Sequence[int]
    is_truncated: Sequence[bool]
    fates: Sequence[Fate]
    places: Sequence[tuple[int, int]]
    values: Sequence[float] = ()
    references: Sequence[float] = ()
    logprobs: "NDArray[np.float32] | tuple[()]" = ()
    top_counts: "NDArray[np.int32] | tuple[()]" = ()
    top_ids: "NDArray[np.int32] | tuple[()]" = ()
    top_logprobs: "NDArray[np.float32] | tuple[()]" = ()
    num_tops: Sequence[int] = ()
    image_keys: "NDArray[np.void] | tuple[()]" = ()
    image_tokens: Sequence[int] = ()
    num_images: Sequence[int] = ()


_ENDS = {
    "offsets": "lengths",
    "end_offsets": "num_ends",
    "top_offsets": "num_tops",
    "image_offsets": "num_images",
}
"""Arrays of a store that say where parts end -> the field of a `Part` with their lengths."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StoreWriter:
    """Writes a store part by part; memory does not grow with it."""

    folder: Path  # where the store will be
    draft: Path  # where it is written meanwhile
    files: Mapping[str, BinaryIO]  # the file of each array
    # The checksum of each so far.
    sums: dict[str, int] = field(default_factory=lambda: dict.fromkeys(_ARRAYS, 0))
    # Where the next part begins: its first row, and in arrays of `_ENDS`.
    at: dict[str, int] = field(default_factory=lambda: dict.fromkeys(("rows", *_ENDS), 0))

    def add(self, part: Part) -> None:
        """Append the rows of a part."""
        for name in _ARRAYS:
            values: Any = getattr(part, _ENDS.get(name, name))
            if name in _ENDS:
                values = np.cumsum(values, dtype=np.int64) + self.at[name]
                self.at[name] = int(values[-1]) if len(values) else self.at[name]
            elif name == "rows":
                values = np.asarray(values, dtype=np.int64) + self.at["rows"]
            self.write(name, values)
        self.at["rows"] += len(part.fates)

    def close(self, report: StoreReport) -> TokenStore:
        """Finish the files and move the store into place.

        If another process has written the same one meanwhile, that is taken.

        Raises:
            OSError: It cannot be written.
        """
        listed = {}
        for name, file in self.files.items():
            file.flush()
            os.fsync(file.fileno())
            listed[name] = (file.tell(), self.sums[name])
        content = {"arrays": listed, "report": asdict(report)}
        (self.draft / _LIST).write_text(json.dumps(content))
        try:
            self.draft.rename(self.folder)
        except OSError:
            notes: list[str] = []
            found = open_store(self.folder, notes=notes)
            if found is not None:
                return found
            shutil.rmtree(self.folder)
            self.draft.rename(self.folder)
        return _opened(self.folder)

    def write(self, name: str, values: "Sequence[Any] | NDArray[Any]") -> None:
        """Append values to an array."""
        content = np.ascontiguousarray(values, dtype=_ARRAYS[name]).tobytes()
        self.sums[name] = zlib.crc32(content, self.sums[name])
        self.files[name].write(content)


@contextmanager
def new_store(folder: Path) -> Iterator[StoreWriter]:
    """Yield what writes a store, under another name that is unique to the process until `close`.

    Raises:
        OSError: The folder cannot be written.
    """
    draft = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(parents=True)
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, draft, ignore_errors=True)
        files = {name: stack.enter_context((draft / f"{name}.bin").open("wb")) for name in _ARRAYS}
        writer = StoreWriter(folder=folder, draft=draft, files=files)
        for name in _ENDS:
            writer.write(name, [0])
        yield writer


# ---------------------------------------------------------------------------------------------
# What a user should know about single rows that are used: counted, and the first ones named.
#
# Special tokens. A rendering is tokenised as a whole, so `<|im_end|>` in what a user said ends the
# turn as the template's own does. Trainers leave it at that, and so it is here; but who did not
# write it on purpose has another conversation than the file shows.
#
# Ratings. A pair says which answer is chosen, and ratings in the row may say the opposite. The pair
# is learned as it is, and what contradicts it is counted: columns may have been swapped.
#
# Turns at the end. Nothing after the last answer is learned, so turns there are left out.

NUM_NAMED = 3


def special_tokens(tokenizer: "PreTrainedTokenizerBase") -> re.Pattern[str] | None:
    """Return what finds the tokenizer's special tokens in a text; None if it has none.

    `<think>` and the like are tokens of their own, but not special: templates leave them to rows.
    """
    added = tokenizer.added_tokens_decoder.values()
    texts = sorted((token.content for token in added if token.special), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, texts))) if texts else None


def remarks_on(row: Row, tokens: re.Pattern[str] | None) -> Iterator[tuple[str, str]]:
    """Give the kind and the detail of each remark on a row.

    Args:
        row: As it was read.
        tokens: What finds special tokens.
    """
    found = (tokens.search(text) for text in row.texts()) if tokens is not None else ()
    special = next((match.group() for match in found if match is not None), None)
    if special is not None:
        yield "special", special
    yield from row.remarks()


# ---------------------------------------------------------------------------------------------
# The rows of a source, encoded in chunks.

# A worker process must first import its libraries, which takes as long as some thousand rows.
MIN_ROWS_FOR_WORKERS = 4_000
_CHUNK_ROWS, _CHUNK_BYTES = 250, 2**22
_CHUNKS_PER_WORKER = 3

_Named = tuple[Place, str, Raw]


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceRows:
    """The rows of a source that are used."""

    source: Source  # where they are
    form: RowForm  # how they are read
    max_rows: int | None  # the first ones, at most; None: all
    drop_duplicates: bool  # whether rows are left out that were there before
    skip_bad: int  # bad rows that may be skipped

    def named(self) -> Iterator[_Named]:
        """Give the rows with their places, in numbers and in words."""
        rows = self.source.rows()
        for place, raw in itertools.islice(rows, self.max_rows):
            yield place, self.source.name(place), raw

    def num(self) -> int | None:
        """Return how many rows these are, None if they would have to be decoded to count them."""
        num = self.source.num_rows()
        return num if num is None or self.max_rows is None else min(num, self.max_rows)

    def opened(self) -> tuple[RowForm, Iterator[_Named]]:
        """Return how rows are read, with the format known, and the rows.

        Raises:
            DataError: There are none, or the format cannot be detected.
        """
        rows, seen = self.named(), list[_Named]()

        def until_detected() -> Iterator[tuple[str, Raw]]:
            for row in rows:
                seen.append(row)
                yield row[1:]

        first = next(rows, None)
        if first is None:
            raise no_rows(self.source.path)
        rows = itertools.chain([first], rows)
        form = self.form.detected(until_detected())
        return form, itertools.chain(seen, rows)


def stored_tokens(
    rows: SourceRows,
    encoder: Encoder,
    *,
    num_workers: int | None,
    cache_dir: Path,
    notes: list[str],
    working: Working,
) -> tuple[TokenStore, bool]:
    """Return the tokens of a source, and whether they were in the cache.

    Args:
        rows: Of the source.
        encoder: Makes them tokens.
        num_workers: Processes; 0 is this one, None one per core if there are many rows.
        cache_dir: Where tokens are kept.
        notes: Gets what a user should know.
        working: Shows the progress of what is not in the cache.

    Raises:
        DataError: Rows are bad, or none; or a worker died.
    """
    settings = {"max_rows": rows.max_rows, "drop_duplicates": rows.drop_duplicates}
    key = cache_key(rows.source.digest(), rows.form, encoder, settings)
    folder = cache_dir / f"tokens-{key}"
    store = open_store(folder, notes=notes)
    is_cached = store is not None
    if store is None:
        try:
            store = _written(rows, encoder, folder, num_workers=num_workers, working=working)
        except OSError as error:
            notes.append(
                f"the token cache {folder} cannot be written: {error.strerror};"
                " the next run will make the tokens again"
            )
            scratch = Path(tempfile.mkdtemp(prefix="sluice-tokens-"))
            atexit.register(shutil.rmtree, scratch, ignore_errors=True)
            store = _written(rows, encoder, scratch / key, num_workers=num_workers, working=working)
    problems = store.report.skipped
    if len(problems) > rows.skip_bad:
        named = [f"{rows.source.name((file, line))}: {what}" for file, line, what in problems]
        num_rows = len(store.fates) + len(problems)
        raise bad_rows(named, num_rows, form=rows.form, num_allowed=rows.skip_bad)
    return store, is_cached


def _written(
    rows: SourceRows, encoder: Encoder, folder: Path, *, num_workers: int | None, working: Working
) -> TokenStore:
    """Encode a source and write its tokens."""
    form, named = rows.opened()
    task = _Task(form=form, encoder=encoder, has_digests=rows.drop_duplicates)
    name = rows.source.path.rstrip("/").rpartition("/")[2]
    with working(f"Tokenising {name}", "rows") as progress, new_store(folder) as writer:
        count = _Count(rows=rows, form=form, progress=progress, num_expected=rows.num())
        progress(0, count.num_expected)
        joined = _Joined(seq_len=encoder.seq_len)
        for chunk in _encoded(named, task, num_workers=num_workers, count=count):
            fresh = count.without_duplicates(chunk)
            if not form.format.is_document:
                writer.add(fresh.part)
                continue
            for part in joined.parts(fresh):
                writer.add(part)
        for part in joined.rest():
            writer.add(part)
        count.require_good()
        return writer.close(count.report(num_documents=joined.num_documents))


# --------------------------------------------------------------------------------------------------
# A chunk, in a worker
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class _Problem:
    """A row that cannot be used."""

    place: Place  # the place of the row
    what: str  # its place in words, and what is wrong
    lost: tuple[str, ...] = ()  # columns whose meaning would be lost
    refusal: tuple[str, str, str] | None = None  # what, limit and hint of a template's refusal


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Chunk:
    """What became of some rows."""

    num_rows: int  # rows that were read
    part: Part  # the tokens of good ones; of documents, one example each, of any length
    # Kind, place and detail of what there is to say about good rows.
    remarks: tuple[tuple[str, Place, str], ...]
    digests: tuple[bytes, ...]  # the digests of the good rows
    problems: tuple[_Problem, ...]  # the problems of the other rows
    unused: tuple[str, ...]  # columns that are not read
    files: tuple[tuple[str, int, int], ...]  # files of images, see `StoreReport.files`


@dataclass(frozen=True, kw_only=True, slots=True)
class _Task:
    """How a chunk is encoded."""

    form: RowForm
    encoder: Encoder
    has_digests: bool

    def run(self, rows: Sequence[_Named], *, is_only_read: bool) -> _Chunk:
        """Read and encode rows; after too many bad ones the others are only read."""
        good: list[tuple[Place, Fate, list[Example]]] = []
        digests, problems, unused = list[bytes](), list[_Problem](), dict[str, None]()
        tokens, remarks = special_tokens(self.encoder.tokenizer), list[tuple[str, Place, str]]()
        files = dict[str, tuple[int, int]]()
        for place, name, raw in rows:
            try:
                row = self.form.read(name, raw)
                unused |= dict.fromkeys(row.unused)
                if is_only_read:
                    continue
                files |= {one.path: stat_of(one.path) for one in row.images if one.path}
                fate, examples = row.encode(self.encoder)
                good.append((place, fate, examples))
                remarks += [(kind, place, detail) for kind, detail in remarks_on(row, tokens)]
                kinds = dict.fromkeys(kind for one in examples for kind in one.kinds)
                remarks += [(kind, place, "") for kind in kinds]
                if self.has_digests:
                    digests.append(_digest(row, self.encoder.loss_on))
            except RowError as error:
                problems.append(_Problem(place=place, what=f"{name}: {error}", lost=error.lost))
            except DataError as error:
                refusal = (error.what, error.limit or "", error.hint)
                problems.append(_Problem(place=place, what=error.what, refusal=refusal))
        return _Chunk(
            num_rows=len(rows),
            part=_part(good),
            remarks=tuple(remarks),
            digests=tuple(digests),
            problems=tuple(problems),
            unused=tuple(unused),
            files=tuple((path, *known) for path, known in files.items()),
        )


def _part(good: Sequence[tuple[Place, Fate, list[Example]]]) -> Part:
    """Lay the examples of rows end to end."""
    examples = [(row, one) for row, (_, _, ones) in enumerate(good) for one in ones]
    none = np.empty(0, dtype=np.int32)
    tops = [one.top for _, one in examples if one.top is not None]
    return Part(
        input_ids=np.concatenate([none, *(one.input_ids for _, one in examples)]),
        labels=np.concatenate([none, *(one.labels for _, one in examples)]),
        lengths=[len(one.input_ids) for _, one in examples],
        end_ids=[token for _, one in examples for token in one.end_ids],
        num_ends=[len(one.end_ids) for _, one in examples],
        rows=[row for row, _ in examples],
        is_truncated=[one.is_truncated for _, one in examples],
        fates=[fate for _, fate, _ in good],
        places=[place for place, _, _ in good],
        values=[one.value for _, one in examples if one.value is not None],
        references=[one.reference for _, one in examples if one.reference is not None],
        logprobs=np.concatenate(
            [
                np.empty(0, dtype=np.float32),
                *(one.logprobs for _, one in examples if one.logprobs is not None),
            ]
        ),
        top_counts=np.concatenate([none, *(top.counts for top in tops)]),
        top_ids=np.concatenate([none, *(top.ids for top in tops)]),
        top_logprobs=np.concatenate(
            [np.empty(0, dtype=np.float32), *(top.logprobs for top in tops)]
        ),
        num_tops=[len(top.ids) for top in tops],
        image_keys=np.frombuffer(
            b"".join(key for _, one in examples for key, _ in one.images), dtype="V16"
        ),
        image_tokens=[num for _, one in examples for _, num in one.images],
        num_images=[len(one.images) for _, one in examples],
    )


def _digest(row: Row, loss_on: LossOn) -> bytes:
    """Digest what a row says and trains, wherever it is and whatever its columns are called."""
    return hashlib.blake2b(json.dumps(row.content(loss_on)).encode(), digest_size=16).digest()


# --------------------------------------------------------------------------------------------------
# All chunks, in order
# --------------------------------------------------------------------------------------------------


@dataclass(kw_only=True, slots=True)
class _Count:
    """What the rows so far had to say."""

    rows: SourceRows
    form: RowForm
    progress: Work
    num_expected: int | None
    num_rows: int = 0
    num_duplicates: int = 0
    remarks: dict[str, tuple[int, tuple[tuple[int, int, str], ...]]] = field(default_factory=dict)
    problems: list[_Problem] = field(default_factory=list)
    unused: dict[str, None] = field(default_factory=dict)
    seen: set[bytes] = field(default_factory=set)
    files: dict[str, tuple[int, int]] = field(default_factory=dict)

    @property
    def is_failed(self) -> bool:
        """Whether there are more bad rows than may be skipped."""
        return len(self.problems) > self.rows.skip_bad

    def add(self, chunk: _Chunk) -> None:
        """Count a chunk's rows.

        Raises:
            DataError: The template refuses a row, which many rows may share: the first is enough.
        """
        self.num_rows += chunk.num_rows
        self.unused |= dict.fromkeys(chunk.unused)
        self.files |= {path: (size, changed) for path, size, changed in chunk.files}
        for kind, place, detail in chunk.remarks:
            num, first = self.remarks.get(kind, (0, ()))
            self.remarks[kind] = num + 1, (*first, (*place, detail))[:NUM_NAMED]
        for problem in chunk.problems:
            self.problems.append(problem)
            are_all = all(one.refusal is not None for one in self.problems)
            if problem.refusal is not None and self.is_failed and are_all:
                what, limit, hint = problem.refusal
                raise DataError(what, limit=limit, hint=hint)
        self.progress(self.num_rows, self.num_expected)

    def without_duplicates(self, chunk: _Chunk) -> _Chunk:
        """Return a chunk without the rows that were there before."""
        if not chunk.digests:
            return chunk
        is_new = []
        for digest in chunk.digests:
            is_new.append(digest not in self.seen)
            self.seen.add(digest)
        self.num_duplicates += is_new.count(False)
        return chunk if all(is_new) else _with_rows(chunk, np.array(is_new))

    def require_good(self) -> None:
        """Raise if there are too many bad rows.

        Raises:
            DataError: It names the first ones, and counts all.
        """
        if self.is_failed:
            lost = dict.fromkeys(name for problem in self.problems for name in problem.lost)
            raise bad_rows(
                [problem.what for problem in self.problems],
                self.num_rows,
                form=self.form,
                lost=tuple(lost),
                num_allowed=self.rows.skip_bad,
            )

    def report(self, *, num_documents: int) -> StoreReport:
        """Return what the source had besides rows that are used."""
        skipped = []
        for problem in self.problems:
            name = self.rows.source.name(problem.place)
            skipped.append((*problem.place, problem.what.removeprefix(f"{name}: ")))
        return StoreReport(
            skipped=tuple(skipped),
            num_duplicates=self.num_duplicates,
            unused=tuple(self.unused),
            num_documents=num_documents,
            remarks=self.remarks,
            files=tuple((path, *known) for path, known in self.files.items()),
        )


def _with_rows(chunk: _Chunk, is_kept: "NDArray[np.bool_]") -> _Chunk:
    """Return a chunk with some of its rows."""
    part = chunk.part
    number = np.cumsum(is_kept) - 1
    has = is_kept[np.asarray(part.rows, dtype=np.int64)]
    tokens = np.repeat(has, part.lengths)
    ends = np.repeat(has, part.num_ends)
    tops = np.repeat(has, part.num_tops) if len(part.num_tops) else has[:0]

    def examples(values: Sequence[int]) -> list[int]:
        return [value for value, is_taken in zip(values, has, strict=True) if is_taken]

    images = np.repeat(has, part.num_images)
    return replace(
        chunk,
        part=Part(
            input_ids=part.input_ids[tokens],
            labels=part.labels[tokens],
            lengths=examples(part.lengths),
            end_ids=np.asarray(part.end_ids, dtype=np.int32)[ends].tolist(),
            num_ends=examples(part.num_ends),
            rows=[int(number[row]) for row in examples(part.rows)],
            is_truncated=[bool(value) for value in examples(part.is_truncated)],
            fates=[fate for fate, kept in zip(part.fates, is_kept, strict=True) if kept],
            places=[place for place, kept in zip(part.places, is_kept, strict=True) if kept],
            values=np.asarray(part.values)[has].tolist() if part.values else (),
            references=np.asarray(part.references)[has].tolist() if part.references else (),
            logprobs=np.asarray(part.logprobs)[tokens] if len(part.logprobs) else (),
            top_counts=np.asarray(part.top_counts)[tokens] if len(part.top_counts) else (),
            top_ids=np.asarray(part.top_ids)[tops] if len(part.top_ids) else (),
            top_logprobs=np.asarray(part.top_logprobs)[tops] if len(part.top_ids) else (),
            num_tops=examples(part.num_tops) if len(part.num_tops) else (),
            image_keys=np.asarray(part.image_keys)[images],
            image_tokens=np.asarray(part.image_tokens, dtype=np.int32)[images].tolist(),
            num_images=examples(part.num_images),
        ),
    )


@dataclass(kw_only=True, slots=True)
class _Joined:
    """Joins documents and cuts them into rows of seq_len tokens; the last row may be shorter."""

    seq_len: int
    num_documents: int = 0
    _held: list["NDArray[np.int32]"] = field(default_factory=list)
    _num_held: int = 0
    _place: Place = (0, 0)

    def parts(self, chunk: _Chunk) -> Iterator[Part]:
        """Give the rows that a chunk's documents fill."""
        at = 0
        for length, place in zip(chunk.part.lengths, chunk.part.places, strict=True):
            if self._num_held == 0:
                self._place = place
            self._held.append(chunk.part.input_ids[at : at + length])
            self._num_held += length
            self.num_documents += 1
            at += length
            if self._num_held >= self.seq_len:
                yield self._filled(place)

    def rest(self) -> Iterator[Part]:
        """Give the last row, unless it is a single token, of which nothing is learned."""
        if self._num_held > 1:
            yield self._rows(np.concatenate(self._held), [self._place])

    def _filled(self, place: Place) -> Part:
        """Return the full rows held, and hold the rest, which is of the last document."""
        ids = np.concatenate(self._held)
        num_full = len(ids) // self.seq_len
        cut = num_full * self.seq_len
        places = [self._place] + [place] * (num_full - 1)
        self._held, self._num_held, self._place = [ids[cut:]], len(ids) - cut, place
        return self._rows(ids[:cut], places)

    def _rows(self, ids: "NDArray[np.int32]", places: list[Place]) -> Part:
        lengths = [min(self.seq_len, len(ids) - at) for at in range(0, len(ids), self.seq_len)]
        return Part(
            input_ids=ids,
            labels=ids,
            lengths=lengths,
            end_ids=[],
            num_ends=[0] * len(lengths),
            rows=range(len(lengths)),
            is_truncated=[False] * len(lengths),
            fates=[Fate.WHOLE] * len(lengths),
            places=places,
            num_images=[0] * len(lengths),
        )


def _chunks(rows: Iterator[_Named]) -> Iterator[list[_Named]]:
    """Group rows, fewer of them if they are large."""
    chunk, num_bytes = list[_Named](), 0
    for row in rows:
        chunk.append(row)
        num_bytes += _size(row[2])
        if len(chunk) == _CHUNK_ROWS or num_bytes >= _CHUNK_BYTES:
            yield chunk
            chunk, num_bytes = [], 0
    if chunk:
        yield chunk


def _size(raw: Raw) -> int:
    """Return about how many bytes a row has."""
    if isinstance(raw, bytes):
        return len(raw)
    values = raw.values() if isinstance(raw, dict) else ()
    return sum(len(value) for value in values if isinstance(value, str))


def _encoded(
    rows: Iterator[_Named], task: _Task, *, num_workers: int | None, count: _Count
) -> Iterator[_Chunk]:
    """Give the chunks in order, counted; encoded here or by workers."""
    first = list(itertools.islice(rows, MIN_ROWS_FOR_WORKERS))
    if num_workers is None:
        num_workers = num_cores() if len(first) == MIN_ROWS_FOR_WORKERS else 0
    chunks = _chunks(itertools.chain(first, rows))
    del first
    if num_workers == 0:
        for chunk in chunks:
            done = task.run(chunk, is_only_read=count.is_failed)
            count.add(done)
            yield done
        return
    pool = ProcessPoolExecutor(
        num_workers, mp_context=process_context(), initializer=_prepare, initargs=(task,)
    )
    try:
        waiting: deque[Future[_Chunk]] = deque()
        for chunk in chunks:
            waiting.append(pool.submit(_run, chunk, count.is_failed))
            if len(waiting) >= _CHUNKS_PER_WORKER * num_workers:
                count.add(done := waiting.popleft().result())
                yield done
        while waiting:
            count.add(done := waiting.popleft().result())
            yield done
    except BrokenProcessPool as error:
        raise worker_died("tokenising", error) from error
    finally:
        pool.shutdown(cancel_futures=True)


_tasks: list[_Task] = []
"""The task of this process, if it is a worker."""


def _prepare(task: _Task) -> None:
    prepare_worker()
    _tasks[:] = [task]


def _run(rows: Sequence[_Named], is_only_read: bool) -> _Chunk:  # noqa: FBT001  # a pool's call
    return _tasks[0].run(rows, is_only_read=is_only_read)
