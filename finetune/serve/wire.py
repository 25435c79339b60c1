"""Tinker's wire, by the schemas of its own package: what clients send, and what they get.

Requests to train are protobuf, all others JSON; so are results, but for those of training and
sampling. What a request says and this server would not do is refused by name: fields that are
unknown, and those of `_REFUSED`.

Shapes: T tokens of a row's input; its target t is what the row predicts after its token t.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from google.protobuf.unknown_fields import UnknownFieldSet  # type: ignore[import-untyped]
from pydantic import BaseModel, ValidationError
from tinker import types
from tinker.proto import tinker_public_pb2 as pb

from finetune.clients.requests import Scored, Step
from finetune.data.tokenize import IGNORE_INDEX
from finetune.errors import ConfigError, DataError
from finetune.online.sample import Answer
from finetune.serve.losses import TokenSum, loss_named
from offload.engine.batch import Batch

if TYPE_CHECKING:
    from numpy.typing import NDArray

PROTOBUF = "application/x-protobuf"
TARGETS = "target_tokens"
_SHOWN = 200
_TOKEN_BYTES = 36  # of a number in a list
_DTYPES: Mapping[int, Any] = {
    pb.DTYPE_FLOAT32: np.float32,
    pb.DTYPE_INT64: np.int64,
    pb.DTYPE_INT32: np.int32,
}
# Of requests to sample: what is not computed here, and the value that asks for nothing.
_REFUSED: Mapping[str, object] = {
    "topk_prompt_logprobs": 0,
    "topk_sample_logprobs": 0,
    "target_prompt_logprobs": None,
    "prompt_alt_tokens_k": 0,
    "base_model": None,
    "model_path": None,
}
Asked = TypeVar("Asked", bound=BaseModel)


def parsed(body: bytes, kind: type[Asked]) -> Asked:
    """Return a JSON request.

    Raises:
        DataError: It is another one.
    """
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"])) or "the request"
        raise DataError(
            f"{where[:_SHOWN]}: {first['msg'][:_SHOWN]}",
            limit=f"a {kind.__name__} of tinker {_sdk_version()}",
            hint="use a client of this version, or install that of the client here",
        ) from error


def training_request(body: bytes) -> pb.ForwardBackwardRequest:
    """Return a request to train or score.

    Raises:
        DataError: It is another one.
    """
    found = pb.ForwardBackwardRequest()
    try:
        found.ParseFromString(body)
    except Exception as error:
        raise DataError(
            f"a request to train cannot be read: {error}",
            limit=f"it is a ForwardBackwardRequest of tinker {_sdk_version()}",
            hint="use a client of this version, or install that of the client here",
        ) from error
    return found


def _require_known(request: pb.ForwardBackwardRequest) -> None:
    unknown = [str(one.field_number) for one in UnknownFieldSet(request)]
    if unknown:
        raise DataError(
            f"a request to train has the fields {', '.join(unknown[:10])}",
            limit=f"tinker {_sdk_version()} knows no such fields",
            hint="use a client of this version, or install that of the client here",
        )


def digest(request: BaseModel | pb.ForwardBackwardRequest) -> bytes:
    """Return what two requests share that ask for the same."""
    if isinstance(request, BaseModel):
        said = json.dumps(request.model_dump(mode="json"), sort_keys=True).encode()
    else:
        said = request.SerializeToString(deterministic=True)
    return sha256(type(request).__name__.encode() + said).digest()


def num_bytes(request: BaseModel | pb.ForwardBackwardRequest) -> int:
    """Return about what a request takes on the host while it waits."""
    if isinstance(request, types.SampleRequest):
        return sum(_TOKEN_BYTES * chunk.length for chunk in request.prompt.chunks)
    return 0 if isinstance(request, BaseModel) else request.ByteSize()


# ---------------------------------------------------------------------------------------------
# Training


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """Rows of a request that are computed in one pass."""

    rows: list[Batch]
    objective: TokenSum


def parts_of(
    request: pb.ForwardBackwardRequest, *, max_tokens: int, pass_tokens: int
) -> list[Part]:
    """Return the rows of a request to train or score with its loss, cut into passes.

    A row has the target of its last token as one more token, which nothing is predicted from. How
    rows are cut follows from the request and these numbers alone.

    Args:
        request: A request of any number of rows.
        max_tokens: The most tokens of a row.
        pass_tokens: The most tokens of a pass, if it has more than one row.

    Raises:
        DataError: A row is empty, too long, or not of tokens; or its loss reads other inputs; or
            the request says more than is known here.
        ConfigError: There is no such loss, or no such setting of it.
    """
    _require_known(request)
    settings = _settings(request)
    TokenSum(request.loss_fn, {}, settings)  # refused before rows are read
    rows = [_row(request.loss_fn, n, one, max_tokens) for n, one in enumerate(request.data)]
    if not rows:
        raise DataError("a request without rows", hint="give at least one row")
    cut: list[list[_Row]] = [[]]
    for row in rows:
        if cut[-1] and sum(one.num_tokens for one in (*cut[-1], row)) > pass_tokens:
            cut.append([])
        cut[-1].append(row)
    return [
        Part(
            rows=[row.batch for row in one],
            objective=TokenSum(request.loss_fn, _joined([row.given for row in one]), settings),
        )
        for one in cut
    ]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Row:
    batch: Batch
    given: Mapping[str, torch.Tensor]  # inputs of the loss, (T,)
    num_tokens: int


def _joined(given: Sequence[Mapping[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {name: torch.cat([one[name] for one in given]) for name in given[0]}


def _row(loss: str, number: int, datum: pb.Datum, max_tokens: int) -> _Row:
    where, inputs = f"row {number}", loss_named(loss).inputs
    ids_T = _tokens(datum.model_input, where)
    if not 1 <= len(ids_T) <= max_tokens:
        raise DataError(
            f"{where} has {len(ids_T)} tokens",
            limit=f"rows of 1 to {max_tokens} tokens were planned",
            hint=f"cut it, or `sluice serve --row-tokens {max(1, len(ids_T))}`",
        )
    values = {
        name: _tensor(tensor, f"{name} of {where}", num=len(ids_T))
        for name, tensor in datum.loss_fn_inputs.items()
    }
    if values.keys() != {TARGETS, *inputs}:
        raise DataError(
            f"{where} has {', '.join(sorted(values)) or 'no inputs of the loss'}",
            limit=f"{loss} reads {', '.join((TARGETS, *inputs))}",
            hint="give each row these, as many numbers as it has tokens",
        )
    targets_T = values.pop(TARGETS)
    if targets_T.is_floating_point() or bool((targets_T < 0).any()):
        raise DataError(
            f"{TARGETS} of {where} are no tokens",
            limit="a target is the number of a token; one without a loss has the weight 0",
            hint="use 0 for a target that does not matter",
        )
    for name, values_T in values.items():
        if not bool(values_T.isfinite().all()):
            raise DataError(f"{name} of {where} has values that are no numbers", hint="look at it")
    before = torch.tensor([IGNORE_INDEX])
    batch: Batch = {
        "input_ids": torch.cat([ids_T, targets_T[-1:]])[None],
        "labels": torch.cat([before, targets_T])[None],
    }
    given = {name: values[name].float() for name in inputs}
    return _Row(batch=batch, given=given, num_tokens=len(ids_T) + 1)


def _settings(request: pb.ForwardBackwardRequest) -> dict[str, float | str]:
    found: dict[str, float | str] = dict(request.loss_fn_config)
    for key, value in request.loss_fn_config_v2.items():
        found[key] = value.text if value.HasField("text") else value.number
    return found


def _tokens(chunks: Sequence[pb.Chunk], where: str) -> torch.Tensor:
    for chunk in chunks:
        if chunk.WhichOneof("chunk") != "encoded_text":
            raise _only_text(str(chunk.WhichOneof("chunk")), where)
    parts = [_numbers(chunk.encoded_text.tokens, np.int32, where) for chunk in chunks]
    return torch.from_numpy(np.concatenate([*parts, np.empty(0, np.int64)]).astype(np.int64))


def _only_text(kind: str, where: str) -> DataError:
    return DataError(
        f"{where} has a part of kind {kind}",
        limit="clients send tokens of text; images are trained by recipes",
        hint="leave it out, or see docs/guides/images.md",
    )


def _tensor(tensor: pb.Tensor, where: str, *, num: int) -> torch.Tensor:
    shape = list(tensor.shape) or [num]
    if tensor.HasField("sparse_csr") or shape != [num]:
        raise DataError(
            f"{where} has the shape {shape}" + (", sparse" * tensor.HasField("sparse_csr")),
            limit=f"one number for each of its {num} tokens",
            hint="`cross_entropy` with one target for each token",
        )
    if tensor.dtype not in _DTYPES:
        raise DataError(f"{where} has the type {tensor.dtype}", hint="float32 or int64")
    values = _numbers(tensor.dense, _DTYPES[tensor.dtype], where)
    if len(values) != num:
        raise DataError(f"{where} has {len(values)} numbers for {num} tokens", hint="one for each")
    wide = values if tensor.dtype == pb.DTYPE_FLOAT32 else values.astype(np.int64)
    return torch.from_numpy(wide.copy())


def _numbers(data: bytes, dtype: Any, where: str) -> "NDArray[Any]":
    try:
        return np.frombuffer(data, dtype)
    except ValueError as error:
        raise DataError(f"{where}: {error}", hint="look at the client that sent it") from error


def require_adamw(optimizer: Any) -> None:
    """Check what a client wants its adapter to be updated by; None leaves that to the server.

    Raises:
        ConfigError: It is not AdamW.
    """
    if not isinstance(optimizer, types.AdamOptimizerConfig | types.AdamParams | None):
        raise ConfigError(
            f"the optimizer {optimizer.type!r}",
            limit="torch's AdamW updates adapters here",
            hint="`AdamParams`, and no `optimizer`",
        )


def step_of(request: types.OptimStepRequest) -> Step:
    """Return a step, after the checks of torch's AdamW.

    Raises:
        ConfigError: It is of another optimizer, or a setting is out of range.
    """
    given = request.optim_params
    require_adamw(given)
    assert isinstance(given, types.AdamParams)
    for name, value in given.model_dump().items():
        is_below = name not in ("beta1", "beta2") or value < 1
        if not (math.isfinite(value) and is_below and (value >= 0 or name == "grad_clip_norm")):
            raise ConfigError(
                f"{name} is {value}",
                limit="settings of AdamW are numbers of 0 or more, and betas are below 1",
                hint=f"e.g. `{name}={getattr(types.AdamParams(), name)}`",
            )
    return Step(
        lr=given.learning_rate,
        betas=(given.beta1, given.beta2),
        eps=given.eps,
        weight_decay=given.weight_decay,
        max_grad_norm=max(0.0, given.grad_clip_norm),
    )


def training_reply(passes: Sequence[Scored]) -> bytes:
    """Return what a request to train or score gives: the loss, and each row's log-probabilities."""
    reply = pb.ForwardBackwardOutput(loss_fn_output_type="ArrayRecord")
    reply.metrics["loss:sum"] = math.fsum(one.loss for one in passes)
    values = [x_T.float().numpy().tobytes() for one in passes for x_T in one.logprobs]
    record = reply.loss_fn_outputs.add(num_datums=len(values))
    ends = np.cumsum([0, *map(len, values)]).astype(np.int64)
    record.fields["logprobs"].CopyFrom(
        pb.BatchedTensor(data=b"".join(values), offsets=ends.tobytes(), dtype=pb.DTYPE_FLOAT32)
    )
    return bytes(reply.SerializeToString())


