"""What is read from the wire and written to it, against Tinker's own package."""

import math
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from tinker import types
from tinker.proto import tinker_public_pb2 as pb

from finetune.clients.requests import Scored
from finetune.errors import ConfigError, DataError
from finetune.online.sample import Answer
from finetune.serve import wire
from tests.served_here import datum, training

IGNORED = -100


def parts(data: list[pb.Datum], pass_tokens: int = 1000, **said: Any) -> list[wire.Part]:
    request = training("m", 1, data, **said)
    return wire.parts_of(request, max_tokens=16, pass_tokens=pass_tokens)


def test_a_target_is_what_a_row_predicts_after_its_token() -> None:
    """Whatever the row goes on with: the target of the last one is a token more."""
    (part,) = parts([datum([3, 4, 5], [7, 0, 9])])
    (batch,) = part.rows
    assert batch["input_ids"].tolist() == [[3, 4, 5, 9]]
    assert batch["labels"].tolist() == [[IGNORED, 7, 0, 9]]
    assert batch["input_ids"].dtype == batch["labels"].dtype == torch.int64


def test_prompts_of_several_chunks_are_one_row() -> None:
    row = datum([3, 4], [5, 6, 7], weights=[1.0, 2.0, 3.0])
    row.model_input.add().encoded_text.tokens = np.array([9], np.int32).tobytes()
    (part,) = parts([row])
    assert part.rows[0]["input_ids"].tolist() == [[3, 4, 9, 7]]


def test_inputs_of_a_loss_are_those_of_all_rows_in_order() -> None:
    rows = [datum([3, 4], weights=[1.0, -2.0]), datum([5], weights=[0.5])]
    (part,) = parts(rows)
    assert part.objective._given["weights"].tolist() == [1.0, -2.0, 0.5]
    cut = parts(rows, pass_tokens=1)
    assert [one.objective._given["weights"].tolist() for one in cut] == [[1.0, -2.0], [0.5]]


@pytest.mark.parametrize(
    ("lengths", "pass_tokens", "cut"),
    [
        ([2, 2, 2], 9, [3]),
        ([2, 2, 2], 8, [2, 1]),
        ([2, 2, 2], 1, [1, 1, 1]),
        ([1, 9, 1, 1], 6, [1, 1, 2]),
        ([1], 1, [1]),
    ],
)
def test_rows_are_cut_into_passes_by_their_tokens(
    lengths: list[int], pass_tokens: int, cut: list[int]
) -> None:
    """Of a row of n tokens n + 1 are computed."""
    found = parts([datum([3] * num) for num in lengths], pass_tokens)
    assert [len(one.rows) for one in found] == cut


def test_numbers_of_all_types_are_read() -> None:
    row = datum([3, 4])
    row.loss_fn_inputs["weights"].CopyFrom(
        pb.Tensor(dense=np.array([1, 2], np.int64).tobytes(), dtype=pb.DTYPE_INT64, shape=[2])
    )
    row.loss_fn_inputs["target_tokens"].CopyFrom(
        pb.Tensor(dense=np.array([8, 9], np.int32).tobytes(), dtype=pb.DTYPE_INT32, shape=[2])
    )
    (part,) = parts([row])
    assert part.objective._given["weights"].tolist() == [1.0, 2.0]
    assert part.rows[0]["labels"].tolist() == [[IGNORED, 8, 9]]


def test_settings_of_both_kinds_are_read() -> None:
    request = training("m", 1, loss="ppo", config={"clip_low_threshold": 0.5})
    request.loss_fn_config_v2["clip_high_threshold"].number = 2.0
    assert wire._settings(request) == {"clip_low_threshold": 0.5, "clip_high_threshold": 2.0}
    request.loss_fn_config_v2["clip_high_threshold"].text = "two"
    with pytest.raises(ConfigError, match="'two'"):
        wire.parts_of(request, max_tokens=16, pass_tokens=100)


def test_requests_that_ask_for_the_same_have_one_digest() -> None:
    one, same = (training("m", 1, config={"a": 1.0, "b": 2.0}) for _ in range(2))
    assert wire.digest(one) == wire.digest(same)
    others = [
        training("m", 2, config={"a": 1.0, "b": 2.0}),
        training("n", 1, config={"a": 1.0, "b": 2.0}),
        training("m", 1, config={"a": 1.0, "b": 2.5}),
        training("m", 1, config={"a": 1.0, "b": 2.0}, forward_only=True),
        training("m", 1, [datum([3, 4, 5, 7])], config={"a": 1.0, "b": 2.0}),
    ]
    asked: list[Any] = [
        types.GetInfoRequest(model_id="m"),
        types.SessionHeartbeatRequest(session_id="m"),
    ]
    digests = {wire.digest(x) for x in (one, *others, *asked)}
    assert len(digests) == 1 + len(others) + len(asked)


