import pytest
import torch

from finetune.training.world.blocks import block_elements, parts_of


@pytest.mark.parametrize(
    ("num_elements", "dtype", "expected_bytes"),
    [
        (1, torch.float32, 64 * 1024),  # no smaller
        (400_000, torch.float32, 100_000),  # a sixteenth
        (800_000, torch.bfloat16, 100_000),
        (100_000_000, torch.float32, 512 * 1024),  # no larger
    ],
)
def test_a_share_is_cut_into_many_blocks_unless_they_were_tiny(
    num_elements: int, dtype: torch.dtype, expected_bytes: int
) -> None:
    assert block_elements(num_elements, dtype) * dtype.itemsize == expected_bytes


def test_parts_hold_all_gradients_in_order_and_none_is_too_large() -> None:
    gradients = [torch.arange(0, 7), torch.arange(7, 9).view(1, 2), torch.arange(9, 20)]
    parts = list(parts_of(gradients, max_elements=5))
    assert all(sum(map(len, part)) <= 5 for part in parts)
    assert torch.equal(torch.cat([piece for part in parts for piece in part]), torch.arange(20))
