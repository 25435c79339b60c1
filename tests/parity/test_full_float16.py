"""Full training in float16 against plain PyTorch with fp32 masters and a scaled loss, and float64.

Weights are rounded to bfloat16 first where its errors are compared, so that both types have them.
"""

from typing import Any

import pytest
import torch
from torch import nn

import offload
from finetune.run.checkpoint import LossScale
from offload.engine.passes.part import RunStep
from tests.parity.full_training import (
    LR,
    MAX_NORM,
    loop_of,
    model_of,
    num_labels,
    share_of,
    step_of,
    wider_model,
)

pytestmark = pytest.mark.usefixtures("one_thread")
NUM_TOKENS = 100_000  # of a large step, of which this is a part: its gradients are small
TOO_LARGE = 2.0**24


def plain_losses(model: Any, num_steps: int) -> tuple[list[float], int]:
    """Train by plain PyTorch; return the losses and how many steps were skipped."""
    masters = {name: nn.Parameter(p.detach().float()) for name, p in model.named_parameters()}
    optimizer = torch.optim.AdamW(masters.values(), lr=LR, weight_decay=0.0, fused=True)
    model.half()
    scale, losses, num_skipped = TOO_LARGE, [], 0
    for number in range(num_steps):
        batches = step_of(number)
        total, loss = num_labels(batches), 0.0
        for batch in batches:
            logits = model(input_ids=batch["input_ids"], use_cache=False).logits[:, :-1].float()
            summed = nn.functional.cross_entropy(
                logits.flatten(0, 1), batch["labels"][:, 1:].flatten(), reduction="sum"
            )
            (scale * summed / total).backward()
            loss += summed.item() / total
            for name, parameter in model.named_parameters():
                if batch is batches[-1] or ".layers." not in name:  # those of layers in float16
                    before, now = masters[name].grad, parameter.grad.float() / scale
                    masters[name].grad = now if before is None else before + now
                    parameter.grad = None
        losses.append(loss)
        gradients = [master.grad for master in masters.values() if master.grad is not None]
        if all(bool(gradient.isfinite().all()) for gradient in gradients):
            nn.utils.clip_grad_norm_(masters.values(), MAX_NORM)
            optimizer.step()
            with torch.no_grad():
                for name, parameter in model.named_parameters():
                    parameter.copy_(masters[name])
        else:
            scale, num_skipped = scale / 2, num_skipped + 1
        optimizer.zero_grad()
    return losses, num_skipped


@pytest.mark.thorough
def test_reorder_losses_and_skipped_steps_are_those_of_plain_pytorch() -> None:
    num_steps = 30
    wanted, num_skipped = plain_losses(wider_model().half().float(), num_steps)
    loop = loop_of(wider_model().half())
    loop.scaling = LossScale(factor=TOO_LARGE)
    records = [loop.step(number, share_of(step_of(number))) for number in range(num_steps)]
    assert [record.is_skipped for record in records].count(True) == num_skipped > 0
    assert [record.loss for record in records] == pytest.approx(wanted, rel=1e-3)
    assert wanted[-1] < 0.5 * wanted[0]


def gradients(name: str, dtype: torch.dtype, scale: float) -> dict[str, torch.Tensor]:
    """Return a step's gradients of all weights: by the engine, or in float64 by plain autograd."""
    base: Any = model_of(name)
    base.set_experts_implementation("eager")  # grouped products have no float64
    with torch.no_grad():
        for parameter in base.parameters():
            parameter.copy_(parameter.bfloat16())
    base = base.to(dtype)
    if dtype is torch.float64:
        for batch in step_of(0):
            logits = base(input_ids=batch["input_ids"]).logits[:, :-1]
            nn.functional.cross_entropy(
                logits.flatten(0, 1), batch["labels"][:, 1:].flatten(), reduction="sum"
            ).div(NUM_TOKENS).backward()
        return {n: p.grad for n, p in base.named_parameters() if p.grad is not None}
    engine = offload.attach(base, num_slots=2, device="cpu", trained_weights="host")
    step = RunStep(micro_batches=step_of(0), num_label_tokens=NUM_TOKENS, loss_scale=scale)
    engine.forward_backward_runs([step])
    found = {
        n: p.grad.double() / scale
        for n, p in engine.trained_parameters.items()
        if p.grad is not None
    }
    engine.close()
    return found


def error(ours: dict[str, torch.Tensor], truth: dict[str, torch.Tensor]) -> float:
    assert ours.keys() == truth.keys()
    squares = [((ours[name] - true).norm() ** 2, true.norm() ** 2) for name, true in truth.items()]
    return float(sum(e for e, _ in squares) / sum(t for _, t in squares)) ** 0.5


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["llama", "qwen3", "qwen3_moe"])
def test_gradients_of_all_weights_are_closer_than_those_in_bfloat16(name: str) -> None:
    truth = gradients(name, torch.float64, 1.0)
    of = {
        "float16": error(gradients(name, torch.float16, 2.0**16), truth),
        "float16, not scaled": error(gradients(name, torch.float16, 1.0), truth),
        "bfloat16": error(gradients(name, torch.bfloat16, 1.0), truth),
    }
    assert of["float16"] <= 0.3 * of["bfloat16"], of
    assert of["float16, not scaled"] > 2 * of["float16"], of
