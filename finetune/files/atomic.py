"""Paths as users write them, and outputs that a kill leaves whole: the old content or the new.

Every output is first written under a unique name next to its target: `partial-NAME-` and random
letters. Files of such a name are created exclusively, so no file of the user's is truncated and no
link is followed.
"""

import fcntl
import json
import os
import secrets
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from finetune.errors import FinetuneError, MergeError

PARTIAL = "partial-"
_MARK = ".sluice-partial"


def expanded(text: str) -> Path:
    """Return a path with its `~` or `~user` expanded, if there is such a user."""
    try:
        return Path(text).expanduser()
    except (RuntimeError, ValueError):  # an unknown home, or text that no path can have
        return Path(text)


def write_atomically(file: Path, text: str, *, mode: int | None = None) -> None:
    """Replace a file's content in one step; `mode` is its permissions, if not the usual ones.

    Raises:
        OSError: It cannot be written; the error names it, and the old content is still there.
    """
    partial = file.with_name(f"{PARTIAL}{file.name}-{secrets.token_hex(4)}")
    with naming(file):
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        try:
            with open(descriptor, "w", encoding="utf-8") as stream:  # noqa: PTH123 - a descriptor
                if mode is not None:
                    os.fchmod(descriptor, mode)
                stream.write(text)
                stream.flush()
                os.fsync(descriptor)
            partial.replace(file)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise


@contextmanager
def workspace(target: Path) -> Iterator[Path]:
    """Yield a new, empty folder next to `target`; it is removed at the end with its contents.

    A folder that a killed process has left is removed first. It is recognised by its name, by the
    marker file in it and by its lock, which ends with the process.

    Raises:
        MergeError: A living process writes the same target.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    prefix = f"{PARTIAL}{target.name}-"
    _clear_left(target.parent, prefix)
    folder = Path(tempfile.mkdtemp(prefix=prefix, dir=target.parent))
    lock = os.open(folder, os.O_RDONLY | os.O_NOFOLLOW)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        (folder / _MARK).touch(exist_ok=False)  # marked once it is locked
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


@contextmanager
def becoming(out: Path) -> Iterator[Path]:
    """Yield an empty folder that becomes `out` at the end; a failure leaves nothing behind.

    Raises:
        MergeError: `out` is there, or another process writes it.
    """
    require_free(out)
    with workspace(out) as work:
        folder = work / out.name
        folder.mkdir()
        yield folder
        flush(folder)
        require_free(out)
        folder.rename(out)
        flush(out.parent)


def require_free(out: Path) -> None:
    """Check that nothing has this name yet, not even a link that leads nowhere.

    Raises:
        MergeError: Something has.
    """
    if os.path.lexists(out):
        raise MergeError(
            f"{out} is there already",
            limit="nothing is overwritten",
            hint="give a name that is free",
        )


def flush(path: Path) -> None:
    """Force a file, or the names in a directory, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def naming(file: Path) -> Iterator[None]:
    """Name the file in an error of the system: a write that fails does not say of which file."""
    try:
        yield
    except OSError as error:
        error.filename, error.filename2 = str(file), None
        raise


def remove(path: Path) -> None:
    """Remove a file, a link (not its target) or a folder with its contents."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _clear_left(parent: Path, prefix: str) -> None:
    for left in parent.iterdir():
        is_like = left.name.startswith(prefix) and not left.is_symlink()
        if is_like and (left / _MARK).is_file():
            _remove_left(left)


def _remove_left(folder: Path) -> None:
    lock = os.open(folder, os.O_RDONLY | os.O_NOFOLLOW)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder)
    except BlockingIOError as error:
        raise MergeError(
            f"{folder} is being written by another process",
            limit="one process writes a directory",
            hint="wait for it, or give another name",
        ) from error
    finally:
        os.close(lock)


# ---------------------------------------------------------------------------------------------
# JSON files that may be damaged: each is read whole and validated before it is used.
#
# Each kind of file has one `JsonFile`: its schema, and the error for a file that does not match it.
# A value that passes has every key and type that its readers rely on.

MAX_BYTES = 2**30
_SHOWN = 200


@dataclass(frozen=True, kw_only=True, slots=True)
class JsonFile:
    """A kind of JSON file."""

    holds: type[BaseModel]  # checks the content
    error: type[FinetuneError]  # raised if the content is wrong
    limit: str  # what it should be
    hint: str  # how to get one that is right

    def read(self, file: Path) -> Any:
        """Return the content of a file.

        Raises:
            FinetuneError: Of this kind: it cannot be read, is not JSON, or holds something else.
        """
        return self.parsed(self.content(file), source=str(file))

    def content(self, file: Path, *, start: int = 0) -> bytes:
        """Return a file's bytes, if it is a plain file of any size that such a file can have.

        Args:
            file: To be read.
            start: Its first bytes that are left out.
        """
        try:
            status = file.stat()
            if not stat.S_ISREG(status.st_mode):
                raise self.refusal(str(file), "it is no file")
            if status.st_size > MAX_BYTES:
                raise self.refusal(str(file), f"it has {status.st_size:,} bytes")
            with file.open("rb") as opened:
                opened.seek(start)
                return opened.read()
        except OSError as error:
            raise self.refusal(str(file), error.strerror or str(error)) from error

    def parsed(self, content: bytes, *, source: str) -> Any:
        """Return the content of JSON text.

        Args:
            content: The text.
            source: Its name in errors.

        Raises:
            FinetuneError: Of this kind: it is not JSON, or says something else.
        """
        try:
            value = json.loads(content.decode("utf-8-sig"))
        except (ValueError, RecursionError) as error:  # also: not UTF-8, a number too long
            raise self.refusal(source, f"it is not JSON: {error}") from error
        try:
            self.holds.model_validate(value, strict=True)
        except ValidationError as error:
            raise self.refusal(source, _first(error)) from error
        return value

    def refusal(self, source: str, why: str) -> FinetuneError:
        """Return the error for a file with something wrong in it."""
        return self.error(
            f"{source} cannot be read: {why[:_SHOWN]}", limit=self.limit, hint=self.hint
        )


def _first(error: ValidationError) -> str:
    """Describe the first error: where it is, what is there, and what should be."""
    detail = error.errors(include_url=False, include_context=False)[0]
    where = ".".join(str(part)[:40] for part in detail["loc"])
    if detail["type"] == "missing":
        return f"{where} is missing"
    seen = json.dumps(detail["input"], default=str)
    seen = seen if len(seen) <= 40 else seen[:37] + "..."
    problem = detail["msg"].removeprefix("Input ").removeprefix("Value error, ")
    if detail["type"] in ("model_type", "dict_type"):
        problem = "should be an object"
    return f"{where} is {seen}, and {problem}" if where else f"it holds {seen}, and {problem}"
