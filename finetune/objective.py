"""What is minimised and by which steps: learning rate, optimizer, clipping."""

import math
from collections.abc import Sequence
from typing import Literal

import torch
from torch import nn

Schedule = Literal["cosine", "linear", "constant"]


def learning_rate(
    step: int, *, peak: float, schedule: Schedule, warmup_steps: int, num_steps: int
) -> float:
    """Return the learning rate of a step, counted from 0; pure, so a resume needs no state.

    It rises linearly over the first `warmup_steps`, reaches `peak`, and falls to 0 behind the
    last step.
    """
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    if schedule == "constant":
        return peak
    progress = (step - warmup_steps) / max(1, num_steps - warmup_steps)
    if schedule == "linear":
        return peak * (1 - progress)
    return peak * 0.5 * (1 + math.cos(math.pi * progress))


def make_optimizer(
    parameters: Sequence[nn.Parameter],
    *,
    name: Literal["adamw", "adamw_8bit"],
    lr: float,
    weight_decay: float,
) -> torch.optim.Optimizer:
    """Return AdamW over the trained tensors.

    `adamw_8bit` is bitsandbytes' blockwise 8-bit AdamW: 2 bytes of state per weight in place of
    8, but for tensors of fewer than 4,096 elements, whose state stays in 32 bits.
    """
    if name == "adamw":
        return torch.optim.AdamW(parameters, lr=lr, weight_decay=weight_decay)
    from bitsandbytes.optim.adamw import AdamW8bit

    optimizer: torch.optim.Optimizer = AdamW8bit(parameters, lr=lr, weight_decay=weight_decay)
    return optimizer


def clip(parameters: Sequence[nn.Parameter], max_norm: float | None) -> torch.Tensor:
    """Scale all gradients to a joint norm of at most `max_norm`; return the norm before."""
    return nn.utils.clip_grad_norm_(parameters, math.inf if max_norm is None else max_norm)


def update(
    optimizer: torch.optim.Optimizer, parameters: Sequence[nn.Parameter], *, lr: float
) -> None:
    """Update the parameters at this learning rate, and clear their gradients."""
    for group in optimizer.param_groups:
        group["lr"] = lr
    optimizer.step()
    for parameter in parameters:
        parameter.grad = None
