"""A step's gradients do not depend on how its sequences are cut into micro-batches."""

import pytest
import torch

from tests.parity.architectures import Gradients, plain, rel_error, streamed
from tests.parity.exactness import adapted
from tests.parity.tiny_models import VOCABULARY, tiny_model
from tests.tiers import mostly_slow

pytestmark = pytest.mark.usefixtures("one_thread")
LENGTHS = (17, 12, 11, 9, 6, 4)


def cut(size: int) -> list[dict[str, torch.Tensor]]:
    """Return six sequences of unequal length and number of labels in micro-batches of `size`."""
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(3, VOCABULARY, (length,), generator=generator) for length in LENGTHS]
    batches = []
    for first in range(0, len(rows), size):
        part = rows[first : first + size]
        batch = {
            name: torch.full((len(part), len(part[0])), fill)
            for name, fill in (("input_ids", 0), ("labels", -100), ("attention_mask", 0))
        }
        for number, row in enumerate(part):
            num_unlabelled = len(row) % 4
            batch["input_ids"][number, : len(row)] = row
            batch["attention_mask"][number, : len(row)] = 1
            batch["labels"][number, num_unlabelled : len(row)] = row[num_unlabelled:]
        batches.append(batch)
    return batches


def step(model: torch.nn.Module, size: int) -> tuple[float, Gradients]:
    return streamed(model, cut(size), num_slots=2)


@pytest.mark.parametrize("model_type", mostly_slow(["llama", "qwen3_moe"], "llama"))
def test_any_cut_of_a_step_gives_its_loss_and_gradients(model_type: str) -> None:
    model = adapted(tiny_model(model_type))
    whole_loss, whole = plain(model, cut(len(LENGTHS)))
    for size in (1, 2, 3, 6):
        loss, ours = step(model, size)
        assert loss == pytest.approx(whole_loss, rel=2e-6)
        assert rel_error(ours, whole) < 2e-6
