"""Damages files as disks, downloads and people do, and runs the program over them.

Every damage is made from a seed, so a failure can be made again from its label alone.
"""

import contextlib
import io
import json
import random
import shutil
import signal
import sys
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

from finetune import app

LIMIT_CPU_S = 60  # of processor time, so that a busy machine is no hang
DEEP = 100_000

VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 7, 2**31, 2**63, 10**18, 10**30, 10**400, 0.5, -0.0, 1e300),
    *(
        float("nan"),
        float("inf"),
        "",
        "x",
        "8",
        "../x",
        "/etc/passwd",
        "\x00",
        "\u2028",
        "a" * 9000,
    ),
    *([], [1], ["x", None], [[[[]]]], {}, {"a": 1}, {"": {"": None}}, [0] * 3, [-1, "q", 2.5]),
)
SCALES = (1e-300, 1e-30, 1e-9, 1.5, 1e9, 1e20, 9e29, 3, 2**20, 2**40, 2**60)


@dataclass(frozen=True, kw_only=True, slots=True)
class Damage:
    """Something that happens to a file: what it is called, and what does it."""

    label: str
    apply: Callable[[Path], object]


@dataclass(frozen=True, kw_only=True, slots=True)
class Ended:
    """How a command ended: its exit code, -1 for a traceback and -2 for a hang."""

    code: int
    out: str
    err: str

    def fault(self, *names: str) -> str | None:
        """Return what is wrong with the way it ended; None if it worked or refused properly.

        Args:
            names: One of these must be in a refusal, so that the user knows where to look.
        """
        if self.code == 0 or (self.code == 3 and "hint: " in self.err):
            return None
        if self.code == -1:
            return f"traceback: {self.err.strip().splitlines()[-1][:160]}"
        if self.code == -2:
            return "hang"
        if self.code != 1:
            return f"exit code {self.code}"
        if not self.err.startswith("error: ") or "\n\nhint: " not in self.err:
            return f"no error and hint: {self.err[:160]}"
        if len(self.err) > 15_000:
            return f"an error of {len(self.err)} characters"
        if not any(name in self.err for name in names):
            return f"names none of {', '.join(names)}: {self.err[:300]}"
        return None


@dataclass(frozen=True, slots=True)
class Tally:
    """Counts how commands ended, and keeps what was wrong."""

    ends: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)

    def add(self, label: str, ended: Ended, *names: str) -> None:
        """Count one command."""
        fault = ended.fault(*names)
        kind = {0: "done", 1: "refused", 3: "does not fit", -1: "traceback", -2: "hang"}
        self.ends[kind.get(ended.code, "other")] += 1
        if fault is not None:
            self.faults.append(f"{label}: {fault}")

    def require_none(self, what: str) -> None:
        """Print the counts, and fail if anything was wrong."""
        counts = ", ".join(f"{number} {kind}" for kind, number in self.ends.most_common())
        sys.stdout.write(
            f"\n{what}: {self.ends.total()} commands: {counts}; {len(self.faults)} faults\n"
        )
        assert not self.faults, "\n".join(self.faults)


class _HangError(BaseException):
    """A command took too long."""


def run(*argv: object) -> Ended:
    """Run the program in this process and tell how it ended."""
    out, err = io.StringIO(), io.StringIO()

    def stop(_number: int, _frame: FrameType | None) -> None:
        raise _HangError

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, LIMIT_CPU_S)
    code = 0
    try:
        with (
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(err),
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("ignore")
            app.main([str(word) for word in argv])
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except _HangError:
        code = -2
    except BaseException:  # noqa: BLE001 - what this looks for
        code = -1
        err.write(traceback.format_exc())
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)
    return Ended(code=code, out=out.getvalue(), err=err.getvalue())


# ----------------------------------------------------------------------------------------- damages


