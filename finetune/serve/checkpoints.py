"""What clients have saved: adapters in peft's format, with AdamW's states where training goes on.

Each is a folder of its own, written whole, with a manifest. A client names a checkpoint, and its
name is looked up in an index: no file or folder is named by a client.
"""

import json
import re
import secrets
import shutil
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field
from safetensors.torch import load_file, save_file

from finetune.clients.requests import ClientState
from finetune.errors import CheckpointError, ConfigError
from finetune.files.atomic import JsonFile, write_atomically
from finetune.files.manifest import (
    clear_partial,
    damage,
    is_sealed_json,
    sealed_json,
    whole_folder,
)
from finetune.run.adapter_folder import CONFIG_FILE, WEIGHTS_FILE
from offload.engine.adapters import AdapterSettings

LEAST_TTL_S, MOST_TTL_S = 1, 10 * 366 * 24 * 3600
Kind = Literal["weights", "sampler_weights", "external_weights"]
"""What a checkpoint is for: to train on, to sample from, to be downloaded."""
RECORD_FILE, MOMENTS_FILE = "checkpoint.json", "optimizer.safetensors"
FILES = (CONFIG_FILE, WEIGHTS_FILE)  # what peft reads
_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
_SCHEME, _FOLDER = "tinker://", re.compile(r"[0-9a-f]{16}")


