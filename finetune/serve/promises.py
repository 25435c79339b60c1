"""Answers that clients are promised: computed once, and sent as often as they are asked for.

A request is promised an answer under a name of its own, which follows from who asks and from its
sequence number. So a request that is sent again is done once; one that was sent with other content
under the same number is refused.
"""

import asyncio
import json
import time
from collections import deque
from collections.abc import Coroutine, Iterator, Mapping
from concurrent.futures import CancelledError
from dataclasses import dataclass
from typing import Any, Self

from pydantic import BaseModel
from tinker.proto import tinker_public_pb2 as pb

from finetune.errors import ConfigError
from finetune.serve import wire
from finetune.serve.limits import BusyError, GoneError, Limits
from offload.errors import OffloadError, SluiceError

_PROMISE_BYTES = 2**11  # of an answer, besides its content
Asked = BaseModel | pb.ForwardBackwardRequest


@dataclass(frozen=True, kw_only=True, slots=True)
class Reply:
    """An answer."""

    content: bytes
    is_protobuf: bool = False

    @classmethod
    def of(cls, **fields: object) -> Self:
        """Return JSON."""
        return cls(content=json.dumps(fields).encode())

    @classmethod
    def failed(cls, error: BaseException) -> Self:
        """Return that a request has failed, and whose fault it is."""
        is_clients = isinstance(error, SluiceError)
        text = str(error) if is_clients else f"{type(error).__name__}: {error}"
        return cls.of(error=text, category="user" if is_clients else "server")


@dataclass(kw_only=True, slots=True, eq=False)
class Session:
    """A client's session: whom answers are promised to."""

    id: str
    heard_s: float  # when it was heard of, on the monotonic clock
    notes: Mapping[str, Any]
    num_open: int = 0  # answers that it was promised and has not fetched


@dataclass(kw_only=True, slots=True, eq=False)
class Promise:
    """An answer that is promised."""

    name: str
    owner: Session
    digest: bytes  # of the request
    takes_slot: bool  # whether what it does may take a slot
    answer: "asyncio.Task[Reply]"
    is_waiting: bool = False  # whether it waits for a slot
    is_sent: bool = False


class Promises:
    """The answers that are promised, and how much of them is held; for one event loop."""

    def __init__(self, limits: Limits) -> None:
        """Promise nothing yet."""
        self._limits = limits
        self._promises: dict[str, Promise] = {}
        self._sent: deque[tuple[str, int]] = deque()  # answers, and their bytes
        self._sent_bytes, self._waiting_bytes = 0, 0
        self._released = asyncio.Event()  # whether nobody is to wait for an answer any more

    def __iter__(self) -> Iterator[Promise]:
        """Iterate over all that are known."""
        return iter(self._promises.values())

    def has(self, name: str, request: Asked) -> bool:
        """Return whether this very request came before.

        Raises:
            ConfigError: Another one came under its number.
        """
        known = self._promises.get(name)
        if known is not None and known.digest != wire.digest(request):
            raise ConfigError(
                f"another request came as {name}",
                limit="each request of a client has a number of its own",
                hint="one process has one client of an id",
            )
        return known is not None

    def require_room(self, session: Session, most: int) -> None:
        """Check that a client may ask for more.

        Args:
            session: The client's.
            most: Number of answers that it may be promised and not have fetched.

        Raises:
            BusyError: It has asked for too much, or all clients have.
        """
        if session.num_open >= most:
            raise BusyError(
                f"{session.num_open} answers of {session.id} are computed, or were not fetched",
                limit=f"{most} at a time",
                hint="fetch some of them",
            )
        if self._waiting_bytes >= self._limits.waiting_bytes:
            raise BusyError(
                f"requests of {self._waiting_bytes:,} bytes wait",
                limit=f"{self._limits.waiting_bytes:,}",
                hint="wait for some of them",
            )

    def give(
        self,
        name: str,
        owner: Session,
        request: Asked,
        answer: Coroutine[Any, Any, Reply],
        *,
        takes_slot: bool = False,
    ) -> None:
        """Promise an answer, and begin with it.

        Args:
            name: The answer's name, which `has` does not know.
            owner: Who asks.
            request: A request as it was sent.
            answer: Computes it; what it raises is the answer, too.
            takes_slot: Whether it may take a slot.
        """
        task = asyncio.get_running_loop().create_task(_settled(answer))
        self._promises[name] = Promise(
            name=name,
            owner=owner,
            digest=wire.digest(request),
            takes_slot=takes_slot,
            answer=task,
        )
        owner.num_open += 1
        num_bytes = wire.num_bytes(request)
        self._waiting_bytes += num_bytes

        def note_done(_: object) -> None:
            self._waiting_bytes -= num_bytes

        task.add_done_callback(note_done)

    def find(self, name: str) -> Promise:
        """Return what was promised.

        Raises:
            GoneError: There is nothing of this name.
        """
        if name not in self._promises:
            raise GoneError(
                f"there is no request {name[:120]!r}",
                limit="the server was started anew, or its client was silent for too long",
                hint="run the recipe again: it goes on from its last checkpoint",
            )
        return self._promises[name]

    async def wait(self, promise: Promise) -> Reply | None:
        """Wait a while for an answer, which its client asks for; None if it is not there yet."""
        promise.owner.heard_s = time.monotonic()
        released = asyncio.ensure_future(self._released.wait())
        try:
            await asyncio.wait(
                [promise.answer, released],
                timeout=self._limits.hold_s,
                return_when=asyncio.FIRST_COMPLETED,
            )
        finally:
            released.cancel()
        if not promise.answer.done() or promise.answer.cancelled():
            return None
        reply = promise.answer.result()
        if not promise.is_sent:
            promise.is_sent = True
            promise.owner.num_open -= 1
            self._keep(promise.name, len(reply.content) + _PROMISE_BYTES)
        return reply

    def _keep(self, name: str, num_bytes: int) -> None:
        """Keep an answer that is sent, and forget those that were sent first."""
        self._sent.append((name, num_bytes))
        self._sent_bytes += num_bytes
        while self._sent_bytes > self._limits.kept_bytes and len(self._sent) > 1:
            old, num_bytes = self._sent.popleft()
            self._sent_bytes -= num_bytes
            self._promises.pop(old, None)

    def cancel(self, owner: Session, *, all_of_them: bool) -> None:
        """Cancel and forget what a session was promised: all, or what may yet take a slot."""
        for one in list(self):
            if one.owner is owner and (all_of_them or one.takes_slot):
                self._promises.pop(one.name).answer.cancel()

    def release(self) -> None:
        """Let those go that wait for an answer."""
        self._released.set()


async def _settled(answer: Coroutine[Any, Any, Reply]) -> Reply:
    """Return an answer, or that it has failed."""
    try:
        return await answer
    except CancelledError as error:
        return Reply.failed(error)
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        return Reply.failed(OffloadError("the request was cancelled", hint="its client has gone"))
    except Exception as error:  # noqa: BLE001 - the client gets it
        return Reply.failed(error)
