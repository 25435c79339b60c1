"""Files of a repository, fetched into the hub's cache: with a size, a rate, an end, and resumed.

What is to be fetched is known before it begins: the files that the weights' index names, with their
sizes by the hub. A file that is cut keeps what has come, next to where it is to be, under its
digest: the next start goes on there. The hub's client keeps nothing of such a file, so its plain
HTTP is used for weights in place of its `hf_hub_download`, which then finds them in its cache.

The client draws bars of its own, one per file, which are turned off: they would fill a log with
thousands of lines.
"""

import errno
import hashlib
import shutil
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Event, Lock
from typing import Any

from finetune.files.shards import INDEX, read_weight_map
from finetune.hub.repository import (
    File,
    Repository,
    cached_file,
    has_cached_weights,
    http_error,
    look_up,
    refusals,
    require_reachable,
    weight_names,
)
from finetune.report.format import shown_gib
from finetune.report.screen import Work, Working

NUM_AT_A_TIME = 8
_PIECE_BYTES = 2**20
_DESCRIBING = ("*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken")
_CUT = ".cut"  # ends the name of a file that has not come whole
_SHA256_DIGITS = 64
_FULL = (errno.ENOSPC, errno.EDQUOT)


def fetch_description(repository: Repository) -> str:
    """Fetch what a repository holds besides weights: config, tokenizer, and the weights' index.

    Returns:
        The commit that it is of.

    Raises:
        ModelError: The hub does not give it, or the disk is full.
    """
    require_reachable(repository)
    from huggingface_hub import snapshot_download

    with refusals(repository), _room_named(repository):
        folder = snapshot_download(
            repository.id, revision=repository.revision, allow_patterns=list(_DESCRIBING)
        )
    return Path(folder).name


@dataclass(frozen=True, kw_only=True, slots=True)
class Missing:
    """The weights of a model that are not on this machine."""

    repository: Repository  # at a commit
    files: Mapping[str, File]  # by their names

    @property
    def num_bytes(self) -> int:
        """Bytes of all files."""
        return sum(file.num_bytes for file in self.files.values())

    @property
    def partials(self) -> tuple[Path, ...]:
        """Where each of them is until it is whole."""
        return tuple(_partial(self.repository, file) for file in self.files.values())

    @property
    def num_kept_bytes(self) -> int:
        """Bytes of them that came before they were cut."""
        return sum(one.stat().st_size for one in self.partials if one.exists())

    def require_room(self) -> None:
        """Check that the rest fits onto the disk of the cache.

        Raises:
            ModelError: It does not.
        """
        needed_bytes, free_bytes = self.num_bytes - self.num_kept_bytes, free_in_cache()
        if needed_bytes > free_bytes:
            raise self.repository.error(
                f"{self.repository.id} needs {shown_gib(needed_bytes)} at {cache()}, and"
                f" {shown_gib(free_bytes)} is free",
                hint="`hf cache ls` shows what else is there and `hf cache rm` removes it; or"
                " `export HF_HOME=DIR` on a larger disk",
            )


def cache() -> Path:
    """Return the folder that the hub's client keeps repositories in."""
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)


def free_in_cache() -> int:
    """Return the bytes that are free on the disk of the cache, which need not be there yet."""
    folder = cache()
    return shutil.disk_usage(next(one for one in (folder, *folder.parents) if one.exists())).free


def missing_weights(repository: Repository) -> Missing:
    """Return the weights at a commit that are not here; its description must be.

    Raises:
        ModelError: The hub does not have them, or not in files that are read.
    """
    listing = look_up(repository)
    (name,) = names = weight_names(repository, listing)
    if name == INDEX:
        index = cached_file(repository.id, INDEX, repository.revision)
        assert index is not None, "it has been fetched"
        names = sorted(set(read_weight_map(index).values()))
    for name in names:
        if name not in listing.files:
            raise repository.error(
                f"{repository.id} lacks {name}, which {INDEX} names",
                limit="its upload is not complete, or failed",
                hint=f"look at {repository.page}/tree/{repository.revision}, or name another"
                f" commit by `{repository.revision_setting}`",
            )
    absent = (
        name for name in names if cached_file(repository.id, name, repository.revision) is None
    )
    return Missing(repository=repository, files={name: listing.files[name] for name in absent})


def download_weights(
    repository: Repository, *, working: Working, note: Callable[[str], None]
) -> None:
    """Fetch the weights of a model, and what describes them, if they are not in the cache.

    Args:
        repository: The model's.
        working: Shows the progress of some work.
        note: Shows a line.

    Raises:
        ModelError: The hub refuses, the connection breaks, or the disk is full.
    """
    if has_cached_weights(repository.id, repository.revision):
        return
    require_reachable(repository)
    weight_names(repository, look_up(repository))
    pinned = replace(repository, revision=fetch_description(repository))
    missing = missing_weights(pinned)
    missing.require_room()
    total, kept = missing.num_bytes, missing.num_kept_bytes
    num = len(missing.files)
    files = f"{num} files" if num > 1 else "1 file"
    note(f"Downloading {pinned.id}: {shown_gib(total)}, {files}, at commit {pinned.revision}")
    note(
        f"  to {cache()}, which takes {shown_gib(total - kept)} more and has"
        f" {shown_gib(free_in_cache())} free"
    )
    if kept:
        note(f"  {shown_gib(kept)} came before it was cut: it goes on from there")
    note("  If it is cut, the same command goes on from there.")
    with working(f"Downloading {pinned.id}", "bytes") as show:
        _fetch_all(missing, show)


