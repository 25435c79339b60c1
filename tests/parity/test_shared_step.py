"""A step computed in shares, as several processes do, against the step in one (REORDER)."""

import copy

import pytest
import torch

import offload
from finetune.training.ranks import micro_batches_by_shares
from tests.parity.steps import NUM_LAYERS, gradients, micro_batches, streamed, tiny


def in_shares(*shares: int, keeps_ids: bool) -> tuple[float, dict[str, torch.Tensor]]:
    """Run each rank's share on an engine of its own; return the sums."""
    batches = micro_batches()
    num_label_tokens = sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in batches)
    losses, found = [], []
    for index in range(len(shares)):
        model = copy.deepcopy(tiny("llama", dropout=0.3))
        own = micro_batches_by_shares(len(batches), index=index, shares=shares)
        engine = offload.attach(model, num_slots=2, device="cpu", head_chunk_tokens=7)
        try:
            result = engine.forward_backward(
                [batches[i] for i in own],
                dropout_seed=5,
                num_label_tokens=num_label_tokens,
                micro_batch_ids=own if keeps_ids else None,
            )
            losses.append(result.loss)
            found.append(gradients(model))
        finally:
            engine.detach()
    return sum(losses), {name: first + found[1][name] for name, first in found[0].items()}


@pytest.mark.thorough
@pytest.mark.parametrize("shares", [(1, 1), (1, 2)])
def test_reorder_the_shares_of_a_step_add_up_to_the_step_with_its_dropout(
    shares: tuple[int, int],
) -> None:
    whole_loss, whole = streamed(tiny("llama", dropout=0.3), num_slots=NUM_LAYERS, seed=5)
    loss, shared = in_shares(*shares, keeps_ids=True)
    assert abs(loss - whole_loss) <= 1e-6 * whole_loss
    for name, gradient in whole.items():
        assert torch.allclose(shared[name], gradient, rtol=1e-5, atol=1e-7), name


def test_shares_that_number_their_micro_batches_anew_drop_out_other_features() -> None:
    whole_loss, _ = streamed(tiny("llama", dropout=0.3), num_slots=NUM_LAYERS, seed=5)
    loss, _ = in_shares(1, 1, keeps_ids=False)
    assert abs(loss - whole_loss) > 1e-3 * whole_loss
