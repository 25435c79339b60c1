"""Signs of life of all ranks, so that none waits for a process or a machine that has stopped.

A process that dies closes its connections, which the others notice at once, though not who it was.
One that is stopped, or whose machine is gone, closes nothing. So a thread of each rank writes a
count to a store every half second, and reads those of the others; next to it is the number of
exchanges that the rank has come to, which shows who lets the others wait.

That thread lives on in a rank whose main thread hangs, so its beat is no sign of work. Work has a
count of its own: of exchanges, of the engine's ops, of rows and weights that are done, and of each
64 MiB that were read from storage or written to it. A rank may take as long as it likes as long as
this count grows.

The others' signs also say why they fail or have left. A rank that comes to no exchange from then on
may be in a long computation, or may hang: the thread ends its process.
"""

import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from threading import Event, Thread, main_thread

from torch.distributed import Store  # type: ignore[attr-defined]  # no stub has it

from finetune.training.world.storage import num_moved

BEAT_S = 0.5
STOPPED_S = 20.0
SILENT_S = 1800.0  # without work, as other trainers wait for a collective
GIVEN_UP_S = 5.0
FAREWELL_S = 6.0
WAITING_IN = ("/torch/distributed/", "/finetune/training/process_group.py")


@dataclass(frozen=True, kw_only=True, slots=True)
class _Sign:
    """A sign of life.

    Attributes:
        number: Of the rank's signs before.
        place: The exchanges and collectives that it has come to.
        work: Units of work that it has done, of all kinds.
        is_waiting: Whether its main thread waits in one, as far as Python's stack says.
        has_left: Whether it is the last one.
        why: Why it fails, or has left; empty if it does neither, or has nothing to say.
    """

    number: int = 0
    place: int = 0
    work: int = 0
    is_waiting: bool = False
    has_left: bool = False
    why: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Seen:
    """What is known of a rank.

    Attributes:
        sign: Its last sign of life; None before the first.
        when_s: When it was new.
        worked_s: When it was last seen to have come further.
    """

    sign: _Sign | None
    when_s: float
    worked_s: float

    def after(self, sign: _Sign, now_s: float) -> "_Seen":
        """Return what is known once a sign has been read."""
        if sign == self.sign:
            return self
        before = self.sign
        is_further = not before or (before.place, before.work) != (sign.place, sign.work)
        return _Seen(sign=sign, when_s=now_s, worked_s=now_s if is_further else self.worked_s)


