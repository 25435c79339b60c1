"""Rounding at random against its definition, and updates against plain optimizers in fp32."""

import io
import math
from typing import Any

import pytest
import torch
from bitsandbytes.optim.adamw import AdamW8bit
from bitsandbytes.optim.lion import Lion
from torch import nn

from finetune.adapter.rounded_weights import RoundedOptimizer, RoundedWeights, round_at_random
from finetune.recipe.sections import TrainSection
from finetune.training.optimizer import AdapterUpdate
from finetune.training.ranks import Ranks

SHAPE = (64, 80)  # enough for states in 8 bits
PLAIN: dict[str, Any] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-3, weight_decay=0.1),
    "adamw_8bit": lambda p: AdamW8bit(p, lr=1e-3, weight_decay=0.1),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-3, weight_decay=0.1, eps=(None, 1.0)),
    "lion": lambda p: Lion(p, lr=1e-3, weight_decay=0.1),
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-3, weight_decay=0.1),
}


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def spacing(x: float) -> float:
    """Return the distance between the two bf16 numbers around x: it has 8 significant bits."""
    return math.ldexp(1.0, max(math.frexp(x)[1], -125) - 8)


def test_what_bf16_has_stays_and_so_do_infinities_and_nan() -> None:
    kept = torch.tensor([0.0, -0.0, 1.0, -1.0078125, 3.3895e38, 2.0**-133, torch.inf, -torch.inf])
    kept = kept.bfloat16().float()
    for seed in range(200):
        rounded = round_at_random(kept, generator(seed))
        assert rounded.dtype is torch.bfloat16
        assert torch.equal(rounded.float().view(torch.int32), kept.view(torch.int32))
    payloads = torch.tensor([0x7FFFFFFF, 0x7F800001, -1, 0x7FC00000], dtype=torch.int32)
    for seed in range(200):
        assert round_at_random(payloads.view(torch.float32), generator(seed)).isnan().all()


@pytest.mark.parametrize("x", [1.0001, -1.0001, 0.1, 1.9999, -255.3, 3e-39, 1e-20, 7.7e30], ids=str)
def test_the_mean_of_many_draws_is_the_number_itself(x: float) -> None:
    num = 200_000
    exact = torch.tensor(x, dtype=torch.float32)
    drawn = round_at_random(exact.expand(num).contiguous(), generator()).double()
    x = float(exact)
    values = drawn.unique().tolist()
    assert len(values) == 2
    assert values[0] < x < values[1]
    assert values[1] - values[0] == spacing(x)
    share = (x - values[0]) / spacing(x)
    deviation = math.sqrt(share * (1 - share) / num)
    assert abs((float(drawn.mean()) - x) / spacing(x)) < 4 * deviation


def update_of(weights: dict[str, nn.Parameter], **settings: Any) -> AdapterUpdate:
    train = TrainSection(
        **{"grad_accum_steps": 1, "lr": 1e-3, "weight_decay": 0.1, "max_grad_norm": None} | settings
    )
    return AdapterUpdate(
        weights, train=train, loraplus_ratio=None, ranks=Ranks(), rounded=weights.keys()
    )


@pytest.mark.parametrize("name", PLAIN)
def test_an_update_is_that_of_the_plain_optimizer_up_to_one_rounding(name: str) -> None:
    weight = nn.Parameter(torch.randn(SHAPE, generator=generator()).bfloat16())
    update = update_of({"w": weight}, optimizer=name)
    plain = nn.Parameter(weight.detach().float())
    optimizer = PLAIN[name]([plain])
    draws = generator(1)
    for _ in range(4):
        factors = torch.randn(SHAPE, generator=draws).bfloat16()
        for _ in range(2):  # micro-batches
            (weight * factors).sum().backward()
        assert weight.grad is None  # it is summed in fp32
        plain.data.copy_(weight)
        plain.grad = 2 * factors.float()
        optimizer.step()
        update.apply(lr=1e-3)
        apart = (weight.detach().double() - plain.detach().double()).abs()
        limits = torch.tensor([spacing(x) for x in plain.flatten().tolist()]).view(SHAPE)
        assert bool((apart < limits).all())
        assert not torch.equal(weight.detach(), plain.detach().bfloat16())  # not to nearest


def test_steps_that_are_too_small_for_a_digit_add_up() -> None:
    weight = nn.Parameter(torch.ones(20_000, dtype=torch.bfloat16))
    update = update_of({"w": weight}, optimizer="sgd", weight_decay=0.0)
    for _ in range(50):
        weight.sum().backward()
        update.apply(lr=2e-4)
    assert float(weight.detach().double().mean()) == pytest.approx(0.99, abs=2e-4)
    assert float(torch.tensor(1.0 - 2e-4).bfloat16()) == 1.0  # why


def test_copies_have_no_memory_between_updates() -> None:
    weights = RoundedWeights({"w": nn.Parameter(torch.ones(SHAPE).bfloat16())}, seed=0)
    (copy,) = weights.copies.values()
    assert copy.untyped_storage().nbytes() == 0
    with weights.updated():
        assert torch.equal(copy.detach(), torch.ones(SHAPE))
    assert copy.untyped_storage().nbytes() == 0
    assert copy.shape == SHAPE


def step(update: AdapterUpdate, weights: dict[str, nn.Parameter], number: int) -> None:
    draws = generator(number)
    for weight in weights.values():
        (weight * torch.randn(SHAPE, generator=draws).bfloat16()).sum().backward()
    update.apply(lr=1e-3)


def two(order: str = "ab") -> dict[str, nn.Parameter]:
    return {name: nn.Parameter(torch.ones(SHAPE, dtype=torch.bfloat16)) for name in order}


def test_a_checkpoint_has_seed_and_number_and_goes_on_to_the_bit() -> None:
    weights = two()
    update = update_of(weights, seed=5)
    for number in range(3):
        step(update, weights, number)
    file = io.BytesIO()
    torch.save(update.optimizer.state_dict(), file)
    file.seek(0)
    content = torch.load(file, weights_only=True)
    assert content["rounding"] == {"seed": 5, "num_updates": 3}
    again = two()
    resumed = update_of(again, seed=6)  # the checkpoint's counts
    undo = resumed.rehearsal()
    step(resumed, again, 0)
    undo()
    assert isinstance(resumed.optimizer, RoundedOptimizer)
    assert resumed.optimizer.state_dict()["rounding"]["num_updates"] == 0
    with torch.no_grad():
        for name, weight in resumed.weights.items():
            weight.copy_(update.weights[name])
    resumed.optimizer.load_state_dict(content)
    for number in range(3, 6):
        step(update, weights, number)
        step(resumed, again, number)
    assert all(torch.equal(again[name], weights[name]) for name in weights)


def test_random_numbers_depend_on_seed_number_and_name_alone() -> None:
    def rounded(order: str, *, seed: int = 0, num_updates: int = 0) -> dict[str, torch.Tensor]:
        weights = RoundedWeights(two(order), seed=seed)
        weights.state = {"seed": seed, "num_updates": num_updates}
        torch.manual_seed(seed + num_updates)
        with weights.updated():
            for copy in weights.copies.values():
                copy.data.add_(0.003)
        return {name: tensor.detach() for name, tensor in weights.held.items()}

    first = rounded("ab")
    assert all(torch.equal(first[name], tensor) for name, tensor in rounded("ba").items())
    assert not torch.equal(first["a"], first["b"])
    assert not torch.equal(first["a"], rounded("ab", seed=1)["a"])
    assert not torch.equal(first["a"], rounded("ab", num_updates=1)["a"])
