import time
from collections.abc import Callable
from threading import Event

import pytest
from torch.distributed import HashStore, TCPStore  # type: ignore[attr-defined]  # no stub has it

from finetune.training.world import heartbeat
from finetune.training.world.heartbeat import STOPPED_S, Heartbeat


@pytest.fixture
def three(monkeypatch: pytest.MonkeyPatch) -> list[Heartbeat]:
    monkeypatch.setattr(heartbeat, "BEAT_S", 0.02)
    monkeypatch.setattr(heartbeat, "STOPPED_S", 0.5)
    store = HashStore()
    ranks = [Heartbeat(store, index=index, num=3) for index in range(3)]
    for rank in ranks[:2]:  # the third has stopped after its first sign of life
        rank.start()
    return ranks


def wait_for(condition: Callable[[], bool]) -> None:
    end_s = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end_s
        time.sleep(0.01)


def test_a_rank_without_signs_of_life_is_noticed_and_who_leaves_is_not_taken_for_it(
    three: list[Heartbeat],
) -> None:
    first, second, _ = three
    wait_for(lambda: first.stopped(waited_s=0.0) == [2])
    assert first.gone() == [2]
    second.leave("rank 2 is gone")
    wait_for(lambda: first.reason() == "rank 2 is gone")
    time.sleep(0.6)
    assert first.stopped(waited_s=0.0) == [2]
    first.leave()


def test_without_the_store_nobody_is_waited_for_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeat, "BEAT_S", 0.02)
    server = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    ranks = [
        Heartbeat(TCPStore("localhost", server.port), index=index, num=2) for index in range(2)
    ]
    ranks[1].start()
    del server
    wait_for(lambda: ranks[1].stopped(waited_s=STOPPED_S + 1) == [0])
    assert ranks[1].stopped(waited_s=1.0) == []


class HungStore:
    """A store whose process is stopped while it is read."""

    def __init__(self) -> None:
        self.is_hung = Event()

    def set(self, key: str, value: str) -> None:
        pass

    def clone(self) -> "HungStore":
        return self

    def multi_get(self, keys: list[str]) -> list[bytes]:
        if self.is_hung.is_set():
            time.sleep(600)
        return [b"1 0" for _ in keys]


def test_while_the_store_does_not_answer_only_rank_0_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(heartbeat, "BEAT_S", 0.02)
    monkeypatch.setattr(heartbeat, "STOPPED_S", 0.5)
    store = HungStore()
    rank = Heartbeat(store, index=1, num=3)  # type: ignore[arg-type]  # what it uses of one
    rank.start()
    assert rank.stopped(waited_s=0.0) == []
    store.is_hung.set()
    wait_for(lambda: rank.stopped(waited_s=0.0) != [])
    assert rank.stopped(waited_s=0.0) == [0]


def test_who_lets_others_wait_is_named(three: list[Heartbeat]) -> None:
    first, second, _ = three
    for rank in (first, second):
        rank.arrive()
    wait_for(lambda: first.late() == [2])
    first.arrive()
    wait_for(lambda: first.late() == [1, 2])
    second.arrive()
    wait_for(lambda: first.late() == [2])
    for rank in (first, second):
        rank.leave()
