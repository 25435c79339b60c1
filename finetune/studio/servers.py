"""Servers of a folder and the rewards of recipes that ran against them, from their files alone.

A server does not see rewards: its clients compute them, and Tinker's cookbook writes them where
the client runs. So they are shown of recipes whose logs are in the folder too. A file that is
damaged, too large or no plain file is passed over, and no link is followed.
"""

import os
import time
from collections.abc import Iterator
from contextlib import suppress
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

from pydantic import AliasChoices, BaseModel, Field, ValidationError

from finetune.errors import CheckpointError
from finetune.recipe.load import RUN_RECIPE
from finetune.run.run_files import Count, Number
from finetune.serve.status import STATUS, STATUS_FILE

METRICS_FILE = "metrics.jsonl"
REWARDS = ("env/all/reward/total", "reward/total")  # as recipes of the cookbook call them
DEPTH = 3  # the cookbook's own places are RECIPE/RUN
CHECKPOINTS = "checkpoints"  # folders that are not searched
MOST_FILES = 100
MOST_BYTES = 2**25
NUM_SPARK = 32  # points of a curve
DEAD_S = 30.0  # a server writes its file every two seconds
CLIENT_COLUMNS = (
    *("server", "client", "rank", "steps", "tokens trained", "loss of the newest request"),
    *("tokens sampled", "requests that wait", "last heard"),
)
REWARD_COLUMNS = ("recipe's log", "reward curve", "steps", "first", "last", "highest")
NUM_WORDS = 2  # columns of each that are no figures
Json = dict[str, Any]


class _Row(BaseModel):
    """A line of a recipe's metrics that has a reward."""

    step: Count
    reward: Number = Field(validation_alias=AliasChoices(*REWARDS))


class Servers:
    """The servers and recipes of a folder; a file is read when it has changed."""

    def __init__(self, folder: Path) -> None:
        """Name the folder; nothing is read yet."""
        self._folder = folder
        self._read: dict[Path, tuple[tuple[int, int, int], Json | None]] = {}

    def all(self) -> Json:
        """Return each server with its clients, and each recipe with its rewards."""
        root = self._folder.resolve()
        files = list(islice(_files(root, DEPTH), MOST_FILES))
        self._read = {file: one for file, one in self._read.items() if file in files}
        servers, rewards = list[Json](), list[Json]()
        for file in files:
            name = os.fsencode(file.parent.relative_to(root)).decode(errors="replace")
            with suppress(OSError, CheckpointError):
                if file.name == STATUS_FILE:
                    servers.append(_server(file, name))
                elif (found := self._rewards(file)) is not None:
                    rewards.append({"name": name, **found})
        return {"servers": servers, "rewards": rewards}

    def _rewards(self, file: Path) -> Json | None:
        """Return the rewards of a recipe's log; None if it has none."""
        status = file.lstat()
        identity = status.st_ino, status.st_size, status.st_mtime_ns
        known = self._read.get(file)
        if known is None or known[0] != identity:
            known = self._read[file] = identity, _rewards(file.read_bytes())
        return known[1]


def _files(folder: Path, depth: int) -> Iterator[Path]:
    """Yield files of servers and recipes' logs; Sluice's own runs are shown elsewhere."""
    with suppress(OSError):  # it may be removed meanwhile
        found = sorted(os.scandir(folder), key=lambda one: one.name)
        plain = {one.name: one for one in found if one.is_file(follow_symlinks=False)}
        if RUN_RECIPE in plain:
            return
        for name in (STATUS_FILE, METRICS_FILE):
            if name in plain and plain[name].stat(follow_symlinks=False).st_size <= MOST_BYTES:
                yield folder / name
        for one in found if depth else ():
            if one.is_dir(follow_symlinks=False) and one.name != CHECKPOINTS:
                yield from _files(folder / one.name, depth - 1)


def _server(file: Path, name: str) -> Json:
    """Return what a server does.

    Raises:
        CheckpointError: Its file is damaged.
    """
    found = STATUS.read(file)
    age_s = time.time() - file.stat().st_mtime  # noqa: TID251 - a date
    passes, loads = found["num_passes"], found["num_loads"]
    kinds = [
        f"passes to {kind}: {num:,} ({loads.get(kind, 0) / num:,.1f} layers loaded in each)"
        for kind, num in passes.items()
        if num
    ]
    return {
        "name": name,
        "base": found["base"],
        "problem": f"it has not written {STATUS_FILE} for {age_s:,.0f} s: it was killed, and its"
        " clients go on when their recipes run again"
        if age_s > DEAD_S
        else None,
        "facts": [
            f"Clients that train: {len(found['clients']):,}",
            f"clients that wait for a slot: {found['num_waiting']:,}",
            *kinds,
        ],
        "clients": [_client(name, one) for one in found["clients"]],
    }


def _client(server: str, found: Json) -> list[str]:
    loss = found["last_loss"]
    return [
        server,
        found["id"],
        f"{found['rank']:,}",
        f"{found['num_steps']:,}",
        f"{found['num_tokens']:,}",
        "-" if loss is None else f"{loss:.4f}",
        f"{found['num_sampled']:,}",
        f"{found['num_pending']:,}",
        f"{found['silent_s']:,.0f} s ago",
    ]


def _rewards(content: bytes) -> Json | None:
    """Return the course of the reward of a recipe; None without any.

    A recipe that is run again writes steps again: the later row counts.
    """
    rows = dict[int, float]()
    for line in content.splitlines():
        with suppress(ValidationError):  # another line, or one that a kill has torn
            row = _Row.model_validate_json(line)
            rows[row.step] = row.reward
    if not rows:
        return None
    values = [rows[step] for step in sorted(rows)]
    num = min(NUM_SPARK, len(values))
    ends = [len(values) * i // num for i in range(num + 1)]
    shown = [f"{one:.4f}" for one in (values[0], values[-1], max(values))]
    return {
        "figures": [f"{len(values):,}", *shown],
        "spark": [sum(values[a:b]) / (b - a) for a, b in pairwise(ends)],
    }