# --------------------------------------------------------------------------------------- replies


def test_log_probabilities_come_back_row_by_row() -> None:
    rows = [torch.tensor([-1.0, -2.0]), torch.tensor([-3.0]), torch.tensor([-4.0, -5.0, -6.0])]
    passes = [
        Scored(loss=1e10, metrics={}, logprobs=tuple(rows[:2]), num_loads=0),
        Scored(loss=0.25, metrics={}, logprobs=(rows[2],), num_loads=0),
        Scored(loss=-1e10, metrics={}, logprobs=(), num_loads=0),
    ]
    found = pb.ForwardBackwardOutput.FromString(wire.training_reply(passes))
    assert dict(found.metrics) == {"loss:sum": 0.25}
    (record,) = found.loss_fn_outputs
    assert record.num_datums == 3
    values = record.fields["logprobs"]
    flat = np.frombuffer(values.data, np.float32)
    ends = np.frombuffer(values.offsets, np.int64)
    cut = [flat[a // 4 : b // 4].tolist() for a, b in pairwise(ends)]
    assert cut == [one.tolist() for one in rows]


@pytest.mark.parametrize("num_scored", [0, 1, 3])
def test_prompts_have_no_number_where_none_was_asked_for(num_scored: int) -> None:
    logps = torch.arange(num_scored).float() - 5
    reply = wire.sample_reply([Answer(tokens=[3, 1], logprobs=[-1.0, -2.0])], logps, 4)
    found = pb.SampleResponse.FromString(reply)
    values = np.frombuffer(found.prompt_logprobs, np.float32).tolist()
    assert [math.isnan(x) for x in values] == [n < 4 - num_scored for n in range(4)]
    assert values[4 - num_scored :] == logps.tolist()


def test_answers_say_why_they_ended() -> None:
    answers = [
        Answer(tokens=[3, 1], logprobs=[-1.0, -2.0], is_cut=False),
        Answer(tokens=[4, 5], logprobs=[-3.0, -4.0], is_cut=True),
    ]
    found = pb.SampleResponse.FromString(wire.sample_reply(answers, None, 4))
    reasons = [one.stop_reason for one in found.sequences]
    assert reasons == [pb.STOP_REASON_STOP, pb.STOP_REASON_LENGTH]
    assert np.frombuffer(found.sequences[0].tokens, np.int32).tolist() == [3, 1]
    assert np.frombuffer(found.sequences[1].logprobs, np.float32).tolist() == [-3.0, -4.0]
    assert not found.prompt_logprobs


@pytest.mark.parametrize(
    ("last", "labels"),
    [
        (None, [IGNORED, 4, 5, 6]),
        (1, [IGNORED, IGNORED, IGNORED, 6]),
        (3, [IGNORED, 4, 5, 6]),
        (9, [IGNORED, 4, 5, 6]),
    ],
)
def test_the_first_token_of_a_prompt_has_no_score(last: int | None, labels: list[int]) -> None:
    assert wire.prompt_row([3, 4, 5, 6], last=last)["labels"].tolist() == [labels]


# -------------------------------------------------------------------------------------- requests


def test_errors_are_short_and_say_where() -> None:
    key = "x" * 5000
    with pytest.raises(DataError) as error:
        wire.parsed(f'{{"{key}": 1, "model_id": "m"}}'.encode(), types.GetInfoRequest)
    assert len(str(error.value)) < 600
    with pytest.raises(DataError, match=r"model_id: Field required; a GetInfoRequest of tinker"):
        wire.parsed(b"{}", types.GetInfoRequest)


def test_what_a_request_takes_is_counted() -> None:
    request = training("m", 1, [datum([3] * 1000)])
    assert wire.num_bytes(request) > 16_000
    params = types.SamplingParams(max_tokens=1)
    prompt = types.ModelInput.from_ints([3] * 1000)
    asked = types.SampleRequest(prompt=prompt, sampling_params=params)
    assert wire.num_bytes(asked) >= 8000
    assert wire.num_bytes(types.GetInfoRequest(model_id="m")) == 0