class Heartbeat:
    """The signs of life of one rank, and what it sees of the others'."""

    def __init__(self, store: Store, *, index: int, num: int, end: Callable[[str], None]) -> None:
        """Give the first sign of life.

        Args:
            store: That all ranks share.
            index: This rank.
            num: Of the ranks.
            end: Ends this process, given why the run cannot go on.
        """
        self._store, self._index, self._num, self._end = store, index, num, end
        self._keys = [f"beat/{rank}" for rank in range(num)]
        self.place = 0
        """The exchanges and collectives that this rank has come to."""
        self.has_steps = False
        """Whether all ranks run steps, in which each has time for a sign of life."""
        self._is_writing = self._is_ending = False
        self._since: tuple[int, float] | None = None  # place and time as the others were lost
        self._looked_s = 0.0
        self._seen: list[_Seen] = []
        self._num_marks = 0
        self._followed: list[Callable[[], int]] = [num_moved]
        self._has_ended = Event()
        self._has_store = True
        self._why = ""
        self._thread: Thread | None = None
        self._give(store, _Sign())

    def start(self) -> None:
        """Beat until `leave`; all ranks must have given their first sign of life."""
        self._looked_s = time.monotonic()
        new = _Seen(sign=None, when_s=self._looked_s, worked_s=self._looked_s)
        self._seen = [new] * self._num
        store = self._store.clone()  # type: ignore[attr-defined]  # no stub has it
        self._thread = Thread(target=self._beat, args=(store,), name="heartbeat", daemon=True)
        self._thread.start()  # on a connection that no other thread waits on

    def arrive(self) -> None:
        """Count an exchange or a collective that this rank has come to."""
        self.place += 1

    def mark(self) -> None:
        """Count a unit of work that this rank has done."""
        self._num_marks += 1

    @contextmanager
    def following(self, count: Callable[[], int]) -> Iterator[None]:
        """Take a count of units of work, which only grows, for this rank's in this context."""
        self._followed.append(count)
        try:
            yield
        finally:
            self._num_marks += count()  # work does not shrink
            self._followed.remove(count)

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Let this rank finish what it writes in this context, whoever is gone.

        Not if it hangs in it: then it does no work for long.
        """
        self._is_writing = True
        try:
            yield
        finally:
            self._is_writing = False

    def fail(self, why: str) -> None:
        """Say why this rank fails, while it waits for the others to come to an exchange."""
        self._why, self._is_ending = why, True

    def note_ending(self) -> None:
        """Note that this rank knows that the run ends, and is not to be ended."""
        self._is_ending = True

    def leave(self, why: str = "") -> None:
        """Say that this rank goes and why, so that it is not taken for dead; takes up to a beat.

        Rank 0, which may have the store, waits until the others have read why.
        """
        self._is_ending = True
        if not self._has_ended.is_set():
            self._why = why
            self._has_ended.set()
        if self._thread is not None:
            self._thread.join(timeout=FAREWELL_S)

    def have_left(self) -> bool:
        """Return whether others have left and said why."""
        return any(one.sign.has_left and one.sign.why for one in self._seen if one.sign)

    def reason(self) -> str:
        """Return why others fail or have left, if one has said so."""
        every = enumerate(self._seen)
        said = (one.sign.why for rank, one in every if one.sign and rank != self._index)
        return next(filter(None, said), "")

    def stopped(self, *, waited_s: float) -> list[int]:
        """Return ranks without a sign of life for long.

        Without its store, or while that does not answer, no rank shows any: then it is rank 0, see
        `gone`.

        Args:
            waited_s: How long this rank has waited for the others.
        """
        if not self._has_store:
            return [0] if waited_s > STOPPED_S else []
        now_s = time.monotonic()
        silent = self._silent(since_s=now_s - STOPPED_S)
        return [0] if silent and self._looked_s < now_s - STOPPED_S / 2 else silent

    def gone(self) -> list[int]:
        """Return ranks that no longer give signs of life; takes a few beats.

        Without its store it is rank 0, or the launcher that started it.
        """
        start_s = time.monotonic() + BEAT_S
        time.sleep(4 * BEAT_S)
        return self._silent(since_s=start_s) if self._has_store else [0]

    def late(self) -> list[int]:
        """Return ranks that have not come to the exchange that others wait in, this one included.

        In a collective of a library within a visit all have come equally far; then it is those that
        do not wait, if others do.
        """
        here = [(rank, one.sign) for rank, one in enumerate(self._seen) if one.sign]
        here = [(rank, sign) for rank, sign in here if not sign.has_left]
        late = [rank for rank, sign in here if sign.place < self.place]
        if late or not any(sign.is_waiting for _, sign in here):
            return late
        return [rank for rank, sign in here if not sign.is_waiting]

    def idle(self, *, waited_s: float) -> list[int]:
        """Return ranks that let others wait and have done no work for long.

        Args:
            waited_s: How long this rank has waited for the others.
        """
        if waited_s < SILENT_S:  # one that has waited itself has done no work either
            return []
        long_s = self._looked_s - SILENT_S
        return [rank for rank in self.late() if self._seen[rank].worked_s < long_s]

    def _silent(self, *, since_s: float) -> list[int]:
        return [
            rank
            for rank, one in enumerate(self._seen)
            if rank != self._index and not (one.sign and one.sign.has_left) and one.when_s < since_s
        ]

    def _beat(self, store: Store) -> None:
        number = 0
        try:
            while not self._has_ended.wait(BEAT_S):
                number += 1
                self._give(store, self._sign(number))
                self._look(store.multi_get(self._keys))
                self._end_if_lost(store)
            self._give(store, _Sign(number=number + 1, has_left=True, why=self._why))
            self._look(store.multi_get(self._keys))
            end_s = time.monotonic() + FAREWELL_S - BEAT_S
            while self._is_awaited() and time.monotonic() < end_s:
                time.sleep(BEAT_S)
                self._look(store.multi_get(self._keys))
        except RuntimeError:  # whoever has the store is gone
            self._has_store = False
        while not self._has_ended.wait(BEAT_S):
            self._end_if_lost(None)

    def _sign(self, number: int) -> _Sign:
        return _Sign(
            number=number,
            place=self.place,
            work=self._num_marks + sum(count() for count in self._followed),
            is_waiting=_is_main_thread_waiting(),
            why=self._why,
        )

    def _give(self, store: Store, sign: _Sign) -> None:
        store.set(self._keys[self._index], json.dumps(asdict(sign)))

    def _end_if_lost(self, store: Store | None) -> None:
        """End this process if the run cannot go on, and it has not come to notice.

        First a rank that waits to say why it fails has some time to show its error itself: when the
        first process of a machine exits, the launcher ends the others there.
        """
        now_s = time.monotonic()
        is_at_work = self._seen[self._index].worked_s > now_s - SILENT_S
        is_writing = self._is_writing and is_at_work
        why = "" if self._is_ending or is_writing else self._lost_because()
        if not why or self._since is None or self._since[0] != self.place:
            self._since = (self.place, now_s) if why else None
            return
        if now_s - self._since[1] < GIVEN_UP_S:
            return
        if store is not None:
            self._give(store, _Sign(has_left=True, why=why))
            time.sleep(4 * BEAT_S)
        if not self._is_ending:
            self._end(why)

    def _lost_because(self) -> str:
        """Return why the run cannot go on, as far as the others' signs say; empty if it can.

        Before the steps a rank may hold the interpreter for long; then who waits for it notices.
        """
        if not self._has_store:
            return self.reason() or "rank 0 is gone or does not answer: its store is gone"
        silent = self.stopped(waited_s=0.0) if self.has_steps else []
        ranks = " and ".join(f"rank {rank}" for rank in silent)
        gone = f"{ranks} is gone or does not answer: no sign of life for {STOPPED_S:.0f} s"
        return self.reason() or (gone if silent else "")

    def _is_awaited(self) -> bool:
        """Return whether others have yet to read from rank 0's store why it goes."""
        if self._index or not self._why:
            return False
        alive_s = time.monotonic() - 4 * BEAT_S
        return any(
            one.sign is not None and not one.sign.has_left and one.when_s > alive_s
            for one in self._seen[1:]
        )

    def _look(self, beats: Sequence[bytes]) -> None:
        self._looked_s = now_s = time.monotonic()
        signs = [_read(beat) for beat in beats]
        self._seen = [
            before.after(sign, now_s) for before, sign in zip(self._seen, signs, strict=True)
        ]


def _read(content: bytes) -> _Sign:
    """Return a sign; what only another version of this program knows is passed over."""
    found = json.loads(content)
    return _Sign(**{one.name: found[one.name] for one in fields(_Sign) if one.name in found})


def _is_main_thread_waiting() -> bool:
    """Return whether the main thread is in an exchange or a collective."""
    frame = sys._current_frames().get(main_thread().ident or 0)
    return frame is not None and any(place in frame.f_code.co_filename for place in WAITING_IN)
