"""Memory that two ranks of a machine share, each the owner of some layers."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from finetune.errors import FinetuneError
from finetune.training.full import owners
from finetune.training.full.owners import Owners
from finetune.training.ranks import Ranks
from offload.engine.host.slab import Block

NUM = 4  # ranks, two on each of two machines
NAMES = ("layer 0", "layer 1", "model.norm.weight")


class Threads(Ranks):
    """Ranks that are threads of this process."""

    num, nodes = NUM, (0, 0, 1, 1)

    def __init__(self, index: int, barrier: threading.Barrier, values: list[object]) -> None:
        self.index, self._barrier, self._values = index, barrier, values
        self.local_index = index % 2
        self.waited_for: list[int] = []

    def exchange(self, value, *, is_step=False):
        self._values[self.index] = value
        self._barrier.wait(timeout=60)
        found = tuple(self._values)
        self._barrier.wait(timeout=60)
        return found

    def wait_until(self, is_done: Callable[[], bool], *, rank: int) -> None:
        self.waited_for.append(rank)
        while not is_done():
            pass


def on_all(make: Callable[[Threads], object]) -> list:
    barrier, values = threading.Barrier(NUM), list[object]([None] * NUM)
    ranks = [Threads(index, barrier, values) for index in range(NUM)]
    with ThreadPoolExecutor(NUM) as pool:
        return list(pool.map(make, ranks))


def made(ranks: Threads) -> tuple[Threads, Owners]:
    owned = frozenset({0, 2} if ranks.local_index == 0 else {1})
    return ranks, Owners(owned, state_bytes=(64, 0, 128), names=NAMES, ranks=ranks)


def test_a_rank_that_gives_up_waits_for_no_other_and_takes_nothing_for_updated() -> None:
    ours = on_all(made)[1][1]
    ours.give_up()
    with pytest.raises(FinetuneError, match="layer 0 has not been updated by the process"):
        ours.await_updated(0, 1)


def test_ranks_of_a_machine_have_the_same_states_and_wait_for_the_owner() -> None:
    every = on_all(made)
    for (_, first), (ranks, second) in (every[:2], every[2:]):
        assert [one.numel() for one in first.states] == [64, 0, 128]
        assert not any(one.any() for one in first.states)
        first.states[2][5] = 7
        assert second.states[2][5] == 7
        first.note_updated(0, 3)
        second.await_updated(0, 3)
        second.await_updated(0, 2)
        assert ranks.waited_for == [ranks.index - 1] * 2
        waiting = threading.Thread(target=second.await_updated, args=(2, 4))
        waiting.start()
        first.note_updated(2, 3)
        waiting.join(timeout=0.05)
        assert waiting.is_alive()
        first.note_updated(2, 4)
        waiting.join(timeout=60)
        assert not waiting.is_alive()
    assert not any(one.states[0].any() for _, one in every[2:])  # the machines share nothing
    every[0][1].states[0][0] = 1
    assert every[2][1].states[0][0] == 0


def test_without_memory_to_share_all_ranks_are_refused_with_the_reason(monkeypatch) -> None:
    memory = torch.zeros(8, dtype=torch.uint8)
    block = Block(memory=memory, descriptor=None, reason="memfd_create: Function not implemented")
    monkeypatch.setattr(owners, "new_block", lambda _num_bytes: block)

    def refused(ranks: Threads) -> str:
        with pytest.raises(
            FinetuneError, match=r"can share no memory here; .*\n\nhint: allow memf"
        ):
            made(ranks)
        return "refused"

    assert on_all(refused) == ["refused"] * NUM
