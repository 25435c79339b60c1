"""Answers that a server samples, vLLM's, with the adapter as it is before each round.

The server reads the adapter from the run's directory. It is asked by token ids and answers by token
ids, with the log-probabilities that it drew them with, so no text is ever tokenized again; what it
computes differently, in another precision and by other kernels, is weighed by
`objective.importance_sampling_mode`. All that a model's generation config may change is stated in
each request. An adapter has a new name for each state of its weights: vLLM keeps the keys and
values of prompts by the adapter's name.

llama.cpp's server cannot sample for a run. It has the adapters that it was started with, and only
their scales change (`/lora-adapters` in its tools/server/README.md; pull request 22061, which would
load others, was open when this was written).

This is written from vLLM's source and documentation and tested with a server that answers in their
shapes. No vLLM has been run with it.

Source: docs.vllm.ai/en/latest/features/lora; of vllm-project/vllm entrypoints/openai/completion,
entrypoints/serve/lora and lora/peft_helper.py; pull requests 22587 (`return_token_ids`, 0.10.2) and
22387 (`--logprobs-mode`).
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from hashlib import sha256
from http import HTTPStatus
from http.client import HTTPConnection, HTTPException
from typing import TYPE_CHECKING, Annotated, TypeVar, cast

from pydantic import BaseModel, Field, ValidationError

from finetune.adapter.lora import ALONE, save_adapter
from finetune.errors import FinetuneError
from finetune.files.atomic import remove
from finetune.files.manifest import clear_partial
from finetune.online.rounds import Rounds
from finetune.online.sample import Answer
from finetune.training.loop import digest_of

if TYPE_CHECKING:
    from peft import PeftModel
    from torch import nn

    from finetune.data.tokenize import Example
    from finetune.objectives.grpo import Grpo

_Reply = TypeVar("_Reply", bound=BaseModel)
_READY_S, _ANSWER_S = 60.0, 3600.0  # within which a server replies, before a run and in it
_MOST_REQUESTS = 64  # at a time, each of one prompt
_MOST_LOGPROB = 1e-3  # rounding: a log-probability is at most 0
_OTHER_TEMPERATURE = 2.0  # the largest that vLLM takes
_SAME_LOGPROB = 0.01  # in nats, what rounding may change from one request to the next
_ADAPTER = "adapter"
_START = (
    "`VLLM_ALLOW_RUNTIME_LORA_UPDATING=True vllm serve MODEL --enable-lora --max-lora-rank RANK"
    " --logprobs-mode processed_logprobs`, vLLM 0.10.2 or later"
)
_KEPT = "a run that has begun goes on with `--resume`"


class ServerError(FinetuneError):
    """A server is not there, refuses what it is asked, or replies something else."""


class _Model(BaseModel):
    id: str
    max_model_len: int | None = None  # tokens of a prompt with its answer


class _Models(BaseModel):
    data: Annotated[list[_Model], Field(min_length=1)]


class _Logprobs(BaseModel):
    token_logprobs: list[Annotated[float, Field(le=_MOST_LOGPROB, allow_inf_nan=False)]]
    top_logprobs: list[dict[str, float]]


class _Completion(BaseModel):
    index: int
    prompt_token_ids: list[int]
    token_ids: Annotated[list[int], Field(min_length=1)]
    logprobs: _Logprobs


class _Completions(BaseModel):
    choices: list[_Completion]


@dataclass(frozen=True, kw_only=True, slots=True)
class Server:
    """A server, which is asked without following redirects."""

    url: str
    timeout_s: float

    def reply(self, path: str, body: Mapping[str, object] | None = None) -> tuple[int, str]:
        """Return the status and the text of a reply.

        Args:
            path: The path of the request.
            body: The JSON that is sent, by POST; None sends nothing, by GET.

        Raises:
            ServerError: There is none in time.
        """
        where = self.url.removeprefix("http://").rstrip("/")
        try:
            connection = HTTPConnection(where, timeout=self.timeout_s)
            try:
                sent = None if body is None else json.dumps(body)
                headers = {"Content-Type": "application/json"}
                connection.request("GET" if body is None else "POST", path, sent, headers)
                found = connection.getresponse()
                return found.status, found.read().decode(errors="replace")
            finally:
                connection.close()
        except TimeoutError as error:
            raise ServerError(
                f"objective.sampler: {self.url} has not answered {path} in {self.timeout_s:g} s",
                limit="a reply comes once all that it holds is sampled",
                hint=f"a smaller `objective.max_new_tokens`, or look at the server's log; {_KEPT}",
            ) from error
        except (OSError, HTTPException) as error:
            raise ServerError(
                f"objective.sampler: {self.url} does not answer {path}: {error}",
                limit="the server must be there for as long as a run samples",
                hint=f"start it, {_START}; {_KEPT}",
            ) from error

    def asked(self, path: str, body: Mapping[str, object] | None = None, *, hint: str) -> str:
        """Return the text of a reply to what is not refused.

        Args:
            path: The path of the request.
            body: The JSON that is sent; None sends nothing, by GET.
            hint: The hint of the error where it is refused.

        Raises:
            ServerError: It is refused, or there is no reply.
        """
        status, text = self.reply(path, body)
        if status != HTTPStatus.OK:
            raise ServerError(
                f"objective.sampler: {self.url} refuses {path} with status {status}: {text[:500]}",
                limit="its own words; redirects are not followed",
                hint=f"{hint}; {_KEPT}",
            )
        return text

    def models(self) -> list[_Model]:
        """Return what it serves: the base first, then adapters.

        Raises:
            ServerError: It does not say.
        """
        text = self.asked("/v1/models", hint=_START)
        return self._read(_Models, text).data

    def completions(
        self,
        model: str,
        prompt: Sequence[int],
        *,
        num: int,
        max_new_tokens: int,
        temperature: float,
        seed: int,
        stop_ids: Sequence[int] = (),
    ) -> list[_Completion]:
        """Return answers to a prompt.

        Args:
            model: An adapter, or the base.
            prompt: Token ids.
            num: Answers.
            max_new_tokens: Tokens after which one is cut off.
            temperature: Divisor of the logits; 0 takes the most probable tokens.
            seed: The seed of the first answer; the next ones have the next seeds.
            stop_ids: Tokens that end an answer.

        Raises:
            ServerError: There are others, they lack what is learned from, or there is no reply.
        """
        body = {
            "model": model,
            "prompt": list(prompt),
            "n": num,
            "max_tokens": max_new_tokens,
            "temperature": temperature,
            "seed": seed,
            "stop_token_ids": list(stop_ids),
            "ignore_eos": True,  # the server's own
            "logprobs": 1,
            "return_token_ids": True,
            # A server takes defaults from the model's generation config: here there are none.
            **{"top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0},
            **{"presence_penalty": 0.0, "frequency_penalty": 0.0},
        }
        text = self.asked("/v1/completions", body, hint="look at the server's log")
        found = sorted(self._read(_Completions, text).choices, key=lambda one: one.index)
        if [one.index for one in found] != list(range(num)):
            raise self.odd(f"{len(found)} answers to a prompt, and {num} were asked for")
        for one in found:
            if one.prompt_token_ids != list(prompt):
                raise self.odd("answers to another prompt than it was given")
            if len(one.token_ids) > max_new_tokens:
                num_tokens = len(one.token_ids)
                raise self.odd(f"{num_tokens} tokens, and at most {max_new_tokens} were asked for")
            if len(one.logprobs.token_logprobs) != len(one.token_ids):
                raise self.odd("another number of log-probabilities than of tokens")
        return found

    def _read(self, kind: type[_Reply], text: str) -> _Reply:
        try:
            return kind.model_validate_json(text)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            where = ".".join(map(str, first["loc"])) or "it"
            raise self.odd(f"a reply in which {where} is wrong: {first['msg']}") from error

    def odd(self, what: str) -> ServerError:
        """Return the error that the server gives something which cannot be learned from."""
        return ServerError(
            f"objective.sampler: {self.url} gives {what}",
            limit="each answer needs its token ids and their log-probabilities; text that is"
            " tokenized again may have other tokens",
            hint=_START,
        )


def require_server(section: "Grpo", *, timeout_s: float = _READY_S) -> None:
    """Check that a server is there, can load adapters, and says what is learned from.

    Args:
        section: The settings, with the server.
        timeout_s: Within which it replies.

    Raises:
        ServerError: One of these is not so.
    """
    server = Server(url=cast("str", section.sampler), timeout_s=timeout_s)
    base = server.models()[0].id
    status, _ = server.reply("/v1/load_lora_adapter", {"lora_name": "", "lora_path": ""})
    if status in (HTTPStatus.NOT_FOUND, HTTPStatus.METHOD_NOT_ALLOWED):
        raise ServerError(
            f"objective.sampler: {server.url} is a server that cannot load an adapter: it answers"
            f" {status} to /v1/load_lora_adapter",
            limit="the adapter is another one in each round; llama.cpp's server keeps those that"
            " it was started with",
            hint=_START,
        )
    tops = [
        max(found.logprobs.top_logprobs[0].values())
        for temperature in (1.0, _OTHER_TEMPERATURE)
        for found in server.completions(
            base, [0], num=1, max_new_tokens=1, temperature=temperature, seed=0
        )
    ]
    if section.temperature != 1.0 and abs(tops[0] - tops[1]) < _SAME_LOGPROB:
        raise ServerError(
            f"objective.sampler: {server.url} gives log-probabilities without the temperature",
            limit=f"objective.temperature is {section.temperature}, and tokens are weighed by what"
            " they were drawn with",
            hint="start it with `--logprobs-mode processed_logprobs`, or `objective.temperature:"
            " 1.0`",
        )


class OutsideRounds(Rounds):
    """Rounds whose answers a server samples."""

    def _prepare(self, lengths: Sequence[int]) -> None:
        """Check that the server has room for prompts of these lengths with their answers."""
        section = self._section
        self._server = Server(url=cast("str", section.sampler), timeout_s=_ANSWER_S)
        self._max_new_tokens = cast("int", section.max_new_tokens)
        most, base = max(lengths) + self._max_new_tokens, self._server.models()[0]
        if base.max_model_len is not None and base.max_model_len < most:
            raise ServerError(
                f"objective.sampler: {self._server.url} takes {base.max_model_len:,} tokens, and"
                f" the longest prompt has {most:,} with its answer",
                limit="an answer is never cut before objective.max_new_tokens",
                hint=f"start it with `--max-model-len {most}`",
            )

    def _sampled(
        self, prompts: "Sequence[Example]", num_answers: int, seeds: Sequence[int] | None
    ) -> tuple[list[list[Answer]], None]:
        """Return answers to prompts; see `Rounds`."""
        num, screen = len(prompts), self._session.run.screen
        temperature = 0.0 if seeds is None else cast("float", self._section.temperature)
        with (
            self._loaded() as name,
            screen.working("Sampling", "answers") as progress,
            ThreadPoolExecutor(min(num, _MOST_REQUESTS)) as pool,
        ):
            asked = [
                pool.submit(
                    self._server.completions,
                    name,
                    prompt.input_ids.tolist(),
                    num=num_answers,
                    max_new_tokens=self._max_new_tokens,
                    temperature=temperature,
                    seed=0 if seeds is None else seeds[number * num_answers],
                    stop_ids=sorted(self._session.stops.ids),
                )
                for number, prompt in enumerate(prompts)
            ]
            try:
                for num_done, one in enumerate(as_completed(asked), 1):
                    one.result()
                    progress(num_done * num_answers, num * num_answers)
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise
        return [[self._answer(found) for found in one.result()] for one in asked], None

    def _answer(self, found: _Completion) -> Answer:
        """Return an answer as one that the engine has sampled.

        Raises:
            ServerError: It has tokens of another model, or has ended too soon.
        """
        stops, tokens = {*self._session.stops.ids}, found.token_ids
        model = cast("PeftModel", self._session.model)
        vocab_size = cast("nn.Embedding", model.get_input_embeddings()).num_embeddings
        odd = [token for token in tokens if not 0 <= token < vocab_size]
        if odd:
            raise self._server.odd(f"the token {odd[0]}, and the model has {vocab_size:,}")
        is_cut = tokens[-1] not in stops
        if is_cut and len(tokens) < self._max_new_tokens:
            raise self._server.odd(
                f"an answer of {len(tokens)} tokens that no stop token ends, before"
                f" objective.max_new_tokens {self._max_new_tokens}"
            )
        if not stops.isdisjoint(tokens[:-1]):
            raise self._server.odd("an answer that goes on after a stop token")
        return Answer(tokens=tokens, logprobs=found.logprobs.token_logprobs, is_cut=is_cut)

    @contextmanager
    def _loaded(self) -> Iterator[str]:
        """Yield the name by which the server has the adapter, as it is now, in this context."""
        session, server = self._session, self._server
        folder = self._folder.absolute() / _ADAPTER
        mine = f"sluice-{sha256(str(folder).encode()).hexdigest()[:12]}-"
        name = mine + digest_of(session.loop.weights)[:16]
        clear_partial(folder.parent, name=_ADAPTER)
        for left in server.models():  # by a run that was killed
            if left.id.startswith(mine):
                self._unload(left.id)
        with session.loop.evaluated():
            save_adapter(
                cast("PeftModel", session.model),
                folder,
                adapter=session.run.adapter or ALONE,
                revision=session.run.recipe.model.revision,
            )
        try:
            body = {"lora_name": name, "lora_path": str(folder)}
            hint = f"the server must be able to read {folder}, and be of the same model: {_START}"
            server.asked("/v1/load_lora_adapter", body, hint=hint)
            yield name
        finally:
            with suppress(ServerError):  # the next round unloads what is left, or says why not
                self._unload(name)
            remove(folder)

    def _unload(self, name: str) -> None:
        body = {"lora_name": name}
        self._server.asked("/v1/unload_lora_adapter", body, hint="start the server again")
