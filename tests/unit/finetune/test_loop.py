from typing import Any

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

import offload
from finetune import adapters
from finetune.batches import StepShare
from finetune.loop import Loop
from finetune.ranks import Ranks
from finetune.recipe_sections import TrainSection

CONFIG = Qwen3Config.from_dict(
    {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "vocab_size": 32,
    }
)


def make_loop(*, optimizer: Any = "adamw") -> tuple[Loop, dict[str, torch.nn.Parameter]]:
    torch.manual_seed(0)
    model = adapters.add_lora(
        Qwen3ForCausalLM(CONFIG),
        rank=2,
        alpha=4,
        dropout=0.2,
        targets="all-linear",
        has_experts=False,
        seed=0,
    ).train()
    trained = adapters.trained(model)
    for name, parameter in trained.items():
        if "lora_B" in name:  # zero at the start, so that dropout would change nothing
            torch.nn.init.constant_(parameter, 0.1)
    train = TrainSection(grad_accum_steps=2, steps=4, lr=0.1, weight_decay=0.1, optimizer=optimizer)
    engine = offload.attach(model, num_slots=2, device="cpu")
    loop = Loop(
        model=model,
        engine=engine,
        parameters=list(trained.values()),
        train=train,
        num_steps=4,
        ranks=Ranks(),
    )
    return loop, trained


def batches(width: int) -> StepShare:
    ids = torch.randint(0, 32, (2, 2, width), generator=torch.Generator().manual_seed(width))
    return StepShare(
        micro_batches=tuple(
            {"input_ids": rows, "labels": rows, "attention_mask": torch.ones_like(rows)}
            for rows in ids
        ),
        micro_batch_ids=(0, 1),
        num_tokens=4 * width,
        num_label_tokens=4 * (width - 1),
    )


def test_a_rehearsal_leaves_no_trace() -> None:
    with_rehearsal, parameters = make_loop()
    before = {name: p.detach().clone() for name, p in parameters.items()}
    with_rehearsal.rehearse(batches(20), batches(8))
    assert all(torch.equal(p, before[name]) for name, p in parameters.items())
    assert all(p.grad is None for p in parameters.values())
    assert not with_rehearsal.optimizer.state
    without, others = make_loop()
    for number in range(2):
        assert with_rehearsal.step(number, batches(8)).loss == without.step(number, batches(8)).loss
    assert all(torch.equal(p, others[name]) for name, p in parameters.items())


def test_a_step_depends_on_its_number_and_not_on_the_state_of_random() -> None:
    first, _ = make_loop()
    again, _ = make_loop()
    loss = first.step(0, batches(8)).loss
    torch.manual_seed(99)
    assert again.step(0, batches(8)).loss == loss
    other, _ = make_loop()
    assert other.step(1, batches(8)).loss != loss  # another dropout mask