# ---------------------------------------------------------------------------------------------
# Sampling


def require_sampled(request: types.SampleRequest) -> None:
    """Check that all that a request to sample asks for is done here.

    Raises:
        ConfigError: It is not.
    """
    asked = {name: getattr(request, name) for name in _REFUSED}
    nothing = dict(_REFUSED)
    asked |= {"top_k": request.sampling_params.top_k, "top_p": request.sampling_params.top_p}
    nothing |= {"top_k": -1, "top_p": 1}
    for name, value in asked.items():
        if value != nothing[name]:
            raise ConfigError(
                f"{name} is {value if isinstance(value, int | float | str) else 'set'}",
                limit="this server samples from the whole distribution of a sampling session, and"
                " scores the tokens of prompts",
                hint=f"leave {name} out",
            )
    last = request.prompt_logprobs_last_n
    if last is not None and last < 1:
        raise ConfigError(
            f"prompt_logprobs_last_n is {last}",
            limit="it is the number of tokens that are scored",
            hint="leave it out for all",
        )


def prompt_of(request: types.SampleRequest) -> list[int]:
    """Return the tokens of a prompt.

    Raises:
        DataError: It has none, or parts of another kind.
    """
    for chunk in request.prompt.chunks:
        if not isinstance(chunk, types.EncodedTextChunk):
            raise _only_text(chunk.type, "the prompt")
    ids = [token for chunk in request.prompt.chunks for token in chunk.tokens]  # type: ignore[union-attr]
    if not ids:
        raise DataError("a prompt without tokens", hint="give at least one token")
    return ids


