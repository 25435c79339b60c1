"""Signs of life of all ranks, so that none waits for a process or a machine that has stopped.

A process that dies closes its connections, which the others notice at once, though not who it was.
One that is stopped, or whose machine is gone, closes nothing. So a thread of each rank writes a
count to a store every half second, and reads those of the others; next to it is the number of
exchanges that the rank has come to, which shows who lets the others wait.
"""

import time
from collections.abc import Sequence
from threading import Event, Thread

from torch.distributed import Store  # type: ignore[attr-defined]  # no stub has it

BEAT_S = 0.5
STOPPED_S = 20.0
FAREWELL_S = 6.0
_LEFT = "left"


class Heartbeat:
    """The signs of life of one rank, and what it sees of the others'."""

    def __init__(self, store: Store, *, index: int, num: int) -> None:
        """Give the first sign of life.

        Args:
            store: That all ranks share.
            index: This rank.
            num: Of the ranks.
        """
        self._store, self._index, self._num = store, index, num
        self._keys = [f"beat/{rank}" for rank in range(num)]
        self.place = 0
        """The exchanges and collectives that this rank has come to."""
        self._looked_s = 0.0
        self._seen: list[tuple[str, float]] = []
        self._has_ended = Event()
        self._has_store = True
        self._reason = ""
        self._thread: Thread | None = None
        store.set(self._keys[index], "0 0")

    def start(self) -> None:
        """Beat until `leave`; all ranks must have given their first sign of life."""
        self._looked_s = time.monotonic()
        self._seen = [("", self._looked_s)] * self._num
        store = self._store.clone()  # type: ignore[attr-defined]  # no stub has it
        self._thread = Thread(target=self._beat, args=(store,), name="heartbeat", daemon=True)
        self._thread.start()  # on a connection that no other thread waits on

    def arrive(self) -> None:
        """Count an exchange or a collective that this rank has come to."""
        self.place += 1

    def leave(self, reason: str = "") -> None:
        """Say that this rank goes and why, so that it is not taken for dead; takes up to a beat.

        Rank 0, which may have the store, waits until the others have read why.
        """
        if not self._has_ended.is_set():
            self._reason = reason
            self._has_ended.set()
        if self._thread is not None:
            self._thread.join(timeout=FAREWELL_S)

    def reason(self) -> str:
        """Return why others have left, if one has said so."""
        said = (
            seen.removeprefix(_LEFT).strip() for seen, _ in self._seen if seen.startswith(_LEFT)
        )
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
        """Return ranks that have not come to the exchange that this one waits in."""
        return [
            rank
            for rank, (seen, _) in enumerate(self._seen)
            if seen and not seen.startswith(_LEFT) and int(seen.partition(" ")[2]) < self.place
        ]

    def _silent(self, *, since_s: float) -> list[int]:
        return [
            rank
            for rank, (seen, when_s) in enumerate(self._seen)
            if rank != self._index and not seen.startswith(_LEFT) and when_s < since_s
        ]

    def _beat(self, store: Store) -> None:
        number, has_ended = 0, False
        try:
            while not has_ended:
                has_ended = self._has_ended.wait(BEAT_S)
                number += 1
                own = f"{_LEFT} {self._reason}" if has_ended else f"{number} {self.place}"
                store.set(self._keys[self._index], own)
                self._look(store.multi_get(self._keys))
            end_s = time.monotonic() + FAREWELL_S - BEAT_S
            while self._is_awaited() and time.monotonic() < end_s:
                time.sleep(BEAT_S)
                self._look(store.multi_get(self._keys))
        except RuntimeError:  # whoever has the store is gone
            self._has_store = False

    def _is_awaited(self) -> bool:
        """Return whether others have yet to read from rank 0's store why it goes."""
        if self._index or not self._reason:
            return False
        alive_s = time.monotonic() - 4 * BEAT_S
        others = self._seen[1:]
        return any(not seen.startswith(_LEFT) and when_s > alive_s for seen, when_s in others)

    def _look(self, beats: Sequence[bytes]) -> None:
        self._looked_s = now_s = time.monotonic()
        self._seen = [
            before if before[0] == beat.decode() else (beat.decode(), now_s)
            for before, beat in zip(self._seen, beats, strict=True)
        ]
