"""Weights that are on the hub and not on this machine yet: fetched with a size, a rate and an end.

What is to be fetched is known before it begins: the files that the weights' index names, with their
sizes by the hub. The hub's client draws bars of its own, one per file, which are turned off: they
would fill a log with thousands of lines.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from threading import Lock
from typing import Any

from finetune.errors import ModelError, read_by_library
from finetune.files.shards import INDEX, SINGLE, read_weight_map
from finetune.model.config import cached_file, is_hub_reachable
from finetune.report.screen import Work, Working

NUM_AT_A_TIME = 8


def download_weights(path: str, *, working: Working, note: Callable[[str], None]) -> None:
    """Fetch the weights of a model into the hub's cache, if it is on the hub and they are missing.

    Files that are there already are not fetched again. If the hub cannot be
    reached nothing is done: whoever reads the weights names what is missing.

    Args:
        path: A directory, or the id of a hub repository.
        working: Shows the progress of some work.
        note: Shows a line.

    Raises:
        ModelError: The hub refuses, or the disk is full.
    """
    if Path(path).is_dir() or not _is_incomplete(path) or not is_hub_reachable():
        return
    from huggingface_hub import constants, hf_hub_download

    with (
        read_by_library(
            f"model.path: {path} cannot be downloaded",
            error=ModelError,
            limit="files that have come whole are kept",
            hint=f"start again; `df -h {constants.HF_HUB_CACHE}` shows the room that is left",
        ),
        ThreadPoolExecutor(NUM_AT_A_TIME) as threads,
    ):
        names = _names_by_hub(path)
        found = threads.map(lambda name: hf_hub_download(path, name, dry_run=True), names)
        missing = {one.filename: one.file_size or 0 for one in found if one.will_download}
        total = sum(missing.values())
        files = f"{len(missing)} files" if len(missing) > 1 else "1 file"
        note(f"Downloading {path}: {total / 1e9:,.2f} GB, {files}, to {constants.HF_HUB_CACHE}")
        with working(f"Downloading {path}", "bytes") as show:
            counter = _counter(total, show)
            for _ in threads.map(
                lambda name: hf_hub_download(path, name, tqdm_class=counter), missing
            ):
                pass


def _is_incomplete(path: str) -> bool:
    """Return whether a file of a model's weights is not in the cache."""
    if cached_file(path, SINGLE) is not None:
        return False
    index = cached_file(path, INDEX)
    return index is None or any(
        cached_file(path, name) is None for name in read_weight_map(index).values()
    )


def _names_by_hub(path: str) -> list[str]:
    """Return the files of a model's weights."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError

    with suppress(EntryNotFoundError):
        hf_hub_download(path, SINGLE, dry_run=True)
        return [SINGLE]
    index = hf_hub_download(path, INDEX)
    return sorted(set(read_weight_map(Path(index)).values()))


def _counter(total: int, show: Work) -> type[Any]:
    """Return what the hub's client takes for the bar of a file, for the sum over all files."""
    from tqdm import tqdm  # type: ignore[import-untyped]  # no stub has it

    lock, done = Lock(), 0

    class Counter(tqdm):  # type: ignore[misc]  # tqdm has no types
        """Counts the bytes of a file."""

        def __init__(self, *_: Any, **__: Any) -> None:
            super().__init__(disable=True)

        def update(self, n: float | None = 1) -> None:
            nonlocal done
            with lock:
                done += int(n or 0)
                show(done, total)

    return Counter