def prompt_row(ids: Sequence[int], *, last: int | None) -> Batch:
    """Return a prompt as a row to score: its last tokens, or all but the first."""
    ids_T = torch.tensor([*ids])
    labels_T = ids_T.clone()
    labels_T[: 1 if last is None else max(1, len(ids) - last)] = IGNORE_INDEX
    return {"input_ids": ids_T[None], "labels": labels_T[None]}


def sample_reply(answers: Sequence[Answer], prompt_logps_N: torch.Tensor | None, num: int) -> bytes:
    """Return what a request to sample gives.

    Args:
        answers: All that were sampled.
        prompt_logps_N: Log-probabilities of the prompt's last tokens; None if none were asked for.
        num: Tokens of the prompt.
    """
    reply = pb.SampleResponse()
    for answer in answers:
        reply.sequences.add(
            stop_reason=pb.STOP_REASON_LENGTH if answer.is_cut else pb.STOP_REASON_STOP,
            tokens=np.array(answer.tokens, np.int32).tobytes(),
            logprobs=np.array(answer.logprobs, np.float32).tobytes(),
        )
    if prompt_logps_N is not None:
        found = np.full(num, math.nan, np.float32)
        found[num - len(prompt_logps_N) :] = prompt_logps_N.float().numpy()
        reply.prompt_logprobs = found.tobytes()
    return bytes(reply.SerializeToString())


def _sdk_version() -> str:
    from importlib.metadata import version

    return version("tinker")
