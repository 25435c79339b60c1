"""Clients of the server: their sessions, and their models in training.

A model's requests are done in the order of their numbers, whichever arrives first; one that is
refused has had its turn.

A client that trains has a slot for its adapter, gradients and AdamW's states. If all are taken, a
new one waits until one ends, or until a client has been silent for a while: that one is saved and
gives way.

All methods are called in the event loop.
"""

import asyncio
import secrets
import time
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from tinker import types
from tinker.proto import tinker_public_pb2 as pb

from finetune.clients.requests import ClientState, Load, Refused, Request, Save, Score, Train
from finetune.errors import ConfigError
from finetune.serve import wire
from finetune.serve.base import Base
from finetune.serve.checkpoints import Checkpoints, Kind, Record, expiry
from finetune.serve.limits import BusyError, GoneError, Limits
from finetune.serve.promises import Promises, Reply, Session
from finetune.serve.samplers import Sampler, Samplers
from finetune.serve.slots import Slots
from offload.engine.adapters import AdapterSettings
from offload.engine.randomness import seed_of
from offload.errors import SluiceError

ALPHA = 32.0
"""The factor of an adapter's branch is this over its rank; the API has no field for it."""
_SEED_BITS = 63
_LEFT = "left"  # the name of what a client's model is saved under when its session ends
_SILENT = "a client is silent"


@dataclass(kw_only=True, slots=True, eq=False)
class _Model:
    """A model in training."""

    id: str
    session: Session
    settings: AdapterSettings
    seed: int  # of what is sampled from it
    notes: Mapping[str, Any] | None
    client: str = ""  # its name for the scheduler, once it has a slot
    next_number: int = 1
    waiting: dict[int, Callable[[], None]] = field(default_factory=dict)
    is_reading: bool = False  # whether a checkpoint is read, and what follows waits for it
    num_steps: int = 0
    num_tokens: int = 0  # trained on
    last_loss: float | None = None  # of the newest request, over its rows


