"""Others reach the ports of a launch: they run no code, and take no rank's place.

What they can still do is in SECURITY.md: whoever reaches torch's store and gloo's connections can
end a run, and write numbers into it.
"""

import contextlib
import hmac
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import (  # type: ignore[attr-defined]  # no stub has them
    PrefixStore,
    Store,
    TCPStore,
)

from finetune.env import SECRET
from tests.e2e.attacks.talk import JOIN_S
from tests.e2e.faults import SECTIONS
from tests.e2e.forked import Forked, Started

MODULE = "tests.e2e.attacks.talk"
OURS, THEIRS = "a secret of the user's own, of some length", "a secret of somebody else, as long"
LISTENS = "0A"


@pytest.fixture
def port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


@pytest.fixture
def joined(tmp_path: Path) -> Path:
    return tmp_path / "joined"


def start(
    forked: Forked,
    rank: int,
    port: int,
    *words: object,
    machines: int = 1,
    secret: str | None = OURS,
) -> Started:
    """Start a rank of two, alone; without a secret it takes that of this user's cache."""
    variables = {"WORLD_SIZE": "2", "RANK": str(rank), "MASTER_ADDR": "127.0.0.1"}
    variables |= {"MASTER_PORT": str(port), "LOCAL_WORLD_SIZE": str(2 // machines)}
    variables |= {"LOCAL_RANK": str(rank if machines == 1 else 0)}
    variables |= {} if secret is None else {SECRET: secret}
    return forked.start(*(words or ("talk",)), module=MODULE, variables=variables)


def store_of(port: int) -> TCPStore:
    """Connect to the store of rank 0 once it listens, with nothing but torch."""
    end_s = time.monotonic() + 60
    while time.monotonic() < end_s:
        with contextlib.suppress(OSError):
            socket.create_connection(("127.0.0.1", port), 1).close()
            break
        time.sleep(0.01)
    return TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=30))


def put(store: TCPStore, key: str, value: bytes) -> None:
    store.set(key, value)  # type: ignore[arg-type]  # the stub knows texts only


def sockets_of(*pids: int) -> Iterator[tuple[str, int]]:
    """Return the addresses at which processes listen, as hexadecimal digits, and the ports."""
    inodes = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            for entry in Path(f"/proc/{pid}/fd").iterdir():
                with contextlib.suppress(OSError):
                    name = str(entry.readlink())
                    inodes.add(name.removeprefix("socket:[").removesuffix("]"))
    for table in ("tcp", "tcp6"):
        for line in Path("/proc/net", table).read_text().splitlines()[1:]:
            _, local, _, state, *rest = line.split()
            if state == LISTENS and rest[5] in inodes:
                address, _, number = local.partition(":")
                yield address, int(number, 16)


# --------------------------------------------------------------------------- in the place of rank 1


class Forged(Store):
    """torch's store with values that begin as signed ones do, by who does not know the secret."""

    def __init__(self, store: Store, sign: Callable[[str, bytes], bytes]) -> None:
        super().__init__()
        self.store: Any = store
        self.sign = sign

    def set(self, key: str, value: str | bytes) -> None:
        content = value.encode() if isinstance(value, str) else bytes(value)
        self.store.set(key, self.sign(key, content) + content)

    def get(self, key: str) -> bytes:
        return bytes(self.store.get(key))[32:]

    def wait(self, keys: list[str], *timeout: timedelta) -> None:
        self.store.wait(keys, *timeout)

    def check(self, keys: list[str]) -> bool:
        return bool(self.store.check(keys))


def unsigned(_key: str, _content: bytes) -> bytes:
    return b""


def random(_key: str, _content: bytes) -> bytes:
    return os.urandom(32)


def of_another_secret(key: str, content: bytes) -> bytes:
    return hmac.digest(THEIRS.encode(), json.dumps(key).encode() + content, "sha256")


def join_as_rank_1(port: int, sign: Callable[[str, bytes], bytes]) -> bool:
    """Join rank 0 by torch's own protocol, and return whether it has sent something."""
    store = store_of(port)
    forged = Forged(PrefixStore("attempt/0", store), sign)
    own = json.loads(forged.get("rank/0"))
    forged.set("rank/1", json.dumps({**own, "place": [1, 2], "pid": os.getpid()}))
    try:
        timeout = timedelta(seconds=JOIN_S)
        dist.init_process_group("gloo", store=forged, rank=1, world_size=2, timeout=timeout)
        sizes = torch.zeros(2, dtype=torch.int64)
        dist.all_gather(list(sizes.split(1)), torch.tensor([4]))
    except RuntimeError:
        return False
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    return bool(sizes.any())


@pytest.mark.parametrize(
    "sign",
    [
        random,
        pytest.param(of_another_secret, marks=pytest.mark.slow),
        pytest.param(unsigned, marks=pytest.mark.slow),
    ],
)
def test_a_stranger_who_joins_by_torch_s_protocol_does_not_take_the_place_of_rank_1(
    sign, forked: Forked, port: int, joined: Path
) -> None:
    first = start(forked, 0, port, "talk", joined)
    assert not join_as_rank_1(port, sign), "rank 0 has taken the stranger in"
    assert first.end() == 1
    assert not joined.exists()
    shown = " ".join(first.shown.split())
    assert "what is at 'rank/1' in the store of this launch is not signed with its secret" in shown


