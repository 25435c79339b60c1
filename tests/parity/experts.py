"""Modules of fused experts by themselves, with random adapters, and a step through them."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import PreTrainedModel
from transformers.models.gemma4.modeling_gemma4 import Gemma4TextExperts
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHExperts
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from finetune.adapter.lora import expert_parameters
from tests.parity.architectures import Gradients

STD = 0.15


class Sizes(NamedTuple):
    """Of a module of experts, and of what goes through it."""

    hidden: int
    width: int
    num_experts: int
    num_tokens: int
    num_choices: int


SIZES = Sizes(64, 48, 5, 40, 2)
D, F, E = SIZES[:3]


class Holder(nn.Module):
    """A model of one experts module."""

    def __init__(
        self, kind: Callable[[Any], nn.Module], path: str, *, limit: float, sizes: Sizes
    ) -> None:
        super().__init__()
        self.config = SimpleNamespace(
            hidden_size=sizes.hidden,
            moe_intermediate_size=sizes.width,
            intermediate_size=sizes.width,
            num_experts=sizes.num_experts,
            num_local_experts=sizes.num_experts,
            n_routed_experts=sizes.num_experts,
            hidden_act="silu",
            hidden_activation="gelu_pytorch_tanh",
            mlp_hidden_act="relu2",
            moe_latent_size=None,
            swiglu_alpha=1.702,
            swiglu_limit=limit,
            _experts_implementation=path,
        )
        self.experts = kind(self.config)
        vars(self.experts)["limit"] = limit  # older versions of transformers do not ask the config
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=STD)
            parameter.requires_grad_(False)

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.experts(*inputs)
        return result


GATE_UP, DOWN = "gate_up_proj", "down_proj"
KINDS: Mapping[str, tuple[Callable[[Any], nn.Module], Sequence[str]]] = {
    "gated": (Qwen3MoeExperts, [GATE_UP, DOWN]),
    "transposed, biased, clamped": (GptOssExperts, [GATE_UP, DOWN]),
    "gelu": (Gemma4TextExperts, [GATE_UP, DOWN]),
    "without gate": (NemotronHExperts, ["up_proj", DOWN]),
    "one projection": (Qwen3MoeExperts, [DOWN]),
    "the other": (GptOssExperts, [GATE_UP]),
}
CLAMPED, UNCLAMPED = 0.5, 7.0


def adapted_experts(
    kind: str,
    path: str,
    dtype: torch.dtype,
    *,
    seed: int = 0,
    limit: float = UNCLAMPED,
    sizes: Sizes = SIZES,
    **settings: Any,
) -> Any:
    """Return an experts module with random adapters of rank 4, computed by peft."""
    make, names = KINDS[kind]
    targets = [f"experts.{name}" for name in names]
    defaults: dict[str, Any] = {"r": 4, "lora_alpha": 8, "target_modules": []}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        holder = Holder(make, path, limit=limit, sizes=sizes).to(dtype)
        config = LoraConfig(target_parameters=targets, **defaults | settings)
        model = randomised(get_peft_model(holder, config))
    return model.double() if dtype is torch.float64 else model


ROUTINGS = ("mixed", "skewed", "idle experts", "one token", "twice the same")


def chosen(
    routing: str, dtype: torch.dtype, seed: int = 0, sizes: Sizes = SIZES
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return hidden states, choices and weights of some tokens, or of one."""
    generator = torch.Generator().manual_seed(seed)
    num_tokens = 1 if routing == "one token" else sizes.num_tokens
    hidden_TD = torch.randn(num_tokens, sizes.hidden, generator=generator)
    scores_TE = torch.randn(num_tokens, sizes.num_experts, generator=generator)
    if routing == "skewed":
        scores_TE[:, -2] += 100
    if routing == "idle experts":
        scores_TE[:, ::2] = -100.0
    weight_TC, expert_TC = scores_TE.softmax(-1).topk(sizes.num_choices)
    if routing == "twice the same":
        expert_TC[:, 1] = expert_TC[:, 0]
    return hidden_TD.to(dtype), expert_TC, weight_TC.to(dtype)


def step(
    model: Any,
    routing: str,
    dtype: torch.dtype,
    *,
    seed: int = 0,
    precision: Any = None,
    sizes: Sizes = SIZES,
) -> Gradients:
    """Return output and gradients for inputs of a dtype, computed in another where one is given.

    They are computed where the model is.
    """
    hidden_TD, expert_TC, weight_TC = chosen(routing, dtype, seed, sizes)
    generator = torch.Generator().manual_seed(seed + 1)
    grad_TD = torch.randn(hidden_TD.shape, generator=generator).to(dtype)
    device = next(model.parameters()).device
    expert_TC = expert_TC.to(device)
    hidden_TD, weight_TC, grad_TD = (
        t.to(device, precision) for t in (hidden_TD, weight_TC, grad_TD)
    )
    hidden_TD.requires_grad_()
    weight_TC.requires_grad_()
    out_TD = model(hidden_TD, expert_TC, weight_TC)
    assert out_TD.dtype is hidden_TD.dtype
    out_TD.backward(grad_TD)
    assert all(p.grad is None for p in model.parameters() if not p.requires_grad)
    grads = {n: p.grad for n, p in model.named_parameters() if p.requires_grad}
    return {"out": out_TD.detach(), "hidden": hidden_TD.grad, "weight": weight_TC.grad, **grads}


def randomised(model: Any) -> Any:
    """Draw all B: they are zero at the start, so half of the gradients would be."""
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.1)
    return model


TYPES = ("qwen3_moe", "mixtral", "gpt_oss", "deepseek_v3", "glm4_moe", "olmoe")


def adapted_by_peft(base: PreTrainedModel, *, seed: int = 0, **settings: Any) -> Any:
    """Put random adapters of rank 4 on experts and attention, computed by peft's own code."""
    targets = [name for name in ("q_proj", "o_proj") if name in str(base)]
    experts = list(expert_parameters(base))
    assert experts
    config: dict[str, Any] = {"r": 4, "lora_alpha": 8, "target_parameters": experts}
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(seed)
        model = get_peft_model(base, LoraConfig(target_modules=targets, **config | settings))
        return randomised(model)
