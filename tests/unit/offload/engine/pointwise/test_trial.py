"""Fused operators are used only where they are right on this device, and no slower."""

import itertools
from typing import Any

import pytest
import torch
from torch import nn

from offload.engine.pointwise import ops, trial
from offload.engine.pointwise.trial import try_fused
from tests.parity.steps import MODELS
from tests.tiers import mostly_slow

CPU, VOCABULARY = torch.device("cpu"), 500


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "NUM_TOKENS", 64)


def layers(name: str = "qwen3", dtype: torch.dtype = torch.bfloat16) -> list[nn.Module]:
    with torch.device("meta"):
        model: Any = MODELS[name]()
    return list(model.to(dtype).requires_grad_(requires_grad=False).model.layers)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "name"),
    mostly_slow(
        itertools.product([torch.float32, torch.bfloat16], ["llama", "qwen3", "gemma3_text"]),
        (torch.bfloat16, "gemma3_text"),
    ),
)
def test_each_kind_of_part_is_right_and_timed(name: str, dtype: torch.dtype) -> None:
    trials = try_fused(layers(name, dtype), VOCABULARY, CPU)
    kinds = {one.name.split()[0] for one in trials}
    assert kinds == {"Norm", "Rotary", "GatedMlp", "cross-entropy"}
    assert all(one.reason in (None, "it is slower") for one in trials), trials
    assert all(one.plain_s and one.fused_s for one in trials)


@pytest.mark.slow
def test_norms_of_two_widths_are_tried_apart_and_equal_ones_once() -> None:
    names = [one.name for one in try_fused(layers("qwen3"), VOCABULARY, CPU)]
    assert names.count("Norm of Qwen3RMSNorm") == 2
    assert len(names) == 5


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "kind", "model"),
    [
        ("norm", "Norm", "qwen3"),
        ("rotate", "Rotary", "llama"),
        ("norm_rotate", "Rotary", "qwen3"),
        ("gated", "GatedMlp", "qwen3"),
        ("cross_entropy", "cross-entropy", "qwen3"),
    ],
)
def test_an_operator_that_is_wrong_is_found(
    name: str, kind: str, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = getattr(ops, name)

    def wrong(*args: Any, **kwargs: Any) -> Any:
        found = own(*args, **kwargs)
        return tuple(1.05 * x for x in found) if isinstance(found, tuple) else 1.05 * found

    monkeypatch.setattr(ops, name, wrong)
    trials = try_fused(layers(model), VOCABULARY, CPU)
    reasons = {one.name.split()[0]: one.reason for one in trials}
    assert reasons.pop(kind) == "its results are not those of the model's code"
    assert set(reasons.values()) <= {None, "it is slower"}


@pytest.mark.thorough
def test_a_wrong_gradient_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    own = ops.gated

    def wrong(gate: torch.Tensor, up: torch.Tensor, curve: Any) -> torch.Tensor:
        y = own(gate, up, curve)
        return y.detach() + 1.1 * (y - y.detach())

    monkeypatch.setattr(ops, "gated", wrong)
    (found,) = (one for one in try_fused(layers(), VOCABULARY, CPU) if one.name.startswith("Gated"))
    assert found.reason == "its results are not those of the model's code"


def test_an_operator_that_fails_or_is_slower_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object, **__: object) -> None:
        raise RuntimeError("no compiler\nat all")

    monkeypatch.setattr(ops, "norm", fails)
    times_s = iter([1.0, 2.0] * 100)
    monkeypatch.setattr(trial, "seconds_of", lambda *_: next(times_s))
    for one in try_fused(layers(), VOCABULARY, CPU):
        wanted = "RuntimeError: no compiler" if one.name.startswith("Norm") else "it is slower"
        assert one.reason == wanted


def test_a_tie_is_the_operators_and_each_trial_says_what_it_is_of(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    times_s = iter([1.0, 1.02] * 100)
    monkeypatch.setattr(trial, "seconds_of", lambda *_: next(times_s))
    trials = try_fused(layers(), VOCABULARY, CPU)
    assert {one.part for one in trials} == {"norms", "rotary", "gates", "loss"}
    assert [one.reason for one in trials] == [None] * len(trials)


def test_of_layers_without_any_part_the_loss_alone_is_tried() -> None:
    (found,) = try_fused([nn.Linear(4, 4)], VOCABULARY, CPU)
    assert found.name == "cross-entropy"
