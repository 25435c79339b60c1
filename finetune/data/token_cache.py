"""A data set's tokens in a cache file: named by a digest of all that they depend on."""

import hashlib
import json
import os
import zipfile
import zlib
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from finetune.data.rows import Conversation, LossOn
from finetune.data.tokenize import check_is_fast

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from transformers import PreTrainedTokenizerBase

_CACHE_VERSION = 2
_CACHED = (
    *("kept", "input_ids", "labels", "offsets"),
    *("is_truncated", "end_ids", "end_offsets"),
)


def cache_key(
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


def read_cache(file: Path, *, notes: list[str]) -> "dict[str, NDArray[Any]] | None":
    """Return the arrays of a cache file, or None with a note if it is torn."""
    try:
        with file.open("rb") as stream, np.load(stream, allow_pickle=False) as stored:
            return {name: stored[name] for name in _CACHED}
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return None
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        notes.append(f"the token cache {file} was torn ({type(error).__name__}); it was rebuilt")
        return None


def write_cache(file: Path, arrays: "dict[str, NDArray[Any]]", *, notes: list[str]) -> None:
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
