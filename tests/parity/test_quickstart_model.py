"""The model that newcomers train first: streamed equals resident over real steps (grade MOVE)."""

from pathlib import Path

import pytest
import torch

import offload
from finetune.adapter import lora as adapters
from finetune.data.steps import collate
from finetune.data.tokenize import encode
from finetune.model.tokenizer import load_tokenizer
from finetune.recipe.sections import AdapterSection
from finetune.training.optimizer import clip, make_optimizer, update
from tests.checkpoints import loaded
from tests.conversations import read_conversations

QUICKSTART = Path(__file__).parents[2] / "recipes" / "quickstart"
NUM_STEPS, NUM_MICRO_BATCHES, MICRO_BATCH_SIZE = 5, 3, 4


def batches() -> list[dict[str, torch.Tensor]]:
    tokenizer = load_tokenizer(str(QUICKSTART / "model"))
    rows = read_conversations(
        path=str(QUICKSTART / "train.jsonl"),
        data_format="messages",
        system=None,
    )
    size = MICRO_BATCH_SIZE
    assert isinstance(tokenizer.pad_token_id, int)
    return [
        collate(
            [encode(r, tokenizer, seq_len=128, loss_on="assistant") for r in rows[at : at + size]],
            pad_token_id=tokenizer.pad_token_id,
        )
        for at in range(0, NUM_STEPS * NUM_MICRO_BATCHES * size, size)
    ]


def steps(num_slots: int) -> list[tuple[float, dict[str, torch.Tensor]]]:
    base = loaded(QUICKSTART / "model")
    section = AdapterSection(rank=4, alpha=8, targets="attention", experts=True)
    model = adapters.add_lora(base.model, section, seed=0).train()
    trained = adapters.trained(model)
    assert any("experts" in name for name in trained)
    assert any("q_proj" in name for name in trained)
    optimizer = make_optimizer(
        trained, name="adamw", lr=0.01, weight_decay=0.0, loraplus_ratio=None
    )
    engine = offload.attach(model, num_slots=num_slots, device="cpu", backing=base.backing)
    found, data = [], batches()
    for step in range(NUM_STEPS):
        part = data[step * NUM_MICRO_BATCHES : (step + 1) * NUM_MICRO_BATCHES]
        result = engine.forward_backward(part, dropout_seed=step)
        gradients = {n: p.grad.clone() for n, p in trained.items() if p.grad is not None}
        assert gradients.keys() == trained.keys()
        found.append((result.loss, gradients))
        clip(list(trained.values()), 1.0)
        update(optimizer, trained.values(), lr=0.01, loraplus_ratio=None)
    engine.detach()
    return found


@pytest.mark.slow
def test_move_five_steps_streamed_equal_five_steps_resident_to_the_bit() -> None:
    for streamed, resident in zip(steps(num_slots=3), steps(num_slots=6), strict=True):
        assert streamed[0] == resident[0]
        for name, gradient in resident[1].items():
            assert torch.equal(streamed[1][name], gradient)
