"""Others reach the ports of a launch: they run no code, and take no rank's place.

What they can still do is in SECURITY.md: whoever reaches torch's store and gloo's connections can
end a run, and write numbers into it.
"""

import contextlib
import json
import pickle
import socket
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # no stub has it

from finetune.env import SECRET
from finetune.training.world.secret import Secret
from tests.e2e.attacks.talk import Touch
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


def meeting_of(store: TCPStore) -> str:
    """Return the name of the meeting that rank 0 has opened."""
    name, _ = json.loads(store.get("sluice/meeting"))
    return str(name)


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


def bare(_store: TCPStore, _name: str, file: Path) -> bytes:
    return b"0123456789abcdef/2"


def of_another_secret(_store: TCPStore, name: str, _file: Path) -> bytes:
    return Secret(THEIRS.encode()).proven(f"sluice/{name}/rank/1", "0123/2").encode()


def what_rank_0_has_written(store: TCPStore, _name: str, _file: Path) -> bytes:
    return bytes(store.get("sluice/meeting"))


def code(_store: TCPStore, _name: str, file: Path) -> bytes:
    return pickle.dumps(Touch(file))


def large(_store: TCPStore, _name: str, _file: Path) -> bytes:
    return b"[" * 4_000_000


WORDS = (bare, of_another_secret, what_rank_0_has_written, large)


@pytest.mark.parametrize(
    "word", [code, *(pytest.param(word, marks=pytest.mark.slow) for word in WORDS)]
)
def test_a_stranger_who_comes_first_does_not_take_the_place_of_rank_1(
    word, forked: Forked, port: int, joined: Path
) -> None:
    first = start(forked, 0, port, "talk", joined)
    store = store_of(port)
    name, ran = meeting_of(store), joined.with_name("ran")
    put(store, f"sluice/{name}/rank/1", word(store, name, ran))
    time.sleep(0.5)
    assert not store.check([f"sluice/{name}/rank/0"]), "rank 0 has taken the stranger in"
    second = start(forked, 1, port, "talk", joined)
    assert [first.end(), second.end()] == [0, 0], (first.shown, second.shown)
    assert not ran.exists()


@pytest.mark.slow
def test_a_proof_of_an_earlier_launch_is_none(forked: Forked, port: int, joined: Path) -> None:
    ranks = [start(forked, rank, port, "talk", joined) for rank in range(2)]
    store = store_of(port)
    ranks[0].wait_for(joined.exists)
    seen = {key: store.get(key) for key in store.list_keys() if key.startswith("sluice/")}
    assert [rank.end() for rank in ranks] == [0, 0], [rank.shown for rank in ranks]
    (old,) = (value for key, value in seen.items() if key.endswith("/rank/1"))

    joined.unlink()
    first = start(forked, 0, port, "talk", joined)
    store = store_of(port)
    name = meeting_of(store)
    for key, value in seen.items():
        put(store, key, value)
    put(store, f"sluice/{name}/rank/1", old)
    time.sleep(0.5)
    assert not store.check([f"sluice/{name}/rank/0"])
    assert not joined.exists()
    assert first.end() == 1
    assert "rank 0 of 2 has waited for rank 1, in whose place something else has answered" in (
        " ".join(first.shown.split())
    )


# --------------------------------------------------------------------------- in the place of rank 0


@pytest.mark.slow
def test_a_stranger_who_has_the_port_first_is_not_taken_for_rank_0(
    forked: Forked, port: int, joined: Path
) -> None:
    server = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    name = "0123456789abcdef/2"
    server.set("sluice/meeting", Secret(THEIRS.encode()).proven("sluice/meeting", name))
    first, second = (start(forked, rank, port, "talk", joined) for rank in range(2))
    assert [first.end(), second.end()] == [1, 1]
    assert f"rank 0 of 2 cannot listen at port {port}: another program has it" in first.shown
    assert "rank 1 of 2 has waited for rank 0, in whose place something else has answered" in (
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
        assert f"rank {rank} of 2 has waited for rank {1 - rank}, in whose place" in (
            " ".join(shown.split())
        )
        assert "set SLUICE_SECRET to the same value on each machine" in " ".join(shown.split())
    assert OURS not in first.shown + second.shown


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
    assert "rank 1 is gone or does not answer: what it has sent cannot be read" in (
        " ".join(first.shown.split())
    )
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
