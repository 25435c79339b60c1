"""The model families: how each differs from a plain decoder.

A Hugging Face config has the sizes; the tensors that follow from them differ by family in a few
respects. `FAMILIES` lists exactly these. Defaults are those of transformers 5, for keys that
published configs omit; sizes that define a model have no default and must be in the config.
"""

import reprlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal, TypeVar

from offload.errors import UnsupportedModelError
from offload.plan.facts.linears import (
    Attention,
    DeltaAttention,
    Group,
    Linear,
    Norm,
    Reads,
    Scores,
    SoftmaxAttention,
)

T = TypeVar("T")

MAX_SIZE = 2**40  # above any real size; products of a few such sizes still fit a float


class Config:
    """Typed access to a config, with errors that name the key."""

    def __init__(
        self, values: Mapping[str, object], model_type: str, defaults: Mapping[str, int]
    ) -> None:
        """Keep the parsed config, and this family's sizes for missing keys."""
        self._values = values
        self._model_type = model_type
        self._defaults = defaults

    def size(self, *keys: str, least: int = 1) -> int:
        """Return the first of these keys that has a value: a size that cannot be guessed."""
        for key in keys:
            if self._values.get(key) is not None or key in self._defaults:
                return self.size_or(key, 0, least=least)
        raise UnsupportedModelError(
            f"the config of a {self._model_type} model has no `{keys[0]}`",
            limit="this size cannot be guessed",
            hint=f'add `"{keys[0]}": ...` to config.json',
        )

    def size_or(self, key: str, default: int, *, least: int = 0) -> int:
        """Return a size; if the key is missing or null, the family's size or the default."""
        value = self._typed(key, int, self._defaults.get(key, default), "a whole number")
        if not least <= value <= MAX_SIZE:
            raise self._wrong(key, value, f"a whole number from {least} to 2**40")
        return value

    def flag(self, key: str, *, default: bool) -> bool:
        """Return a boolean, or the default if the key is missing or null."""
        return self._typed(key, bool, default, "true or false")

    def names(self, key: str) -> list[object]:
        """Return a list, empty if the key is missing or null."""
        return self._typed(key, list, [], "a list")

    def frac(self, key: str, *, within: str, default: float) -> float:
        """Return a fraction from a config, or from a mapping in it, or the default."""
        inner = self._values.get(within)
        for values in (self._values, inner if isinstance(inner, Mapping) else {}):
            value = values.get(key)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
                raise self._wrong(key, value, "a number from 0 to 1")
            return float(value)
        return default

    def is_null(self, key: str) -> bool:
        """Whether the key is present but null."""
        return self._values.get(key, 0) is None

    def _typed(self, key: str, kind: type[T], default: T, limit: str) -> T:
        value = self._values.get(key)
        if value is None:
            return default
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise self._wrong(key, value, limit)
        return value

    def _wrong(self, key: str, value: object, limit: str) -> UnsupportedModelError:
        return UnsupportedModelError(
            f"`{key}` is {reprlib.repr(value)} in the config of a {self._model_type} model",
            limit=f"it must be {limit}",
            hint=f"correct `{key}` in config.json",
        )


# ---------------------------------------------------------------------------------------------
# The blocks of decoder layers, each as a small value that reads its sizes from a config.
#
# A block lists its differences from the plain one: biases, norms on queries and keys, fused
# projections, the key of an expert's width. Defaults are those of transformers 5.


@dataclass(frozen=True, kw_only=True, slots=True)
class Mixer:
    """The part of a layer that mixes tokens."""

    attention: Attention  # what it computes
    linears: tuple[Linear, ...]  # its matrix products
    norms: tuple[Norm, ...] = ()  # the norms inside it
    num_others: int = 0  # other parameters: attention sinks, convolutions, decays


