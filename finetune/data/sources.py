"""Where rows come from: files, directories of them, saved data sets, and data sets of the hub.

A source knows its rows by place: the number of a file, and a row's line (from 1) or index (from 0)
in it. Rows are given as they were read, the lines of a .jsonl file as bytes, so that the processes
that tokenise also decode. A source's digest is that of its bytes, wherever they are stored.

Local files are read here, because the errors of a row name its file and line. What files a
directory's split has, parquet, saved data sets and the hub are left to `datasets`.
"""

import csv
import difflib
import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from finetune.errors import DataError, RowError

MAX_ROW_BYTES = 2**26  # 64 MiB: as many characters as a rendered row may have
_BLOCK_BYTES = 2**24
_MAX_SHOWN = 10

Place = tuple[int, int]
Raw = object
"""A row as it was read: the bytes of a JSON text, a mapping, or the `RowError` that came of it."""


class Repeated(dict[str, object]):
    """A JSON object that has a key twice; Python would keep the last value."""

    def __init__(self, pairs: Sequence[tuple[str, object]], key: str) -> None:
        super().__init__(pairs)
        self.key = key

    def __reduce__(self) -> tuple[type["Repeated"], tuple[list[tuple[str, object]], str]]:
        return Repeated, (list(self.items()), self.key)


class Filled(dict[str, object]):
    """A row of a table, whose objects have the keys of all rows: null where a row had none."""


class Source(Protocol):
    """What rows are read from."""

    @property
    def path(self) -> str:
        """As the recipe names it."""
        ...

    @property
    def notes(self) -> tuple[str, ...]:
        """What a user should know about it."""
        ...

    def digest(self) -> str:
        """Return a digest of its content."""
        ...

    def name(self, place: Place) -> str:
        """Return a row's place in words: `file:line` or `path[index]`."""
        ...

    def rows(self) -> Iterator[tuple[Place, Raw]]:
        """Give the rows in order."""
        ...

    def num_rows(self) -> int | None:
        """Count the rows, None if they would have to be decoded for it."""
        ...


def open_source(path: str, *, revision: str | None = None) -> Source:
    """Return what a path of the recipe means.

    Args:
        path: A file, a directory, a saved data set or one of the hub.
        revision: A branch, tag or commit of one on the hub; None for the newest.

    Raises:
        DataError: There is no such file, or a directory holds nothing that can be read.
    """
    file = Path(path)
    if file.suffix in READERS:
        if not file.is_file():
            raise missing(file)
        return FileSource(path=path, files=(file,))
    name, split, config = _parts(path)
    folder = Path(name)
    if folder.is_file():
        raise DataError(
            f"data file {folder} has the ending {folder.suffix or 'of no kind'}",
            limit=f"files are read that end in {', '.join(READERS)}",
            hint="unpack it, or give it the ending of what it holds",
        )
    if not folder.is_dir() and (folder.is_absolute() or name.startswith(".")):
        raise missing(folder)
    if folder.is_dir() and not _is_saved(folder):
        files = _files_of(folder, split=split, config=config, path=path)
        if files and all(one.suffix in READERS for one in files):
            return FileSource(path=path, files=files, notes=_unread_files(folder, files))
    return DatasetSource(path=path, revision=revision)


def hub_name(path: str) -> str | None:
    """Return the hub's repository that a path means; None if it means something else."""
    name = _parts(path)[0]
    is_file = Path(path).suffix in READERS or Path(name).exists()
    return None if is_file or Path(name).is_absolute() or name.startswith(".") else name


def missing(file: Path) -> DataError:
    """Return the error for a file that does not exist, with the nearest name that does."""
    folder = file.parent
    if not folder.is_dir():
        return DataError(
            f"data file {file} does not exist, nor does its folder {folder}",
            limit="`data.path` must name a file that can be read",
            hint="set `data.path`; a relative path starts at the current directory",
        )
    names = sorted(entry.name for entry in folder.iterdir())
    near = difflib.get_close_matches(file.name, names, n=1, cutoff=0.5)
    return DataError(
        f"data file {file} does not exist",
        limit=f"{folder} holds {', '.join(names[:_MAX_SHOWN]) or 'no files'}",
        hint=f"`data.path: {folder / near[0]}`"
        if near
        else "set `data.path` to a file that exists",
    )


