"""The file that a model's layers wait in: where it is, and which weights it was made from.

A store is known by a hash of all that its model's files contain, taken while the layers are
written. Next to it is a record of the files' inodes, sizes and times. While these are unchanged, a
start takes the hashes from the record; else it reads the files again.
"""

import hashlib
import json
import re
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from finetune.env import stores_dir
from finetune.errors import ModelError
from finetune.files.atomic import write_atomically
from finetune.model.checkpoint import is_loaded, load_published
from finetune.model.config import known_folder, model_folder
from finetune.model.empty import config_of
from finetune.recipe.sections import ModelSection
from offload.engine.host.store import Store, StoreWriter, require_store, sole_builder, unusable
from offload.engine.model.capture import CaptureWeights, OnPut
from offload.errors import StoreError
from offload.plan.facts.codec import CODECS

_NUM_THREADS = 4

Contents = Mapping[str, str]  # name of a file -> hash of all of it


def store_path(model: str, dtype: str, codec: str) -> Path:
    """Return the file of a model's store; another model, dtype or codec has another file."""
    path = str(Path(model).resolve()) if Path(model).is_dir() else model
    key = hashlib.sha256("\n".join((path, dtype, codec)).encode()).hexdigest()[:12]
    name = re.sub(r"[^A-Za-z0-9._-]", "-", Path(path).name)
    return stores_dir() / f"{name}-{dtype}-{codec}-{key}.store"


def identity(contents: Contents, dtype: str, codec: str) -> dict[str, Any]:
    """Return what a store depends on: when any of it changes, the store is built anew."""
    return {
        "contents": dict(contents),
        "dtype": dtype,
        "codec": codec,
        "transformers": version("transformers"),
    }


def weights_digest(section: ModelSection, codec: str) -> str:
    """Return a digest of all that a model is made from.

    Files are read only if they have changed since they were last read.

    Args:
        section: The model.
        codec: Of its store.

    Raises:
        ModelError: Weights are missing, or change meanwhile.
    """
    path = section.path
    if section.init == "random" or path is None:
        return hashlib.sha256(config_of(section).to_json_string().encode()).hexdigest()
    files = WeightFiles(model_folder(section), store_path(path, section.dtype, codec))
    contents = files.recorded() or files.read()
    return hashlib.sha256(json.dumps(contents, sort_keys=True).encode()).hexdigest()


def layer_store(
    section: ModelSection,
    codec: str,
    device: str,
    on_put: OnPut,
) -> tuple[Store, tuple[str, ...]]:
    """Open the store of a model's weights, which is written first if necessary.

    Args:
        section: A model with published weights.
        codec: Of the layers in the store.
        device: What encodes them.
        on_put: Called with the progress of writing.

    Returns:
        The store, and what the user should know about it.

    Raises:
        ModelError: Weights are missing, do not match the config, or change meanwhile.
        TransferError: The disk is full.
        CodecError: Weights cannot be written by the codec.
    """
    path, dtype = section.path, section.dtype
    assert path is not None
    file = store_path(path, dtype, codec)
    with sole_builder(file):
        try:
            return _open_store(section, codec, file)
        except StoreError as error:
            note = (
                f"Built the store anew: {error.what}."
                if file.exists()
                else f"Wrote the layers of {path} to {file}."
            )
            contents = _build_store(section, codec, file, device, on_put)
            return Store(file, identity=identity(contents, dtype, codec)), (note,)


def _open_store(section: ModelSection, codec: str, file: Path) -> tuple[Store, tuple[str, ...]]:
    """Open a store, after checking that the weights are still those that it was made from.

    Raises:
        StoreError: There is none, or it has to be built again.
    """
    require_store(file)  # before all weights are read for one that is not there
    folder, dtype = known_folder(section), section.dtype
    if folder is None:
        raise unusable(file, f"{section.path} is not in the cache")
    files = WeightFiles(folder, file)
    contents = files.recorded()
    if contents is not None:
        return Store(file, identity=identity(contents, dtype, codec)), ()
    store = Store(file, identity=identity(files.read(), dtype, codec))
    path = section.path
    note = f"Files of {path} were touched, so all were read again: they hold what {file} holds."
    return store, (note,)


def _build_store(
    section: ModelSection, codec: str, file: Path, device: str, on_put: OnPut
) -> Contents:
    """Write a store; return the contents of the files that it was made from."""
    make_writer = partial(StoreWriter, file, encoding_device=torch.device(device))
    folder, dtype = model_folder(section), section.dtype
    files = WeightFiles(folder, file)
    kept = None
    if CODECS[codec].published:
        from finetune.model.form import kept_in

        kept = kept_in(folder)
    with CaptureWeights(
        make_writer, codec=codec, kept=kept, is_loaded=is_loaded, on_put=on_put
    ) as captured:
        with files.reading() as contents:
            model = load_published(str(folder), dtype)
        writer = captured.backing
        if writer is None:
            raise ModelError(
                f"model.path: {section.path} was loaded and no weight of its layers was seen",
                limit="the disk tier writes each as transformers registers it",
                hint="`offload.tier: ram`, or another version of transformers",
            )
        writer.finish(_all_but(model, writer.names), identity(contents, dtype, codec))
    return contents


def _all_but(model: torch.nn.Module, names: Collection[str]) -> dict[str, torch.Tensor]:
    """Return the model's other parameters and buffers; tied ones once, by their first name."""
    state = model.state_dict(keep_vars=True)
    first_names = {id(tensor): name for name, tensor in reversed(state.items())}
    return {name: state[name].detach() for name in first_names.values() if name not in names}


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
        self._record.parent.mkdir(parents=True, exist_ok=True)
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