class _StoppedError(Exception):
    """Another file has failed, or the user has stopped the download."""


def _fetch_all(missing: Missing, show: Work) -> None:
    """Fetch files, several at a time; if one fails the others end after what they have."""
    stop = Event()
    counter = _counter(missing.num_bytes - missing.num_kept_bytes, show, stop)
    with _small_pieces(), ThreadPoolExecutor(NUM_AT_A_TIME) as threads:
        every = [
            threads.submit(_fetch, missing.repository, name, file, counter)
            for name, file in missing.files.items()
        ]
        try:
            for one in as_completed(every):
                one.result()
        except BaseException:
            stop.set()
            threads.shutdown(wait=False, cancel_futures=True)
            raise


@contextmanager
def _small_pieces() -> Iterator[None]:
    """Have the hub's client read 1 MiB at a time: of 10, slow lines bring none for a minute."""
    from huggingface_hub import constants

    before = constants.DOWNLOAD_CHUNK_SIZE
    constants.DOWNLOAD_CHUNK_SIZE = _PIECE_BYTES
    try:
        yield
    finally:
        constants.DOWNLOAD_CHUNK_SIZE = before


def _fetch(repository: Repository, name: str, file: File, counter: type[Any]) -> None:
    """Fetch a file, or the rest of it, and put it where the hub's client looks for it."""
    from huggingface_hub import constants, hf_hub_download, hf_hub_url
    from huggingface_hub.file_download import http_get
    from huggingface_hub.utils import (  # type: ignore[attr-defined]  # they are not marked as
        WeakFileLock,
        build_hf_headers,
    )

    partial, revision = _partial(repository, file), repository.revision
    whole = partial.with_name(file.digest)
    lock = cache() / ".locks" / partial.parents[1].name / f"{file.digest}.lock"  # the client's
    for folder in (partial.parent, lock.parent):
        folder.mkdir(parents=True, exist_ok=True)
    with refusals(repository), _room_named(repository), _cut_named(repository, name):
        if file.num_bytes <= constants.MAX_HTTP_DOWNLOAD_SIZE:
            with WeakFileLock(lock):
                if not whole.exists():
                    with partial.open("ab") as content:
                        num_before = content.tell()
                        if num_before < file.num_bytes:
                            http_get(
                                hf_hub_url(repository.id, name, revision=revision),
                                content,
                                resume_size=num_before,
                                headers=build_hf_headers(),
                                expected_size=file.num_bytes,
                                tqdm_class=counter,
                            )
                    if num_before:
                        _require_digest(repository, partial, name)
                    partial.rename(whole)
        hf_hub_download(repository.id, name, revision=revision, tqdm_class=counter)


def _partial(repository: Repository, file: File) -> Path:
    """Return where a file is until it is whole."""
    from huggingface_hub.file_download import repo_folder_name

    folder = repo_folder_name(repo_id=repository.id, repo_type=repository.kind)
    return cache() / folder / "blobs" / f"{file.digest}{_CUT}"


def _require_digest(repository: Repository, partial: Path, name: str) -> None:
    """Check a file that came in several parts.

    Raises:
        ModelError: It is not what the hub has; it is removed.
    """
    digest = partial.name.removesuffix(_CUT)
    with partial.open("rb") as content:
        found = hashlib.file_digest(content, lambda: _hash(partial, digest)).hexdigest()
    if found != digest:
        partial.unlink()
        raise repository.error(
            f"{name} of {repository.id} came in several parts, and together they are damaged",
            limit=f"its digest is {digest[:8]}..., and not {found[:8]}...",
            hint="start again: it was removed, and is fetched anew",
        )


def _hash(file: Path, digest: str) -> Any:
    """Return what computes such a digest of a file: SHA-256, or git's of a small one."""
    if len(digest) == _SHA256_DIGITS:
        return hashlib.sha256()
    return hashlib.sha1(f"blob {file.stat().st_size}\0".encode())


@contextmanager
def _room_named(repository: Repository) -> Iterator[None]:
    """Name the disk that was full.

    Raises:
        ModelError: It was.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in _FULL:
            raise
        raise repository.error(
            f"the disk of {cache()} is full, and {repository.id} has not come whole",
            limit="what has come is kept",
            hint=f"free space (`df -h {cache()}`, `hf cache ls`), then start again",
        ) from error


@contextmanager
def _cut_named(repository: Repository, name: str) -> Iterator[None]:
    """Say that a connection broke, and what that means.

    Raises:
        ModelError: It did.
    """
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        yield
    except HfHubHTTPError:
        raise  # which is an answer
    except (http_error(), LocalEntryNotFoundError, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise repository.error(
            f"the connection to the hub broke in {name} of {repository.id}",
            limit="what has come is kept",
            hint="start again: the download goes on where it broke",
        ) from error


def _counter(total: int, show: Work, stop: Event) -> type[Any]:
    """Return what the hub's client takes for the bar of a file, for the sum over all files."""
    from tqdm import tqdm  # type: ignore[import-untyped]  # no stub has it

    lock, done = Lock(), 0

    class Counter(tqdm):  # type: ignore[misc]  # tqdm has no types
        """Counts the bytes of a file."""

        def __init__(self, *_: Any, **__: Any) -> None:
            super().__init__(disable=True)

        def update(self, n: float | None = 1) -> None:
            nonlocal done
            if stop.is_set():
                raise _StoppedError
            with lock:
                done += int(n or 0)
                show(done, total)

        def update_transfer(self, _n: float) -> None:
            """Count nothing: xet reports what it has received, and then again what it wrote."""

    return Counter
