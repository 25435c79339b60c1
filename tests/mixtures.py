"""Experts of published models: transformers' own modules, at their size or scaled down."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import GptOssConfig, MixtralConfig, Qwen3MoeConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.mixtral.modeling_mixtral import MixtralExperts
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts


@dataclass(frozen=True, kw_only=True, slots=True)
class Mixture:
    """A layer's experts.

    Attributes:
        name: Of the model.
        num_experts: In a layer.
        top_k: Of these, computed per token.
        hidden: Features of a token.
        width: Features between the projections.
        build: Makes transformers' module of a mixture.
    """

    name: str
    num_experts: int
    top_k: int
    hidden: int
    width: int
    build: "Callable[[Mixture], nn.Module]"

    def experts(self, dtype: torch.dtype, *, path: str) -> Any:
        """Return the module, frozen and without values, computed by a path of transformers'."""
        before = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            experts: Any = self.build(self)
        finally:
            torch.set_default_dtype(before)
        experts.config._experts_implementation = path
        return experts.requires_grad_(requires_grad=False)


def _qwen(mixture: Mixture) -> nn.Module:
    config = Qwen3MoeConfig(
        hidden_size=mixture.hidden,
        moe_intermediate_size=mixture.width,
        num_experts=mixture.num_experts,
    )
    return Qwen3MoeExperts(config)


def _sized(mixture: Mixture) -> dict[str, int]:
    return {
        "hidden_size": mixture.hidden,
        "intermediate_size": mixture.width,
        "num_local_experts": mixture.num_experts,
    }


QWEN = Mixture(name="Qwen3-30B-A3B", num_experts=128, top_k=8, hidden=2048, width=768, build=_qwen)
GPT_OSS = Mixture(
    name="gpt-oss-20b",
    num_experts=32,
    top_k=4,
    hidden=2880,
    width=2880,
    build=lambda mixture: GptOssExperts(GptOssConfig(**_sized(mixture))),
)
MIXTRAL = Mixture(
    name="Mixtral-8x7B",
    num_experts=8,
    top_k=2,
    hidden=4096,
    width=14336,
    build=lambda mixture: MixtralExperts(MixtralConfig(**_sized(mixture))),
)
MIXTURES = (QWEN, GPT_OSS, MIXTRAL)
