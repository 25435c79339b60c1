"""How the processes of a launch find each other, also after the launcher has restarted them.

A launcher may keep its store over a restart, with all that the processes before have written there;
and the launchers of two machines need not agree on how often they have restarted. So rank 0 opens a
meeting under a new name, the others join it under names of their own, and rank 0 publishes who has
come. A rank that does not find itself on a list has read an old one, and looks again.

Names end with how many ranks there are by the launcher of each: where these differ, nothing else
would, as a rank would wait for others that nobody has started.

Whoever reaches the store can write to it. So each name is written with a proof that its rank knows
the secret of the launch, and so is the list. What has no proof, or that of another meeting or rank,
counts for nothing: a name of a meeting is new and random, so no proof is good twice.
"""

import json
import re
import socket
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from threading import Thread
from uuid import uuid4

from torch.distributed import (  # type: ignore[attr-defined]  # no stub has them
    PrefixStore,
    Store,
    TCPStore,
)

from finetune.env import SECRET, Launch
from finetune.errors import FinetuneError
from finetune.training.world.secret import Secret

ANSWER_S = 15.0  # once something listens
_POLL_S, _READ_S = 0.02, 1.0
_LOOPBACK = "127.0.0.1"
_MEETING, _BEGUN = "sluice/meeting", "sluice/begun"


@dataclass(frozen=True, kw_only=True, slots=True)
class Meeting:
    """Where all ranks have met.

    Attributes:
        store: For these processes alone.
        launch_store: Of the launcher; what is in it may outlive these processes.
        secret: Of the launch.
        is_restart: Whether the launcher had started processes before, and they had begun a run.
    """

    store: Store
    launch_store: Store
    secret: Secret
    is_restart: bool

    def note_begun(self) -> None:
        """Leave word that a run has begun, for processes that the launcher starts after these."""
        self.launch_store.set(_BEGUN, self.secret.proven(_BEGUN, ""))


def opened_store(launch: Launch, *, timeout_s: float) -> Store:
    """Return the store of the launcher, or that of rank 0.

    A program of another kind at its port would never answer, and torch would wait for it without a
    limit. So a rank first waits until something listens there, and from then on not for long. On
    one machine the store of rank 0 listens on the loopback interface alone.

    Raises:
        FinetuneError: Another program has the port, or rank 0 is not in time.
        RuntimeError: It cannot be reached.
    """
    if launch.store is None:
        raise FinetuneError(
            f"the launcher of rank {launch.index} of {launch.num} does not say where ranks meet",
            limit="it sets MASTER_ADDR, and MASTER_PORT to a number",
            hint=f"`accelerate launch --multi_gpu --num_processes {launch.num}`",
        )
    host, port = launch.store
    if launch.is_on_one_machine:
        host = _LOOPBACK
    is_server = launch.index == 0 and not launch.is_store_launcher_s
    if launch.index and not _listens((host, port), time.monotonic() + timeout_s):
        raise _absent([0], index=launch.index, num=launch.num, timeout_s=timeout_s)
    stores: list[Store] = []
    failures: list[Exception] = []

    def open_it() -> None:
        try:
            listener = _listener(port) if is_server and launch.is_on_one_machine else None
            stores.append(
                TCPStore(
                    host,
                    port,
                    None,  # it waits for no others, for which `meet` does
                    is_server,
                    timedelta(seconds=timeout_s),
                    wait_for_workers=False,
                    master_listen_fd=listener,
                )
            )
        except (RuntimeError, OSError) as error:
            failures.append(error)

    opening = Thread(target=open_it, name="store", daemon=True)  # it may never return
    opening.start()
    opening.join(timeout=timeout_s if launch.index == 0 else ANSWER_S)
    if stores:
        return stores[0]
    is_taken = bool(failures) and (
        "EADDRINUSE" in str(failures[0]) or isinstance(failures[0], OSError)
    )
    if failures and not is_taken:
        raise failures[0]
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


def _listener(port: int) -> int:
    """Return a socket for the store of one machine; torch's own listens on every interface.

    Raises:
        OSError: Another program has the port.
    """
    return socket.create_server((_LOOPBACK, port)).detach()  # torch closes it


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


