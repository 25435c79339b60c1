"""Samplers: the base and frozen copies of adapters, and their answers to prompts.

A sampler is kept on the host or on disk, and put into a slot when it is asked; of those in slots,
the one that was asked least recently gives way.

What is sampled follows from seeds alone: the request's own, or the client's, with the numbers of
the sampler and the request. So a client gets the same answers whoever else is there.
"""

import asyncio
import time
from collections.abc import Coroutine, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from tinker import types

from finetune.clients.requests import Sample, Score
from finetune.errors import ConfigError
from finetune.online.sample import Answer
from finetune.serve import wire
from finetune.serve.base import Base
from finetune.serve.checkpoints import Checkpoints, Record
from finetune.serve.limits import GoneError, Limits
from finetune.serve.promises import Reply, Session
from finetune.serve.slots import Slots
from offload.engine.adapters import AdapterSettings
from offload.engine.randomness import seed_of


@dataclass(kw_only=True, slots=True, eq=False)
class Sampler:
    """What is sampled from: a frozen adapter, or the base."""

    id: str
    session: Session
    settings: AdapterSettings
    seed: int
    model: str | None = None  # the model it was copied from
    values: Mapping[str, torch.Tensor] | None = None  # what was copied
    saved: Record | None = None  # the checkpoint that it is read from when it gets a slot
    client: str | None = None  # its name for the scheduler, while it is in a slot
    num_pending: int = 0
    num_tokens: int = 0  # sampled
    asked_s: float = 0.0
    # The first of its prompts gets a slot for all: where there is one, no prompt waits.
    placing: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def path(self) -> str | None:
        """The checkpoint's path."""
        return None if self.saved is None else self.saved.path