@pytest.mark.slow
def test_signatures_of_an_earlier_launch_are_good_for_no_other(
    forked: Forked, port: int, joined: Path
) -> None:
    ranks = [start(forked, rank, port, "talk", joined) for rank in range(2)]
    store = store_of(port)
    ranks[0].wait_for(joined.exists)
    seen = {key: store.get(key) for key in store.list_keys() if "/" in key}
    assert [rank.end() for rank in ranks] == [0, 0], [rank.shown for rank in ranks]

    joined.unlink()
    first = start(forked, 0, port, "talk", joined)
    store = store_of(port)
    store.wait(["attempt/0/rank/0"])
    for key, value in seen.items():
        if not key.endswith("rank/0"):
            put(store, key, value)
    assert first.end() == 1
    assert not joined.exists()
    assert "in the store of this launch is not signed with its secret" in (
        " ".join(first.shown.split())
    )


# --------------------------------------------------------------------------- in the place of rank 0


@pytest.mark.slow
def test_a_stranger_who_has_the_port_first_is_not_taken_for_rank_0(
    forked: Forked, port: int, joined: Path
) -> None:
    server = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    Forged(PrefixStore("attempt/0", server), random).set("rank/0", "{}")
    first, second = (start(forked, rank, port, "talk", joined) for rank in range(2))
    assert [first.end(), second.end()] == [1, 1]
    assert f"rank 0 of 2 cannot reach the others at 127.0.0.1:{port}: " in first.shown
    assert "what is at 'rank/0' in the store of this launch is not signed with its secret" in (
        " ".join(second.shown.split())
    )
    assert not joined.exists()


@pytest.mark.slow
def test_machines_with_two_secrets_do_not_meet_and_each_says_so(
    forked: Forked, port: int, joined: Path
) -> None:
    first, second = (
        start(forked, rank, port, "talk", joined, machines=2, secret=secret)
        for rank, secret in enumerate((OURS, THEIRS))
    )
    assert [first.end(), second.end()] == [1, 1]
    for rank, shown in enumerate((first.shown, second.shown)):
        assert f"what is at 'rank/{1 - rank}' in the store of this launch is not signed" in (
            " ".join(shown.split())
        )
        assert "set SLUICE_SECRET to the same value on each machine" in " ".join(shown.split())
    assert OURS not in first.shown + second.shown


@pytest.mark.slow
def test_a_rank_that_does_not_come_is_named(forked: Forked, port: int, joined: Path) -> None:
    first = start(forked, 0, port, "talk", joined)
    assert first.end() == 1
    shown = " ".join(first.shown.split())
    assert f"rank 0 of 2 cannot reach the others at 127.0.0.1:{port}: wait timeout" in shown
    assert "rank/1" in shown


# ------------------------------------------------------------------------------ at all their ports


def test_ranks_of_one_machine_listen_on_the_loopback_interface_alone(
    forked: Forked, port: int, joined: Path
) -> None:
    ranks = [start(forked, rank, port, "talk", joined, secret=None) for rank in range(2)]
    ranks[0].wait_for(joined.exists)
    found = set(sockets_of(*(rank.pid for rank in ranks)))
    assert [rank.end() for rank in ranks] == [0, 0], [rank.shown for rank in ranks]
    assert port in {number for _, number in found}
    assert {address for address, _ in found} <= {"0100007F"}, found


GARBAGE = (b"\xff" * 64, b"\x00" * 64, b"GET / HTTP/1.0\r\n\r\n", (2**62).to_bytes(8, "little") * 9)


@pytest.mark.slow
def test_garbage_at_every_port_ends_nothing(forked: Forked, port: int, joined: Path) -> None:
    first, has_ended, reached = (
        start(forked, 0, port, "talk", joined),
        threading.Event(),
        set[int](),
    )
    pids = [first.pid]

    def disturb() -> None:
        while not has_ended.wait(0.01):
            for _, number in sockets_of(*pids):
                for word in GARBAGE:
                    with (
                        contextlib.suppress(OSError),
                        socket.create_connection(("127.0.0.1", number), 1) as stranger,
                    ):
                        stranger.sendall(word)
                        reached.add(number)

    disturbing = threading.Thread(target=disturb)
    disturbing.start()
    try:
        time.sleep(0.3)
        second = start(forked, 1, port, "talk", joined)
        pids.append(second.pid)
        codes = [first.end(), second.end()]
    finally:
        has_ended.set()
        disturbing.join()
    assert codes == [0, 0], (first.shown, second.shown)
    assert port in reached


@pytest.mark.slow
def test_code_of_a_rank_that_knows_the_secret_does_not_run(
    forked: Forked, port: int, joined: Path
) -> None:
    first, second = (start(forked, rank, port, "send_code", joined) for rank in range(2))
    assert [first.end(), second.end()] != [0, 0]
    assert "KeyError: 'os.system'" in first.shown
    assert not joined.with_name("ran").exists()


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["stream", "fsdp2"])
def test_torch_sends_no_objects_for_a_run_and_its_resume(
    engine: str, write_recipe, machine_file: Path, forked: Forked
) -> None:
    recipe = write_recipe(**SECTIONS, output={"eval_every": 3})
    words = ("finetune", recipe, "--machine", machine_file, f"train.parallel={engine}")
    for more in (("train.steps=3",), ("train.steps=4", "--resume")):
        steps = (*words, "train.schedule=constant", "train.warmup_steps=0", *more)
        ranks = forked.start_ranks(*steps, module="tests.e2e.attacks.no_objects")
        assert [rank.end() for rank in ranks] == [0, 0], [rank.shown for rank in ranks]
