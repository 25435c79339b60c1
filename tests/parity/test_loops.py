"""The engine in other people's loops: plain PyTorch, and accelerate."""

import copy
from typing import Any

import torch
from accelerate import Accelerator

import offload
from tests.parity.steps import micro_batches, tiny

NUM_STEPS = 3


def weights_after(prepare: Any) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Train for some steps with an optimizer and a schedule of the learning rate."""
    model = copy.deepcopy(tiny("qwen3"))
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=0.01)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=NUM_STEPS)
    engine = offload.attach(model, num_slots=2, device="cpu")
    optimizer, scheduler = prepare(optimizer, scheduler)
    losses = []
    for step in range(NUM_STEPS):
        losses.append(engine.forward_backward(micro_batches(), dropout_seed=step).loss)
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    engine.detach()
    return losses, {n: p.detach().clone() for n, p in model.named_parameters() if p.requires_grad}


def test_a_loop_with_accelerate_trains_like_a_plain_loop_to_the_bit() -> None:
    plain_losses, plain = weights_after(lambda *parts: parts)
    losses, found = weights_after(Accelerator(cpu=True).prepare)
    assert losses == plain_losses
    assert losses[-1] < losses[0]
    assert all(torch.equal(found[name], plain[name]) for name in plain)


def test_a_step_runs_under_the_callers_autocast() -> None:
    """Visits run on the caller's thread, whose settings a lane's own thread would not have."""
    model = tiny("qwen3")
    engine = offload.attach(model, num_slots=2, device="cpu")
    batch = {k: v for k, v in micro_batches()[0].items() if k != "labels"}
    plain = engine.forward(batch).logits
    with torch.autocast("cpu", torch.bfloat16):
        cast = engine.forward(batch).logits
    engine.detach()
    assert plain is not None
    assert cast is not None
    assert not torch.equal(plain, cast.float())
    assert torch.allclose(plain, cast.float(), atol=0.05)
