"""The matrices that Muon orthogonalises, found in models and split by hand here."""

from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from finetune.full.host_optimizer import HostOptimizer
from finetune.full.matrices import matrices_of
from offload.errors import UnsupportedModelError
from offload.plan.facts.facts import model_facts
from offload.plan.facts.matrices import layer_matrices

LR = 0.01
SHAPE: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "pad_token_id": 0,
}
EXPERTS: dict[str, Any] = {
    "num_experts": 2,
    "num_experts_per_tok": 1,
    "moe_intermediate_size": 12,
    "head_dim": 8,
}


def phi3() -> Any:
    return Phi3ForCausalLM(Phi3Config(**SHAPE))


def qwen3_moe() -> Any:
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**SHAPE, **EXPERTS))


def gpt_oss() -> Any:
    few: dict[str, Any] = {"num_local_experts": 2, "num_experts_per_tok": 1, "head_dim": 8}
    return GptOssForCausalLM(GptOssConfig(**SHAPE, **few))


def by_hand(name: str, weight: torch.Tensor) -> list[torch.Tensor]:
    """Return copies of the matrices of a weight; none if AdamW updates it."""
    if "norm" in name or "bias" in name or "sinks" in name or ".layers." not in name:
        return []
    if "qkv_proj" in name:  # 4 heads of queries, 2 of keys, 2 of values, 8 features each
        return [weight[:32].clone(), weight[32:48].clone(), weight[48:].clone()]
    if "gate_up_proj" not in name:
        return [one.clone() for one in weight] if weight.dim() == 3 else [weight.clone()]
    if weight.dim() == 2:
        return [weight[:24].clone(), weight[24:].clone()]
    if weight.shape == (2, 24, 32):
        return [half.clone() for one in weight for half in (one[:12], one[12:])]
    assert weight.shape == (2, 32, 48)  # columns of gate and up take turns
    return [half.clone() for one in weight for half in (one[:, 0::2], one[:, 1::2])]


@pytest.mark.parametrize("make", [phi3, qwen3_moe, gpt_oss])
def test_reorder_each_matrix_is_updated_as_by_torch_alone(make: Any) -> None:
    torch.manual_seed(0)
    model = make()
    found = matrices_of(model)
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    expected = {name: by_hand(name, weight) for name, weight in weights.items()}
    assert set(found) == {name for name, matrices in expected.items() if matrices}
    optimizer = HostOptimizer(weights, name="muon", weight_decay=0.1, matrices=found)
    plain = {name: [nn.Parameter(one) for one in matrices] for name, matrices in expected.items()}
    reference = torch.optim.Muon(
        [one for matrices in plain.values() for one in matrices],
        lr=LR,
        weight_decay=0.1,
        adjust_lr_fn="match_rms_adamw",
    )
    others = {n: nn.Parameter(w.clone()) for n, w in weights.items() if not plain[n]}
    adamw = torch.optim.AdamW(
        [{"params": [p], "weight_decay": 0.1 if p.dim() > 1 else 0.0} for p in others.values()],
        lr=LR,
        fused=True,
    )
    for number in range(1, 4):
        gradients = {name: torch.randn_like(weight) for name, weight in weights.items()}
        for name, matrices in plain.items():
            for one, gradient in zip(matrices, by_hand(name, gradients[name]), strict=True):
                one.grad = gradient
        for name, one in others.items():
            one.grad = gradients[name].clone()
        before = {name: list(map(torch.clone, by_hand(name, w))) for name, w in weights.items()}
        optimizer.update(gradients, num_updates=number, lr=LR, scale=1.0)
        reference.step()
        adamw.step()
        for name, weight in weights.items():
            if not plain[name]:
                assert torch.equal(weight, others[name])
            for was, ours, one in zip(
                before[name], by_hand(name, weight), plain[name], strict=True
            ):
                # products in bfloat16 of other strides round otherwise
                assert (ours - one).norm() <= 0.03 * (ours - was).norm(), name


@pytest.mark.parametrize("make", [phi3, qwen3_moe])
def test_the_plan_counts_the_same_matrices(make: Any) -> None:
    model = make()
    counted = sorted(
        (kind.rows, kind.columns)
        for layer in model_facts(model.config.to_dict()).layers
        for kind in layer_matrices(layer)
        for _ in range(kind.number)
    )
    found = matrices_of(model)
    shapes = [
        tuple(view.shape)
        for name, parameter in model.named_parameters()
        if name in found
        for view in found[name].views(parameter)
    ]
    assert counted == sorted(shapes)


def test_rows_that_are_mixed_by_heads_are_refused_by_name() -> None:
    model = GPTNeoXForCausalLM(GPTNeoXConfig(**SHAPE))
    with pytest.raises(UnsupportedModelError) as caught:
        matrices_of(model)
    assert "query_key_value holds several matrices" in caught.value.what
