import json
import pickle
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from finetune.planning.candidates import full_requests
from finetune.planning.parallel import Shares
from finetune.planning.subject import subject_of
from finetune.recipe.load import load_recipe
from finetune.recipe.recipe import differences
from finetune.run.run_files import Evaluations
from finetune.training.messages import read, written
from offload.engine.host.slab import SlabHandle
from offload.plan.machine.machine import named_machine
from offload.plan.memory.memory import TracedBytes


def received(value: Any) -> tuple[Any, int]:
    """Send a value to oneself; return it and the bytes that travel apart."""
    tensors: list[torch.Tensor] = []
    empty: list[torch.Tensor] = []
    content = json.dumps(written(value, tensors))
    found = read(json.loads(content), empty)
    for sent, to_fill in zip(tensors, empty, strict=True):
        to_fill.view(-1).view(torch.uint8).copy_(sent.view(-1).view(torch.uint8))
    return found, sum(one.nbytes for one in tensors)


def test_a_checkpoint_s_tensors_travel_apart_and_arrive_as_they_are() -> None:
    value: dict[str, Any] = {
        "step": 7,
        "states": {0: {"exp_avg": torch.randn(3, 5), "step": torch.tensor(3.0)}},
        "weights": {"w": torch.randn(4, 2).bfloat16(), "mask": torch.tensor([True, False])},
    }
    found, num_bytes = received(value)
    assert num_bytes == 60 + 4 + 16 + 2
    assert found["step"] == 7
    for one, before in zip(
        (*found["states"][0].values(), *found["weights"].values()),
        (*value["states"][0].values(), *value["weights"].values()),
        strict=True,
    ):
        assert one.dtype is before.dtype
        assert one.shape == before.shape
        assert torch.equal(one, before)


def test_tensors_of_any_layout_arrive_with_their_values() -> None:
    table = torch.arange(12.0).view(3, 4)
    none, few = torch.from_numpy(np.empty(0)), torch.tensor(3.0).expand(1)
    assert none.stride() == few.stride() == (0,), "which is contiguous"
    value = [table[1], table.t(), torch.empty(0, 3), nn.Parameter(torch.ones(2)), none, few]
    found, num_bytes = received(value)
    assert num_bytes == 16 + 48 + 8 + 4, "and not that of which they are a part"
    for one, before in zip(found, value, strict=True):
        assert torch.equal(one, before)


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        [1, -(2**70), 0.1, 5e-324, float("inf"), "a text\u2028\U0001f600\udc80"],
        (),
        ((1, (2,)), {"a": (1,), 3: [None]}, {(1, "b"): 2}),
        {1, 2},
        frozenset({"x"}),
        Path("runs/one"),
        (
            np.arange(3),
            np.zeros((), dtype=np.float64),
            np.array([True]),
            torch.where(torch.zeros(3) > 1)[0].numpy(),
        ),
        Evaluations(patience=2, min_delta=0.5),
        SlabHandle(pid=3, descriptor=4, num_bytes=5, layout="of it"),
        (0.5, {("GPU", "NVML"): 3.0}, {"CPU": "no counter"}),
        TracedBytes(visits=(1, 2), head_chunk=3, recorded=4),
        (named_machine("rtx4090", ram_bytes=2**36), True),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_ranks_send_arrives_as_it_was(value: object) -> None:
    found = received(value)[0]
    assert type(found) is type(value)
    np.testing.assert_equal(found, value)


def test_shares_with_their_requests_arrive_as_they_were() -> None:
    subject = subject_of("qwen3-8b", ["train.tokens_per_step=16384"])
    requests = tuple(full_requests(subject.recipe, subject.facts, num_ranks=2))
    shares = Shares(micro_batches=(3, 1), requests=requests, step_s=0.25)
    assert received(shares)[0] == shares


def test_a_recipe_arrives_with_what_was_set_in_it() -> None:
    recipe = load_recipe("quickstart", ["train.lr=1.1e-4", "train.shares=[3,1]"])
    found, is_resume = received((recipe, True))[0]
    assert is_resume
    assert found == recipe
    assert not list(differences(recipe, found))
    assert found.train.model_fields_set == recipe.train.model_fields_set


def test_a_number_that_is_none_arrives() -> None:
    assert str(received(float("nan"))[0]) == "nan"


def test_the_text_of_a_large_tensor_is_short() -> None:
    large = torch.zeros(1_000_000)
    tensors: list[torch.Tensor] = []
    content = written({"large": large}, tensors)
    assert [one.data_ptr() for one in tensors] == [large.data_ptr()]
    assert len(json.dumps(content)) < 1_000


@pytest.mark.parametrize("value", [object(), signal.SIGINT, len, np.int64(3), 1j, Path])
def test_nothing_else_is_sent(value: object) -> None:
    with pytest.raises(TypeError, match="is not sent to other processes"):
        written([value], [])


# ------------------------------------------------------------------ from a stranger


class _Code:
    """Ends the process that unpickles it."""

    def __reduce__(self) -> Any:
        return exit, (3,)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff" * 4096,
        pickle.dumps(_Code()),
        b"[" * 1_000_000,
        b"9" * 10_000,
        b'{"os.system": "true"}',
        b'["os.system", "true"]',
        b'["Popen", {"args": "true"}]',
        b'["Machine", {"name": "a"}]',
        b'["Machine", 3]',
        b'["SlabHandle", {"pid": 1, "__class__": 2}]',
        b'["Recipe", {}]',
        b'["tuple", 3]',
        b'["tuple", [1], "set", [2]]',
        b'["set", [["list", [1]]]]',
        b'["dict", [1]]',
        b'["Tensor", ["float32", [-1]]]',
        b'["Tensor", ["float32", ["a"]]]',
        b'["Tensor", ["os", [1]]]',
        b'["Tensor", ["load", [1]]]',
        b'["ndarray", 3]',
    ],
)
def test_what_no_rank_sends_makes_no_value(content: bytes) -> None:
    failures = (ValueError, TypeError, LookupError, AttributeError, RuntimeError)
    with pytest.raises(failures):
        read(json.loads(content), [])
