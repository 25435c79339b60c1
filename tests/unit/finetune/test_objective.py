import math
from typing import Any

import pytest
import torch

from finetune.objective import clip, learning_rate, make_optimizer, update


def rates(schedule: Any, *, warmup_steps: int = 0, num_steps: int = 10) -> list[float]:
    return [
        learning_rate(
            step, peak=2.0, schedule=schedule, warmup_steps=warmup_steps, num_steps=num_steps
        )
        for step in range(num_steps)
    ]


def test_the_rate_rises_over_the_warmup_and_then_follows_its_schedule() -> None:
    assert rates("constant", warmup_steps=4)[:5] == [0.5, 1.0, 1.5, 2.0, 2.0]
    assert rates("linear") == pytest.approx([2.0 - 0.2 * step for step in range(10)])
    assert rates("cosine")[5] == pytest.approx(1.0)
    assert rates("cosine")[0] == 2.0


@pytest.mark.parametrize("name", ["adamw", "adamw_8bit"])
def test_a_step_clips_updates_and_clears_the_gradients(name: Any) -> None:
    parameter = torch.nn.Parameter(torch.zeros(64, 128))
    optimizer = make_optimizer([parameter], name=name, lr=0.1, weight_decay=0.0)
    parameter.grad = torch.full_like(parameter, 3.0)
    norm = clip([parameter], 1.0)
    update(optimizer, [parameter], lr=0.01)
    assert float(norm) == pytest.approx(3.0 * math.sqrt(64 * 128))
    assert parameter.grad is None
    assert torch.allclose(parameter, torch.tensor(-0.01), rtol=1e-3)


def test_without_a_limit_nothing_is_clipped() -> None:
    parameter = torch.nn.Parameter(torch.zeros(4))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    parameter.grad = torch.tensor([3.0, 0.0, 4.0, 0.0])
    norm = clip([parameter], None)
    update(optimizer, [parameter], lr=1.0)
    assert float(norm) == 5.0
    assert parameter.tolist() == [-3.0, 0.0, -4.0, 0.0]
