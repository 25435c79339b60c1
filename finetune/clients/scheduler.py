"""One engine for the requests of several clients: training, scoring and decoding.

A client has an adapter, gradients and an optimizer of its own. Its requests are done in the order
in which it has submitted them, and those of other clients in between. Of the requests that are due,
one to train of each client is computed in a common pass over the layers, then those to score, then
one token of each answer that is being sampled. So a pass loads the layers once for all clients.

Each as if alone, to the bit. What a client gets does not depend on who else is there:

1. A request is cut into passes by itself: a row is a micro-batch. So chunks of a request that are
   submitted one by one give the gradients of the whole request, too.
2. A request to sample is a group of its own, with a cache of its own. Rows that shared a batch with
   another client's would be rounded differently.
3. Initial values and drawn tokens come from the client's own seeds.
4. Clipping and AdamW see the client's own parameters only.

Failures. If a common pass fails, what it has added to gradients is undone, and each request is
computed by itself, so that only that which fails alone does fail. A loss that is not a number fails
its own request. The client's next step then fails, too, and clears its gradients: they lack rows.

Which requests wait. Those to sample go on while their client trains, since gradients change no
weight; whatever changes weights waits until the client's answers have ended.
"""

import math
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import torch

from finetune.adapter.linear_lora import compute_by_peft, compute_in_base_dtype
from finetune.clients.requests import (
    ClientState,
    Freeze,
    Load,
    Refused,
    Request,
    Sample,
    Save,
    Score,
    Scored,
    Step,
    Stepped,
    Train,
)
from finetune.errors import ConfigError, DataError, DivergedError
from finetune.online.draw import Choose, Draw, greedy
from finetune.online.sample import Answer, Sampler
from offload.engine.adapters import Adapters, AdapterSettings
from offload.engine.batch import checked_batch, checked_batches
from offload.engine.generation import Generation
from offload.engine.objective import (
    Objective,
    OutputObjective,
    Scores,
    StepLoss,
    TopObjective,
)
from offload.engine.passes.part import RunStep
from offload.engine.randomness import seed_of
from offload.engine.shared import Asked, SharedEngine
from offload.errors import SluiceError


def settle(model: Any) -> None:
    """Compute the adapters of a model at the precision of its base, after some have changed."""
    compute_by_peft(model)
    compute_in_base_dtype(model)


Values = Mapping[str, torch.Tensor]
Work = Callable[[], object]
"""Something that is done in a client's order, and is no request."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Queued:
    """What a client has asked for."""

    request: Request | Work
    future: Future[Any] = field(default_factory=Future)

    @property
    def changes_weights(self) -> bool:
        """Whether the client's answers must have ended before it is done."""
        return not isinstance(self.request, Train | Score | Sample | Save | Freeze | Refused)


@dataclass(kw_only=True, slots=True, eq=False)
class _Decoding:
    """Answers that are being sampled."""

    client: str
    request: Sample
    future: Future[Any]
    group: int  # its number, which no other has
    given: torch.Tensor = field(init=False)  # tokens of the next pass
    rows: list[tuple[int, Answer]] = field(init=False)
    choose: Choose = field(init=False)
    is_first: bool = True  # whether the next pass is the one over the prompt
    is_cancelled: bool = False

    def __post_init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Begin, or begin again with the same random numbers."""
        request = self.request
        self.given, self.is_first = torch.tensor([list(request.prompt)]), True
        self.rows = [(n, Answer()) for n in range(request.num_answers)]
        seeds = [seed_of(request.seed, n) for n in range(request.num_answers)]
        is_drawn = request.temperature > 0
        self.choose = Draw(seeds, temperature=request.temperature) if is_drawn else greedy


@dataclass(kw_only=True, slots=True, eq=False)
class _Client:
    """A client's requests in order."""

    queue: deque[_Queued] = field(default_factory=deque)
    decoding: list[_Decoding] = field(default_factory=list)
    optimizer: torch.optim.AdamW | None = None  # of one that trains, once its adapter is there
    is_frozen: bool = False  # whether it only scores and samples
    is_ready: bool = True  # whether its adapter is there, or added by what is in its queue
    lacks_rows: bool = False  # whether a request to train has failed since the last step
    is_leaving: bool = False  # whether it was removed, and nothing more may be asked