class Record(BaseModel):
    """What is known of a checkpoint."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    run: str = Field(description="The model id of the client that saved it.")
    kind: Kind = Field(description="What it is for.")
    name: str = Field(pattern=f"^{_NAME.pattern}$", description="The client's name for it.")
    base: str = Field(description="The name of the model that it adapts.")
    rank: int = Field(ge=1, description="The adapter's rank.")
    alpha: float = Field(description="The factor of its branch, times the rank.")
    targets: list[str] = Field(description="Last names of the linears that it is on.")
    seed: int = Field(description="The seed of what is sampled from the client's model.")
    num_steps: int = Field(ge=0, description="Steps of the optimizer that it has had.")
    time_s: float = Field(description="When it was saved, in seconds since 1970.")
    expires_s: float | None = Field(default=None, description="When it is removed; null: never.")
    num_bytes: int = Field(ge=0, description="What its tensors take on disk.")
    notes: Mapping[str, str] | None = Field(default=None, description="What the client notes.")

    @property
    def path(self) -> str:
        """Its name among all checkpoints."""
        return f"{_SCHEME}{self.run}/{self.kind}/{self.name}"

    @property
    def settings(self) -> AdapterSettings:
        """The settings of its adapter."""
        return AdapterSettings(rank=self.rank, alpha=self.alpha, targets=frozenset(self.targets))


def expiry(now_s: float, ttl_s: int | None) -> float | None:
    """Return when a checkpoint is removed that was saved now; None for never.

    Args:
        now_s: Seconds since 1970.
        ttl_s: Seconds that a client asks for.

    Raises:
        ConfigError: They are too few or too many.
    """
    if ttl_s is None:
        return None
    if not LEAST_TTL_S <= ttl_s <= MOST_TTL_S:
        raise ConfigError(
            f"ttl_seconds is {ttl_s if abs(ttl_s) < 2**63 else 'very large'}",
            limit=f"a checkpoint is kept for {LEAST_TTL_S} to {MOST_TTL_S} seconds",
            hint="leave it out: it is kept until it is deleted",
        )
    return now_s + ttl_s


class _Sealed(Record):
    """A record as it is written, with the hash of what is above its last line."""

    sha256: str


_RECORDS = JsonFile(
    holds=_Sealed,
    error=CheckpointError,
    limit="it describes a checkpoint of `sluice serve`, which is left out",
    hint="remove its folder, if nothing else reads it",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Kept:
    record: Record
    folder: Path


class Checkpoints:
    """The checkpoints of a folder; every method may be called from any thread.

    Attributes:
        problems: Records that cannot be read, whose checkpoints are left out.
    """

    def __init__(self, folder: Path) -> None:
        """Read what is there."""
        self._folder, self.problems = folder, list[str]()
        folder.mkdir(parents=True, exist_ok=True)
        clear_partial(folder, name="")
        kept = list[_Kept]()
        for found in sorted(folder.iterdir()):
            if not _FOLDER.fullmatch(found.name):
                continue
            try:
                kept.append(_Kept(record=_record(found), folder=found))
            except CheckpointError as error:
                self.problems.append(str(error))
        kept.sort(key=lambda one: one.record.time_s)
        self._kept = {one.record.path: one for one in kept}
        self._changed = threading.RLock()
        for one in kept:
            if self._kept[one.record.path] is not one:  # it was replaced, and the server killed
                shutil.rmtree(one.folder)

    def __iter__(self) -> Iterator[Record]:
        """Iterate over those that have not expired, the oldest first."""
        with self._changed:
            now_s = time.time()  # noqa: TID251 - a date
            for path, one in list(self._kept.items()):
                if one.record.expires_s is not None and one.record.expires_s < now_s:
                    self._forget(path)
            return iter([one.record for one in self._kept.values()])

    def require_free(self, run: str, kind: Kind, name: str, *, may_replace: bool) -> None:
        """Check a name that a client gives to a checkpoint.

        Raises:
            ConfigError: It is no name, or the client has used it.
        """
        if not _NAME.fullmatch(name):
            raise ConfigError(
                f"a checkpoint is to be named {name[:80]!r}",
                limit="a name is 1 to 64 of letters, digits, `.`, `_` and `-`",
                hint="e.g. 'step-10'",
            )
        if not may_replace and f"{_SCHEME}{run}/{kind}/{name}" in {one.path for one in self}:
            raise ConfigError(
                f"there is a checkpoint {name!r} already",
                limit="a checkpoint is replaced where that is asked for",
                hint="another name, or `overwrite=True`",
            )

    def save(self, record: Record, state: ClientState) -> None:
        """Write a checkpoint; one of the same path is replaced once it is whole.

        Args:
            record: Record of the checkpoint.
            state: Values of the adapter; moments of AdamW are written if there are any.

        Raises:
            CheckpointError: It cannot be written.
        """
        folder = self._folder / secrets.token_hex(8)
        values = {name: value.contiguous() for name, value in state.values.items()}
        moments = _flat(state.moments)
        num_bytes = sum(one.nbytes for one in (*values.values(), *moments.values()))
        record = record.model_copy(update={"num_bytes": num_bytes})
        with whole_folder(folder, unlisted=(RECORD_FILE,)) as partial:
            save_file(values, partial / WEIGHTS_FILE)
            (partial / CONFIG_FILE).write_text(_peft_config(record, values))
            if moments:
                save_file(moments, partial / MOMENTS_FILE)
            (partial / RECORD_FILE).write_text(_text(record))
        with self._changed:
            old = self._kept.pop(record.path, None)
            self._kept[record.path] = _Kept(record=record, folder=folder)
        if old is not None:
            shutil.rmtree(old.folder)

    def find(self, path: str) -> Record:
        """Return a checkpoint's record.

        Raises:
            CheckpointError: There is none of this path.
        """
        return self._found(path)[0]

    def _found(self, path: str) -> tuple[Record, Path]:
        with self._changed:
            num_kept = len(list(self))  # those that have expired are left out
            found = self._kept.get(path)
        if found is None:
            raise CheckpointError(
                f"there is no checkpoint {path[:200]!r}",
                limit=f"{self._folder} holds {num_kept}",
                hint="`tinker checkpoint list`",
            )
        return found.record, found.folder

    def load(self, path: str, *, has_moments: bool) -> ClientState:
        """Read a checkpoint; all of its files are compared with what was written.

        Args:
            path: Path of a checkpoint.
            has_moments: Whether AdamW's states are read.

        Raises:
            CheckpointError: There is none, it is damaged, or it has no such states.
        """
        record, folder = self._found(path)
        if has_moments and record.kind != "weights":
            raise CheckpointError(
                f"{path} has no states of the optimizer",
                limit="`save_state` writes them, `save_weights_for_sampler` does not",
                hint="`create_training_client_from_state` without the optimizer",
            )
        moments: dict[str, Any] = {}
        try:
            problem = damage(folder, needs=FILES)
            if problem is not None:
                raise CheckpointError(
                    f"{path} is damaged: {problem}",
                    hint=f"another checkpoint; its folder is {folder}",
                )
            if has_moments and (folder / MOMENTS_FILE).is_file():
                moments = _nested(load_file(folder / MOMENTS_FILE))
            return ClientState(values=load_file(folder / WEIGHTS_FILE), moments=moments)
        except FileNotFoundError as error:
            raise CheckpointError(
                f"{path} was removed while it was read", hint="another checkpoint"
            ) from error

    def file(self, path: str, name: str) -> Path:
        """Return a file of a checkpoint that peft reads.

        Raises:
            CheckpointError: There is no such file.
        """
        _, folder = self._found(path)
        if name not in FILES:
            raise CheckpointError(f"{path} has no file {name[:80]!r}", hint=" or ".join(FILES))
        return folder / name

    def expire(self, path: str, expires_s: float | None) -> None:
        """Set when a checkpoint is removed; None for never.

        Raises:
            CheckpointError: There is none of this path.
        """
        with self._changed:
            record, folder = self._found(path)
            record = record.model_copy(update={"expires_s": expires_s})
            write_atomically(folder / RECORD_FILE, _text(record))
            self._kept[path] = _Kept(record=record, folder=folder)

    def remove(self, path: str) -> None:
        """Remove a checkpoint.

        Raises:
            CheckpointError: There is none of this path.
        """
        with self._changed:
            self.find(path)
            self._forget(path)

    def _forget(self, path: str) -> None:
        shutil.rmtree(self._kept.pop(path).folder)


def _text(record: Record) -> str:
    return sealed_json(record.model_dump_json(indent=1))


def _record(folder: Path) -> Record:
    file = folder / RECORD_FILE
    content = _RECORDS.content(file)
    values = _RECORDS.parsed(content, source=str(file))
    if not is_sealed_json(content.decode()):
        raise _RECORDS.refusal(str(file), "it is not what was written")
    return Record(**{name: value for name, value in values.items() if name != "sha256"})


def _peft_config(record: Record, values: Mapping[str, torch.Tensor]) -> str:
    """Return the settings of an adapter as peft reads them."""
    prefix, suffix = "base_model.model.", ".lora_A.weight"
    modules = [name for name in values if name.endswith(suffix)]
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": record.base,
        "r": record.rank,
        "lora_alpha": record.alpha,
        "target_modules": sorted(x.removeprefix(prefix).removesuffix(suffix) for x in modules),
        "lora_dropout": 0.0,
        "bias": "none",
        "inference_mode": True,
    }
    return json.dumps(config, indent=1) + "\n"


def _flat(moments: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return AdamW's states as tensors by name: the number of the parameter, and what it is."""
    states: Mapping[int, Mapping[str, torch.Tensor]] = moments.get("state", {})
    return {f"{n}.{key}": value for n, of in states.items() for key, value in of.items()}


def _nested(tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    states: dict[int, dict[str, torch.Tensor]] = {}
    for name, value in tensors.items():
        number, _, key = name.partition(".")
        states.setdefault(int(number), {})[key] = value
    return {"state": states}
