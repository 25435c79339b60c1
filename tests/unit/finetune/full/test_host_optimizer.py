"""Updates on the host against the libraries' on plain tensors; split masters against whole ones."""

from functools import partial
from typing import Any

import pytest
import torch
from bitsandbytes.optim.adamw import AdamW8bit
from bitsandbytes.optim.lion import Lion
from torch import nn

from finetune.full import optimizer
from finetune.full.optimizer import HostOptimizer, total_norm
from offload.plan.facts.optimizer import Optimizer

SHAPES = {"matrix": (111, 53), "stack": (3, 37, 53), "vector": (41,)}


def drawn(seed: int, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {n: torch.randn(s, generator=generator).to(dtype) for n, s in SHAPES.items()}


def optimizer_of(
    weights: dict[str, torch.Tensor], *, name: Optimizer = "adamw", weight_decay: float = 0.0
) -> HostOptimizer:
    return HostOptimizer(weights, name=name, weight_decay=weight_decay)


def rounding(library: Any, state: str, groups: Any, **options: Any) -> torch.optim.Optimizer:
    """Return a library's optimizer whose state is rounded to bfloat16 after each step."""
    optimizer: torch.optim.Optimizer = library(groups, **options)

    def round_state(*_: Any) -> None:
        for states in optimizer.state.values():
            states[state].copy_(states[state].bfloat16())

    optimizer.register_step_post_hook(round_state)
    return optimizer


LIBRARY: dict[Optimizer, Any] = {
    "adamw": partial(torch.optim.AdamW, fused=True),
    "adamw_bf16": partial(rounding, partial(torch.optim.AdamW, fused=True), "exp_avg"),
    "adamw_8bit": AdamW8bit,
    "adafactor": partial(torch.optim.Adafactor, eps=(None, 1.0)),
    "lion": Lion,
    "lion_bf16": partial(rounding, Lion, "state1"),
    "sgd": torch.optim.SGD,
}
# torch's AdamW divides by other roundings than bitsandbytes', so that codes of moments differ
ERRORS: dict[Optimizer, float] = {"adamw_8bit": 2e-3, "sgd": 1e-6, "lion": 1e-6, "lion_bf16": 1e-6}


@pytest.mark.parametrize("piece_elements", [256, 2**18])
@pytest.mark.parametrize("name", list(LIBRARY))
def test_reorder_it_is_the_librarys_optimizer(
    name: Optimizer, piece_elements: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(optimizer, "PIECE_ELEMENTS", piece_elements)
    plain = {key: nn.Parameter(value) for key, value in drawn(0).items()}
    groups: list[dict[str, Any]] = [
        {"params": [plain["matrix"], plain["stack"]]},
        {"params": [plain["vector"]], "weight_decay": 0.0},
    ]
    reference = LIBRARY[name](groups, lr=0.0, weight_decay=0.1)
    ours = optimizer_of(drawn(0), name=name, weight_decay=0.1)
    for number in range(1, 8):
        for group in reference.param_groups:
            group["lr"] = 0.01 * number
        for key, gradient in drawn(number).items():
            plain[key].grad = gradient * 0.5
        reference.step()
        ours.update(drawn(number), num_updates=number, lr=0.01 * number, scale=0.5)
        for key, value in ours.masters().items():
            error = (value - plain[key]).norm() / plain[key].norm()
            assert error <= ERRORS.get(name, 0.0), (number, key)


@pytest.mark.parametrize("name", list(LIBRARY))
def test_a_resume_goes_on_where_the_states_were(name: Optimizer) -> None:
    whole, begun, resumed = (optimizer_of(drawn(0, torch.bfloat16), name=name) for _ in range(3))
    for number in range(1, 6):
        for one in (whole, begun if number < 3 else resumed):
            one.update(drawn(number), num_updates=number, lr=1e-3, scale=1.0)
        if number == 2:
            for key, tensor in begun.tensors.items():
                resumed.tensors[key].copy_(tensor)
    assert all(torch.equal(value, resumed.tensors[key]) for key, value in whole.tensors.items())


@pytest.mark.parametrize("num_steps", [20, pytest.param(1000, marks=pytest.mark.slow)])
def test_move_split_masters_are_an_fp32_master_to_the_bit(num_steps: int) -> None:
    started = drawn(0, torch.bfloat16)
    whole = optimizer_of({n: v.float() for n, v in started.items()}, weight_decay=0.01)
    split = optimizer_of({n: v.clone() for n, v in started.items()}, weight_decay=0.01)
    for number in range(1, num_steps + 1):
        gradients = drawn(number, torch.bfloat16)
        for one in (whole, split):
            one.update(gradients, num_updates=number, lr=1e-4, scale=0.7)
    masters = split.masters()
    assert all(torch.equal(masters[name], value) for name, value in whole.masters().items())
    assert any(not torch.equal(split.tensors[n], v) for n, v in started.items())
    for name, value in masters.items():  # ties aside, what computes is rounded as torch does
        is_tie = (value.view(torch.int32) & 0xFFFF) == 0x8000
        assert torch.equal(split.tensors[name][~is_tie], value.bfloat16()[~is_tie])


def test_updates_that_bfloat16_cannot_hold_are_kept() -> None:
    one = optimizer_of({"w": torch.ones(1, 8, dtype=torch.bfloat16)}, weight_decay=0.0)
    for number in range(1, 101):
        one.update({"w": torch.ones(1, 8)}, num_updates=number, lr=1e-4, scale=1.0)
    assert one.masters()["w"].tolist()[0] == pytest.approx([0.99] * 8, rel=1e-4)
    assert one.tensors["w"].tolist()[0] == [torch.tensor(0.99).bfloat16().item()] * 8


@pytest.mark.parametrize(("name", "wide"), [("adamw_bf16", "adamw"), ("lion_bf16", "lion")])
def test_a_mean_in_bfloat16_follows_and_falls_as_one_in_float32(
    name: Optimizer, wide: Optimizer
) -> None:
    """After large gradients come none; squares, in float32, fall by a part in 1,000 per step."""
    reduced, whole = (optimizer_of({"w": torch.zeros(64, 64)}, name=n) for n in (name, wide))
    gradient = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    for number in range(1, 201):
        scale = 1.0 if number <= 100 else 0.0
        for one in (reduced, whole):
            one.update({"w": gradient.clone()}, num_updates=number, lr=1e-3, scale=scale)
        if number == 100:
            expected = whole.tensors["w:mean"]
            assert ((reduced.tensors["w:mean"] - expected).abs() <= 0.25 * expected.abs()).all()
    mean = reduced.tensors["w:mean"]
    assert mean.dtype is torch.bfloat16
    assert mean.abs().max() <= 0.4 * gradient.abs().max()
    if name == "adamw_bf16":
        squares = reduced.tensors["w:square"]
        assert squares.dtype is torch.float32
        assert torch.equal(squares, whole.tensors["w:square"])


def test_forgetting_makes_it_new() -> None:
    used, new = optimizer_of(drawn(0), weight_decay=0.0), optimizer_of(drawn(0), weight_decay=0.0)
    used.update(drawn(1), num_updates=1, lr=0.0, scale=1.0)
    used.num_updates = 1
    used.forget()
    assert used.num_updates == 0
    assert all(torch.equal(value, new.tensors[name]) for name, value in used.tensors.items())


def test_the_total_norm_is_that_of_all_elements() -> None:
    gradients = drawn(3)
    flat = torch.cat([gradient.flatten() for gradient in gradients.values()])
    norms = [torch.linalg.vector_norm(gradient) for gradient in gradients.values()]
    assert total_norm(norms) == pytest.approx(float(flat.norm()), rel=1e-6)