@dataclass(frozen=True, kw_only=True, slots=True)
class Heads:
    """Attention with projections for queries, keys and values."""

    bias_key: str | None = "attention_bias"  # the flag for biases, if a config has one
    has_bias: bool = False  # the flag's default
    is_output_biased: bool = True  # whether the flag applies to the output projection too
    # Norms on queries and keys: of each head, or of all heads together.
    qk_norm: Literal["head", "whole"] | None = None
    # The flag for these norms, off by default; None if they are always on.
    qk_norm_key: str | None = None
    is_fused: bool = False  # whether queries, keys and values are one projection
    # Whether the projection of queries computes a gate for the output as well.
    has_output_gate: bool = False
    scores: Scores = "fused"  # whether they have sinks, one parameter per head, or soft caps
    rotary_frac: float = 1.0  # fraction of a head that is rotated, if the config has none

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
    """A mixture of experts."""

    width_key: str = "moe_intermediate_size"  # the key of an expert's width
    # An expert for all tokens: one with its own gate, or one as wide as several.
    shared: Literal["gated", "counted"] | None = None
    shared_bias_key: str | None = None  # the flag for biases of the shared expert, off by default
    is_biased: bool = False  # whether experts and the router have biases
    is_clamped: bool = False  # whether gate and up are clamped
    # Whether the router is a linear module after a norm without weights, with scales for its input
    # and one scale per expert.
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


_HEADS, _MLP = Heads(), Mlp()


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """How a model type differs from the plain decoder."""

    defaults: Mapping[str, int] = field(default_factory=dict)  # sizes of missing keys
    attention: Heads | GlobalHeads | Latent = _HEADS  # its softmax attention
    delta: Delta | None = None  # its layers of linear attention
    mlp: Mlp = _MLP  # its dense layers
    experts: Experts | None = None  # its mixtures of experts
    has_mlp_beside_experts: bool = False  # whether a layer with experts has the dense MLP too
    num_norms: int = 2  # norms of a layer, except those inside attention
    has_norm_weights: bool = True  # whether these norms, and the one before the head, have weights
    # Whether a norm reads the output of a dense MLP before it is added.
    has_norm_after_mlp: bool = False
    # Whether each layer has its own embedding, gated into its output.
    has_layer_inputs: bool = False
    is_tied: bool = False  # whether head and embedding are tied, if the config does not say
    has_window_switch: bool = False  # whether windows are off unless a flag is set
    # Whether the last layer attends to all tokens, whatever the config says.
    has_global_last: bool = False
    # Whether layer i has a window, if the config lists no layer types.
    slides: Callable[[int, Config], bool] = lambda _i, _config: True
    # Whether layer i has linear attention, if the config lists no layer types.
    is_linear: Callable[[int, Config], bool] = lambda _i, _config: False


def _above(i: int, config: Config) -> bool:
    return i >= config.size_or("max_window_layers", 28)


def _not_each(key: str, default: int) -> Callable[[int, Config], bool]:
    """Return a pattern: all layers except every n-th."""
    return lambda i, config: (i + 1) % config.size_or(key, default, least=1) != 0


def _sizes(
    *, positions: int, kv_heads: int | None = None, head_dim: int | None = None, **others: int
) -> Mapping[str, int]:
    named = {
        "max_position_embeddings": positions,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
    }
    return others | {key: value for key, value in named.items() if value is not None}


_UNBIASED = Heads(bias_key=None)
_QKV_BIASED = Heads(bias_key=None, has_bias=True, is_output_biased=False)
_HEAD_NORMED = Heads(qk_norm="head")
_GATED = Heads(qk_norm="head", has_output_gate=True, rotary_frac=0.25)
_GLM = Heads(has_bias=True, is_output_biased=False, rotary_frac=0.5)
_NARROW_EXPERTS = Experts(width_key="intermediate_size")
_COUNTED = Experts(shared="counted")

