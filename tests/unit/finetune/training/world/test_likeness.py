import hashlib

import pytest
import torch

from finetune.training.world.likeness import difference, digests_of


def test_a_digest_is_that_of_the_tensor_s_bytes_as_they_lie() -> None:
    table = torch.arange(6, dtype=torch.float32).view(2, 3)
    found = digests_of({"table": table, "turned": table.t(), "scalar": torch.tensor(1.0)})
    values = [[0, 1, 2, 3, 4, 5], [0, 3, 1, 4, 2, 5], [1]]
    for name, numbers in zip(("table", "turned", "scalar"), values, strict=True):
        content = b"".join(torch.tensor(float(n)).numpy().tobytes() for n in numbers)
        assert found[name] == hashlib.sha256(content).hexdigest()


@pytest.mark.parametrize(
    ("every", "nodes", "shown"),
    [
        ([{"a": "1", "b": "2"}, {"a": "1", "b": "2"}], (0, 0), None),
        ([{"a": "1"}, {"b": "2"}, {"a": "1", "b": "2"}], (0, 0, 1), None),
        ([{"a": "1"}, {"b": "2"}, {"b": "2"}, {"a": "1"}], (0, 0, 1, 1), None),
        ([{"a": "1"}, {}, {"a": "1"}], (0, 0, 1), None),  # more ranks than weights
        ([{}, {}], (0, 0), None),
        ([{"a": "1", "b": "2"}, {"a": "1", "b": "3"}], (0, 1), "1 are not those on rank 0"),
        (
            [{"a": "1"}, {"a": "2"}, {"a": "1"}, {"a": "2"}],
            (0, 0, 1, 1),
            "1, 3 are not those on rank 0",
        ),
        ([{"a": "1"}, {"b": "2"}, {"a": "1", "b": "3"}], (0, 0, 1), "2 are not those on rank 1"),
        ([{"a": "1", "b": "2"}, {"a": "1"}], (0, 0), "1 lack b, which rank 0 has"),
        ([{"a": "1"}, {"a": "1", "b": "2"}], (0, 1), "0 lack b, which rank 1 has"),
        ([{"a": "1"}, {"b": "2"}, {"a": "1"}], (0, 0, 1), "2 lack b, which rank 1 has"),
        ([{"a": "1"}, {}], (0, 1), "1 lack a, which rank 0 has"),
    ],
)
def test_ranks_must_have_the_same_names_and_digests_and_machines_each_of_them(
    every, nodes, shown
) -> None:
    found = difference("the weights", every, nodes=nodes)
    assert (found and found.what) == (shown and f"the weights on rank {shown}")
