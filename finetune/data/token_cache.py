"""A source's tokens on disk: written as rows are tokenised, then memory-mapped.

A folder per source, named by a digest of all that its tokens depend on: the bytes of the source,
how its rows are read, the tokenizer, and how they are encoded. It holds one file per array and a
list of them with their checksums. It is written under another name and renamed when it is whole.
Opening it reads every byte once, to check the sums; pages are dropped again when memory is short.
"""

import hashlib
import json
import os
import shutil
import zlib
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, BinaryIO, Self

import numpy as np

from finetune.data.rows import RowForm
from finetune.data.tokenize import Encoder, Fate, check_is_fast

if TYPE_CHECKING:
    from numpy.typing import NDArray

_CACHE_VERSION = 9
_BLOCK_BYTES = 2**22
_LIST = "arrays.json"
_ARRAYS = {
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
}
"""Of each array, the type; see `TokenStore`."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TokenStore:
    """The tokens of a source's rows; example i is `offsets[i]` to `offsets[i + 1]`.

    Attributes:
        folder: Where it is.
        input_ids: Tokens of all examples, end to end.
        labels: The same tokens, or -100 for no loss.
        offsets: (examples + 1).
        end_ids: Tokens that end answers; those of example i are at `end_offsets[i]` on.
        end_offsets: (examples + 1).
        rows: (examples): the row that each is of; a row may be in several examples, or in none.
        is_truncated: (examples): whether it was cut at its right.
        fates: (rows): what became of each, a `Fate`.
        places: (rows, 2): where it is in the source: file, and line or index.
        values: (examples) of rows that compare answers, else none; see `Example.value`.
        references: (examples) where rows have them, else none; see `Example.reference`.
        logprobs: Of all tokens, end to end, where rows have them, else none.
        top_counts: Of all tokens, how many likeliest tokens a teacher has there; none where rows
            have no teacher.
        top_ids: These tokens, end to end; those of example i are at `top_offsets[i]` on.
        top_logprobs: Their log-probabilities.
        top_offsets: (examples + 1) where rows have a teacher.
        report: What the source had besides rows that are used.
    """

    folder: Path
    input_ids: "NDArray[np.int32]"
    labels: "NDArray[np.int32]"
    offsets: "NDArray[np.int64]"
    end_ids: "NDArray[np.int32]"
    end_offsets: "NDArray[np.int64]"
    rows: "NDArray[np.int64]"
    is_truncated: "NDArray[np.bool_]"
    fates: "NDArray[np.int8]"
    places: "NDArray[np.int64]"
    values: "NDArray[np.float64]"
    references: "NDArray[np.float64]"
    logprobs: "NDArray[np.float32]"
    top_counts: "NDArray[np.int32]"
    top_ids: "NDArray[np.int32]"
    top_logprobs: "NDArray[np.float32]"
    top_offsets: "NDArray[np.int64]"
    report: "StoreReport"

    def __len__(self) -> int:
        return len(self.rows)

    def __reduce__(self) -> tuple[Any, tuple[Path]]:
        """Let another process map the files again, in place of a copy of them."""
        return _reopened, (self.folder,)


@dataclass(frozen=True, kw_only=True, slots=True)
class StoreReport:
    """What a source had besides rows that are used.

    Attributes:
        skipped: `place: problem` of bad rows that the recipe allows.
        num_duplicates: Rows that were in the source before.
        unused: Columns that are read from no row -> 0, kept in the order of the rows.
        num_documents: Documents that were joined; 0 for rows.
        remarks: Of each kind of remark on rows, their number, and place and detail of the first.
    """

    skipped: tuple[tuple[int, int, str], ...] = ()
    num_duplicates: int = 0
    unused: tuple[str, ...] = ()
    num_documents: int = 0
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
        return _opened(folder, is_checked=True)
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        if folder.is_dir():
            notes.append(f"the token cache {folder} was torn (a file is missing); it was rebuilt")
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        notes.append(f"the token cache {folder} was torn ({error}); it was rebuilt")
        return None


def _checksum(file: Path) -> int:
    """Return the checksum of a file, read in blocks: mapped pages would count as the run's own."""
    checksum = 0
    with file.open("rb") as content:
        while block := content.read(_BLOCK_BYTES):
            checksum = zlib.crc32(block, checksum)
    return checksum


