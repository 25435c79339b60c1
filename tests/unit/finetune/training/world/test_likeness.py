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
    ("every", "shown"),
    [
        ([{"a": "1", "b": "2"}, {"a": "1", "b": "2"}], None),
        ([{"a": "1"}, {"b": "2"}, {"a": "1", "b": "2"}], None),
        ([{"a": "1", "b": "2"}, {"a": "1", "b": "3"}], "rank 1 are not those on rank 0"),
        ([{"a": "1"}, {"a": "2"}, {"a": "1"}, {"a": "2"}], "rank 1, 3 are not those on rank 0"),
        ([{"a": "1"}, {"b": "2"}, {"b": "3"}], "rank 2 are not those on rank 1"),
        ([{}, {}], None),
    ],
)
def test_ranks_that_have_the_same_name_must_have_the_same_digest(every, shown) -> None:
    found = difference("the weights", every)
    assert (found and found.what) == (shown and f"the weights on {shown}")
