import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from finetune.env import Launch
from finetune.errors import FinetuneError
from finetune.training.world.secret import Secret, secret_of

SECRET = Secret(b"of this launch")


def proven(secret: Secret, what: str = "a name", value: str = "rank 1") -> bytes:
    return secret.proven(what, value).encode()


def test_a_proof_holds_for_what_was_proven() -> None:
    assert SECRET.checked("a name", proven(SECRET)) == "rank 1"
    assert SECRET.checked("another name", proven(SECRET)) is None
    assert SECRET.checked("a name", proven(Secret(b"of another launch"))) is None
    value, proof = json.loads(proven(SECRET))
    assert value == "rank 1"
    assert SECRET.checked("a name", json.dumps(["rank 2", proof]).encode()) is None


def test_words_do_not_run_into_each_other() -> None:
    _, proof = json.loads(proven(SECRET, "ab", "c"))
    assert SECRET.checked("a", json.dumps(["bc", proof]).encode()) is None


@pytest.mark.parametrize(
    "found",
    [
        *(b"", b"\xff", b"{}", b"[]", b"3", b"null", b'["a"]', b'["a", 3]', b'[3, "a"]'),
        *(b'["a", "b", "c"]', b'["a", "\xc3\xa9"]', b'["a", ""]', b"[" * 100_000),
        b"\x80\x04\x95",
    ],
)
def test_garbage_is_no_proof(found: bytes) -> None:
    assert SECRET.checked("a name", found) is None


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
    assert all(one.checked("a name", proven(every[0])) == "rank 1" for one in every)
    assert (cache / "secret").stat().st_mode & 0o777 == 0o600
    assert (cache / "secret").stat().st_size == 32


def test_another_cache_has_another_secret(cache: Path, tmp_path: Path, monkeypatch) -> None:
    first = secret_of(launch())
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "other"))
    assert secret_of(launch()).checked("a name", proven(first)) is None


def test_a_secret_that_the_user_has_set_is_taken_and_no_file_is_written(cache: Path) -> None:
    one, other = (secret_of(launch("a secret")) for _ in range(2))
    assert one.checked("a name", proven(other)) == "rank 1"
    assert secret_of(launch("another")).checked("a name", proven(one)) is None
    assert not cache.exists()


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o666])
def test_a_file_that_others_can_read_or_write_is_refused(cache: Path, mode: int) -> None:
    secret_of(launch())
    (cache / "secret").chmod(mode)
    with pytest.raises(
        FinetuneError, match=rf"secret has mode {mode:o}, .*he alone reads it\n\nhint: `rm /"
    ):
        secret_of(launch())


@pytest.mark.skipif(os.geteuid() != 0, reason="needs another user's file")
def test_a_file_of_another_user_is_refused(cache: Path) -> None:
    secret_of(launch())
    os.chown(cache / "secret", 12345, 12345)
    with pytest.raises(FinetuneError, match="secret has mode 600, user 12345; "):
        secret_of(launch())


def test_a_file_that_is_cut_off_is_refused(cache: Path) -> None:
    secret_of(launch())
    os.truncate(cache / "secret", 31)
    with pytest.raises(FinetuneError, match=r"secret has 31 bytes of 32; .*\n\nhint: `rm /"):
        secret_of(launch())


def test_a_link_is_not_followed(cache: Path, tmp_path: Path) -> None:
    cache.mkdir()
    (tmp_path / "elsewhere").write_bytes(bytes(32))
    (cache / "secret").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(FinetuneError, match="secret: Too many levels of symbolic links"):
        secret_of(launch())