_qwen = partial(Family, has_window_switch=True, slides=_above)
_QWEN2 = _qwen(
    defaults=_sizes(positions=32768, kv_heads=32, sliding_window=4096), attention=_QKV_BIASED
)
_QWEN2_VL = replace(
    _QWEN2,
    defaults=_sizes(positions=32768, kv_heads=8, sliding_window=4096, max_window_layers=80),
)
_QWEN3 = _qwen(
    defaults=_sizes(positions=32768, kv_heads=32, head_dim=128, sliding_window=4096),
    attention=_HEAD_NORMED,
)
_QWEN3_MOE = Family(
    defaults=_sizes(positions=32768, kv_heads=4, sliding_window=4096),
    attention=_HEAD_NORMED,
    experts=Experts(),
    has_window_switch=True,
)
_DELTA_SIZES = {
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
}
_QWEN3_5 = Family(
    defaults=_sizes(positions=32768, kv_heads=4, head_dim=256, **_DELTA_SIZES),
    attention=_GATED,
    delta=Delta(),
    is_linear=_not_each("full_attention_interval", 4),
)
_QWEN3_5_MOE = replace(
    _QWEN3_5,
    defaults=_sizes(positions=32768, kv_heads=2, head_dim=256, **_DELTA_SIZES),
    experts=Experts(shared="gated"),
)
_GEMMA = Family(defaults=_sizes(positions=8192, kv_heads=16, head_dim=256), is_tied=True)
_GEMMA3 = Family(
    defaults=_sizes(
        positions=131072,
        kv_heads=4,
        head_dim=256,
        sliding_window=4096,
        num_attention_heads=8,
        vocab_size=262_208,
    ),
    attention=_HEAD_NORMED,
    num_norms=4,
    has_norm_after_mlp=True,
    is_tied=True,
    slides=_not_each("sliding_window_pattern", 6),
)
_GEMMA4 = Family(
    defaults=_sizes(
        positions=131072,
        kv_heads=4,
        head_dim=256,
        sliding_window=512,
        hidden_size_per_layer_input=256,
        vocab_size_per_layer_input=262_144,
    ),
    attention=GlobalHeads(),
    experts=Experts(has_router_scales=True),
    has_mlp_beside_experts=True,
    num_norms=4,
    has_norm_after_mlp=True,
    has_layer_inputs=True,
    is_tied=True,
    has_global_last=True,
    slides=lambda i, _config: (i + 1) % 6 != 0,
)
_MISTRAL = Family(
    defaults=_sizes(positions=131072, kv_heads=8, sliding_window=4096), attention=_UNBIASED
)
_LATENT_SIZES = {
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
}
_READS_OTHERS = "layers that read another layer's keys and values cannot be visited alone"
_ONE_STATE = "one hidden state may go from layer to layer, and only layers may use it"
_NEXT_TOKENS = "its loss must be the mean cross-entropy of the next tokens"
_ONE_LIST = "one list, of its decoder layers, can be streamed"

# Composites whose own flag says whether the head is tied, and the flag's default. For those of
# qwen2 the text part's flag counts too; for those in `TEXT_TIED` only the text part's counts.
WHOLE_TIED: Mapping[str, bool] = {
    "gemma3": True,
    "gemma4": True,
    "mistral3": True,
    "qwen2_vl": False,
    "qwen2_5_vl": False,
    "qwen3_vl": False,
    "qwen3_vl_moe": False,
}
TEXT_TIED = ("qwen3_5", "qwen3_5_moe")

RESIDENT_HINT = "train this model resident, with another tool"
# Model types that the engine refuses whatever their sizes, and why.
REFUSED: Mapping[str, str] = {
    **dict.fromkeys(("gemma4_assistant", "gemma4_unified_assistant"), _READS_OTHERS),
    **dict.fromkeys(("blt", "hrm_text", "musicgen", "musicgen_melody", "xlm"), _ONE_LIST),
    **dict.fromkeys(
        ("cpmant", "gemma3n", "gemma3n_text", "git", "glm_moe_dsa", "hy_v4", "inkling2_text"),
        _ONE_STATE,
    ),
    **dict.fromkeys(("mllama", "prophetnet", "reformer", "xlnet", "xmod", "zaya"), _ONE_STATE),
    **dict.fromkeys(
        ("bart", "bigbird_pegasus", "blenderbot", "blenderbot-small", "marian"), _NEXT_TOKENS
    ),
    **dict.fromkeys(("mbart", "mvp", "pegasus", "plbart", "trocr", "whisper"), _NEXT_TOKENS),
}

