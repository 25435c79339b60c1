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
from finetune.training.world.parcel import (
    ParcelError,
    memory_of,
    opened,
    packed,
    sealed,
    unpacked,
)
from offload.engine.host.slab import SlabHandle
from offload.plan.machine.machine import named_machine
from offload.plan.memory.memory import TracedBytes
from offload.probe.energy import Taken


def received(value: Any) -> tuple[Any, int]:
    """Send a value to oneself; return it and the bytes that travel apart."""
    content, tensors = packed(value)
    found, empty = unpacked(content)
    for sent, to_fill in zip(tensors, empty, strict=True):
        memory_of(to_fill).copy_(memory_of(sent))
    return found, sum(map(torch.Tensor.numel, map(memory_of, tensors)))


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
        Taken(window_s=0.5, joules={("GPU", "NVML"): 3.0}, missing={"CPU": "no counter"}),
        TracedBytes(visits=(1, 2), head_chunk=3, recorded=4),
        (named_machine("rtx4090", ram_bytes=2**36), True),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_ranks_send_arrives_as_it_was(value: object) -> None:
    found = opened(sealed(value))
    assert type(found) is type(value)
    np.testing.assert_equal(found, value)


def test_shares_with_their_requests_arrive_as_they_were() -> None:
    subject = subject_of("qwen3-8b", ["train.tokens_per_step=16384"])
    requests = tuple(full_requests(subject.recipe, subject.facts, num_ranks=2))
    shares = Shares(micro_batches=(3, 1), requests=requests, step_s=0.25)
    assert opened(sealed(shares)) == shares


def test_a_recipe_arrives_with_what_was_set_in_it() -> None:
    recipe = load_recipe("quickstart", ["train.lr=1.1e-4", "train.shares=[3,1]"])
    found, is_resume = opened(sealed((recipe, True)))
    assert is_resume
    assert found == recipe
    assert not list(differences(recipe, found))
    assert found.train.model_fields_set == recipe.train.model_fields_set


def test_a_number_that_is_none_arrives() -> None:
    assert str(opened(sealed(float("nan")))) == "nan"


def test_the_text_of_a_large_tensor_is_short() -> None:
    large = torch.zeros(1_000_000)
    content, (sent,) = packed({"large": large})
    assert sent.data_ptr() == large.data_ptr()
    assert len(content) < 1_000


@pytest.mark.parametrize("value", [object(), signal.SIGINT, len, np.int64(3), 1j, Path])
def test_nothing_else_is_sent(value: object) -> None:
    with pytest.raises(TypeError, match="is not sent to other processes"):
        packed([value])


# ------------------------------------------------------------------ from a stranger


class _Code:
    """Ends the process that unpickles it."""

    def __reduce__(self) -> Any:
        return exit, (3,)


def forged(content: object, rest: bytes = b"") -> torch.Tensor:
    """Return bytes as `sealed` lays them out."""
    text = content if isinstance(content, bytes) else json.dumps(content).encode()
    return torch.tensor(list(len(text).to_bytes(8, "big") + text + rest), dtype=torch.uint8)


@pytest.mark.parametrize(
    "parcel",
    [
        torch.empty(0, dtype=torch.uint8),
        torch.full((8,), 255, dtype=torch.uint8),
        torch.full((4096,), 255, dtype=torch.uint8),
        torch.tensor(list(pickle.dumps(_Code())), dtype=torch.uint8),
        forged(pickle.dumps(_Code())),
        forged(b"[" * 1_000_000),
        forged(b"9" * 10_000),
        forged({"os.system": {"command": "true"}}),
        forged({"Popen": {"args": "true"}}),
        forged({"Machine": {"name": "a"}}),
        forged({"Machine": 3}),
        forged({"SlabHandle": {"pid": 1, "__class__": 2}}),
        forged({"Recipe": "{}"}),
        forged({"Recipe": {}}),
        forged({"tuple": 3}),
        forged({"tuple": [1], "set": [2]}),
        forged({"set": [[1]]}),
        forged({"dict": [[1]]}),
        forged({"tensor": ["torch.float32", [2**62]]}),
        forged({"tensor": ["torch.float32", [-1]]}),
        forged({"tensor": ["torch.float32", ["a"]]}),
        forged({"tensor": ["torch.os", [1]]}),
        forged({"tensor": ["torch.float32", [2]]}, b"1234567"),
        forged({"tensor": ["torch.float32", [2]]}, b"123456789"),
        forged(["a text"], b"and more"),
    ],
)
def test_what_no_rank_sends_is_refused(parcel: torch.Tensor) -> None:
    with pytest.raises(ParcelError):
        opened(parcel)
