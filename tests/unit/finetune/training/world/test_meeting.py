from concurrent.futures import ThreadPoolExecutor

import pytest
from torch.distributed import HashStore  # type: ignore[attr-defined]  # no stub has it

from finetune.errors import FinetuneError
from finetune.training.world.meeting import Meeting, meet


def met(store: HashStore, num: int = 3) -> list[Meeting]:
    with ThreadPoolExecutor(num) as threads:
        waiting = [
            threads.submit(meet, store, index=index, num=num, timeout_s=20.0)
            for index in reversed(range(num))
        ]
    return [one.result() for one in waiting]


def test_ranks_that_meet_share_a_store_and_those_after_a_restart_another() -> None:
    store = HashStore()
    first = met(store)
    first[0].store.set("word", "of the first")
    assert [one.store.get("word") for one in first] == [b"of the first"] * 3
    again = met(store)  # the launcher has kept what the first have written
    assert not any(one.store.check(["word"]) for one in again)
    again[2].store.set("word", "of the second")
    assert [one.store.get("word") for one in again] == [b"of the second"] * 3
    assert first[0].store.get("word") == b"of the first"


def test_a_restart_is_one_only_once_a_run_has_begun() -> None:
    store = HashStore()
    first = met(store)
    assert [one.is_restart for one in first] == [False] * 3
    assert [one.is_restart for one in met(store)] == [False] * 3
    first[0].note_begun()
    assert [one.is_restart for one in met(store)] == [True] * 3


@pytest.mark.parametrize(("index", "missing"), [(0, "1, 2"), (1, "0")])
def test_ranks_that_do_not_come_are_named(index: int, missing: str) -> None:
    with pytest.raises(
        FinetuneError, match=f"rank {index} of 3 has waited for rank {missing}; .*within 0 s"
    ):
        meet(HashStore(), index=index, num=3, timeout_s=0.1)
