import math
from collections import OrderedDict
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from peft.optimizers import create_loraplus_optimizer
from torch import nn
from transformers import Trainer, TrainingArguments, get_scheduler

from finetune.adapter import lora as adapters
from finetune.recipe.sections import TrainSection
from finetune.training.optimizer import (
    MasterWeights,
    clip,
    is_b_matrix,
    learning_rate,
    make_optimizer,
    rates_since,
    update,
)


def train_section(**settings: Any) -> TrainSection:
    return TrainSection(grad_accum_steps=1, **settings)


@pytest.mark.parametrize("num_steps", [1, 10, 97])
@pytest.mark.parametrize(
    ("settings", "their_name", "their_warmup", "their_kwargs"),
    [
        ({"schedule": "constant", "warmup_steps": 4}, "constant_with_warmup", 4, {}),
        ({"schedule": "constant"}, "constant", 0, {}),
        ({"schedule": "linear", "warmup_ratio": 0.03}, "linear", 0.03, {}),
        ({"schedule": "linear"}, "linear", 0, {}),
        ({"schedule": "cosine", "warmup_steps": 3}, "cosine", 3, {}),
        ({"schedule": "cosine", "warmup_ratio": 0.25}, "cosine", 0.25, {}),
        (
            {"schedule": "cosine_with_restarts", "num_cycles": 3, "warmup_ratio": 0.1},
            "cosine_with_restarts",
            0.1,
            {"num_cycles": 3},
        ),
    ],
)
def test_the_rates_are_those_of_transformers_to_the_bit(
    settings: Any, their_name: str, their_warmup: float, their_kwargs: Any, num_steps: int
) -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.7e-4)
    args = TrainingArguments(output_dir="unused", warmup_steps=their_warmup, use_cpu=True)
    num_warmup_steps = args.get_warmup_steps(num_steps)
    if num_steps == 1 and "warmup_ratio" in settings:
        num_warmup_steps = 0  # theirs is 1, a run that trains nothing
    schedule = get_scheduler(
        their_name,
        optimizer,
        num_warmup_steps=num_warmup_steps,
        num_training_steps=num_steps,
        scheduler_specific_kwargs=their_kwargs,
    )
    theirs = []
    for _ in range(num_steps):
        theirs.append(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()
    train = train_section(lr=1.7e-4, steps=num_steps, **settings)
    ours = [learning_rate(step, train, num_steps=num_steps) for step in range(num_steps)]
    assert ours == theirs


@pytest.mark.parametrize(
    ("settings", "first_step", "said"),
    [
        (
            {"schedule": "cosine"},
            6,
            "train.steps: 8 -> 12; with 12 steps the learning rate differs from step 2 on: steps 2"
            " to 6 were run at that of 8 steps",
        ),
        (
            {"schedule": "linear", "warmup_steps": 5},
            3,
            "train.steps: 8 -> 12; with 12 steps the learning rate differs from step 7 on",
        ),
        (
            {"schedule": "linear", "warmup_ratio": 0.5},
            1,
            "train.steps: 8 -> 12; with 12 steps the learning rate differs from step 2 on",
        ),
        (
            {"schedule": "constant", "warmup_steps": 5},
            8,
            "train.steps: 8 -> 12; the learning rate of the first 8 steps is the same",
        ),
    ],
)
def test_a_run_that_is_made_longer_says_where_its_rate_differs(
    settings: Any, first_step: int, said: str
) -> None:
    before, after = (train_section(steps=steps, **settings) for steps in (8, 12))
    assert rates_since(before, after, first_step=first_step) == said


@pytest.mark.parametrize("name", ["adamw", "adamw_8bit", "adafactor", "lion"])
def test_a_step_clips_updates_and_clears_the_gradients(name: Any) -> None:
    parameter = torch.nn.Parameter(torch.zeros(64, 128))
    optimizer = make_optimizer(
        {"w": parameter}, name=name, lr=0.1, weight_decay=0.0, loraplus_ratio=None
    )
    parameter.grad = torch.full_like(parameter, 3.0)
    norm = clip([parameter], 1.0)
    update(optimizer, [parameter], lr=0.01, loraplus_ratio=None)
    assert float(norm) == pytest.approx(3.0 * math.sqrt(64 * 128))
    assert parameter.grad is None
    assert torch.allclose(parameter, torch.tensor(-0.01), rtol=1e-3)


@pytest.mark.parametrize("max_norm", [0.5, 1e3, None])
def test_move_clipping_divides_by_the_scale_of_the_loss(max_norm: float | None) -> None:
    scaled, plain = ([nn.Parameter(torch.zeros(5)) for _ in range(3)] for _ in range(2))
    generator = torch.Generator().manual_seed(0)
    for one, other in zip(scaled, plain, strict=True):
        other.grad = torch.randn(5, generator=generator)
        one.grad = other.grad * 2.0**16
    assert clip(scaled, max_norm, loss_scale=2.0**16) == clip(plain, max_norm)
    for one, other in zip(scaled, plain, strict=True):
        assert one.grad is not None
        assert other.grad is not None
        assert torch.equal(one.grad, other.grad)


def test_without_a_limit_nothing_is_clipped() -> None:
    parameter = torch.nn.Parameter(torch.zeros(4))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    parameter.grad = torch.tensor([3.0, 0.0, 4.0, 0.0])
    norm = clip([parameter], None)
    update(optimizer, [parameter], lr=1.0, loraplus_ratio=None)
    assert float(norm) == 5.0
    assert parameter.tolist() == [-3.0, 0.0, -4.0, 0.0]


@pytest.mark.parametrize("name", ["adamw", "adamw_8bit", "adafactor", "lion", "sgd"])
@pytest.mark.parametrize("loraplus_ratio", [None, 16.0])
def test_norms_biases_and_magnitudes_do_not_decay(name: Any, loraplus_ratio: float | None) -> None:
    trained = adapters.trained(lora_layer())
    with torch.no_grad():
        for parameter in trained.values():
            parameter.fill_(1.0)
    optimizer = make_optimizer(
        trained, name=name, lr=0.1, weight_decay=0.5, loraplus_ratio=loraplus_ratio
    )
    for parameter in trained.values():
        parameter.grad = torch.zeros_like(parameter)
    update(optimizer, trained.values(), lr=0.1, loraplus_ratio=loraplus_ratio)
    for key, parameter in trained.items():
        is_whole = "lora_A" not in key and "lora_B" not in key
        factor = 1.0 if is_whole else 1.0 - 0.5 * 0.1 * (loraplus_ratio or 1) ** ("lora_B" in key)
        assert torch.allclose(parameter, torch.tensor(factor), rtol=1e-5), key
    whole = [key for key in trained if "lora_A" not in key and "lora_B" not in key]
    assert len(whole) == 3, "a norm's weight and bias, and a magnitude"


def test_what_decays_is_what_transformers_decays() -> None:
    model = lora_layer()
    own = make_optimizer(
        adapters.trained(model), name="adamw", lr=0.1, weight_decay=0.5, loraplus_ratio=None
    )
    decayed = {
        id(p) for group in own.param_groups if group["weight_decay"] for p in group["params"]
    }
    trainer = Trainer.get_decay_parameter_names(None, model)  # type: ignore[arg-type]  # unused
    wanted = {
        id(p) for n, p in adapters.trained(model).items() if n in trainer and "magnitude" not in n
    }
    assert decayed == wanted


# ------------------------------------------------------------------------------------------ LoRA+


def lora_layer() -> Any:
    """Return a linear layer with DoRA beside a norm that trains whole."""
    base = nn.Sequential(OrderedDict(linear=nn.Linear(64, 128), norm=nn.LayerNorm(128)))
    config = LoraConfig(r=64, target_modules=["linear"], modules_to_save=["norm"], use_dora=True)
    torch.manual_seed(0)
    return get_peft_model(base, config)


@pytest.mark.parametrize("name", ["adamw", "adamw_8bit", "adafactor", "lion", "sgd"])
def test_b_learns_at_its_multiple_of_the_rate_and_all_else_at_the_rate(name: Any) -> None:
    trained = adapters.trained(lora_layer())
    before = {key: p.detach().clone() for key, p in trained.items()}
    optimizer = make_optimizer(trained, name=name, lr=0.1, weight_decay=0.0, loraplus_ratio=16.0)
    for parameter in trained.values():
        parameter.grad = torch.ones_like(parameter)
    update(optimizer, trained.values(), lr=0.001, loraplus_ratio=16.0)
    moved = {key: float((before[key] - p.detach()).mean()) for key, p in trained.items()}
    assert sum(is_b_matrix(key) for key in moved) == 1
    for key, distance in moved.items():  # the first step of Adam is as long as its rate
        assert distance == pytest.approx(0.016 if is_b_matrix(key) else 0.001, rel=1e-2), key


def test_matrices_are_grouped_as_peft_groups_them() -> None:
    model = lora_layer()
    theirs = create_loraplus_optimizer(model, torch.optim.AdamW, lr=0.1, loraplus_lr_ratio=16.0)
    ours = make_optimizer(
        adapters.trained(model), name="adamw", lr=0.1, weight_decay=0.0, loraplus_ratio=16.0
    )
    update(ours, [], lr=0.1, loraplus_ratio=16.0)
    rates = [
        {id(p): g["lr"] for g in optimizer.param_groups for p in g["params"] if p.dim() == 2}
        for optimizer in (ours, theirs)
    ]
    assert rates[0] == rates[1]
    assert sorted(rates[0].values()) == [0.1, 1.6]


def test_without_loraplus_there_is_one_group_at_the_rate() -> None:
    optimizer = make_optimizer(
        adapters.trained(lora_layer()),
        name="adamw",
        lr=0.1,
        weight_decay=0.0,
        loraplus_ratio=None,
    )
    update(optimizer, [], lr=0.03, loraplus_ratio=None)
    assert [group["lr"] for group in optimizer.param_groups] == [0.03]


# ---------------------------------------------------------------------------------------- masters


def test_a_16_bit_weight_moves_by_steps_that_its_own_digits_could_not_hold() -> None:
    weight = nn.Parameter(torch.ones(8, dtype=torch.bfloat16))
    masters = MasterWeights({"w": weight})
    optimizer = make_optimizer(
        masters.weights, name="adamw", lr=1.0, weight_decay=0.0, loraplus_ratio=None
    )
    for _ in range(40):
        weight.sum().backward()
        assert weight.grad is None  # it went to the master
        update(optimizer, masters.weights.values(), lr=2e-4, loraplus_ratio=None)
        masters.publish()
    assert masters.weights["w"].dtype is torch.float32
    assert masters.weights["w"].mean().item() == pytest.approx(1 - 40 * 2e-4, abs=1e-4)
    assert torch.equal(weight, masters.weights["w"].bfloat16())
    assert float(torch.tensor(1.0, dtype=torch.bfloat16) - 2e-4) == 1.0  # why


def test_many_small_gradients_add_up_in_fp32() -> None:
    weight = nn.Parameter(torch.ones(1, dtype=torch.bfloat16))
    masters = MasterWeights({"w": weight})
    for _ in range(1000):
        (weight * 0.01).sum().backward()
    grad = masters.weights["w"].grad
    assert grad is not None
    one = float(torch.tensor(0.01, dtype=torch.bfloat16))
    assert float(grad) == pytest.approx(1000 * one, rel=1e-4)


def test_a_weight_in_fp32_is_its_own_master() -> None:
    weight = nn.Parameter(torch.ones(2))
    masters = MasterWeights({"w": weight})
    assert masters.weights["w"] is weight
    weight.sum().backward()
    assert weight.grad is not None
