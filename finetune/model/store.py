"""Which weights a store was made from, and where it is.

A store is known by a hash of all that its model's files contain, taken while the layers are
written. Next to it is a record of the files' inodes, sizes and times. While these are unchanged, a
start takes the hashes from the record; else it reads the files again.
"""

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

from finetune.env import stores_dir
from finetune.errors import ModelError
from finetune.files.atomic import write_atomically
from offload.plan.facts.codec import CodecName

_NUM_THREADS = 4

Contents = Mapping[str, str]  # name of a file -> hash of all of it


def store_path(model: str, dtype: str, codec: CodecName) -> Path:
    """Return the file of a model's store; another model, dtype or codec has another file."""
    path = str(Path(model).resolve()) if Path(model).is_dir() else model
    key = hashlib.sha256("\n".join((path, dtype, codec)).encode()).hexdigest()[:12]
    name = re.sub(r"[^A-Za-z0-9._-]", "-", Path(path).name)
    return stores_dir() / f"{name}-{dtype}-{codec}-{key}.store"


def identity(contents: Contents, dtype: str, codec: CodecName) -> dict[str, Any]:
    """Return what a store depends on: when any of it changes, the store is built anew."""
    return {
        "contents": dict(contents),
        "dtype": dtype,
        "codec": codec,
        "transformers": version("transformers"),
    }


class WeightFiles:
    """The files of a model's weights, and the record of what a store was made from."""

    def __init__(self, folder: Path, store: Path) -> None:
        """Take note of the files as they are now; none is read.

        Args:
            folder: Where config.json and the shards are.
            store: The store's file.
        """
        self._files = sorted(
            file
            for pattern in ("config.json", "*.safetensors*")
            for file in folder.glob(pattern)
            if file.is_file()
        )
        self._record = store.with_name(store.name + ".source")
        self._stamps = {file.name: _stamp(file) for file in self._files}

    def recorded(self) -> Contents | None:
        """Return the contents by the record; None if a file is another by inode, size or times."""
        try:
            record = json.loads(self._record.read_text())
            contents: Contents = record["contents"] if record["stamps"] == self._stamps else {}
        except (OSError, ValueError, TypeError, KeyError):  # absent or damaged
            return None
        return contents or None

    def read(self) -> Contents:
        """Read all files and write the record.

        Raises:
            ModelError: A file changed meanwhile.
        """
        with self.reading() as contents:
            pass
        return contents

    @contextmanager
    def reading(self) -> Iterator[Contents]:
        """Read all files on separate threads, while they are also read by the body.

        The contents are there after the body, and the record is written.

        Raises:
            ModelError: A file changed meanwhile.
        """
        contents: dict[str, str] = {}
        with ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="hash") as threads:
            hashes = {file.name: threads.submit(_hash, file) for file in self._files}
            try:
                yield contents
            except BaseException:
                threads.shutdown(wait=False, cancel_futures=True)
                raise
            contents |= {name: found.result() for name, found in hashes.items()}
        self._require_unchanged()
        record = {"stamps": self._stamps, "contents": contents}
        write_atomically(self._record, json.dumps(record))

    def _require_unchanged(self) -> None:
        changed = [file for file in self._files if _stamp(file) != self._stamps[file.name]]
        if changed:
            raise ModelError(
                f"{changed[0]} changed while it was read",
                limit="layers that wait on disk, or encoded, are written from one set of weights",
                hint="start again when nothing writes to it",
            )


def _stamp(file: Path) -> list[int]:
    """Return values that any write to a file changes: its ctime cannot be set."""
    with _named_errors(file):
        status = file.stat()
    return [status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns]


def _hash(file: Path) -> str:
    with _named_errors(file), file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


@contextmanager
def _named_errors(file: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ModelError(
            f"{file} cannot be read: {error.strerror}",
            limit="all files of a model's weights are read while its layers are written",
            hint="check the disk and `model.path`",
        ) from error