# --------------------------------------------------------------------------------------------------
# Files
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class FileSource:
    """Local files, one after the other."""

    path: str
    files: tuple[Path, ...]
    notes: tuple[str, ...] = ()

    def digest(self) -> str:
        """Return a digest of the files' bytes and kinds, in order."""
        digest = hashlib.sha256()
        for file in self.files:
            digest.update(f"{file.suffix} {file.stat().st_size}\n".encode())
            _update(digest, file)
        return digest.hexdigest()

    def name(self, place: Place) -> str:
        """Return `file:line`, or `file[index]` where rows have no line."""
        file, number = self.files[place[0]], place[1]
        return f"{file}:{number}" if file.suffix in _BY_LINE else f"{file}[{number}]"

    def rows(self) -> Iterator[tuple[Place, Raw]]:
        """Give the rows of all files."""
        for index, file in enumerate(self.files):
            for number, raw in READERS[file.suffix](file):
                yield (index, number), raw

    def num_rows(self) -> int | None:
        """Count the rows of all files, None if one is of a kind that has to be decoded."""
        if any(file.suffix not in _COUNTERS for file in self.files):
            return None
        return sum(_COUNTERS[file.suffix](file) for file in self.files)


def _update(digest: Any, file: Path) -> None:
    with file.open("rb") as content:
        while block := content.read(_BLOCK_BYTES):
            digest.update(block)


def decoded(raw: Raw) -> object:
    """Return a row as an object; one that cannot be decoded is returned as its error."""
    if not isinstance(raw, bytes):
        num_chars = _num_chars(raw)
        return raw if num_chars <= MAX_ROW_BYTES else too_large(num_chars)
    try:
        return json.loads(raw.decode("utf-8-sig"), object_pairs_hook=_object)
    except json.JSONDecodeError as error:
        return RowError(f"broken JSON: {error.msg} at column {error.colno}")
    except UnicodeDecodeError as error:
        return RowError(f"not UTF-8: byte 0x{raw[error.start]:02x} at {error.start}")
    except (ValueError, RecursionError) as error:
        return RowError(f"JSON beyond what can be read: {str(error).partition(';')[0]}")


