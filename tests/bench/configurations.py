"""Configurations of tiny models and their steps, drawn at random from a space."""

import random
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from typing import Any

MIN_SEQ_LEN = 64
NUM_EXPERTS_PER_TOKEN = 2
MIXTURES = ("qwen3_moe", "mixtral", "olmoe")


@dataclass(frozen=True, kw_only=True, slots=True)
class Space:
    """What configurations are drawn from: an axis for each field, and limits.

    Attributes:
        model_types: Dense models and mixtures.
        layers: How many a model has.
        widths: Hidden sizes, multiples of 64.
        mlp_ratios: Width of a dense MLP over the hidden size; an expert's is half of that.
        experts: In a mixture's layer.
        vocabularies: Sizes.
        micro_batches: Per step.
        seq_lens: Tokens of a sequence.
        slots: As a share of the layers; at least two.
        forms: Type of the weights, and codec.
        tiers: Where layers wait.
        stashes: Where layer inputs wait.
        targets: Of the adapter; with all-linear, a mixture's experts have one too.
        step_flops: 6 x active parameters x tokens of a step, about.
        limit_s: A run that takes longer has failed.
    """

    model_types: Sequence[str]
    layers: Sequence[int]
    widths: Sequence[int]
    mlp_ratios: Sequence[int]
    experts: Sequence[int]
    vocabularies: Sequence[int]
    micro_batches: Sequence[int]
    seq_lens: Sequence[int]
    slots: Sequence[float]
    forms: Sequence[tuple[str, str]]
    tiers: Sequence[str]
    stashes: Sequence[str]
    targets: Sequence[str]
    step_flops: Sequence[float]
    limit_s: float


SPACES = {
    "cpu": Space(
        model_types=("llama", "qwen3_moe", "qwen3", "mixtral", "phi3", "olmoe"),
        layers=(3, 4, 5, 6, 8, 10),
        widths=(128, 192, 256, 384),
        mlp_ratios=(2, 3, 4),
        experts=(4, 8),
        vocabularies=(512, 2048, 8192),
        micro_batches=(1, 2, 3, 4, 6, 8),
        seq_lens=(64, 128, 192, 256),
        slots=(0.0, 0.5, 0.75, 1.0),
        forms=(
            ("float32", "native"),
            ("float32", "nf4"),
            ("float32", "fp8"),
            ("float32", "int8"),
            ("float32", "bf16"),
            ("float32", "fp16"),
            ("bfloat16", "native"),
            ("bfloat16", "bf16_packed"),
            ("bfloat16", "nf4"),
        ),
        tiers=("ram", "disk"),
        stashes=("device", "host"),
        targets=("attention", "all-linear"),
        step_flops=(15e9, 25e9, 40e9),
        limit_s=120.0,
    ),
    "cuda": Space(
        model_types=("llama", "qwen3_moe", "qwen3", "mixtral", "phi3", "olmoe"),
        layers=(4, 6, 8, 10, 12, 16),
        widths=(1024, 1536, 2048, 3072),
        mlp_ratios=(2, 3, 4),
        experts=(8, 16),
        vocabularies=(8192, 32768, 131072),
        micro_batches=(1, 2, 3, 4, 6, 8),
        seq_lens=(512, 1024, 2048, 4096),
        slots=(0.0, 0.5, 0.75, 1.0),
        forms=(
            ("bfloat16", "native"),
            ("bfloat16", "nf4"),
            ("bfloat16", "fp8"),
            ("bfloat16", "int8"),
            ("bfloat16", "bf16_packed"),
        ),
        tiers=("ram", "disk"),
        stashes=("device", "host"),
        targets=("attention", "all-linear"),
        step_flops=(20e12, 40e12, 80e12),
        limit_s=300.0,
    ),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Configuration:
    """One run."""

    model_type: str
    num_layers: int
    hidden: int
    mlp_ratio: int
    num_experts: int
    vocabulary: int
    num_micro_batches: int
    num_sequences: int
    seq_len: int
    num_slots: int
    dtype: str
    codec: str
    tier: str
    stash: str
    targets: str

    @property
    def has_experts(self) -> bool:
        """Whether its layers are mixtures."""
        return self.num_experts > 0

    @property
    def num_tokens(self) -> int:
        """Of a step."""
        return self.num_micro_batches * self.num_sequences * self.seq_len


def draw(space: Space, *, seed: int, num: int) -> list[Configuration]:
    """Draw configurations: the same ones for the same seed, and the same first ones for more."""
    *axes, _ = astuple(space)
    columns = [
        _column(random.Random(f"{seed} {axis}"), values, num) for axis, values in enumerate(axes)
    ]
    return [_configuration(*row) for row in zip(*columns, strict=True)]


def _column(source: random.Random, values: Sequence[Any], num: int) -> list[Any]:
    column: list[Any] = []
    while len(column) < num:
        column += source.sample(values, len(values))
    return column[:num]


def _configuration(
    model_type: str,
    num_layers: int,
    hidden: int,
    mlp_ratio: int,
    num_experts: int,
    vocabulary: int,
    num_micro_batches: int,
    seq_len: int,
    slots_frac: float,
    form: tuple[str, str],
    tier: str,
    stash: str,
    targets: str,
    step_flops: float,
) -> Configuration:
    is_mixture = model_type in MIXTURES
    mlp = 3 * mlp_ratio * hidden**2  # a mixture's: NUM_EXPERTS_PER_TOKEN of half the width
    active = num_layers * (3 * hidden**2 + mlp) + vocabulary * hidden
    tokens = step_flops / (6 * active * num_micro_batches)  # of a micro-batch
    seq_len = min(seq_len, max(MIN_SEQ_LEN, int(tokens) // MIN_SEQ_LEN * MIN_SEQ_LEN))
    return Configuration(
        model_type=model_type,
        num_layers=num_layers,
        hidden=hidden,
        mlp_ratio=mlp_ratio,
        num_experts=num_experts if is_mixture else 0,
        vocabulary=vocabulary,
        num_micro_batches=num_micro_batches,
        num_sequences=max(1, round(tokens / seq_len)),
        seq_len=seq_len,
        num_slots=max(2, round(slots_frac * num_layers)),
        dtype=form[0],
        codec=form[1],
        tier=tier,
        stash=stash,
        targets=targets,
    )
