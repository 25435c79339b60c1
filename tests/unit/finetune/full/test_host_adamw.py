"""AdamW on the host against torch's own on plain tensors, and split masters against whole ones."""

from typing import Any

import pytest
import torch
from torch import nn

from finetune.full import host_adamw
from finetune.full.host_adamw import HostAdamW, total_norm

SHAPES = {"matrix": (37, 53), "vector": (41,)}


def drawn(seed: int, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {n: torch.randn(s, generator=generator).to(dtype) for n, s in SHAPES.items()}


@pytest.mark.parametrize("piece_elements", [64, 2**18])
def test_move_it_is_torchs_fused_adamw(
    piece_elements: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_adamw, "PIECE_ELEMENTS", piece_elements)
    plain = {name: nn.Parameter(value) for name, value in drawn(0).items()}
    groups: list[dict[str, Any]] = [
        {"params": [plain["matrix"]]},
        {"params": [plain["vector"]], "weight_decay": 0.0},
    ]
    reference = torch.optim.AdamW(groups, lr=0.0, weight_decay=0.1, fused=True)
    ours = HostAdamW(drawn(0), weight_decay=0.1)
    for number in range(1, 8):
        for group in reference.param_groups:
            group["lr"] = 0.01 * number
        for name, gradient in drawn(number).items():
            plain[name].grad = gradient * 0.5
        reference.step()
        ours.update(drawn(number), num_updates=number, lr=0.01 * number, scale=0.5)
        assert all(torch.equal(value, plain[name]) for name, value in ours.masters().items())


@pytest.mark.parametrize("num_steps", [20, pytest.param(1000, marks=pytest.mark.slow)])
def test_move_split_masters_are_an_fp32_master_to_the_bit(num_steps: int) -> None:
    started = drawn(0, torch.bfloat16)
    whole = HostAdamW({n: v.float() for n, v in started.items()}, weight_decay=0.01)
    split = HostAdamW({n: v.clone() for n, v in started.items()}, weight_decay=0.01)
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
    one = HostAdamW({"w": torch.ones(1, 8, dtype=torch.bfloat16)}, weight_decay=0.0)
    for number in range(1, 101):
        one.update({"w": torch.ones(1, 8)}, num_updates=number, lr=1e-4, scale=1.0)
    assert one.masters()["w"].tolist()[0] == pytest.approx([0.99] * 8, rel=1e-4)
    assert one.tensors["w"].tolist()[0] == [torch.tensor(0.99).bfloat16().item()] * 8


def test_forgetting_makes_it_new() -> None:
    used, new = HostAdamW(drawn(0), weight_decay=0.0), HostAdamW(drawn(0), weight_decay=0.0)
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