def _num_chars(value: object) -> int:
    """Count the characters of all texts in a row."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        return sum(map(_num_chars, value.values()))
    return sum(map(_num_chars, value)) if isinstance(value, list) else 0


def _object(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """Return an object of a JSON text, marked if a key is there twice."""
    fields = dict(pairs)
    if len(fields) == len(pairs):
        return fields
    keys = [key for key, _ in pairs]
    return Repeated(pairs, next(key for key in keys if keys.count(key) > 1))


def too_large(num_bytes: int) -> RowError:
    """Return the error for a row that is larger than any that could be trained on."""
    return RowError(
        f"the row has {num_bytes / 2**20:,.0f} MiB; at most {MAX_ROW_BYTES // 2**20} MiB are read:"
        " split it into several rows"
    )


def _read_jsonl(file: Path) -> Iterator[tuple[int, Raw]]:
    """Give one row per line that is not blank, as bytes."""
    with file.open("rb") as lines:
        number = 0
        while line := lines.readline(MAX_ROW_BYTES + 1):
            number += 1
            if len(line) > MAX_ROW_BYTES:
                num_bytes = len(line)
                while not line.endswith(b"\n") and (line := lines.readline(_BLOCK_BYTES)):
                    num_bytes += len(line)
                yield number, too_large(num_bytes)
            elif not line.isspace():
                yield number, line


def _read_json(file: Path) -> Iterator[tuple[int, Raw]]:
    """Give the elements of a JSON array, which is read whole."""
    try:
        rows = json.loads(file.read_text(encoding="utf-8-sig"), object_pairs_hook=_object)
    except json.JSONDecodeError as error:
        raise DataError(
            f"{file}:{error.lineno}: broken JSON: {error.msg} at column {error.colno}",
            limit="a .json file must hold one array of rows",
            hint="if it holds one row per line, give it the ending .jsonl",
        ) from error
    except (ValueError, RecursionError) as error:
        raise DataError(
            f"{file} cannot be read as JSON: {str(error).partition(';')[0]}",
            limit="a .json file must hold one array of rows in UTF-8",
            hint=f"`iconv -t UTF-8 {file}`, or .jsonl with a row per line, which names the bad one",
        ) from error
    if not isinstance(rows, list):
        raise DataError(
            f"{file} holds one {type(rows).__name__}",
            limit="a .json file must hold one array of rows",
            hint="wrap the rows in [ ], or use .jsonl with one row per line",
        )
    yield from enumerate(rows)


def _read_csv(file: Path) -> Iterator[tuple[int, Raw]]:
    """Give the records below the header as objects of texts, by the line they begin in."""
    csv.field_size_limit(MAX_ROW_BYTES)
    with file.open(encoding="utf-8-sig", newline="") as text:
        records = csv.reader(text, strict=True)
        line = 1
        try:
            head = next(records, [])
            if len(set(head)) < len(head):
                raise DataError(
                    f"{file}:1: the header names a column twice: {', '.join(head)}",
                    limit="the first line of a .csv file names the columns",
                    hint="rename one of them, or write the header if the file has none",
                )
            other = next((mark for mark in ";\t|" if mark in head[0]), "") if len(head) == 1 else ""
            if other:
                raise DataError(
                    f"{file}:1: the header is one column, {head[0]!r}",
                    limit="the fields of a .csv file are separated by commas",
                    hint=f"save it with commas in place of {other!r}",
                )
            line = records.line_num + 1
            for fields in records:
                if len(fields) == len(head):
                    yield line, dict(zip(head, fields, strict=True))
                elif fields:
                    yield line, RowError(f"{len(fields)} fields, the header has {len(head)}")
                line = records.line_num + 1
        except (csv.Error, UnicodeDecodeError) as error:
            raise DataError(
                f"{file}:{line}: {_csv_problem(error)}",
                limit=f"a .csv file is UTF-8 with fields of at most {MAX_ROW_BYTES // 2**20} MiB",
                hint="fix this line: quote fields that hold commas, quotes or line ends, double the"
                " quotes within",
            ) from error


def _csv_problem(error: Exception) -> str:
    if isinstance(error, UnicodeDecodeError):
        return f"not UTF-8 from about here on: byte 0x{error.object[error.start]:02x}"
    return f"broken CSV: {error}"


def _read_text(file: Path) -> Iterator[tuple[int, Raw]]:
    """Give a text file as one document."""
    num_bytes = file.stat().st_size
    if num_bytes > MAX_ROW_BYTES:
        yield 1, too_large(num_bytes)
        return
    content = file.read_bytes()
    try:
        yield 1, {"text": content.decode("utf-8-sig")}
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        yield line, RowError(f"not UTF-8: byte 0x{content[error.start]:02x}")


def _read_parquet(file: Path) -> Iterator[tuple[int, Raw]]:
    """Give the rows of a parquet file."""
    yield from enumerate(map(Filled, _parquet(file)))


def _parquet(file: Path) -> Any:
    return _load("parquet", split="train", data_files=str(file), path=str(file))


READERS = {
    ".jsonl": _read_jsonl,
    ".json": _read_json,
    ".csv": _read_csv,
    ".parquet": _read_parquet,
    ".txt": _read_text,
    ".md": _read_text,
}
"""Ending of a file -> what gives its rows, by line or by index."""
_COUNTERS: dict[str, Callable[[Path], int]] = {
    ".jsonl": lambda file: sum(1 for _ in _read_jsonl(file)),
    ".parquet": lambda file: len(_parquet(file)),
    ".txt": lambda _: 1,
    ".md": lambda _: 1,
}
_BY_LINE = (".jsonl", ".csv", ".txt", ".md")


# --------------------------------------------------------------------------------------------------
# Directories and data sets, through `datasets`
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class DatasetSource:
    """A saved data set, or one of the hub, named as `name#config:split`."""

    path: str
    revision: str | None = None  # a branch, tag or commit of one on the hub; None is the newest

    @property
    def notes(self) -> tuple[str, ...]:
        """Nothing is left out of a split."""
        return ()

    def digest(self) -> str:
        """Return a digest of the rows' files, or of the rows where they are not all of a file."""
        loaded = self._loaded()
        files = [entry["filename"] for entry in getattr(loaded, "cache_files", ())]
        is_part = "[" in _parts(self.path)[1] or getattr(loaded, "_indices", None) is not None
        if not files or is_part:
            return _digest_of_rows(loaded)
        digest = hashlib.sha256()
        for file in files:
            _update(digest, Path(file))
        return digest.hexdigest()

    def name(self, place: Place) -> str:
        """Return `path[index]`."""
        return f"{self.path}[{place[1]}]"

    def rows(self) -> Iterator[tuple[Place, Raw]]:
        """Give the rows of the split."""
        for index, row in enumerate(map(Filled, self._loaded())):
            yield (0, index), row

    def num_rows(self) -> int | None:
        """Return the rows of the split, which the data set knows."""
        return len(self._loaded())

    def _loaded(self) -> Any:
        from finetune.hub.repository import is_commit

        name, split, config = _parts(self.path)
        loaded = _load(
            name, config=config, split=split or "train", path=self.path, revision=self.revision
        )
        files = [entry["filename"] for entry in loaded.cache_files]
        if files and is_commit(self.revision) and self.revision not in Path(files[0]).parts:
            # without the hub, `datasets` takes any commit that it has
            raise DataError(
                f"{self.path} is in the cache of `datasets`, and not at commit {self.revision}",
                limit="the hub cannot be reached",
                hint="start where there is a network, or name another `data.revision`",
            )
        return loaded