FAMILIES: Mapping[str, Family] = {
    "llama": Family(defaults=_sizes(positions=2048), mlp=Mlp(bias_key="mlp_bias")),
    "mistral": _MISTRAL,
    "ministral": _MISTRAL,
    "ministral3": Family(
        defaults=_sizes(positions=262144, kv_heads=8, head_dim=128), attention=_UNBIASED
    ),
    "mixtral": Family(
        defaults=_sizes(positions=131072, kv_heads=8),
        attention=_UNBIASED,
        experts=_NARROW_EXPERTS,
    ),
    "qwen2": _QWEN2,
    **dict.fromkeys(("qwen2_vl", "qwen2_vl_text", "qwen2_5_vl", "qwen2_5_vl_text"), _QWEN2_VL),
    "qwen2_moe": Family(
        defaults=_sizes(positions=32768, kv_heads=16, sliding_window=4096),
        attention=Heads(bias_key="qkv_bias", has_bias=True, is_output_biased=False),
        experts=Experts(shared="gated"),
        has_window_switch=True,
        slides=lambda i, config: i % 2 == 0 and not _above(i, config),
    ),
    "qwen3": _QWEN3,
    "qwen3_vl_text": replace(_QWEN3, defaults=_sizes(positions=128000, kv_heads=32, head_dim=128)),
    "qwen3_moe": _QWEN3_MOE,
    "qwen3_vl_moe_text": replace(
        _QWEN3_MOE, defaults=_sizes(positions=128000, kv_heads=16, sliding_window=4096)
    ),
    "qwen3_next": Family(
        defaults=_sizes(positions=32768, kv_heads=2, head_dim=256, **_DELTA_SIZES),
        attention=_GATED,
        delta=Delta(is_fused=True),
        experts=Experts(shared="gated"),
        is_linear=_not_each("full_attention_interval", 4),
    ),
    "qwen3_5_text": _QWEN3_5,
    "qwen3_5_moe_text": _QWEN3_5_MOE,
    "gemma": _GEMMA,
    "gemma2": replace(
        _GEMMA,
        defaults=_sizes(positions=8192, kv_heads=4, head_dim=256, sliding_window=4096),
        attention=Heads(scores="capped"),
        num_norms=4,
        has_norm_after_mlp=True,
        slides=lambda i, _config: i % 2 == 0,
    ),
    "gemma3_text": _GEMMA3,
    "gemma4_text": _GEMMA4,
    "phi3": Family(
        defaults=_sizes(positions=4096),
        attention=Heads(bias_key=None, is_fused=True),
        mlp=Mlp(is_fused=True),
    ),
    "olmo": Family(defaults=_sizes(positions=2048), has_norm_weights=False),
    "olmo2": Family(
        defaults=_sizes(positions=2048),
        attention=Heads(qk_norm="whole"),
        has_norm_after_mlp=True,
    ),
    "olmo3": Family(
        defaults=_sizes(positions=2048, sliding_window=4096),
        attention=Heads(qk_norm="whole"),
        has_norm_after_mlp=True,
        slides=lambda i, _config: (i + 1) % 4 != 0,
    ),
    "olmoe": Family(
        defaults=_sizes(positions=4096),
        attention=Heads(qk_norm="whole"),
        experts=_NARROW_EXPERTS,
    ),
    "gpt_oss": Family(
        defaults=_sizes(positions=131072, kv_heads=8, head_dim=64, sliding_window=128),
        attention=Heads(has_bias=True, scores="sinks"),
        experts=Experts(width_key="intermediate_size", is_biased=True, is_clamped=True),
        slides=lambda i, _config: i % 2 == 0,
    ),
    "granite": Family(defaults=_sizes(positions=2048), mlp=Mlp(bias_key="mlp_bias")),
    "granitemoe": Family(defaults=_sizes(positions=2048), experts=_NARROW_EXPERTS),
    "glm": Family(
        defaults=_sizes(positions=131072, kv_heads=2, head_dim=128),
        attention=_GLM,
        mlp=Mlp(is_fused=True),
    ),
    "glm4": Family(
        defaults=_sizes(positions=131072, kv_heads=2, head_dim=128),
        attention=_GLM,
        mlp=Mlp(is_fused=True),
        num_norms=4,
        has_norm_after_mlp=True,
    ),
    "glm4_moe": Family(
        defaults=_sizes(positions=131072, kv_heads=8, first_k_dense_replace=1),
        attention=Heads(
            is_output_biased=False, qk_norm="head", qk_norm_key="use_qk_norm", rotary_frac=0.5
        ),
        experts=_COUNTED,
    ),
    "deepseek_v2": Family(
        defaults=_sizes(positions=2048, n_shared_experts=2, **_LATENT_SIZES),
        attention=Latent(),
        mlp=Mlp(bias_key="mlp_bias"),
        experts=Experts(shared="counted", shared_bias_key="mlp_bias"),
    ),
    "deepseek_v3": Family(
        defaults=_sizes(
            positions=4096, first_k_dense_replace=3, n_shared_experts=1, **_LATENT_SIZES
        ),
        attention=Latent(),
        experts=_COUNTED,
    ),
}