class _Kept:
    """An objective that keeps what it has read; without one, the loss is 0."""

    def __init__(self, objective: Objective | None) -> None:
        self.reference = None if objective is None else objective.reference
        self._objective = objective
        self._scores: Scores | None = None

    def loss(self, scores: Scores) -> StepLoss:
        """Return the objective's loss."""
        self._scores = scores
        if self._objective is None:
            return StepLoss(value=scores.policy_N.new_zeros(()), metrics={})
        return self._objective.loss(scores)

    def logprobs(self) -> tuple[torch.Tensor, ...]:
        """Return the log-probabilities of each row on the host."""
        assert self._scores is not None
        counts = torch.bincount(self._scores.rows_N.cpu(), minlength=self._scores.num_rows)
        logprobs_N = self._scores.policy_N.detach().cpu()
        return tuple(torch.split(logprobs_N, counts.tolist()))


class Scheduler:
    """Does the requests of clients on one engine; see the module.

    `add`, `submit`, `cancel` and `remove` may be called from any thread. One thread calls
    `run_pass`, `run_all` or `serve`.

    Attributes:
        adapters: The clients' adapters.
        num_passes: Passes over the layers so far, by kind.
        num_loads: Layers that were copied to the device in them.
    """

    def __init__(
        self,
        engine: SharedEngine,
        *,
        pattern: str,
        max_clients: int,
        max_rank: int,
        max_cached_tokens: int,
        state_tokens: int = 0,
    ) -> None:
        """Take an engine; no client is there.

        Args:
            engine: Attached to a peft model in evaluation mode.
            pattern: Its one adapter, on all linears that clients' may be on.
            max_clients: Clients at a time, frozen ones included.
            max_rank: The largest rank of an adapter.
            max_cached_tokens: Tokens whose keys and values are on the device at a time.
            state_tokens: Tokens that an answer counts for besides its own, for states of a fixed
                size.

        Raises:
            OffloadError: `Adapters` refuses the engine or the pattern.
        """
        self._engine = engine
        self.adapters = Adapters(
            engine,
            pattern=pattern,
            max_adapters=max_clients,
            max_rank=max_rank,
            settle=settle,
        )
        self._max_cached_tokens, self._state_tokens = max_cached_tokens, state_tokens
        self._clients: dict[str, _Client] = {}
        self._generations: dict[str, Generation] = {}
        self._num_groups, self._is_closed = 0, False
        self._changed = threading.Condition()
        self.num_passes = {"train": 0, "score": 0, "decode": 0}
        self.num_loads = {"train": 0, "score": 0, "decode": 0}

    # ---------------------------------------------------------------------------------- any thread

    def add(self, client: str, settings: AdapterSettings, *, seed: int) -> Future[None]:
        """Add a client whose adapter computes nothing yet; it may be asked at once.

        Args:
            client: Name of the client, and of its adapter.
            settings: The settings of its adapter.
            seed: The seed of its initial values.

        Returns:
            Done once the adapter is there; if it cannot be added, all the client's requests fail.

        Raises:
            ConfigError: There is a client of this name.
        """
        return self._begin(client, partial(self._add, client, settings, seed), is_frozen=False)

    def put(self, client: str, settings: AdapterSettings, values: Values) -> Future[None]:
        """Add a client that only scores and samples; it may be asked at once.

        Args:
            client: Name of the client, and of its adapter.
            settings: The settings of its adapter.
            values: The values of its adapter, as `ClientState` has them.

        Returns:
            As of `add`.

        Raises:
            ConfigError: There is a client of this name.
        """
        return self._begin(client, partial(self._put, client, settings, values), is_frozen=True)

    def _begin(self, client: str, work: Work, *, is_frozen: bool) -> Future[None]:
        one = _Queued(request=work)
        with self._changed:
            self._require_new(client)
            self._clients[client] = _Client(queue=deque([one]), is_frozen=is_frozen)
            self._changed.notify_all()
        return one.future

    def submit(self, client: str, request: Request) -> Future[Any]:
        """Ask for something, after all that this client has asked for before.

        Args:
            client: A client that was added and not removed.
            request: The request.

        Returns:
            Its result: `Scored`, `Stepped`, a tuple of `Answer`, `ClientState`, or None. A request
            that is not valid has failed already.

        Raises:
            ConfigError: There is no such client.
        """
        one = _Queued(request=request)
        with self._changed:
            known = self._known(client)
            try:
                self._require_valid(client, request)
            except SluiceError as error:
                one.future.set_exception(error)
                return one.future
            if isinstance(request, Freeze):
                self._clients[request.name] = _Client(is_frozen=True, is_ready=False)
            known.queue.append(one)
            self._changed.notify_all()
        return one.future

    def cancel(self, client: str) -> None:
        """Cancel what a client has asked for and is not computed by now; answers end unfinished.

        Args:
            client: A client that was added and not removed.

        Raises:
            ConfigError: There is no such client.
        """
        with self._changed:
            known = self._known(client)
            left = [one for one in known.queue if not _is_kept(one) and one.future.cancel()]
            known.queue = deque(one for one in known.queue if one not in left)
            for one in left:
                if isinstance(one.request, Freeze):
                    self._drop(one.request.name, CancelledError())
            for decoding in known.decoding:
                decoding.is_cancelled = True

    def remove(self, client: str) -> Future[None]:
        """Cancel what a client has asked for, and let its adapter go.

        Args:
            client: A client that was added and not removed.

        Raises:
            ConfigError: There is no such client.
        """
        with self._changed:
            self.cancel(client)
            known = self._known(client)
            known.is_leaving = True
            one = _Queued(request=partial(self._remove, client))
            known.queue.append(one)
            self._changed.notify_all()
        return one.future

    def close(self) -> None:
        """Let `serve` return after the pass that runs."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def _known(self, client: str) -> _Client:
        known = self._clients.get(client)
        if known is None or known.is_leaving:
            raise ConfigError(
                f"there is no client {client!r}",
                limit=f"there are {', '.join(self._clients) or 'none'}",
                hint="`Scheduler.add` first",
            )
        return known

    def _require_new(self, client: str) -> None:
        if client in self._clients:
            raise ConfigError(
                f"there is a client {client!r} already",
                limit="each client has a name of its own",
                hint="choose another name, or remove that one and wait until it is gone",
            )

    def _require_valid(self, client: str, request: Request) -> None:
        """Check what can be checked without the engine.

        Raises:
            ConfigError: A setting is not possible.
            DataError: Rows are not.
            OffloadError: Tokens are not in the vocabulary.
        """
        if self._clients[client].is_frozen and isinstance(request, Train | Step | Load):
            raise ConfigError(
                f"{client!r} is frozen, and is asked to {type(request).__name__.lower()}",
                limit="a frozen client scores and samples",
                hint="ask the client that it was copied from",
            )
        if isinstance(request, Train | Score):
            self._require_rows(request)
        elif isinstance(request, Freeze):
            self._require_new(request.name)
        elif isinstance(request, Sample):
            self._require_prompt(request)

    def _require_rows(self, request: Train | Score) -> None:
        batches = checked_batches(request.rows, self._engine.vocabulary)
        shapes = [tuple(batch["input_ids"].shape) for batch in batches]
        odd = next((n for n, shape in enumerate(shapes) if shape[0] != 1), None)
        if odd is not None or any("row_lens" in batch for batch in batches):
            raise DataError(
                f"row {odd} is {shapes[odd]}" if odd is not None else "rows are packed",
                limit="each is one row of tokens, (1, T), whatever request it came with",
                hint="give each row by itself",
            )
        objective = request.objective
        is_tempered = getattr(objective, "logits_temperature", 1.0) != 1
        if is_tempered or isinstance(objective, TopObjective | OutputObjective):
            raise ConfigError(
                f"{type(objective).__name__} reads more than log-probabilities of labels",
                limit="clients' losses read those, at temperature 1",
                hint="an objective with `reference` and `loss` alone",
            )

    def _require_prompt(self, request: Sample) -> None:
        limits = {"max_tokens": request.max_tokens, "num_answers": request.num_answers}
        for name, value in limits.items():
            if value < 1:
                raise ConfigError(
                    f"{name} is {value}", limit="it is at least 1", hint=f"`{name}=1`"
                )
        if not (request.temperature >= 0 and math.isfinite(request.temperature)):
            raise ConfigError(
                f"temperature is {request.temperature}",
                limit="it is 0 for the most probable tokens, or above",
                hint="`temperature=1.0`",
            )
        ids = torch.tensor([list(request.prompt)], dtype=torch.int64)
        checked_batch({"input_ids": ids}, self._engine.vocabulary, "the prompt")
        if self._num_cached(request) > self._max_cached_tokens:
            raise ConfigError(
                f"{request.num_answers} answers of {request.max_tokens} tokens to a prompt of"
                f" {len(request.prompt)} keep {self._num_cached(request)} tokens",
                limit=f"keys and values of {self._max_cached_tokens} tokens fit",
                hint="a smaller `max_tokens` or `num_answers`",
            )

    # ---------------------------------------------------------------------------- the one thread

    def serve(self) -> None:
        """Do requests as they come, until `close`."""
        while not self._is_closed:
            if not self.run_pass():
                with self._changed:
                    self._changed.wait_for(self._has_more)

    def _has_more(self) -> bool:
        return self._is_closed or any(one.queue for one in self._clients.values())

    def run_all(self) -> None:
        """Do all that was asked for."""
        while self.run_pass():
            pass

    def run_pass(self) -> bool:
        """Do what is due of each client, in at most one common pass of each kind.

        Returns:
            Whether there was anything.
        """
        trained: list[tuple[str, _Queued]] = []
        scored: list[tuple[str, _Queued]] = []
        has_work = False
        for client in list(self._clients):
            while (one := self._next(client)) is not None:
                has_work = True
                if isinstance(one.request, Train | Score):
                    (trained if isinstance(one.request, Train) else scored).append((client, one))
                    break
                self._do(client, one)
        self._compute(trained, self._trained)
        self._compute(scored, self._scored)
        return self._decode() or has_work

    def _next(self, client: str) -> _Queued | None:
        """Take the next request of a client that may be done now."""
        with self._changed:
            known = self._clients.get(client)
            while known is not None and known.is_ready and known.queue:
                one = known.queue[0]
                if one.changes_weights and known.decoding:
                    return None
                if isinstance(one.request, Sample) and not self._has_room(one.request):
                    return None
                known.queue.popleft()
                if one.future.set_running_or_notify_cancel():
                    return one
        return None

    def _has_room(self, request: Sample) -> bool:
        taken = sum(self._num_cached(one.request) for one in self._decodings())
        return taken + self._num_cached(request) <= self._max_cached_tokens

    def _num_cached(self, request: Sample) -> int:
        """Return the tokens that a request's answers count for at their end."""
        num_tokens = len(request.prompt) + request.max_tokens + self._state_tokens
        return num_tokens * request.num_answers

    def _decodings(self) -> list[_Decoding]:
        return [decoding for known in self._clients.values() for decoding in known.decoding]

    # ---------------------------------------------------------------------- what needs no pass

    def _do(self, client: str, one: _Queued) -> None:
        """Do a request that needs no pass of its own; its failure is its own."""
        request = one.request
        if isinstance(request, Sample):
            self._num_groups += 1
            decoding = _Decoding(
                client=client, request=request, future=one.future, group=self._num_groups
            )
            self._clients[client].decoding.append(decoding)
            return
        work = request if callable(request) else partial(self._done, client, request)
        try:
            result = work()
        except Exception as error:  # noqa: BLE001 - the future has it
            one.future.set_exception(error)
            return
        one.future.set_result(result)

    def _done(self, client: str, request: Request) -> object:
        if isinstance(request, Step):
            return self._step(client, request)
        if isinstance(request, Save):
            return self._state(client, has_moments=request.has_moments)
        if isinstance(request, Load):
            self._load(client, request.state)
            return None
        if isinstance(request, Refused):
            self._clients[client].lacks_rows = True
            raise request.error
        assert isinstance(request, Freeze)
        with self._dropping(request.name):
            self.adapters.copy(client, request.name)
        self._clients[request.name].is_ready = True
        return None

    def _add(self, client: str, settings: AdapterSettings, seed: int) -> None:
        with self._dropping(client):
            self.adapters.add(client, settings, seed=seed)
        self._clients[client].optimizer = self._new_optimizer(client)

    def _put(self, client: str, settings: AdapterSettings, values: Values) -> None:
        with self._dropping(client):
            self.adapters.put(client, settings, values)

    @contextmanager
    def _dropping(self, client: str) -> Iterator[None]:
        """Forget a client whose adapter cannot be added in this context."""
        try:
            yield
        except Exception as error:
            self._drop(client, error)
            raise

    def _remove(self, client: str) -> None:
        self._end(client)
        if client in self.adapters.names:
            self.adapters.remove(client)
        self._drop(client, CancelledError())

    def _drop(self, client: str, error: BaseException) -> None:
        """Forget a client; what it has asked for fails."""
        with self._changed:
            for one in self._clients.pop(client).queue:
                if one.future.set_running_or_notify_cancel():
                    one.future.set_exception(error)
                if isinstance(one.request, Freeze):
                    self._drop(one.request.name, error)

    def _new_optimizer(self, client: str) -> torch.optim.AdamW:
        return torch.optim.AdamW(self.adapters.parameters(client).values())

    def _step(self, client: str, request: Step) -> Stepped:
        known = self._clients[client]
        optimizer = known.optimizer
        assert optimizer is not None
        if known.lacks_rows:
            known.lacks_rows = False
            optimizer.zero_grad()
            raise DataError(
                f"a request of {client!r} to train on has failed before this step",
                limit="the gradients lack its rows, and are cleared",
                hint="`Train` on all rows of the step again",
            )
        own = [p for p in self.adapters.parameters(client).values() if p.grad is not None]
        if not own:
            raise DataError(
                f"{client!r} has no gradients",
                limit="a step follows rows to train on, and clears their gradients",
                hint="`Train` first",
            )
        max_norm = request.max_grad_norm or math.inf
        norm = float(torch.nn.utils.clip_grad_norm_(own, max_norm))
        if not math.isfinite(norm):
            optimizer.zero_grad()
            raise DivergedError(
                f"the gradients of {client!r} have the norm {norm}",
                limit="the adapter is unchanged, and the gradients are cleared",
                hint="a smaller learning rate, or other rows",
            )
        for group in optimizer.param_groups:
            group |= {
                "lr": request.lr,
                "betas": request.betas,
                "eps": request.eps,
                "weight_decay": request.weight_decay,
            }
        self._end(client)
        optimizer.step()
        optimizer.zero_grad()
        return Stepped(grad_norm=norm)

    def _state(self, client: str, *, has_moments: bool) -> ClientState:
        optimizer = self._clients[client].optimizer if has_moments else None
        moments = {} if optimizer is None else {"state": optimizer.state_dict()["state"]}
        values = self.adapters.values(client)
        return ClientState(values=values, moments=cast("dict[str, Any]", _on_host(moments)))

    def _load(self, client: str, state: ClientState) -> None:
        optimizer = self._new_optimizer(client)
        if state.moments:
            groups = optimizer.state_dict()["param_groups"]
            moments = cast("dict[str, Any]", _on_host(state.moments))
            optimizer.load_state_dict({**moments, "param_groups": groups})
        self.adapters.load(client, state.values)
        optimizer.zero_grad()
        self._clients[client].optimizer = optimizer
        self._clients[client].lacks_rows = False
        self._end(client)

    def _end(self, client: str) -> None:
        """End the client's generation, whose caches are of weights that change now."""
        generation = self._generations.pop(client, None)
        if generation is not None:
            generation.close()

    # ------------------------------------------------------------------- training and scoring

    def _compute(
        self, due: Sequence[tuple[str, _Queued]], compute: Callable[[Sequence[RunStep]], Any]
    ) -> None:
        """Compute requests in one pass; if it fails, each by itself."""
        if not due:
            return
        kept = [_Kept(cast("Train | Score", one.request).objective) for _, one in due]
        runs = [
            RunStep(
                adapter=client,
                micro_batches=cast("Train | Score", one.request).rows,
                objective=objective,
            )
            for (client, one), objective in zip(due, kept, strict=True)
        ]
        before = [self._gradients(client) for client, _ in due]
        try:
            results = compute(runs)
            for (client, one), objective, result, gradients in zip(
                due, kept, results, before, strict=True
            ):
                self._settle(client, one, objective, result, gradients)
        except Exception as error:  # noqa: BLE001 - the future has it
            for gradients in before:
                _restore(gradients)
            if len(due) == 1:
                self._fail(*due[0], error)
                return
            for pair in due:
                self._compute([pair], compute)

    def _trained(self, runs: Sequence[RunStep]) -> Sequence[Any]:
        results = self._engine.forward_backward_runs(runs)
        self._count("train", results[0].num_loads)
        self._engine.wait()
        return results

    def _scored(self, runs: Sequence[RunStep]) -> Sequence[Any]:
        results = self._engine.evaluate_runs(runs)
        self._count("score", results[0].num_loads)
        return results

    def _fail(self, client: str, one: _Queued, error: Exception) -> None:
        """Fail a request to train or score."""
        self._clients[client].lacks_rows |= isinstance(one.request, Train)
        one.future.set_exception(error)

    def _settle(
        self,
        client: str,
        one: _Queued,
        kept: _Kept,
        result: Any,
        gradients: Mapping[torch.Tensor, Any],
    ) -> None:
        """Give a request its result, unless that is no number."""
        found = Scored(
            loss=result.loss,
            metrics=dict(result.metrics),
            logprobs=kept.logprobs(),
            num_loads=result.num_loads,
        )
        if math.isfinite(found.loss):
            one.future.set_result(found)
            return
        _restore(gradients)
        error = DivergedError(
            f"the loss is {found.loss}",
            limit="gradients are as they were before the request",
            hint="look at its rows and at the values that its loss reads",
        )
        self._fail(client, one, error)

    def _gradients(self, client: str) -> dict[torch.Tensor, torch.Tensor | None]:
        """Return copies of the gradients of a client."""
        return {
            parameter: None if parameter.grad is None else parameter.grad.clone()
            for parameter in self.adapters.parameters(client).values()
        }

    def _count(self, kind: str, num_loads: int) -> None:
        self.num_passes[kind] += 1
        self.num_loads[kind] += num_loads

    # -------------------------------------------------------------------------------- decoding

    def _decode(self) -> bool:
        """Give each answer that goes on a token, in one pass; return whether there was any."""
        is_any = bool(self._decodings())
        for decoding in self._decodings():
            if decoding.is_cancelled:
                self._leave(decoding)
                decoding.future.set_exception(CancelledError())
        due = self._decodings()
        try:
            self._decode_pass(due)
        except Exception:  # noqa: BLE001 - each is tried again by itself
            for decoding in due:
                self._end(decoding.client)
            for decoding in due:
                self._decode_alone(decoding)
        return is_any

    def _decode_alone(self, decoding: _Decoding) -> None:
        """Sample all of a request by itself, from its start."""
        decoding.begin()
        try:
            while not decoding.future.done():
                self._decode_pass([decoding])
        except Exception as error:  # noqa: BLE001 - the future has it
            self._end(decoding.client)
            self._leave(decoding)
            decoding.future.set_exception(error)

    def _decode_pass(self, due: Sequence[_Decoding]) -> None:
        given: dict[str, dict[int, torch.Tensor]] = {}
        for decoding in due:
            given.setdefault(decoding.client, {})[decoding.group] = decoding.given
        asked = [
            Asked(adapter=client, generation=self._generation(client), tokens=tokens)
            for client, tokens in given.items()
        ]
        if not asked:
            return
        num_before = asked[0].generation.num_loads
        found = zip(asked, self._engine.joined_logits(asked), strict=True)
        logits = {one.adapter: by_group for one, by_group in found}
        self._count("decode", asked[0].generation.num_loads - num_before)
        for decoding in due:
            self._give(decoding, logits[decoding.client][decoding.group])

    def _give(self, decoding: _Decoding, logits_BV: torch.Tensor) -> None:
        """Give the answers of a request a token each; those of a prompt begin alike."""
        request, generation = decoding.request, self._generations[decoding.client]
        if decoding.is_first:
            generation.repeat(decoding.group, request.num_answers)
            logits_BV = logits_BV.repeat_interleave(request.num_answers, dim=0)
            decoding.is_first = False
        sampler = Sampler(
            engine=self._engine,
            max_new_tokens=request.max_tokens,
            stop_ids=request.stop_ids,
            pad_id=0,  # prompts of a request are of one length
        )
        sampler.give(decoding.rows, logits_BV, decoding.choose)
        answers = tuple(answer for _, answer in decoding.rows)
        for answer in answers:
            if answer.is_cut and request.is_ended is not None and request.is_ended(answer.tokens):
                answer.is_cut = False
        if any(map(sampler.goes_on, answers)):
            decoding.given = torch.tensor([[answer.tokens[-1]] for answer in answers])
            return
        self._leave(decoding)
        decoding.future.set_result(answers)

    def _leave(self, decoding: _Decoding) -> None:
        self._clients[decoding.client].decoding.remove(decoding)
        if decoding.client in self._generations:
            self._generations[decoding.client].drop(decoding.group)

    def _generation(self, client: str) -> Generation:
        if client not in self._generations:
            with self._engine.using(client):
                self._generations[client] = self._engine.generation()
        return self._generations[client]


def _is_kept(one: _Queued) -> bool:
    """Return whether this stays in a queue that is cancelled: it adds or removes the client."""
    return callable(one.request)


def _restore(gradients: Mapping[torch.Tensor, torch.Tensor | None]) -> None:
    """Set gradients back; those that were none are cleared."""
    for parameter, gradient in gradients.items():
        parameter.grad = gradient


def _on_host(value: object) -> object:
    """Return a copy of nested values with its tensors on the host."""
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, Mapping):
        return {key: _on_host(one) for key, one in value.items()}
    return [_on_host(one) for one in value] if isinstance(value, list) else value
