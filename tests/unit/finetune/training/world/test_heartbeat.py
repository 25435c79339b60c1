import time
from collections.abc import Callable, Iterator
from threading import Event

import pytest
from torch.distributed import HashStore, TCPStore  # type: ignore[attr-defined]  # no stub has it

from finetune.training.world import heartbeat
from finetune.training.world.heartbeat import STOPPED_S, Heartbeat


def not_ended(why: str) -> None:
    raise AssertionError(why)


class Ended:
    """What would end a process."""

    def __init__(self) -> None:
        self.why = ""

    def __call__(self, why: str) -> None:
        self.why = why


@pytest.fixture
def three(monkeypatch: pytest.MonkeyPatch) -> list[Heartbeat]:
    monkeypatch.setattr(heartbeat, "BEAT_S", 0.02)
    monkeypatch.setattr(heartbeat, "STOPPED_S", 0.5)
    store = HashStore()
    ranks = [Heartbeat(store, index=index, num=3, end=not_ended) for index in range(3)]
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
    monkeypatch.setattr(heartbeat, "GIVEN_UP_S", 0.3)
    server, ended = TCPStore("localhost", 0, is_master=True, wait_for_workers=False), Ended()
    ranks = [
        Heartbeat(TCPStore("localhost", server.port), index=index, num=2, end=ended)
        for index in range(2)
    ]
    ranks[1].start()
    del server
    wait_for(lambda: ranks[1].stopped(waited_s=STOPPED_S + 1) == [0])
    assert ranks[1].stopped(waited_s=1.0) == []
    wait_for(lambda: ended.why == "rank 0 is gone or does not answer: its store is gone")
    ranks[1].leave()


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
        return [b'{"number": 1, "of_another_version": 2}' for _ in keys]


def test_while_the_store_does_not_answer_only_rank_0_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(heartbeat, "BEAT_S", 0.02)
    monkeypatch.setattr(heartbeat, "STOPPED_S", 0.5)
    store = HungStore()
    rank = Heartbeat(store, index=1, num=3, end=not_ended)  # type: ignore[arg-type]  # what it uses
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


@pytest.fixture
def hung(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Heartbeat, Heartbeat, Ended]]:
    """Return two ranks of which the second comes to no exchange, and what ends it."""
    monkeypatch.setattr(heartbeat, "BEAT_S", 0.02)
    monkeypatch.setattr(heartbeat, "GIVEN_UP_S", 0.3)
    store, ended = HashStore(), Ended()
    first = Heartbeat(store, index=0, num=2, end=not_ended)
    second = Heartbeat(store, index=1, num=2, end=ended)
    for rank in (first, second):
        rank.start()
    yield first, second, ended
    for rank in (first, second):
        rank.leave()


def test_of_ranks_that_have_come_equally_far_who_does_not_wait_lets_others_wait(
    three: list[Heartbeat], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second, _ = three
    wait_for(lambda: second.stopped(waited_s=0.0) == [2])
    assert first.late() == []
    here = __file__  # the main thread of both is in this test
    monkeypatch.setattr(heartbeat, "WAITING_IN", (here,))
    wait_for(lambda: first.late() == [2])
    for rank in (first, second):
        rank.leave()


def test_who_comes_to_no_exchange_after_others_have_left_is_ended_by_their_words(
    hung: tuple[Heartbeat, Heartbeat, Ended],
) -> None:
    first, second, ended = hung
    time.sleep(0.5)
    assert ended.why == ""
    first.fail("rank 0 has failed: a copy failed")
    wait_for(lambda: second.reason() != "")
    assert not second.have_left()  # it fails, and waits
    wait_for(lambda: ended.why == "rank 0 has failed: a copy failed")
    assert first.have_left()


def test_who_still_comes_to_exchanges_or_writes_is_not_ended(
    hung: tuple[Heartbeat, Heartbeat, Ended],
) -> None:
    first, second, ended = hung
    first.fail("rank 0 has failed: a copy failed")
    wait_for(lambda: second.reason() != "")
    end_s = time.monotonic() + 0.6
    while time.monotonic() < end_s:
        second.arrive()
        time.sleep(0.02)
    with second.writing():
        time.sleep(0.6)
        assert ended.why == ""
    wait_for(lambda: ended.why != "")


def test_who_knows_of_the_end_is_not_ended(hung: tuple[Heartbeat, Heartbeat, Ended]) -> None:
    first, second, ended = hung
    second.note_ending()
    first.leave("rank 0 has failed: a copy failed")
    wait_for(second.have_left)
    time.sleep(0.6)
    assert ended.why == ""


def test_in_steps_a_rank_ends_when_another_shows_no_sign_of_life(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(heartbeat, "BEAT_S", 0.02)
    monkeypatch.setattr(heartbeat, "STOPPED_S", 0.5)
    monkeypatch.setattr(heartbeat, "GIVEN_UP_S", 0.3)
    store, ended = HashStore(), Ended()
    first = Heartbeat(store, index=0, num=2, end=ended)
    Heartbeat(store, index=1, num=2, end=not_ended)  # gives one sign
    first.start()
    wait_for(lambda: first.stopped(waited_s=0.0) == [1])
    time.sleep(0.6)
    assert ended.why == ""
    first.has_steps = True
    wait_for(lambda: ended.why == "rank 1 is gone or does not answer: no sign of life for 0 s")
    first.leave()


def test_who_does_no_work_for_long_lets_others_wait_in_vain_and_one_at_work_does_not(
    hung: tuple[Heartbeat, Heartbeat, Ended], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heartbeat, "SILENT_S", 0.5)
    first, second, _ = hung
    first.arrive()
    issued = 0
    with second.following(lambda: issued):
        end_s = time.monotonic() + 1.0
        while time.monotonic() < end_s:
            assert first.idle(waited_s=1.0) == []
            second.mark()
            time.sleep(0.02)
        while time.monotonic() < end_s + 1.0:
            assert first.idle(waited_s=1.0) == []
            issued += 1
            time.sleep(0.02)
    wait_for(lambda: first.idle(waited_s=1.0) == [1])
    assert first.idle(waited_s=0.1) == []  # it may itself have waited until now


def test_who_hangs_as_it_writes_is_ended_after_all(
    hung: tuple[Heartbeat, Heartbeat, Ended], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heartbeat, "SILENT_S", 1.0)
    first, second, ended = hung
    with second.writing():
        first.fail("rank 0 has failed: a copy failed")
        end_s = time.monotonic() + 1.5
        while time.monotonic() < end_s:
            assert ended.why == ""
            second.mark()
            time.sleep(0.02)
        wait_for(lambda: ended.why == "rank 0 has failed: a copy failed")