def _reopened(folder: Path) -> TokenStore:
    return _opened(folder, is_checked=False)


def _opened(folder: Path, *, is_checked: bool) -> TokenStore:
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


@dataclass(kw_only=True, slots=True)
class StoreWriter:
    """Writes a store part by part; memory does not grow with it.

    Attributes:
        folder: Where the store will be.
    """

    folder: Path
    _draft: Path = field(init=False)
    _files: dict[str, BinaryIO] = field(init=False)
    _sums: dict[str, int] = field(init=False)
    _at: dict[str, int] = field(init=False)
    _stack: ExitStack = field(init=False, default_factory=ExitStack)

    def __enter__(self) -> Self:
        """Start to write, under another name that is unique to the process.

        Raises:
            OSError: The folder cannot be written.
        """
        self._draft = self.folder.with_name(f".{self.folder.name}.{os.getpid()}.tmp")
        shutil.rmtree(self._draft, ignore_errors=True)
        self._draft.mkdir(parents=True)
        self._files = {
            name: self._stack.enter_context((self._draft / f"{name}.bin").open("wb"))
            for name in _ARRAYS
        }
        self._sums = dict.fromkeys(_ARRAYS, 0)
        self._at = {"offsets": 0, "end_offsets": 0, "rows": 0, "top_offsets": 0}
        self._write("offsets", [0])
        self._write("end_offsets", [0])
        self._write("top_offsets", [0])
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.close()
        with suppress(OSError):
            shutil.rmtree(self._draft, ignore_errors=True)

    def add(self, part: Part) -> None:
        """Append the rows of a part."""
        self._write("input_ids", part.input_ids)
        self._write("labels", part.labels)
        self._write("offsets", self._ends("offsets", part.lengths))
        self._write("end_ids", part.end_ids)
        self._write("end_offsets", self._ends("end_offsets", part.num_ends))
        self._write("rows", np.asarray(part.rows, dtype=np.int64) + self._at["rows"])
        self._at["rows"] += len(part.fates)
        self._write("is_truncated", part.is_truncated)
        self._write("fates", part.fates)
        self._write("places", np.asarray(part.places, dtype=np.int64).ravel())
        self._write("values", part.values)
        self._write("references", part.references)
        self._write("logprobs", part.logprobs)
        self._write("top_counts", part.top_counts)
        self._write("top_ids", part.top_ids)
        self._write("top_logprobs", part.top_logprobs)
        self._write("top_offsets", self._ends("top_offsets", part.num_tops))

    def close(self, report: StoreReport) -> TokenStore:
        """Finish the files and move the store into place.

        If another process has written the same one meanwhile, that is taken.

        Raises:
            OSError: It cannot be written.
        """
        listed = {}
        for name, file in self._files.items():
            file.flush()
            os.fsync(file.fileno())
            listed[name] = (file.tell(), self._sums[name])
        self._stack.close()
        content = {
            "arrays": listed,
            "report": {
                "skipped": report.skipped,
                "num_duplicates": report.num_duplicates,
                "unused": report.unused,
                "num_documents": report.num_documents,
                "remarks": report.remarks,
            },
        }
        (self._draft / _LIST).write_text(json.dumps(content))
        try:
            self._draft.rename(self.folder)
        except OSError:
            notes: list[str] = []
            found = open_store(self.folder, notes=notes)
            if found is not None:
                return found
            shutil.rmtree(self.folder)
            self._draft.rename(self.folder)
        return _reopened(self.folder)

    def _ends(self, name: str, lengths: Sequence[int]) -> "NDArray[np.int64]":
        ends = np.cumsum(lengths, dtype=np.int64) + self._at[name]
        self._at[name] = int(ends[-1]) if len(ends) else self._at[name]
        return ends

    def _write(self, name: str, values: "Sequence[Any] | NDArray[Any]") -> None:
        content = np.ascontiguousarray(values, dtype=_ARRAYS[name]).tobytes()
        self._sums[name] = zlib.crc32(content, self._sums[name])
        self._files[name].write(content)
