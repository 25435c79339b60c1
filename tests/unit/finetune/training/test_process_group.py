import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import HashStore  # type: ignore[attr-defined]  # no stub has it

from finetune.env import Launch
from finetune.errors import FinetuneError
from finetune.training.process_group import SignedStore, _met, secret_of, surroundings

SIGNED = "is not signed with its secret"


def store_of(key: bytes, store: Any = None) -> SignedStore:
    return SignedStore(HashStore() if store is None else store, key)


# -------------------------------------------------------------------------------------- signatures


def test_a_value_is_read_by_who_knows_the_secret() -> None:
    one = store_of(b"of this launch")
    one.set("a name", "a word")
    one.set("bytes", b"\x00\xff")
    same = store_of(b"of this launch", one.store)
    assert (same.get("a name"), same.get("bytes")) == (b"a word", b"\x00\xff")
    with pytest.raises(FinetuneError, match=SIGNED):
        store_of(b"of another launch", one.store).get("a name")


def test_the_first_of_two_words_stays() -> None:
    one = store_of(b"of this launch")
    other = store_of(b"of this launch", one.store)
    assert one.compare_set("cause", "", "mine") == b"mine"
    assert other.compare_set("cause", "", "theirs") == b"mine"
    with pytest.raises(FinetuneError, match=SIGNED):
        store_of(b"of another launch", one.store).compare_set("cause", "", "theirs")


@pytest.mark.parametrize("content", [b"", b"a word", bytes(31), bytes(32), bytes(32) + b"a word"])
def test_what_is_not_signed_is_refused(content: bytes) -> None:
    one = store_of(b"of this launch")
    one.store.set("a name", content)
    with pytest.raises(FinetuneError, match=SIGNED):
        one.get("a name")


def test_a_signature_holds_for_one_key_and_one_value() -> None:
    one = store_of(b"of this launch")
    one.set("ab", "c")
    signed = bytes(one.store.get("ab"))
    for key, content in (("a", signed), ("ab", signed + b"d"), ("ab", signed[:32] + b"d")):
        one.store.set(key, content)
        with pytest.raises(FinetuneError, match=SIGNED):
            one.get(key)


# ----------------------------------------------------------------------------------------- meeting


def meet_two(*, node: int = 0, place: int = 1, **changed: str) -> list[dict[str, Any]]:
    """Return what rank 0 of two finds, the other of which has said that something is different."""
    ours, theirs = (store_of(b"of this launch", store) for store in [HashStore()] for _ in range(2))
    at = {"LOCAL_RANK": place, "LOCAL_WORLD_SIZE": 2}
    own = {"nonce": "of rank 1", "pid": 1, "node": node, "place": at}
    alike = {"WORLD_SIZE": 2, **surroundings(), **changed}
    theirs.set("rank/1", json.dumps({**own, "alike": alike}))
    return _met(ours, launch())


def test_each_meeting_has_a_number_of_its_own() -> None:
    first, second = meet_two(), meet_two()
    assert first[1] == second[1]
    assert first[0]["nonce"] != second[0]["nonce"]


@pytest.mark.parametrize(
    ("changed", "shown"),
    [
        ({"peft": "0.0.1"}, r"rank 1 has peft 0\.0\.1; by the other ranks it is peft "),
        ({"WORLD_SIZE": "3"}, "rank 1 has WORLD_SIZE 3; by the other ranks it is WORLD_SIZE 2,"),
        ({"another": "3"}, "rank 1 has another 3; by the other ranks it is another None,"),
        ({"node": 1}, "rank 0 has LOCAL_WORLD_SIZE 2; by the other ranks it is LOCAL_WORLD_SIZE 1"),
    ],
)
def test_what_is_not_alike_is_named(changed: dict[str, Any], shown: str) -> None:
    with pytest.raises(FinetuneError, match=shown):
        meet_two(**changed)


def test_what_changes_the_last_bits_is_listed() -> None:
    found = surroundings()
    assert found["torch"] == torch.__version__
    assert {"transformers", "peft", "bitsandbytes", "Python"} <= found.keys()
    if not torch.cuda.is_available():
        assert found["torch's threads"] == str(torch.get_num_threads())


# ------------------------------------------------------------------------------------- the file


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "sluice"


def launch(secret: str | None = None, index: int = 0) -> Launch:
    return Launch(num=2, index=index, num_local=2, local_index=index, node=0, secret=secret)


def test_the_processes_of_a_user_on_one_machine_have_one_secret(cache: Path) -> None:
    with ThreadPoolExecutor(8) as threads:
        every = list(threads.map(lambda rank: secret_of(launch(index=rank)), range(8)))
    assert set(every) == {(cache / "secret").read_bytes()}
    assert (cache / "secret").stat().st_mode & 0o777 == 0o600
    assert (cache / "secret").stat().st_size == 32
    assert [file.name for file in cache.iterdir()] == ["secret"]


def test_another_cache_has_another_secret(cache: Path, tmp_path: Path, monkeypatch) -> None:
    first = secret_of(launch())
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "other"))
    assert secret_of(launch()) != first


def test_a_secret_that_the_user_has_set_is_taken_and_no_file_is_written(cache: Path) -> None:
    assert secret_of(launch("a secret")) == b"a secret"
    assert not cache.exists()


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o666])
def test_a_file_that_others_can_read_or_write_is_refused(cache: Path, mode: int) -> None:
    secret_of(launch())
    (cache / "secret").chmod(mode)
    with pytest.raises(
        FinetuneError, match=rf"secret has mode {mode:o}, .* he alone reads\n\nhint: `rm /"
    ):
        secret_of(launch())


@pytest.mark.skipif(os.geteuid() != 0, reason="needs another user's file")
def test_a_file_of_another_user_is_refused(cache: Path) -> None:
    secret_of(launch())
    os.chown(cache / "secret", 12345, 12345)
    with pytest.raises(FinetuneError, match="secret has mode 600, user 12345, 32 bytes; "):
        secret_of(launch())


def test_a_file_that_is_cut_off_is_refused(cache: Path) -> None:
    secret_of(launch())
    os.truncate(cache / "secret", 31)
    with pytest.raises(
        FinetuneError, match=r"secret has mode 600, user \d+, 31 bytes; .*\n\nhint: `rm /"
    ):
        secret_of(launch())


def test_a_link_to_a_file_that_others_can_read_is_refused(cache: Path, tmp_path: Path) -> None:
    cache.mkdir()
    (tmp_path / "elsewhere").write_bytes(bytes(32))
    (cache / "secret").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(FinetuneError, match="secret has mode 644"):
        secret_of(launch())
