"""How the processes of a launch find each other, also after the launcher has restarted them.

A launcher may keep its store over a restart, with all that the processes before have written there;
and the launchers of two machines need not agree on how often they have restarted. So rank 0 opens a
meeting under a new name, the others join it under names of their own, and rank 0 publishes who has
come. A rank that does not find itself on a list has read an old one, and looks again.

Names end with how many ranks there are by the launcher of each: where these differ, nothing else
would, as a rank would wait for others that nobody has started.
"""

import json
import re
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from threading import Thread
from uuid import uuid4

from torch.distributed import (  # type: ignore[attr-defined]  # no stub has them
    PrefixStore,
    Store,
    rendezvous,
)

from finetune.env import Launch
from finetune.errors import FinetuneError

ANSWER_S = 15.0  # once something listens
_POLL_S, _READ_S = 0.02, 1.0
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


def opened_store(launch: Launch, *, timeout_s: float) -> Store:
    """Return the store of the launcher, or that of rank 0.

    A program of another kind at its port would never answer, and torch would wait for it without a
    limit. So a rank first waits until something listens there, and from then on not for long.

    Raises:
        FinetuneError: Another program has the port, or rank 0 is not in time.
        RuntimeError: It cannot be reached.
        ValueError: The launcher has not said where it is.
    """
    awaited = launch.store if launch.index else None
    if awaited is not None and not _listens(awaited, time.monotonic() + timeout_s):
        raise _absent([0], index=launch.index, num=launch.num, timeout_s=timeout_s)
    stores: list[Store] = []
    failures: list[Exception] = []

    def open_it() -> None:
        try:
            # as one of one: it waits for no others, for which `meet` does
            ways = rendezvous("env://", launch.index, 1, timeout=timedelta(seconds=timeout_s))
            stores.append(next(ways)[0])
        except (RuntimeError, ValueError) as error:
            failures.append(error)

    opening = Thread(target=open_it, name="store", daemon=True)  # it may never return
    opening.start()
    opening.join(timeout=timeout_s if awaited is None else ANSWER_S)
    if stores:
        return stores[0]
    is_taken = bool(failures) and "EADDRINUSE" in str(failures[0])
    if failures and not is_taken:
        raise failures[0]
    host, port = launch.store or ("MASTER_ADDR", "MASTER_PORT")
    raise FinetuneError(
        f"rank {launch.index} of {launch.num} "
        + (
            f"cannot listen at port {port}: another program has it"
            if is_taken
            else f"has no answer from rank 0 at {host}:{port}, where another program listens"
        ),
        limit="the processes meet at MASTER_PORT, which is rank 0's or the launcher's alone",
        hint="`--main_process_port 0` of `accelerate launch` takes a free one; of several machines"
        " all are given the same, such as `--master-port 29517` of torchrun",
    )


def _listens(place: tuple[str, int], end_s: float) -> bool:
    """Wait until something accepts connections; return whether it does."""
    while time.monotonic() < end_s:
        try:
            socket.create_connection(place, timeout=ANSWER_S).close()
        except OSError:
            time.sleep(10 * _POLL_S)
        else:
            return True
    return False


def meet(store: Store, *, index: int, num: int, timeout_s: float) -> Meeting:
    """Wait until all ranks are there.

    Raises:
        FinetuneError: Some are not in time, or their launchers have said other numbers of them.
    """
    own, end_s = f"{uuid4().hex}/{num}", time.monotonic() + timeout_s
    name, is_restart = (
        _opened(store, own, num, end_s) if index == 0 else _joined(store, own, index, end_s)
    )
    if not name:
        missing = _missing(store, own, num) if index == 0 else [0]
        raise _absent(missing, index=index, num=num, timeout_s=timeout_s)
    _require_one_number(store, name, index=index, num=num)
    met = PrefixStore(f"sluice/{name}", store)
    return Meeting(store=met, launch_store=store, is_restart=is_restart)


def _absent(missing: Sequence[int], *, index: int, num: int, timeout_s: float) -> FinetuneError:
    return FinetuneError(
        f"rank {index} of {num} has waited for rank {', '.join(map(str, missing))}",
        limit=f"all must be there within {timeout_s:,.0f} s, and reach the launcher's"
        " MASTER_ADDR and MASTER_PORT",
        hint="start the same command on each machine; see that a firewall lets them through",
    )


def _opened(store: Store, own: str, num: int, end_s: float) -> tuple[str, bool]:
    """Open a meeting and wait for the others; return an empty name if they do not come."""
    store.set(_MEETING, own)
    while missing := _missing(store, own, num):
        names = [store.get(_place(own, rank)).decode() for rank in _come(num, missing)]
        if any(_number(name) != num for name in names):
            break
        if time.monotonic() > end_s:
            return "", False
        time.sleep(_POLL_S)
    is_restart = store.check([_BEGUN])
    names = [store.get(_place(own, rank)).decode() for rank in _come(num, missing)]
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


def _require_one_number(store: Store, name: str, *, index: int, num: int) -> None:
    """Check that the launchers of all ranks have the same number of ranks.

    Raises:
        FinetuneError: They have not.
    """
    _, *names = json.loads(store.get(_place(name, 0)))
    numbers = sorted({_number(one) for one in (name, *names)})
    if numbers != [num]:
        if index == 0:  # which may have the store
            time.sleep(_READ_S)
        raise FinetuneError(
            f"rank {index} is one of {num}, and by the launchers of others there are"
            f" {' and '.join(str(one) for one in numbers if one != num)}",
            limit="all ranks of a run are started as so many",
            hint="give all machines the same `--num_processes` (`--nnodes` and `--nproc-per-node`"
            " of torchrun), and see that none sets WORLD_SIZE itself",
        )


def _number(name: str) -> int:
    return int(name.rpartition("/")[2])


def _come(num: int, missing: Sequence[int]) -> Sequence[int]:
    return [rank for rank in range(1, num) if rank not in missing]


def _missing(store: Store, name: str, num: int) -> Sequence[int]:
    return [rank for rank in range(1, num) if not store.check([_place(name, rank)])]


def _place(name: str, rank: int) -> str:
    return f"sluice/{name}/rank/{rank}"


def cause_of(error: RuntimeError) -> str:
    """Return what gloo says of a connection, without its source file and its advice."""
    first = str(error).splitlines()[0]
    return re.sub(r"^\[\S+:\d+\] |\. This is typically caused by .*", "", first)
