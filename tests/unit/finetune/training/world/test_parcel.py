import pickle
from typing import Any

import torch
from torch import nn

from finetune.training.world.parcel import memory_of, packed, unpacked


def received(value: Any) -> tuple[Any, int]:
    """Send a value to oneself; return it and the bytes that travel apart."""
    content, tensors = packed(value)
    found, empty = unpacked(content)
    assert len(tensors) == len(empty)
    for sent, to_fill in zip(tensors, empty, strict=True):
        memory_of(to_fill).copy_(memory_of(sent))
    return found, sum(map(torch.Tensor.numel, map(memory_of, tensors)))


def test_a_checkpoint_s_tensors_travel_apart_and_arrive_as_they_are() -> None:
    moments = torch.randn(3, 5)
    value = {
        "step": 7,
        "states": [{"exp_avg": moments, "step": torch.tensor(3.0)}, ("again", moments)],
        "weights": {"w": torch.randn(4, 2).bfloat16(), "mask": torch.tensor([True, False])},
    }
    found, num_bytes = received(value)
    assert num_bytes == 60 + 4 + 16 + 2
    assert found["step"] == 7
    assert torch.equal(found["states"][0]["exp_avg"], moments)
    assert found["states"][1][1] is found["states"][0]["exp_avg"]
    assert found["states"][0]["step"] == 3.0
    assert found["states"][0]["step"].shape == ()
    assert found["weights"]["w"].dtype is torch.bfloat16
    assert torch.equal(found["weights"]["w"], value["weights"]["w"])  # type: ignore[index]
    assert found["weights"]["mask"].tolist() == [True, False]


def test_tensors_that_are_not_alone_in_plain_memory_are_pickled_as_ever() -> None:
    table = torch.arange(12.0).view(3, 4)
    value = [table[1], table.t(), torch.empty(0, 3), nn.Parameter(torch.ones(2))]
    found, num_bytes = received(value)
    assert num_bytes == 8, "of what a parameter holds"
    for one, before in zip(found, value, strict=True):
        assert torch.equal(one, before)
        assert type(one) is type(before)
        assert one.requires_grad == before.requires_grad


def test_what_is_pickled_has_no_values_of_tensors() -> None:
    large = torch.zeros(1_000_000)
    content, (sent,) = packed({"large": large})
    assert sent is large
    assert len(content) < 1_000 < len(pickle.dumps(large))