class Sessions:
    """See the module."""

    def __init__(
        self,
        base: Base,
        checkpoints: Checkpoints,
        limits: Limits,
        *,
        note: Callable[[str], None],
    ) -> None:
        """Serve nobody yet.

        Args:
            base: The model that all adapters are of.
            checkpoints: Checkpoints that were saved before.
            limits: Limits of what clients may ask for.
            note: Reports what the user of this machine should know.
        """
        self.base, self.checkpoints, self.limits = base, checkpoints, limits
        self.promises = Promises(limits)
        self._note, self._scheduler = note, base.scheduler
        self._sessions: dict[str, Session] = {}
        self._models: dict[str, _Model] = {}
        self._samplers = Samplers(base, checkpoints, limits)
        self._slots = Slots(base.scheduler, limits.num_clients, kind="model")

    # ------------------------------------------------------------------------------- sessions

    def create_session(self, request: types.CreateSessionRequest) -> dict[str, object]:
        """Begin a session."""
        if len(self._sessions) >= self.limits.num_sessions:
            raise BusyError(
                f"{len(self._sessions)} clients have a session",
                limit=f"{self.limits.num_sessions} at a time",
                hint="close those that have ended, or wait until they have been silent for"
                f" {self.limits.frees_s:.0f} s",
            )
        name = secrets.token_hex(6)
        notes = request.user_metadata or {}
        self._sessions[name] = Session(id=name, heard_s=time.monotonic(), notes=notes)
        return {"session_id": name, "info_message": self.base.shown}

    def hear(self, session: str) -> Session:
        """Note that a session's client lives.

        Raises:
            GoneError: There is no such session.
        """
        found = self._session(session)
        found.heard_s = time.monotonic()
        return found

    def _session(self, session: str) -> Session:
        if session not in self._sessions:
            raise GoneError(
                f"there is no session {session[:80]!r}",
                limit="the server was started anew, or the client was silent for too long",
                hint="run the recipe again: it goes on from its last checkpoint",
            )
        return self._sessions[session]

    async def finish(self, session: str) -> None:
        """End a session, its models and samplers; nothing is saved."""
        await self._end(self.hear(session), why=None)

    async def watch(self) -> None:
        """Free clients that have been silent for too long, for as long as this is not cancelled."""
        while True:
            await asyncio.sleep(min(5.0, self.limits.frees_s / 2))
            for session in self._silent(self.limits.frees_s):
                await self._end(session, why=_SILENT)

    async def close(self) -> None:
        """Save all models, and end all sessions."""
        for session in list(self._sessions.values()):
            await self._end(session, why="the server ends")
        await self._slots.close()
        await self._samplers.slots.close()

    def _silent(self, for_s: float) -> list[Session]:
        """Return sessions that have been silent, the longest first."""
        before_s = time.monotonic() - for_s
        found = [one for one in self._sessions.values() if one.heard_s < before_s]
        return sorted(found, key=lambda one: one.heard_s)

    async def _end(self, session: Session, *, why: str | None) -> None:
        """End a session; why its models are saved before, or None if they are not."""
        if self._sessions.pop(session.id, None) is not None:
            await self._slots.finish(self._ended(session, why))

    async def _ended(self, session: Session, why: str | None) -> None:
        self.promises.cancel(session, all_of_them=False)
        while models := self._models_of(session):
            model = self._models.pop(models[0].id)
            model.waiting.clear()
            try:
                if why is not None and model.num_steps:
                    await self._save_left(model, why)
            finally:
                await self._slots.leave(model.client)
        self.promises.cancel(session, all_of_them=True)
        for sampler in self._samplers.of(session):
            await self._samplers.end(sampler)

    def _models_of(self, session: Session) -> list[_Model]:
        return [one for one in self._models.values() if one.session is session]

    async def _save_left(self, model: _Model, why: str) -> None:
        self._scheduler.cancel(model.client)
        try:
            state = await asyncio.wrap_future(self._submit(model, Save()))
            record = self._record(model, "weights", _LEFT)
            await asyncio.to_thread(self.checkpoints.save, record, state)
            said = f"{why}: {model.id} is saved as {record.path}"
        except (SluiceError, OSError) as error:
            said = f"{why}: {model.id} cannot be saved: {error}"
        with suppress(OSError):  # nobody reads what is said here
            self._note(said)

    # ---------------------------------------------------------------------------------- models

    def create_model(self, request: types.CreateModelRequest) -> str:
        """Begin a model; return the name of the answer.

        Raises:
            ConfigError: Such a model is not trained here.
        """
        return self._begin(request.session_id, request.model_seq_id, request, self._creates)

    def load_weights(self, request: types.LoadWeightsRequest) -> str:
        """Let a model go on from a checkpoint: a new one, or one that is there.

        Raises:
            CheckpointError: There is no such checkpoint.
        """
        if request.weights_access_token is not None:
            raise ConfigError("weights_access_token", hint="leave it out: this server has one user")
        if request.model_id is not None:
            return self._in_turn(request.model_id, request.seq_id, request, self._loads)
        if request.session_id is None or request.model_seq_id is None:
            raise ConfigError("load_weights without a model and a session", hint="give one")
        return self._begin(request.session_id, request.model_seq_id, request, self._restores)

    def _begin(
        self,
        session_id: str,
        number: int,
        request: Any,
        begin: Callable[[Session, str, Any], Coroutine[Any, Any, Reply]],
    ) -> str:
        """Begin a model; return the name of the answer.

        Args:
            session_id: The session's.
            number: The model's.
            request: A request as it was sent.
            begin: Checks it, and returns what begins the session's model of an id.
        """
        session = self.hear(session_id)
        model_id = f"{session.id}:train:{number}"
        name = f"{model_id}:0"
        if not self.promises.has(name, request):
            if model_id in self._models:
                raise GoneError(f"{model_id} has begun", hint="another number for another model")
            self.promises.require_room(session, self.limits.num_pending)
            answer = begin(session, model_id, request)
            self.promises.give(name, session, request, answer, takes_slot=True)
        return name

    def _creates(
        self, session: Session, model_id: str, request: types.CreateModelRequest
    ) -> Coroutine[Any, Any, Reply]:
        self.base.require_named(request.base_model)
        wire.require_adamw(request.optimizer_config)
        lora = request.lora_config or types.LoraConfig(rank=32)
        self.limits.require_planned("an adapter", lora.rank)
        seed = secrets.randbits(_SEED_BITS) if lora.seed is None else lora.seed
        if not 0 <= seed < 2**_SEED_BITS:
            raise ConfigError(
                f"a seed of {'many bits' if seed > 0 else seed}",
                limit=f"seeds are of 0 or more, and have up to {_SEED_BITS} bits",
                hint="`seed=0`",
            )
        targets = self.base.targets(
            mlp=lora.train_mlp, attention=lora.train_attn, head=lora.train_unembed
        )
        model = _Model(
            id=model_id,
            session=session,
            settings=AdapterSettings(rank=lora.rank, alpha=ALPHA, targets=targets),
            seed=seed_of(seed),
            notes=request.user_metadata,
        )

        async def created() -> Reply:
            await self._admit(model, seed=seed)
            return Reply.of(model_id=model_id, type="create_model")

        return created()

    def _restores(
        self, session: Session, model_id: str, request: types.LoadWeightsRequest
    ) -> Coroutine[Any, Any, Reply]:
        record = self.checkpoints.find(request.path)
        self.base.require_named(record.base if request.base_model is None else request.base_model)
        wire.require_adamw(request.optimizer_config)
        self.limits.require_planned(record.path, record.rank)
        model = _Model(
            id=model_id,
            session=session,
            settings=record.settings,
            seed=seed_of(record.seed, record.num_steps),
            notes=request.user_metadata,
        )

        async def restored() -> Reply:
            state = await asyncio.to_thread(
                self.checkpoints.load, request.path, has_moments=request.optimizer
            )
            await self._admit(model, seed=0, state=state)
            model.num_steps = record.num_steps if request.optimizer else 0
            return Reply.of(path=request.path, model_id=model_id, type="load_weights")

        return restored()

    async def _admit(self, model: _Model, *, seed: int, state: ClientState | None = None) -> None:
        """Wait until a model has a slot, and begin it.

        Args:
            model: The model.
            seed: The seed of its first values.
            state: State that the model goes on from; None for new values.
        """
        promise = self.promises.find(f"{model.id}:0")
        promise.is_waiting = True
        model.client = await self._slots.take(self._give_way)
        promise.is_waiting = False
        self._models[model.id] = model
        try:
            done = [self._scheduler.add(model.client, model.settings, seed=seed)]
            if state is not None:
                done.append(self._submit(model, Load(state=state)))
            for one in done:
                await asyncio.shield(asyncio.wrap_future(one))  # which is not undone
        except BaseException:
            if self._models.pop(model.id, None) is not None:
                await self._slots.leave(model.client)
            raise

    async def _give_way(self) -> bool:
        """End a client that trains and is silent, if there is one; return whether there was."""
        held = {one.session.id for one in self._models.values()}
        silent = [one for one in self._silent(self.limits.gives_way_s) if one.id in held]
        if silent:
            await self._end(silent[0], why=_SILENT)
        return bool(silent)

    def model(self, model_id: str) -> _Model:
        """Return a model.

        Raises:
            GoneError: There is none of this id.
        """
        if model_id not in self._models:
            raise GoneError(
                f"there is no model {model_id[:120]!r}",
                limit="the server was started anew, or the client was silent and gave way",
                hint="run the recipe again: it goes on from its last checkpoint;"
                " `tinker checkpoint list` shows what was saved",
            )
        found = self._models[model_id]
        self.hear(found.session.id)
        return found

    # ------------------------------------------------------------------- requests of a model

    def train(self, request: pb.ForwardBackwardRequest) -> str:
        """Train or score rows."""
        adds = not request.forward_only
        return self._in_turn(request.model_id, request.seq_id, request, self._trains, adds=adds)

    def step(self, request: types.OptimStepRequest) -> str:
        """Update a model."""
        return self._in_turn(request.model_id, request.seq_id, request, self._steps, adds=True)

    def save(self, request: types.SaveWeightsRequest) -> str:
        """Save a model, to train or to sample from it later."""
        return self._in_turn(request.model_id, request.seq_id, request, self._saves)

    def save_for_sampler(self, request: types.SaveWeightsForSamplerRequest) -> str:
        """Save a model to sample from it, or begin a sampler of it."""
        return self._in_turn(request.model_id, request.seq_id, request, self._snapshots)

    def save_external(self, request: types.SaveWeightsExternalRequest) -> str:
        """Save a model's adapter to download it."""
        return self._in_turn(request.model_id, request.seq_id, request, self._exports)

    def _in_turn(
        self,
        model_id: str,
        number: int | None,
        request: Any,
        begin: Callable[[_Model, Any], Coroutine[Any, Any, Reply]],
        *,
        adds: bool = False,
    ) -> str:
        """Do a request once those of its model before it have begun; return its answer's name.

        Args:
            model_id: The model's.
            number: Sequence number of the request.
            request: A request as it was sent.
            begin: Submits it to the scheduler, and returns what waits for the result. If it
                raises, the request fails in its turn.
            adds: Whether it is part of a step, which fails if this does.
        """
        model = self.model(model_id)
        if number is None or number < 1:
            raise ConfigError(f"seq_id is {number}", hint="requests of a model count from 1")
        name = f"{model_id}:{number}"
        if self.promises.has(name, request):
            return name
        if number < model.next_number:
            raise GoneError(f"request {number} of {model_id} was answered", hint="take the next")
        if number >= model.next_number + self.limits.num_pending:
            raise BusyError(
                f"request {number} of {model_id} came before number {model.next_number}",
                limit=f"the next {self.limits.num_pending} may come in any order",
                hint="send that one",
            )
        if not (model.waiting and number == model.next_number):  # that others wait for
            self.promises.require_room(model.session, 2 * self.limits.num_pending)
        loop = asyncio.get_running_loop()
        turn: asyncio.Future[Coroutine[Any, Any, Reply]] = loop.create_future()

        def start() -> None:
            try:
                turn.set_result(begin(model, request))
            except Exception as error:  # noqa: BLE001 - the answer has it
                if adds:
                    self._submit(model, Refused(error=error))
                turn.set_exception(error)

        async def answered() -> Reply:
            return await (await turn)

        model.waiting[number] = start
        self.promises.give(name, model.session, request, answered())
        self._go_on(model)
        return name

    def _go_on(self, model: _Model) -> None:
        """Begin the requests whose turn it is."""
        while model.next_number in model.waiting and not model.is_reading:
            model.waiting.pop(model.next_number)()
            model.next_number += 1

    def _submit(self, model: _Model, request: Request) -> Future[Any]:
        return self._scheduler.submit(model.client, request)

    def _trains(
        self, model: _Model, request: pb.ForwardBackwardRequest
    ) -> Coroutine[Any, Any, Reply]:
        if len(request.data) > self.limits.chunk_rows:
            raise ConfigError(
                f"{len(request.data)} rows in a request",
                limit=f"up to {self.limits.chunk_rows}",
                hint="a client of tinker cuts them by itself",
            )
        limits, kind = self.limits, Score if request.forward_only else Train
        parts = wire.parts_of(request, max_tokens=limits.row_tokens, pass_tokens=limits.pass_tokens)
        futures = [
            self._checked(model, kind(rows=one.rows, objective=one.objective)) for one in parts
        ]

        async def trained() -> Reply:
            passes = await asyncio.gather(*map(asyncio.wrap_future, futures))
            if not request.forward_only:
                model.num_tokens += sum(len(x) for one in passes for x in one.logprobs)
                model.last_loss = sum(one.loss for one in passes) / len(request.data)
            return Reply(content=wire.training_reply(passes), is_protobuf=True)

        return trained()

    def _checked(self, model: _Model, request: Train | Score) -> Future[Any]:
        """Submit rows; raise why they are refused if that is known at once."""
        future = self._submit(model, request)
        if future.done() and (error := future.exception()):
            raise error
        return future

    def _steps(self, model: _Model, request: types.OptimStepRequest) -> Coroutine[Any, Any, Reply]:
        future = self._submit(model, wire.step_of(request))

        async def stepped() -> Reply:
            found = await asyncio.wrap_future(future)
            model.num_steps += 1
            return Reply.of(metrics={"grad_norm:mean": found.grad_norm})

        return stepped()

    def _loads(
        self, model: _Model, request: types.LoadWeightsRequest
    ) -> Coroutine[Any, Any, Reply]:
        record = self.checkpoints.find(request.path)
        if record.settings != model.settings:
            raise ConfigError(
                f"{request.path} has rank {record.rank} on {', '.join(record.targets)}",
                limit="a model that is there keeps its rank and its linears",
                hint="`create_training_client_from_state`",
            )
        model.is_reading = True

        async def loaded() -> Reply:
            try:
                state = await asyncio.to_thread(
                    self.checkpoints.load, request.path, has_moments=request.optimizer
                )
                future = self._submit(model, Load(state=state))
            finally:
                model.is_reading = False
                self._go_on(model)
            await asyncio.wrap_future(future)
            model.num_steps = record.num_steps if request.optimizer else 0
            return Reply.of(path=request.path, model_id=model.id, type="load_weights")

        return loaded()

    def _saves(
        self, model: _Model, request: types.SaveWeightsRequest
    ) -> Coroutine[Any, Any, Reply]:
        return self._saved(
            model,
            request,
            "weights",
            "save_weights",
            notes=request.user_metadata,
            may_replace=request.overwrite,
        )

    def _exports(
        self, model: _Model, request: types.SaveWeightsExternalRequest
    ) -> Coroutine[Any, Any, Reply]:
        if request.age_encryption_recipients:
            raise ConfigError("age_encryption_recipients", hint="encrypt what was downloaded")
        return self._saved(model, request, "external_weights", "save_weights_external")

    def _snapshots(
        self, model: _Model, request: types.SaveWeightsForSamplerRequest
    ) -> Coroutine[Any, Any, Reply]:
        if request.kind != "snapshot":
            raise ConfigError(
                f"a sampler of kind {request.kind!r}",
                limit="what is sampled does not depend on when weights change",
                hint="`save_weights_and_get_sampling_client` after each step",
            )
        answer, number = "save_weights_for_sampler", request.sampling_session_seq_id
        if request.path is not None:
            return self._saved(
                model, request, "sampler_weights", answer, notes=request.user_metadata
            )
        if number is None:
            raise ConfigError("a sampler without a name and a number", hint="give one")
        future = self._submit(model, Save(has_moments=False))

        async def begun() -> Reply:
            state = await asyncio.wrap_future(future)
            sampler = Sampler(
                id=f"{model.session.id}:sample:{number}",
                session=model.session,
                model=model.id,
                settings=model.settings,
                values=state.values,
                seed=seed_of(model.seed, number),
            )
            self._samplers.add(sampler)
            await self._samplers.let_older_go(model.id)
            return Reply.of(sampling_session_id=sampler.id, type=answer)

        return begun()

    def _saved(
        self,
        model: _Model,
        request: types.SaveWeightsRequest
        | types.SaveWeightsExternalRequest
        | types.SaveWeightsForSamplerRequest,
        kind: Kind,
        answer: str,
        *,
        notes: Mapping[str, str] | None = None,
        may_replace: bool = False,
    ) -> Coroutine[Any, Any, Reply]:
        """Save a checkpoint, with AdamW's states if training may go on from it."""
        name = request.path or ""
        self.checkpoints.require_free(model.id, kind, name, may_replace=may_replace)
        record = self._record(model, kind, name, ttl_s=request.ttl_seconds, notes=notes)
        future = self._submit(model, Save(has_moments=kind == "weights"))

        async def saved() -> Reply:
            state = await asyncio.wrap_future(future)
            made = record.model_copy(update={"num_steps": model.num_steps})
            await asyncio.to_thread(self.checkpoints.save, made, state)
            return Reply.of(path=made.path, type=answer)

        return saved()

    def _record(
        self,
        model: _Model,
        kind: Kind,
        name: str,
        *,
        ttl_s: int | None = None,
        notes: Mapping[str, str] | None = None,
    ) -> Record:
        now_s = time.time()  # noqa: TID251 - a date
        said = model.notes if notes is None else notes
        return Record(
            run=model.id,
            kind=kind,
            name=name,
            base=self.base.name,
            rank=model.settings.rank,
            alpha=model.settings.alpha,
            targets=sorted(model.settings.targets),
            seed=model.seed,
            num_steps=model.num_steps,
            time_s=now_s,
            expires_s=expiry(now_s, ttl_s),
            num_bytes=0,
            notes=None if said is None else {key: str(value) for key, value in said.items()},
        )

    # -------------------------------------------------------------------------------- sampling

    def create_sampler(self, request: types.CreateSamplingSessionRequest) -> str:
        """Begin a sampler of a checkpoint, or of the base; return its id.

        Raises:
            CheckpointError: There is no such checkpoint.
            ConfigError: There is another sampler of this number.
        """
        return self._samplers.create(self.hear(request.session_id), request)

    def sampler(self, sampler_id: str) -> Sampler:
        """Return a sampler.

        Raises:
            GoneError: There is none of this id.
        """
        found = self._samplers.find(sampler_id)
        self.hear(found.session.id)
        return found

    def sample(self, request: types.SampleRequest) -> tuple[str, list[str]]:
        """Answer a prompt; return the answer's name, and those of the sequences."""
        wire.require_sampled(request)
        if request.sampling_session_id is None or request.seq_id is None:
            raise ConfigError("a prompt without a sampling session and a number", hint="give both")
        sampler = self.sampler(request.sampling_session_id)
        name = f"{sampler.id}:{request.seq_id}"
        if not self.promises.has(name, request):
            self.promises.require_room(sampler.session, self.limits.num_pending)
            answer = self._samplers.answer(sampler, request, request.seq_id)
            self.promises.give(name, sampler.session, request, answer, takes_slot=True)
        return name, [f"{name}:{number}" for number in range(request.num_samples)]

    # ------------------------------------------------------------------------------------ what

    def of_session(self, session: str) -> tuple[list[str], list[str], Mapping[str, Any]]:
        """Return the models and samplers of a session, and what its client notes of it."""
        found = self._session(session)
        models = [one.id for one in self._models_of(found)]
        return models, [one.id for one in self._samplers.of(found)], found.notes

    @property
    def sessions(self) -> tuple[str, ...]:
        """The sessions, the oldest first."""
        return tuple(self._sessions)

    def status(self) -> dict[str, Any]:
        """Return what a page shows of the clients."""
        now_s = time.monotonic()
        clients = [
            {
                "id": one.id,
                "rank": one.settings.rank,
                "num_steps": one.num_steps,
                "num_tokens": one.num_tokens,
                "last_loss": one.last_loss,
                "num_sampled": sum(x.num_tokens for x in self._samplers.of(one.session)),
                "num_pending": sum(
                    not x.answer.done() for x in self.promises if x.owner is one.session
                ),
                "silent_s": round(now_s - one.session.heard_s, 1),
            }
            for one in self._models.values()
        ]
        return {
            "base": self.base.name,
            "clients": clients,
            "num_waiting": sum(one.is_waiting for one in self.promises),
            "num_passes": dict(self._scheduler.num_passes),
            "num_loads": dict(self._scheduler.num_loads),
        }
