"""Slots on the device: each holds an adapter, of a model in training or of a sampler."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from typing import Any

from finetune.clients.scheduler import Scheduler
from finetune.errors import ConfigError

_LOOKS_S = 1.0  # how often who waits looks for what says nothing: the silence of a client


class Slots:
    """The slots of one kind; who waits first gets the first. For one event loop.

    Attributes:
        num_taken: Number of slots that hold an adapter, or are about to.
    """

    def __init__(self, scheduler: Scheduler, num: int, *, kind: str) -> None:
        """Begin with empty slots.

        Args:
            scheduler: Scheduler that has room for these slots.
            num: Number of slots.
            kind: Purpose of the slots: the beginning of the names of their adapters.
        """
        self._scheduler, self._num, self._kind = scheduler, num, kind
        self.num_taken, self._num_names = 0, 0
        self._turn, self._changed = asyncio.Lock(), asyncio.Condition()
        self._going: set[asyncio.Task[None]] = set()

    async def take(self, make_room: Callable[[], Awaitable[bool]]) -> str:
        """Wait for a slot; return a name for its adapter, which the caller adds.

        Args:
            make_room: Empties a slot; returns whether there was one to empty.
        """
        async with self._turn:
            while self.num_taken >= self._num:
                if not await make_room():
                    # `wait_for` may lose a cancellation (Python 3.11).
                    with suppress(TimeoutError):
                        async with asyncio.timeout(_LOOKS_S), self._changed:
                            await self._changed.wait()
            self.num_taken += 1
            self._num_names += 1
            return f"{self._kind}_{self._num_names}"

    async def leave(self, name: str) -> None:
        """Let an adapter go if it was added, and its slot."""

        async def left() -> None:
            with suppress(ConfigError):  # it could not be added
                await asyncio.wrap_future(self._scheduler.remove(name))
            self.num_taken -= 1
            await self.tell()

        await self.finish(left())

    async def tell(self) -> None:
        """Let those look who wait for a slot."""
        async with self._changed:
            self._changed.notify_all()

    async def finish(self, work: Coroutine[Any, Any, None]) -> None:
        """Do something to its end, even if the request that it is done for is cancelled."""
        task = asyncio.get_running_loop().create_task(work)
        self._going.add(task)
        task.add_done_callback(self._going.discard)
        await asyncio.shield(task)

    async def close(self) -> None:
        """Wait for what is done to its end."""
        await asyncio.gather(*self._going)
