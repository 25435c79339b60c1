import json
from concurrent.futures import ThreadPoolExecutor

import pytest
from torch.distributed import HashStore  # type: ignore[attr-defined]  # no stub has it

from finetune.errors import FinetuneError
from finetune.training.world import meeting
from finetune.training.world.meeting import Meeting, meet
from finetune.training.world.secret import Secret

SECRET = Secret(b"of this launch")


def met(store: HashStore, num: int = 3) -> list[Meeting]:
    with ThreadPoolExecutor(num) as threads:
        waiting = [
            threads.submit(meet, store, SECRET, index=index, num=num, timeout_s=20.0)
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
        meet(HashStore(), SECRET, index=index, num=3, timeout_s=0.1)


@pytest.mark.parametrize("numbers", [(2, 3), (3, 2), (3, 4, 3)])
def test_launchers_that_say_other_numbers_are_named_on_each_at_once(
    numbers: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(meeting, "_READ_S", 0.0)
    store = HashStore()

    def error_of(index: int) -> str:
        with pytest.raises(FinetuneError) as error:
            meet(store, SECRET, index=index, num=numbers[index], timeout_s=2.0)
        return str(error.value)

    with ThreadPoolExecutor(len(numbers)) as threads:
        errors = list(threads.map(error_of, range(len(numbers))))
    for index, error in enumerate(errors[:2]):
        others = " and ".join(str(n) for n in sorted(set(numbers)) if n != numbers[index])
        assert f"rank {index} is one of {numbers[index]}, and by the launchers of others" in error
        assert f"there are {others}; " in error


# ------------------------------------------------------------------------------------ strangers


@pytest.mark.parametrize("secret", [Secret(b"of another launch"), None])
def test_a_list_of_one_without_the_secret_is_not_joined(secret: Secret | None) -> None:
    store, name = HashStore(), "0123/2"
    place = f"sluice/{name}/rank/0"

    def written(key: str, value: str) -> str:
        return secret.proven(key, value) if secret else json.dumps([value, ""])

    def play_rank_0() -> None:
        store.set("sluice/meeting", written("sluice/meeting", name))
        joined, _ = json.loads(store.get(f"sluice/{name}/rank/1"))
        store.set(place, written(place, json.dumps([False, joined])))

    with ThreadPoolExecutor(1) as threads:
        playing = threads.submit(play_rank_0)
        with pytest.raises(
            FinetuneError, match=r"rank 1 of 2 has waited for rank 0, in whose place something else"
        ):
            meet(store, SECRET, index=1, num=2, timeout_s=1.0)
        playing.result()


def test_a_run_that_a_stranger_says_has_begun_is_no_restart() -> None:
    store = HashStore()
    store.set("sluice/begun", "yes")
    assert [one.is_restart for one in met(store)] == [False] * 3


def test_a_rank_that_comes_after_a_stranger_is_met() -> None:
    store = HashStore()
    store.set("sluice/meeting", json.dumps(["0123/3", "no proof"]))
    assert len(met(store)) == 3
