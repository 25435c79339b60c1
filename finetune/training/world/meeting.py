"""How the processes of a launch find each other, also after the launcher has restarted them.

A launcher may keep its store over a restart, with all that the processes before have written there;
and the launchers of two machines need not agree on how often they have restarted. So rank 0 opens a
meeting under a new name, the others join it under names of their own, and rank 0 publishes who has
come. A rank that does not find itself on a list has read an old one, and looks again.
"""

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from uuid import uuid4

from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]  # no stub has it

from finetune.errors import FinetuneError

_POLL_S = 0.02
_MEETING, _BEGUN = "sluice/meeting", "sluice/begun"


@dataclass(frozen=True, kw_only=True, slots=True)
class Meeting:
    """Where all ranks have met.

    Attributes:
        store: For these processes alone.
        launch_store: Of the launcher; what is in it may outlive these processes.
        is_restart: Whether the launcher had started processes before, and they had begun a run.
    """

    store: Store
    launch_store: Store
    is_restart: bool

    def note_begun(self) -> None:
        """Leave word that a run has begun, for processes that the launcher starts after these."""
        self.launch_store.set(_BEGUN, "yes")


def meet(store: Store, *, index: int, num: int, timeout_s: float) -> Meeting:
    """Wait until all ranks are there.

    Raises:
        FinetuneError: Some are not in time.
    """
    own, end_s = uuid4().hex, time.monotonic() + timeout_s
    name, is_restart = (
        _opened(store, own, num, end_s) if index == 0 else _joined(store, own, index, end_s)
    )
    if not name:
        missing = _missing(store, own, num) if index == 0 else [0]
        raise FinetuneError(
            f"rank {index} of {num} has waited for rank {', '.join(map(str, missing))}",
            limit=f"all must be there within {timeout_s:,.0f} s, and reach the launcher's"
            " MASTER_ADDR and MASTER_PORT",
            hint="start the same command on each machine; see that a firewall lets them through",
        )
    met = PrefixStore(f"sluice/{name}", store)
    return Meeting(store=met, launch_store=store, is_restart=is_restart)


def _opened(store: Store, own: str, num: int, end_s: float) -> tuple[str, bool]:
    """Open a meeting and wait for the others; return an empty name if they do not come."""
    store.set(_MEETING, own)
    while _missing(store, own, num):
        if time.monotonic() > end_s:
            return "", False
        time.sleep(_POLL_S)
    is_restart = store.check([_BEGUN])
    names = [store.get(_place(own, rank)).decode() for rank in range(1, num)]
    store.set(_place(own, 0), json.dumps([is_restart, *names]))
    return own, is_restart


def _joined(store: Store, own: str, index: int, end_s: float) -> tuple[str, bool]:
    """Join the meeting that answers; return an empty name if none does."""
    asked = ""
    while time.monotonic() < end_s:
        if store.check([_MEETING]):
            name = store.get(_MEETING).decode()
            if name != asked:
                store.set(_place(name, index), own)
                asked = name
            if store.check([_place(name, 0)]):
                is_restart, *names = json.loads(store.get(_place(name, 0)))
                if own in names:
                    return name, is_restart
        time.sleep(_POLL_S)
    return "", False


def _missing(store: Store, name: str, num: int) -> Sequence[int]:
    return [rank for rank in range(1, num) if not store.check([_place(name, rank)])]


def _place(name: str, rank: int) -> str:
    return f"sluice/{name}/rank/{rank}"
