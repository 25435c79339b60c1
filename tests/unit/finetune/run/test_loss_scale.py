"""The factor of the loss moves as that of torch's own scaler."""

import random
from dataclasses import replace

import pytest
import torch

from finetune.run import checkpoint
from finetune.run.checkpoint import FIRST, LossScale


@pytest.mark.parametrize("frac", [0.0, 0.02, 0.6])
def test_it_moves_as_torchs_scaler(frac: float, monkeypatch: pytest.MonkeyPatch) -> None:
    interval = 7
    monkeypatch.setattr(checkpoint, "INTERVAL", interval)
    chance, ours = random.Random(0), LossScale()
    scaler = torch.amp.GradScaler("cpu", growth_interval=interval)
    weight = torch.nn.Parameter(torch.zeros(()))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    scaler.scale(torch.ones(()))
    assert scaler.get_scale() == ours.factor == FIRST
    for _ in range(100):
        has_overflow = chance.random() < frac
        weight.grad = torch.tensor(float("inf" if has_overflow else "1"))
        scaler.step(optimizer)
        scaler.update()
        ours = ours.skipped() if has_overflow else ours.applied()
        assert ours.factor == scaler.get_scale()
        assert ours.num_good == scaler._get_growth_tracker()


def test_skipped_steps_are_counted_and_a_row_of_them_ends_with_one_that_is_applied() -> None:
    found = LossScale().skipped().applied().skipped().skipped()
    assert (found.num_skipped, found.num_in_a_row) == (3, 2)
    assert (found.applied().num_skipped, found.applied().num_in_a_row) == (3, 0)


def test_the_factor_stays_finite() -> None:
    largest = LossScale(factor=2.0**1023, num_good=checkpoint.INTERVAL - 1)
    assert largest.applied() == replace(largest, num_good=0)