class Samplers:
    """The samplers of all sessions; for one event loop."""

    def __init__(self, base: Base, checkpoints: Checkpoints, limits: Limits) -> None:
        """Begin with none."""
        self._base, self._checkpoints, self._limits = base, checkpoints, limits
        self._samplers: dict[str, Sampler] = {}
        self.slots = Slots(base.scheduler, limits.num_samplers, kind="sampler")

    def __iter__(self) -> Iterator[Sampler]:
        """Iterate over all, the oldest first."""
        return iter(self._samplers.values())

    def of(self, session: Session) -> list[Sampler]:
        """Return those of a session, the oldest first."""
        return [one for one in self if one.session is session]

    def find(self, sampler_id: str) -> Sampler:
        """Return a sampler.

        Raises:
            GoneError: There is none of this id.
        """
        if sampler_id not in self._samplers:
            raise GoneError(
                f"there is no sampler {sampler_id[:120]!r}",
                limit=f"the newest {self._limits.num_snapshots} of a model are kept, until its"
                " session ends",
                hint="`save_weights_for_sampler` with a name keeps one",
            )
        return self._samplers[sampler_id]

    # ----------------------------------------------------------------------------- begin, end

    def create(self, session: Session, request: types.CreateSamplingSessionRequest) -> str:
        """Begin a sampler of a checkpoint, or of the base; return its id.

        Raises:
            CheckpointError: There is no such checkpoint.
            ConfigError: There is another sampler of this number.
        """
        number = request.sampling_session_seq_id
        sampler_id = f"{session.id}:sample:{number}"
        known = self._samplers.get(sampler_id)
        if known is not None and known.model is None and known.path == request.model_path:
            return sampler_id
        settings, saved, seed = self._base.smallest, None, seed_of(number)
        if request.model_path is None:
            self._base.require_named(request.base_model or "")
        else:
            saved = self._checkpoints.find(request.model_path)
            self._base.require_named(saved.base)
            self._limits.require_planned(saved.path, saved.rank)
            settings, seed = saved.settings, seed_of(saved.seed, saved.num_steps, number)
        self.add(Sampler(id=sampler_id, session=session, saved=saved, settings=settings, seed=seed))
        return sampler_id

    def add(self, sampler: Sampler) -> None:
        """Begin a sampler.

        Raises:
            ConfigError: There is one of its id.
        """
        if sampler.id in self._samplers:
            raise ConfigError(
                f"there is a sampler {sampler.id}",
                limit="each sampler of a client has a number of its own",
                hint="one process has one client of an id",
            )
        self._samplers[sampler.id] = sampler

    async def let_older_go(self, model: str) -> None:
        """End the older samplers that were copied from a model and are not in use."""
        copied = [one for one in self if one.model == model]
        for sampler in copied[: -self._limits.num_snapshots]:
            if not sampler.num_pending:
                await self.end(sampler)

    async def end(self, sampler: Sampler) -> None:
        """Forget a sampler, and empty its slot."""
        self._samplers.pop(sampler.id, None)
        await self._take_out(sampler)

    # -------------------------------------------------------------------------------- answers

    def answer(
        self, sampler: Sampler, request: types.SampleRequest, number: int
    ) -> Coroutine[Any, Any, Reply]:
        """Return what answers a prompt.

        Args:
            sampler: Sampler that is asked.
            request: The prompt, which `wire.require_sampled` has checked.
            number: The request's, which seeds it without a seed of its own.

        Raises:
            ConfigError: A number is out of range.
        """
        asked, prompt = self._asked(sampler, request, number), None
        if request.prompt_logprobs and len(asked.prompt) > 1:
            row = wire.prompt_row(asked.prompt, last=request.prompt_logprobs_last_n)
            prompt = Score(rows=[row])
        sampler.num_pending += 1
        scheduler = self._base.scheduler

        async def sampled() -> Reply:
            try:
                client = await self._placed(sampler)
                scores = None if prompt is None else scheduler.submit(client, prompt)
                answers: tuple[Answer, ...] = await asyncio.wrap_future(
                    scheduler.submit(client, asked)
                )
                scored = None if scores is None else await asyncio.wrap_future(scores)
            finally:
                sampler.num_pending -= 1
                sampler.asked_s = time.monotonic()
                await self.slots.tell()
            sampler.num_tokens += sum(len(one.tokens) for one in answers)
            logps_N = None if scored is None else scored.logprobs[0]
            if scored is None and request.prompt_logprobs:
                logps_N = torch.empty(0)
            content = wire.sample_reply(answers, logps_N, len(asked.prompt))
            return Reply(content=content, is_protobuf=True)

        return sampled()

    def _asked(self, sampler: Sampler, request: types.SampleRequest, number: int) -> Sample:
        """Return what the scheduler is asked for."""
        params, ids = request.sampling_params, wire.prompt_of(request)
        room = self._limits.row_tokens - len(ids)
        max_tokens = room if params.max_tokens is None else params.max_tokens
        if not 1 <= max_tokens <= room:
            raise ConfigError(
                f"a prompt of {len(ids)} tokens and max_tokens {max_tokens}",
                limit=f"both together are up to {self._limits.row_tokens}, and max_tokens 1 or"
                " more",
                hint=f"`max_tokens={room}`"
                if room > 0
                else f"a shorter prompt, or `sluice serve --row-tokens {len(ids) + 1}`",
            )
        if not 1 <= request.num_samples <= self._limits.num_answers:
            raise ConfigError(
                f"num_samples is {request.num_samples}",
                limit=f"1 to {self._limits.num_answers}",
                hint="ask more than once",
            )
        stop_ids, is_ended = self._base.stops(params.stop)
        seed = seed_of(sampler.seed, number) if params.seed is None else seed_of(params.seed)
        return Sample(
            prompt=ids,
            max_tokens=max_tokens,
            seed=seed,
            num_answers=request.num_samples,
            stop_ids=stop_ids,
            temperature=params.temperature,
            is_ended=is_ended,
        )

    # ---------------------------------------------------------------------------------- slots

    async def _placed(self, sampler: Sampler) -> str:
        """Return a sampler's name for the scheduler, once it is in a slot."""
        async with sampler.placing:
            if sampler.client is None:
                sampler.client = await self.slots.take(self._make_room)
                try:
                    await self._put(sampler.client, sampler)
                except BaseException:
                    await self._take_out(sampler)
                    raise
            return sampler.client

    async def _make_room(self) -> bool:
        idle = [one for one in self if one.client and not one.num_pending]
        if idle:
            await self._take_out(min(idle, key=lambda one: one.asked_s))
        return bool(idle)

    async def _put(self, client: str, sampler: Sampler) -> None:
        values = sampler.values if sampler.saved is None else await self._read(sampler.saved)
        if values is None:  # an adapter that has begun adds 0 to the base
            adapter = self._base.scheduler.add(client, sampler.settings, seed=0)
        else:
            adapter = self._base.scheduler.put(client, sampler.settings, values)
        await asyncio.shield(asyncio.wrap_future(adapter))  # which is not undone

    async def _read(self, saved: Record) -> Mapping[str, torch.Tensor]:
        state = await asyncio.to_thread(self._checkpoints.load, saved.path, has_moments=False)
        if self._checkpoints.find(saved.path).time_s != saved.time_s:
            raise ConfigError(
                f"{saved.path} was replaced",
                limit="a sampler is of one checkpoint",
                hint="`create_sampling_client` again",
            )
        return state.values

    async def _take_out(self, sampler: Sampler) -> None:
        if sampler.client is not None:
            client, sampler.client = sampler.client, None
            await self.slots.leave(client)