def of_any_file() -> list[Damage]:
    """Return what can happen to any file."""

    def written(content: bytes) -> Callable[[Path], None]:
        return lambda file: _rewrite(file, lambda _: content)

    changes: dict[str, Callable[[bytes], bytes]] = {
        "cut in half": lambda content: content[: len(content) // 2],
        "cut by a byte": lambda content: content[:-1].rstrip()[:-1],
        "a byte that is not UTF-8": lambda c: c[: len(c) // 2] + b"\xff" + c[len(c) // 2 :],
        "a NUL": lambda c: c[: len(c) // 2] + b"\x00" + c[len(c) // 2 :],
        "a byte order mark": lambda content: b"\xef\xbb\xbf" + content,
        "UTF-16": lambda content: content.decode("utf-8", "replace").encode("utf-16"),
        "twice": lambda content: content + content,
    }
    contents = {
        "empty": b"",
        "a newline": b"\n",
        "garbage": random.Random(0).randbytes(4096),
        "zeros": bytes(4096),
        "brackets": b"[" * DEEP,
        "braces": b'{"a":' * DEEP,
    }
    return [
        Damage(label="missing", apply=lambda file: file.unlink()),
        Damage(label="a directory", apply=_to_directory),
        Damage(label="a link to nothing", apply=lambda file: _to_link(file, "nothing")),
        Damage(label="a link to itself", apply=lambda file: _to_link(file, file.name)),
        Damage(label="unreadable", apply=lambda file: file.chmod(0)),  # root reads it anyway
        *(Damage(label=label, apply=written(content)) for label, content in contents.items()),
        *(
            Damage(label=label, apply=partial(_rewrite, change=change))
            for label, change in changes.items()
        ),
    ]


def of_json_file(*, seed: int, num: int) -> list[Damage]:
    """Return damages of a JSON file: its values, and its writing."""
    texts = ("[]", "{}", "null", "1", '"x"', "[{}]", "9" * 5000, "NaN", '{"a": 1, "a": 2}')
    whole = [Damage(label=f"is {text[:20]}", apply=partial(_write, text=text)) for text in texts]
    inside = [
        Damage(label=f"seed {one}", apply=partial(change_values, seed=one))
        for one in range(seed, seed + num)
    ]
    return [*whole, *inside]


def change_values(file: Path, *, seed: int) -> None:
    """Delete, replace, rename or add values of a JSON file."""
    chance = random.Random(seed)
    content = json.loads(file.read_text())
    for _ in range(chance.choice((1, 1, 1, 2, 3))):
        content = changed(content, chance)
    _write(file, json.dumps(content))


def changed(content: Any, chance: random.Random) -> Any:
    """Return a JSON value with one change somewhere inside."""
    holders = [holder for holder in _holders(content) if len(holder)]
    if not holders:
        return chance.choice(VALUES)
    holder = chance.choice(holders)
    key = chance.choice(list(holder)) if isinstance(holder, dict) else chance.randrange(len(holder))
    what = chance.random()
    if what < 0.2:
        del holder[key]
    elif what < 0.25 and isinstance(holder, dict):
        holder[f"{key}_"] = holder.pop(key)
    elif what < 0.6 and isinstance(holder[key], int | float):
        holder[key] = chance.choice((-holder[key], holder[key] * 10**9, holder[key] + 1, *SCALES))
    else:
        holder[key] = chance.choice(VALUES)
    return content


def _holders(content: Any) -> Iterator[Any]:
    if isinstance(content, dict | list):
        yield content
        for value in content.values() if isinstance(content, dict) else content:
            yield from _holders(value)


def copied(source: Path, target: Path) -> Path:
    """Return a fresh copy of a folder."""
    if target.exists():
        for path in target.rglob("*"):
            if not path.is_symlink():
                path.chmod(0o755)
        shutil.rmtree(target)
    shutil.copytree(source, target)
    return target


def _write(file: Path, text: str) -> None:
    file.chmod(0o644)
    file.write_text(text)


def _rewrite(file: Path, change: Callable[[bytes], bytes]) -> None:
    content = file.read_bytes()
    file.chmod(0o644)
    file.write_bytes(change(content))


def _to_directory(file: Path) -> None:
    file.unlink()
    file.mkdir()


def _to_link(file: Path, to: str) -> None:
    file.unlink()
    file.symlink_to(to)
