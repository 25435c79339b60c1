import torch
from torch import nn

from finetune.objective.features import Features, PassThrough


def test_features_are_read_by_row_in_any_order() -> None:
    table = Features(num_rows=4, max_features=9, dtype=torch.float32)
    table.add((2, 0), [1, 3], torch.tensor([[20.0], [0.0], [1.0], [2.0]]))
    table.add((3, 1), [2, 1], torch.tensor([[30.0], [31.0], [10.0]]))
    values, rows = table.of((3, 0, 2))
    assert values.flatten().tolist() == [30, 31, 0, 1, 2, 20]
    assert rows.tolist() == [0, 0, 1, 1, 1, 2]
    assert table.num == 7
    assert table.num_bytes == 7 * 4


def test_a_head_returns_what_it_reads_only_meanwhile() -> None:
    head, values = nn.Linear(3, 2), torch.ones(4, 3)
    hook = PassThrough(head)
    with hook.on():
        assert head(values) is values
    assert head(values).shape == (4, 2)