def _digest_of_rows(rows: Any) -> str:
    digest = hashlib.sha256()
    for row in rows:
        digest.update(json.dumps(row, default=repr).encode() + b"\n")
    return digest.hexdigest()


def _parts(path: str) -> tuple[str, str, str | None]:
    """Return the name, the split (empty: the default) and the config of `name#config:split`."""
    source, _, split = path.partition(":")
    name, _, config = source.partition("#")
    return name, split, config or None


def _is_saved(folder: Path) -> bool:
    return (folder / "state.json").is_file() or (folder / "dataset_dict.json").is_file()


def _files_of(folder: Path, *, split: str, config: str | None, path: str) -> tuple[Path, ...]:
    """Return the files of a directory's split, as `datasets` finds them."""
    import datasets

    with _read_by_datasets(path):
        builder = datasets.load_dataset_builder(str(folder), config)
        found: dict[str, Any] = builder.config.data_files or {}
        return tuple(Path(file) for file in found[split or "train"])


def _unread_files(folder: Path, read: Sequence[Path]) -> tuple[str, ...]:
    """Return a note on files of a directory that look like data and are not in the split."""
    known = {file.resolve() for file in read}
    others = [
        str(file.relative_to(folder))
        for file in sorted(folder.rglob("*"))
        if file.suffix in READERS and file.suffix != ".md" and file.resolve() not in known
    ]
    more = f" and {len(others) - _MAX_SHOWN} more" if len(others) > _MAX_SHOWN else ""
    named = ", ".join(others[:_MAX_SHOWN])
    return (f"Files of {folder} that are not read: {named}{more}",) if others else ()


def _load(
    name: str,
    *,
    split: str,
    path: str,
    config: str | None = None,
    data_files: str | None = None,
    revision: str | None = None,
) -> Any:
    """Load a data set through `datasets`."""
    import datasets

    datasets.disable_progress_bars()
    with _read_by_datasets(path):
        if _is_saved(Path(name)):
            loaded = datasets.load_from_disk(name)
            if isinstance(loaded, datasets.DatasetDict):
                return _undecoded(loaded[split])
            if split not in ("train", str(loaded.split)):
                raise ValueError(f"it was saved without splits, and there is no {split}")
            return _undecoded(loaded)
        return _undecoded(
            datasets.load_dataset(
                name, config, split=split, data_files=data_files, revision=revision
            )
        )


def _undecoded(loaded: Any) -> Any:
    """Return a data set whose images are given as they are stored: as bytes, or the path of a file.

    Else they would be decoded to objects that know neither, and so would sounds and films.
    """
    import datasets

    stored = {name: _as_stored(feature) for name, feature in loaded.features.items()}
    loaded.info.features = datasets.Features(stored)  # a cast would write all rows anew
    return loaded


def _as_stored(feature: Any) -> Any:
    """Return the type of a column, or of what is in it, that is not decoded."""
    import datasets

    if isinstance(feature, dict):
        return {name: _as_stored(one) for name, one in feature.items()}
    if isinstance(feature, datasets.List | datasets.LargeList):
        return replace(feature, feature=_as_stored(feature.feature))
    if isinstance(feature, datasets.Image | datasets.Audio | datasets.Video):
        return replace(feature, decode=False)
    return feature


@contextmanager
def _read_by_datasets(path: str) -> Iterator[None]:
    """Turn the failures of `datasets` into one error."""
    import datasets

    failures = (OSError, ValueError, KeyError, RuntimeError, datasets.exceptions.DatasetsError)
    try:
        yield
    except failures as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise DataError(
            f"{path} cannot be loaded as a data set: {reason}",
            limit="`data.path` must be a file, a directory of data files or a Hub id in reach",
            hint="without a network set `data.path` to a local .jsonl, .json, .csv or .parquet"
            " file, or a directory of them",
        ) from error
