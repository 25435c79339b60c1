"""What the processes of a launch know and others do not, by which they prove whose they are.

On one machine it is in a file that its user alone can read, so that nothing is to be set. Several
machines need not share a file: there the user sets an environment variable.
"""

import fcntl
import hmac
import json
import os
import secrets
import stat
from pathlib import Path

from finetune.env import SECRET, Launch, cache_dir
from finetune.errors import FinetuneError, file_error

_FILE, _NUM_BYTES = "secret", 32


class Secret:
    """Proves and checks statements. A proof says nothing about the secret."""

    def __init__(self, key: bytes) -> None:
        """Take the secret."""
        self._key = key

    def proven(self, what: str, value: str) -> str:
        """Return a value with a proof that it is `what`, by one who knows the secret."""
        return json.dumps([value, self._proof(what, value)])

    def checked(self, what: str, found: bytes) -> str | None:
        """Return the value of `proven`; None if it is not of one who knows the secret.

        Args:
            what: As it was given to `proven`: a proof of something else is none of this.
            found: What anybody may have written.
        """
        value, proof = _parts(found)
        return value if hmac.compare_digest(self._proof(what, value), proof) else None

    def claimed(self, found: bytes) -> str:
        """Return the value of what anybody may have written; empty if there is none."""
        return _parts(found)[0]

    def _proof(self, what: str, value: str) -> str:
        said = json.dumps([what, value]).encode()
        return hmac.digest(self._key, said, "sha256").hex()


def _parts(found: bytes) -> tuple[str, str]:
    """Return the value and the proof of `proven`; empty for anything else."""
    try:
        value, proof = json.loads(found)
    except (ValueError, TypeError, RecursionError):
        return "", ""
    if isinstance(value, str) and isinstance(proof, str) and proof.isascii():
        return value, proof
    return "", ""


def secret_of(launch: Launch) -> Secret:
    """Return the secret that all processes of a launch know.

    Raises:
        FinetuneError: It cannot be kept from other users of this machine.
    """
    if launch.secret is not None:
        return Secret(launch.secret.encode())
    file = cache_dir() / _FILE
    try:
        return Secret(_kept(file))
    except OSError as error:
        raise file_error(error, str(file)) from error


def _kept(file: Path) -> bytes:
    """Return the content of a file that is written once, and read by its owner alone."""
    file.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)  # one process writes it, the others wait
        status = os.fstat(descriptor)
        if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077:
            raise _shared(file, f"has mode {stat.S_IMODE(status.st_mode):o}, user {status.st_uid}")
        key = os.read(descriptor, _NUM_BYTES)
        if not key:
            key = secrets.token_bytes(_NUM_BYTES)
            os.write(descriptor, key)
    finally:
        os.close(descriptor)
    if len(key) < _NUM_BYTES:
        raise _shared(file, f"has {len(key)} bytes of {_NUM_BYTES}")
    return key


def _shared(file: Path, seen: str) -> FinetuneError:
    return FinetuneError(
        f"{file} {seen}",
        limit="by what is in it the processes of a run prove that they are of one user, so he alone"
        " reads it",
        hint=f"`rm {file}`, and start again; or set {SECRET} to a secret of your own",
    )
