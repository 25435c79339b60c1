"""The blocks of decoder layers, each as a small value that reads its sizes from a config.

A block lists its differences from the plain one: biases, norms on queries and keys, fused
projections, the key of an expert's width. Defaults are those of transformers 5.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

from offload.plan.facts.attention import Attention, DeltaAttention, Scores, SoftmaxAttention
from offload.plan.facts.config import Config
from offload.plan.facts.linears import Group, Linear, Norm, Reads


@dataclass(frozen=True, kw_only=True, slots=True)
class Mixer:
    """The part of a layer that mixes tokens.

    Attributes:
        attention: What it computes.
        linears: Its matrix products.
        norms: The norms inside it.
        num_others: Other parameters: attention sinks, convolutions, decays.
    """

    attention: Attention
    linears: tuple[Linear, ...]
    norms: tuple[Norm, ...] = ()
    num_others: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Heads:
    """Attention with projections for queries, keys and values.

    Attributes:
        bias_key: The flag for biases, if a config has one.
        has_bias: The flag's default.
        is_output_biased: Whether the flag applies to the output projection too.
        qk_norm: Norms on queries and keys: of each head, or of all heads together.
        qk_norm_key: The flag for these norms, off by default; None if they are always on.
        is_fused: Whether queries, keys and values are one projection.
        has_output_gate: Whether the projection of queries computes a gate for the output as well.
        scores: Whether they have sinks, one parameter per head, or soft caps.
        rotary_frac: Fraction of a head that is rotated, if the config has none.
    """

    bias_key: str | None = "attention_bias"
    has_bias: bool = False
    is_output_biased: bool = True
    qk_norm: Literal["head", "whole"] | None = None
    qk_norm_key: str | None = None
    is_fused: bool = False
    has_output_gate: bool = False
    scores: Scores = "fused"
    rotary_frac: float = 1.0

    def read(self, config: Config, hidden: int, window: int | None) -> Mixer:
        """Read the sizes of one layer."""
        attention = self._attention(config, hidden, window)
        q_width = attention.num_heads * attention.qk_dim
        kv_width = attention.num_kv_heads * attention.qk_dim
        has_bias = self.has_bias
        if self.bias_key is not None:
            has_bias = config.flag(self.bias_key, default=has_bias)
        first = partial(Linear, group="attention", d_in=hidden, has_bias=has_bias)
        gates = q_width if self.has_output_gate else 0
        if self.is_fused:
            projections = [first(name="qkv_proj", d_out=q_width + 2 * kv_width)]
        else:
            projections = [
                first(name="q_proj", d_out=q_width + gates),
                first(name="k_proj", d_out=kv_width),
                first(name="v_proj", d_out=kv_width),
            ]
        output = Linear(
            name="o_proj",
            group="attention",
            d_in=q_width,
            d_out=hidden,
            has_bias=has_bias and self.is_output_biased,
            reads="inside",
        )
        return Mixer(
            attention=attention,
            linears=(*projections, output),
            norms=self._norms(config, attention),
            num_others=attention.num_heads if self.scores == "sinks" else 0,
        )

    def _attention(self, config: Config, hidden: int, window: int | None) -> SoftmaxAttention:
        num_heads = config.size("num_attention_heads")
        num_kv_heads = num_heads
        if not config.is_null("num_key_value_heads"):
            num_kv_heads = config.size_or("num_key_value_heads", num_heads, least=1)
        head_dim = config.size_or("head_dim", hidden // num_heads, least=1)
        frac = config.frac(
            "partial_rotary_factor", within="rope_parameters", default=self.rotary_frac
        )
        return SoftmaxAttention(
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            qk_dim=head_dim,
            v_dim=head_dim,
            rotary_dim=int(head_dim * frac),
            num_rotated_heads=num_heads + num_kv_heads,
            window=window,
            has_output_gate=self.has_output_gate,
            is_fused=self.is_fused,
            scores=self.scores,
        )

    def _norms(self, config: Config, attention: SoftmaxAttention) -> tuple[Norm, ...]:
        if self.qk_norm is None:
            return ()
        if self.qk_norm_key is not None and not config.flag(self.qk_norm_key, default=False):
            return ()
        widths = [n * attention.qk_dim for n in (attention.num_heads, attention.num_kv_heads)]
        is_whole = self.qk_norm == "whole"
        return tuple(
            Norm(num_features=width, num_weights=width if is_whole else attention.qk_dim)
            for width in widths
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class GlobalHeads:
    """Attention whose layers without a window have heads of another size (gemma4).

    In these layers keys may also serve as values, with another number of heads. Values have a norm
    without weights.
    """

    def read(self, config: Config, hidden: int, window: int | None) -> Mixer:
        """Read the sizes of one layer."""
        mixer = Heads(qk_norm="head").read(config, hidden, window)
        attention, linears = mixer.attention, mixer.linears
        assert isinstance(attention, SoftmaxAttention)
        if window is None:
            head_dim = config.size_or("global_head_dim", 512, least=1)
            shares = config.flag("attention_k_eq_v", default=False)
            num_kv_heads = attention.num_kv_heads
            if shares:
                num_kv_heads = config.size_or("num_global_key_value_heads", num_kv_heads, least=1)
            attention = replace(
                attention,
                num_kv_heads=num_kv_heads,
                qk_dim=head_dim,
                v_dim=head_dim,
                rotary_dim=head_dim,
                num_rotated_heads=attention.num_heads + num_kv_heads,
            )
            q_width, kv_width = attention.num_heads * head_dim, num_kv_heads * head_dim
            q_proj, k_proj, v_proj, o_proj = linears
            linears = (
                replace(q_proj, d_out=q_width),
                replace(k_proj, d_out=kv_width),
                *(() if shares else (replace(v_proj, d_out=kv_width),)),
                replace(o_proj, d_in=q_width),
            )
        dim, num_kv_heads = attention.qk_dim, attention.num_kv_heads
        norms = (
            Norm(num_features=attention.num_heads * dim, num_weights=dim),
            Norm(num_features=num_kv_heads * dim, num_weights=dim),
            Norm(num_features=num_kv_heads * dim, num_weights=0),
        )
        return Mixer(attention=attention, linears=linears, norms=norms)


@dataclass(frozen=True, kw_only=True, slots=True)
class Latent:
    """Multi-head latent attention: keys, values and perhaps queries from a few features."""

    def read(self, config: Config, hidden: int, window: int | None) -> Mixer:
        """Read the sizes of one layer."""
        num_heads = config.size("num_attention_heads")
        kv_rank, rotary_dim = config.size("kv_lora_rank"), config.size("qk_rope_head_dim")
        nope_dim, v_dim = config.size("qk_nope_head_dim"), config.size("v_head_dim")
        q_rank = None if config.is_null("q_lora_rank") else config.size("q_lora_rank")
        q_width = num_heads * (nope_dim + rotary_dim)
        linear = partial(Linear, group="attention")
        has_bias = config.flag("attention_bias", default=False)
        norms = [Norm(num_features=kv_rank, num_weights=kv_rank)]
        if q_rank is None:
            queries = [linear(name="q_proj", d_in=hidden, d_out=q_width)]
        else:
            norms.append(Norm(num_features=q_rank, num_weights=q_rank))
            queries = [
                linear(name="q_a_proj", d_in=hidden, d_out=q_rank, has_bias=has_bias),
                linear(name="q_b_proj", d_in=q_rank, d_out=q_width, reads="inside"),
            ]
        return Mixer(
            attention=SoftmaxAttention(
                num_heads=num_heads,
                num_kv_heads=num_heads,
                qk_dim=nope_dim + rotary_dim,
                v_dim=v_dim,
                rotary_dim=rotary_dim,
                num_rotated_heads=num_heads + 1,
                window=window,
            ),
            linears=(
                *queries,
                linear(
                    name="kv_a_proj_with_mqa",
                    d_in=hidden,
                    d_out=kv_rank + rotary_dim,
                    has_bias=has_bias,
                ),
                linear(
                    name="kv_b_proj",
                    d_in=kv_rank,
                    d_out=num_heads * (nope_dim + v_dim),
                    reads="inside",
                ),
                linear(
                    name="o_proj",
                    d_in=num_heads * v_dim,
                    d_out=hidden,
                    has_bias=has_bias,
                    reads="inside",
                ),
            ),
            norms=tuple(norms),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Delta:
    """A gated delta net whose inputs are projected in two products (qwen3_next) or in four."""

    is_fused: bool = False

    def read(self, config: Config, hidden: int) -> Mixer:
        """Read the sizes of one layer."""
        attention = DeltaAttention(
            num_key_heads=config.size("linear_num_key_heads"),
            num_value_heads=config.size("linear_num_value_heads"),
            key_dim=config.size("linear_key_head_dim"),
            value_dim=config.size("linear_value_head_dim"),
            conv_tokens=config.size("linear_conv_kernel_dim"),
        )
        num_heads = attention.num_value_heads
        width, mixed = num_heads * attention.value_dim, attention.conv_features
        widths = {"qkv": mixed, "z": width, "b": num_heads, "a": num_heads}
        if self.is_fused:
            widths = {"qkvz": mixed + width, "ba": 2 * num_heads}
        linear = partial(Linear, group="attention")
        output = linear(name="out_proj", d_in=width, d_out=hidden, reads="inside")
        return Mixer(
            attention=attention,
            linears=(
                *(linear(name=f"in_proj_{k}", d_in=hidden, d_out=v) for k, v in widths.items()),
                output,
            ),
            norms=(Norm(num_features=width, num_weights=attention.value_dim),),
            num_others=2 * num_heads + attention.conv_tokens * mixed,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Mlp:
    """A gated MLP; its first two projections may be fused."""

    is_fused: bool = False
    bias_key: str | None = None

    def read(self, config: Config, hidden: int) -> tuple[Linear, ...]:
        """Read its products."""
        has_bias = self.bias_key is not None and config.flag(self.bias_key, default=False)
        width = config.size("intermediate_size")
        return gated("mlp", hidden, width, is_fused=self.is_fused, has_bias=has_bias)


@dataclass(frozen=True, kw_only=True, slots=True)
class Experts:
    """A mixture of experts.

    Attributes:
        width_key: The key of an expert's width.
        shared: An expert for all tokens: one with its own gate, or one as wide as several.
        shared_bias_key: The flag for biases of the shared expert, off by default.
        is_biased: Whether experts and the router have biases.
        is_clamped: Whether gate and up are clamped.
        has_router_scales: Whether the router is a linear module after a norm without weights, with
            scales for its input and one scale per expert.
    """

    width_key: str = "moe_intermediate_size"
    shared: Literal["gated", "counted"] | None = None
    shared_bias_key: str | None = None
    is_biased: bool = False
    is_clamped: bool = False
    has_router_scales: bool = False

    def is_in(self, layer: int, config: Config) -> bool:
        """Return whether a layer has experts."""
        if layer in config.names("mlp_only_layers"):
            return False
        if layer < config.size_or("first_k_dense_replace", 0):
            return False
        return (layer + 1) % config.size_or("decoder_sparse_step", 1, least=1) == 0

    def read(self, config: Config, hidden: int, *, is_unread: bool) -> tuple[Linear, ...]:
        """Read the products of router, experts and shared experts.

        Args:
            config: Of the text part.
            hidden: Features of a hidden state.
            is_unread: Whether what the experts give is only added to the hidden state.
        """
        width = config.size(self.width_key)
        num_experts = config.size("num_experts", "num_local_experts", "n_routed_experts")
        expert = partial(
            Linear,
            group="experts",
            is_module=False,
            num_experts=num_experts,
            active=config.size("num_experts_per_tok", "top_k_experts"),
            has_bias=self.is_biased,
        )
        router = Linear(
            name="proj" if self.has_router_scales else "gate",
            group="router",
            is_module=self.has_router_scales,
            d_in=hidden,
            d_out=num_experts,
            has_bias=self.is_biased,
        )
        reads: Reads = "clamped" if self.is_clamped else "gated"
        return (
            router,
            expert(name="gate_up_proj", d_in=hidden, d_out=2 * width),
            expert(name="down_proj", d_in=width, d_out=hidden, reads=reads, is_unread=is_unread),
            *self._shared(config, hidden, width),
        )

    def _shared(self, config: Config, hidden: int, width: int) -> tuple[Linear, ...]:
        key = self.shared_bias_key
        has_bias = key is not None and config.flag(key, default=False)
        mlp = partial(gated, "shared_experts", hidden, has_bias=has_bias)
        if self.shared == "gated":
            gate = Linear(name="shared_expert_gate", group="shared_experts", d_in=hidden, d_out=1)
            return (*mlp(config.size("shared_expert_intermediate_size")), gate)
        if self.shared is None:
            return ()
        return with_unread_last(mlp(width * config.size("n_shared_experts", least=0)))


def with_unread_last(mlp: tuple[Linear, ...]) -> tuple[Linear, ...]:
    """Return the products of an MLP whose output is only added to the hidden state."""
    *others, down = mlp
    return (*others, replace(down, is_unread=True))


def gated(
    group: Group, hidden: int, width: int, *, is_fused: bool = False, has_bias: bool = False
) -> tuple[Linear, ...]:
    """Return the products of a gated MLP."""
    linear = partial(Linear, group=group, has_bias=has_bias)
    down = linear(name="down_proj", d_in=width, d_out=hidden, reads="gated")
    if is_fused:
        return (linear(name="gate_up_proj", d_in=hidden, d_out=2 * width), down)
    return (
        linear(name="gate_proj", d_in=hidden, d_out=width),
        linear(name="up_proj", d_in=hidden, d_out=width),
        down,
    )
