"""Folders that are written whole and checked when they are read: their files' sizes and hashes.

A folder is written under another name, gets a manifest as its last file, is flushed to the disk and
is renamed in one step. Readers first compare each file with the manifest, so that a flipped bit, a
file truncated by a copy, or a file of another run is detected.
"""

import hashlib
import json
import os
import re
import secrets
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from finetune.errors import CheckpointError
from finetune.files.atomic import PARTIAL, flush, remove, write_atomically

# ---------------------------------------------------------------------------------------------
# Text files that end with the SHA-256 of what is above their last line.
#
# A recipe has the seal in a comment, which any YAML reader skips, and announces it in its first
# line, so that a truncated file is detected. A JSON object has it as its last entry: truncated, it
# is not JSON, and if the entry's name is damaged it still ends with a hash. A file without a seal
# is of an older version, or was changed on purpose.

_YAML_HEAD = "# Written by a run, with a hash in its last line: copy it to change it.\n"
_YAML_MARK = "# SHA-256 of the lines above: "
_JSON_MARK = ',\n "sha256": "'
_JSON_HASH = re.compile(r'"[0-9a-f]{64}"\s*}\s*$')


def sealed_yaml(text: str) -> str:
    """Return YAML with its seal, as a last line."""
    content = _YAML_HEAD + text
    return f"{content}{_YAML_MARK}{_digest_of(content)}\n"


def has_yaml_seal(text: str) -> bool:
    """Return whether YAML has a seal, or a part of it."""
    return _YAML_MARK in text or text.startswith(_YAML_HEAD)


def is_sealed_yaml(text: str) -> bool:
    """Return whether YAML matches its seal, or has none."""
    content, _, seal = text.rpartition(_YAML_MARK)
    return not has_yaml_seal(text) or seal == f"{_digest_of(content)}\n"


def sealed_json(text: str) -> str:
    """Return a JSON object, written over several lines, with its seal as its last entry."""
    content = text.rstrip().removesuffix("\n}")
    return f'{content}{_JSON_MARK}{_digest_of(content)}"\n}}\n'


def is_sealed_json(text: str) -> bool:
    """Return whether a JSON object matches its seal, or has none."""
    content, mark, seal = text.rpartition(_JSON_MARK)
    has_seal = mark or _JSON_HASH.search(text)
    return not has_seal or seal == f'{_digest_of(content)}"\n}}\n'


def _digest_of(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


MANIFEST = "manifest.json"
_FORMAT = 1
_NUM_RANDOM_BYTES = 4
_SHOWN_DIGITS = 12


@contextmanager
def whole_folder(final: Path, *, unlisted: Collection[str] = ()) -> Iterator[Path]:
    """Yield a new, empty folder, which becomes `final` once it is whole and on the disk.

    A failure leaves nothing behind, and an existing `final` unchanged.

    Args:
        final: The folder's name; an existing folder is replaced.
        unlisted: Files that users may change, which the manifest leaves out.

    Raises:
        CheckpointError: It cannot be written: the disk is full, or may not be written to.
    """
    from safetensors import SafetensorError  # a browser's Python, which only plans, has none

    partial = _fresh(final)
    try:
        try:
            partial.mkdir(parents=True)
            yield partial
            _write_manifest(partial, unlisted=unlisted)
            _replace(final, partial)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(
                f"{final} cannot be written: {_reason(error)}",
                limit="nothing of it is left, and what was there before is unchanged",
                hint=f"free space (`df -h {final.parent}`), raise the limit (`ulimit -f`) or fix"
                f" the permissions (`ls -ld {final.parent}`); `--resume` then goes on from the"
                " newest checkpoint",
            ) from error
    except BaseException:
        with suppress(OSError):
            remove(partial)
        raise


def clear_partial(folder: Path, *, name: str) -> None:
    """Remove remains of folders whose names began with `name`, left by killed processes."""
    for left in folder.glob(f"{PARTIAL}{name}*-" + "[0-9a-f]" * 2 * _NUM_RANDOM_BYTES):
        remove(left)


def has_manifest(folder: Path) -> bool:
    """Return whether a folder has a manifest; those of older versions have none."""
    return (folder / MANIFEST).exists()


def damage(folder: Path, *, needs: Collection[str]) -> str | None:
    """Describe what differs from the folder's manifest; None if nothing does.

    Args:
        folder: With a manifest.
        needs: Files that must be there.
    """
    try:
        listed = _read_manifest(folder / MANIFEST)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"{MANIFEST} cannot be read ({type(error).__name__}: {error})"
    for name in needs:
        if name not in listed:
            return f"{MANIFEST} does not list {name}"
    for name, (num_bytes, _) in listed.items():
        file = folder / name
        if not file.is_file():
            return f"{name} is missing"
        found_bytes = file.stat().st_size
        if found_bytes != num_bytes:
            return f"{name} has {found_bytes:,} bytes in place of {num_bytes:,}"
    found = _digests([folder / name for name in listed])
    for (name, (_, digest)), now in zip(listed.items(), found, strict=True):
        if now != digest:
            return (
                f"{name} is not what was written: its SHA-256 is {now[:_SHOWN_DIGITS]}..., not"
                f" {digest[:_SHOWN_DIGITS]}..."
            )
    return None


def _fresh(final: Path) -> Path:
    """Return an unused name next to `final`."""
    return final.with_name(f"{PARTIAL}{final.name}-{secrets.token_hex(_NUM_RANDOM_BYTES)}")


def _write_manifest(folder: Path, *, unlisted: Collection[str]) -> None:
    """Hash a folder's files while they are flushed, and list them in a manifest, written last."""
    files = sorted(file for file in folder.iterdir() if file.name not in unlisted)
    with ThreadPoolExecutor() as pool:
        flushed = [pool.submit(flush, file) for file in folder.iterdir()]
        digests = _digests(files)
        for one in flushed:
            one.result()
    listed = {
        file.name: {"num_bytes": file.stat().st_size, "sha256": digest}
        for file, digest in zip(files, digests, strict=True)
    }
    content = {"format": _FORMAT, "files": listed}
    write_atomically(folder / MANIFEST, json.dumps(content, indent=1) + "\n")
    flush(folder)


def _read_manifest(file: Path) -> dict[str, tuple[int, str]]:
    content: dict[str, Any] = json.loads(file.read_text())
    if content["format"] != _FORMAT:
        raise ValueError(f"its format is {content['format']}, this version's is {_FORMAT}")
    listed = {name: (of["num_bytes"], of["sha256"]) for name, of in content["files"].items()}
    for name in listed:
        if name != Path(name).name:
            raise ValueError(f"{name!r} is no name of a file")
    return listed


def _replace(final: Path, partial: Path) -> None:
    """Rename a folder to its name; an old folder is removed only once the new one is in place."""
    aside = None
    if os.path.lexists(final):
        aside = _fresh(final)
        final.rename(aside)
    try:
        partial.rename(final)
    except OSError:
        if aside is not None:
            aside.rename(final)
        raise
    flush(final.parent)
    if aside is not None:
        remove(aside)


def _digests(files: Sequence[Path]) -> list[str]:
    """Return the SHA-256 of files, read in one pass each, side by side."""
    with ThreadPoolExecutor() as pool:
        return list(pool.map(_digest, files))


def _digest(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _reason(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return (
            f"{Path(error.filename).name}: {error.strerror}" if error.filename else error.strerror
        )
    return str(error).splitlines()[0]
