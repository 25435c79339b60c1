"""Experts of published models: transformers' own modules, and what computing them would launch."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import nn
from transformers import GptOssConfig, MixtralConfig, Qwen3MoeConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.mixtral.modeling_mixtral import MixtralExperts
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from offload.engine.experts import fused
from offload.engine.experts.launcher import Blocks
from offload.engine.experts.products import Branch, route
from tests.compiled import KERNELS, Launch

NUM_TOKENS = 4096  # kernels are compiled for any number


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


def _sized(mixture: Mixture) -> dict[str, Any]:
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


class Recorder:
    """Stands in for the module of kernels."""

    def __init__(self) -> None:
        self.launches: list[Launch] = []

    def __getattr__(self, kernel: str) -> Any:
        return _Noted(self.launches, kernel)


class _Noted:
    def __init__(self, launches: list[Launch], kernel: str) -> None:
        self._launches, self._kernel = launches, kernel

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def note(**arguments: Any) -> None:
            self._launches.append(Launch(kernel=self._kernel, grid=grid, arguments=arguments))

        return note


def launches(
    mixture: Mixture, dtype: torch.dtype, blocks: Blocks, *, rank: int | None, is_kept: bool = True
) -> list[Launch]:
    """Return what a forward starts, and the backward if a graph is kept.

    fused.py computes over tensors without memory, and the kernels only note what they are handed.
    """
    recorder = Recorder()
    with torch.device("meta"):
        experts = mixture.experts(dtype, path="eager")
        hidden_TD = torch.empty(NUM_TOKENS, mixture.hidden, dtype=dtype, requires_grad=True)
        weight_TC = torch.empty(NUM_TOKENS, mixture.top_k, dtype=dtype, requires_grad=True)
        expert_TC = torch.empty_like(weight_TC, dtype=torch.int64)
        lora = {} if rank is None else branches(experts, rank)
    with (
        mock.patch(KERNELS, recorder, create=True),
        mock.patch.object(fused, "blocks_for", return_value=blocks),
        torch.set_grad_enabled(is_kept),
    ):
        routing = route(expert_TC, num_experts=mixture.num_experts)
        out_TD = fused.compute(experts, lora, routing, hidden_TD, weight_TC, has_value=True)
        if is_kept:
            out_TD.backward(torch.empty_like(out_TD))
    return recorder.launches


def branches(experts: Any, rank: int) -> dict[str, Branch]:
    """Return adapters of both projections, without values."""
    made = {}
    for name in ("gate_up_proj", "down_proj"):
        num_experts, num_k, num_n = getattr(experts, name).shape
        if not experts.is_transposed:
            num_k, num_n = num_n, num_k
        made[name] = Branch(
            a_ERK=torch.empty(num_experts, rank, num_k, requires_grad=True),
            b_ERN=torch.empty(num_experts, rank, num_n, requires_grad=True),
            scaling=1.0,
        )
    return made
