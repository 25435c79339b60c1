"""Gradients in float16 with a scaled loss, next to those in bfloat16: errors against float64.

Base weights are rounded to bfloat16 first, and the truth is plain autograd in float64 from them.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch

from offload.engine.bound import EngineOptions
from offload.engine.engine import Engine
from offload.engine.objective import Scores, StepLoss
from offload.engine.passes.part import RunStep
from tests.parity.steps import OPTIONS, micro_batches, tiny

pytestmark = pytest.mark.usefixtures("one_thread")

NUM_TOKENS = 100_000  # of a large step, of which this is a part: its gradients are small


class MeanOfLogps:
    """An objective whose gradients are those of the cross-entropy."""

    reference = None

    def loss(self, scores: Scores) -> StepLoss:
        return StepLoss(value=-scores.policy_N.sum() / NUM_TOKENS, metrics={})


def model_of(name: str, dtype: torch.dtype) -> Any:
    model = tiny(name)
    base: Any = model.get_base_model()
    base.set_experts_implementation("eager")  # grouped products have no float64
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if "lora_" not in parameter_name:
                parameter.copy_(parameter.bfloat16())
    return model.to(dtype)


def found(model: Any) -> dict[str, torch.Tensor]:
    grads = {n: p.grad.double() for n, p in model.named_parameters() if p.grad is not None}
    assert len(grads) == sum(p.requires_grad for p in model.parameters())
    return grads


def true_gradients(name: str) -> dict[str, torch.Tensor]:
    model = model_of(name, torch.float64)
    for batch in micro_batches():
        logits = model(**{k: v for k, v in batch.items() if k != "labels"}).logits[:, :-1]
        torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), batch["labels"][:, 1:].flatten(), reduction="sum"
        ).div(NUM_TOKENS).backward()
    return found(model)


def gradients(
    name: str,
    dtype: torch.dtype,
    scale: float,
    *,
    has_router_loss: bool = False,
    options: EngineOptions = OPTIONS,
    **run: Any,
) -> dict[str, torch.Tensor]:
    model = model_of(name, dtype)
    model.get_base_model().config.output_router_logits = has_router_loss
    for parameter_name, parameter in model.named_parameters():
        if "lora_" in parameter_name:
            parameter.data = parameter.data.float()
    engine = Engine(model, device=torch.device("cpu"), options=options)
    step = RunStep(
        micro_batches=micro_batches(), num_label_tokens=NUM_TOKENS, loss_scale=scale, **run
    )
    engine.forward_backward_runs([step])
    grads = {key: grad / scale for key, grad in found(model).items()}
    engine.detach()
    return grads


def error(ours: dict[str, torch.Tensor], truth: dict[str, torch.Tensor]) -> float:
    squares = [((ours[name] - true).norm() ** 2, true.norm() ** 2) for name, true in truth.items()]
    return float(sum(e for e, _ in squares) / sum(t for _, t in squares)) ** 0.5


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["llama", "qwen3", "qwen3_moe"])
def test_gradients_of_a_scaled_loss_are_closer_than_those_in_bfloat16(name: str) -> None:
    truth = true_gradients(name)
    of = {
        "float16": error(gradients(name, torch.float16, 2.0**16), truth),
        "float16, not scaled": error(gradients(name, torch.float16, 1.0), truth),
        "bfloat16": error(gradients(name, torch.bfloat16, 1.0), truth),
    }
    assert of["float16"] <= 0.3 * of["bfloat16"], of
    assert of["float16, not scaled"] > 2 * of["float16"], of


@pytest.mark.thorough
@pytest.mark.parametrize("is_fused", [False, True], ids=["plain", "fused"])
@pytest.mark.parametrize("run", [{}, {"objective": MeanOfLogps()}], ids=["loss", "objective"])
def test_each_loss_is_scaled(run: Any, *, is_fused: bool) -> None:
    options = replace(OPTIONS, layer_kernels="fused" if is_fused else "plain")
    ours = gradients("llama", torch.float16, 2.0**16, options=options, **run)
    assert error(ours, true_gradients("llama")) <= 3e-3


@pytest.mark.parametrize("has_router_loss", [False, True])
def test_move_a_power_of_two_changes_no_bit_where_nothing_underflows(
    *, has_router_loss: bool
) -> None:
    """Nor does it change the part of a mixture's router loss."""
    plain, scaled = (
        gradients("qwen3_moe", torch.float32, scale, has_router_loss=has_router_loss)
        for scale in (1.0, 2.0**10)
    )
    assert all(torch.equal(plain[key], scaled[key]) for key in plain)