def meet(store: Store, secret: Secret, *, index: int, num: int, timeout_s: float) -> Meeting:
    """Wait until all ranks are there.

    Args:
        store: That all can reach, and others too.
        secret: Of the launch, which others do not know.
        index: This rank.
        num: Of the ranks.
        timeout_s: How long to wait.

    Raises:
        FinetuneError: Some are not in time, or their launchers have said other numbers of them.
    """
    board, end_s = _Board(store=store, secret=secret), time.monotonic() + timeout_s
    own = f"{uuid4().hex}/{num}"
    found = _opened(board, own, num, end_s) if index == 0 else _joined(board, own, index, end_s)
    if found is None:
        if board.unproven:
            raise _unproven(board.unproven, index=index, num=num)
        places = {rank: _place(own, rank) for rank in range(1, num)}
        missing = [rank for rank, place in places.items() if not store.check([place])]
        raise _absent([0] if index else missing, index=index, num=num, timeout_s=timeout_s)
    name, is_restart, names = found
    _require_one_number([name, *names], index=index, num=num)
    met = PrefixStore(f"sluice/{name}", store)
    return Meeting(store=met, launch_store=store, secret=secret, is_restart=is_restart)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Board:
    """Where ranks write for each other, with proofs that they know the secret of the launch.

    Attributes:
        store: Where it is.
        secret: Of the launch.
        unproven: Ranks in whose place something was without a proof.
    """

    store: Store
    secret: Secret
    unproven: set[int] = field(default_factory=set)

    def write(self, key: str, value: str) -> None:
        """Write a value that no other rank writes."""
        self.store.set(key, self.secret.proven(key, value))

    def read(self, key: str, *, rank: int) -> str | None:
        """Return what a rank has written; None if it has not, or not a rank of this launch."""
        if not self.store.check([key]):
            return None
        value = self.secret.checked(key, self.store.get(key))
        (self.unproven.add if value is None else self.unproven.discard)(rank)
        return value

    def claimed(self, key: str, *, rank: int) -> str:
        """Return what somebody has written for a rank, with or without a proof; empty if none."""
        if self.read(key, rank=rank) is None and rank not in self.unproven:
            return ""
        return self.secret.claimed(self.store.get(key))


_Found = tuple[str, bool, list[str]]  # a meeting, whether it is after a restart, and who is there


def _opened(board: _Board, own: str, num: int, end_s: float) -> _Found | None:
    """Open a meeting and wait for the others; return nothing if they do not come."""
    board.write(_MEETING, own)
    while True:
        every = [board.read(_place(own, rank), rank=rank) for rank in range(1, num)]
        names = [name for name in every if name is not None]
        if len(names) == num - 1 or any(_number(name) != num for name in names):
            break
        if time.monotonic() > end_s:
            return None
        time.sleep(_POLL_S)
    is_restart = board.read(_BEGUN, rank=0) is not None
    board.write(_place(own, 0), json.dumps([is_restart, *names]))
    return own, is_restart, names


def _joined(board: _Board, own: str, index: int, end_s: float) -> _Found | None:
    """Join the meeting that answers; return nothing if none does.

    The name of a meeting may be anybody's: the list of who has come is rank 0's.
    """
    asked = ""
    while time.monotonic() < end_s:
        name = board.claimed(_MEETING, rank=0)
        if name:
            if name != asked:
                board.write(_place(name, index), own)
                asked = name
            answer = board.read(_place(name, 0), rank=0)
            if answer is not None:
                is_restart, *names = json.loads(answer)
                if own in names:
                    return name, is_restart, names
        time.sleep(_POLL_S)
    return None


def _absent(missing: Sequence[int], *, index: int, num: int, timeout_s: float) -> FinetuneError:
    return FinetuneError(
        f"rank {index} of {num} has waited for rank {_listed(missing)}",
        limit=f"all must be there within {timeout_s:,.0f} s, and reach the launcher's"
        " MASTER_ADDR and MASTER_PORT",
        hint="start the same command on each machine; see that a firewall lets them through",
    )


def _unproven(ranks: Iterable[int], *, index: int, num: int) -> FinetuneError:
    return FinetuneError(
        f"rank {index} of {num} has waited for rank {_listed(ranks)}, in whose place something else"
        " has answered",
        limit="the ranks of a launch prove to each other that they know its secret",
        hint=f"set {SECRET} to the same value on each machine; on one machine start all ranks as"
        " the same user, with the same XDG_CACHE_HOME",
    )


def _listed(ranks: Iterable[int]) -> str:
    return ", ".join(map(str, sorted(ranks)))


def _require_one_number(names: Sequence[str], *, index: int, num: int) -> None:
    """Check that the launchers of all ranks have the same number of ranks.

    Raises:
        FinetuneError: They have not.
    """
    numbers = sorted(set(map(_number, names)))
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


def _place(name: str, rank: int) -> str:
    return f"sluice/{name}/rank/{rank}"


def cause_of(error: RuntimeError) -> str:
    """Return what gloo says of a connection, without its source file and its advice."""
    first = str(error).splitlines()[0]
    return re.sub(r"^\[\S+:\d+\] |\. This is typically caused by .*", "", first)
