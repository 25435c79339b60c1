"""What a model is made of: shapes and counts from its config, without weights."""

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

from offload.errors import UnsupportedModelError
from offload.plan.families import FAMILIES, Config, Family

Group = Literal["attention", "mlp", "experts", "shared_experts", "router"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Linear:
    """One matrix product of a layer, or a fused stack of one per expert.

    Attributes:
        name: Last part of the module's (or fused parameter's) name, such as q_proj.
        group: Part of the layer that it belongs to.
        d_in: Features in.
        d_out: Features out.
        num_experts: Matrices in the stack.
        active: Matrices of the stack that one token passes through.
        has_bias: Whether each matrix has a bias of d_out elements.
    """

    name: str
    group: Group
    d_in: int
    d_out: int
    num_experts: int = 1
    active: int = 1
    has_bias: bool = False

    @property
    def num_weights(self) -> int:
        """Weights of the whole stack, without biases."""
        return self.num_experts * self.d_in * self.d_out

    @property
    def num_biases(self) -> int:
        """Biases of the whole stack."""
        return self.num_experts * self.d_out if self.has_bias else 0

    def adapter_parameters(self, rank: int) -> int:
        """LoRA parameters as peft shapes them: A (rank * E, d_in) and B (d_out, rank * E)."""
        return rank * self.num_experts * (self.d_in + self.d_out)

    @property
    def key(self) -> str:
        """Name by which an adapter's patterns mean it, whose last part others may share."""
        return f"experts.{self.name}" if self.group == "experts" else self.name


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerFacts:
    """One decoder layer.

    Attributes:
        attention: Whether each token sees all before it, or a window.
        mlp: Whether the MLP is one, or a mixture of experts.
        window: Tokens that a sliding layer sees.
        linears: All matrix products but attention's own.
        norm_parameters: Weights of the norms, those on queries and keys included.
        num_norms: Norms, those on queries and keys included.
        normed_features: Elements of one token that pass through a norm, counted once per norm.
        sink_parameters: Attention sinks, one per head where the family has them.
    """

    attention: Literal["full", "sliding"]
    mlp: Literal["dense", "moe"]
    window: int | None
    linears: tuple[Linear, ...]
    norm_parameters: int
    num_norms: int
    normed_features: int
    sink_parameters: int

    def weights(self, group: Group) -> int:
        """Weights of one group's matrices, without biases."""
        return sum(linear.num_weights for linear in self.linears if linear.group == group)

    def parameters_by_class(self) -> dict[str, int]:
        """Parameter counts that add up to `num_parameters`."""
        return {
            "attention": self.weights("attention"),
            "mlp": self.weights("mlp"),
            "experts": self.weights("experts"),
            "shared_experts": self.weights("shared_experts"),
            "router": self.weights("router"),
            "norm": self.norm_parameters,
            "bias": sum(linear.num_biases for linear in self.linears),
            "sinks": self.sink_parameters,
        }

    @property
    def matrix_parameters(self) -> int:
        """Parameters that a codec writes: not routers, norms, biases and sinks."""
        kinds = ("attention", "mlp", "experts", "shared_experts")
        return sum(self.parameters_by_class()[kind] for kind in kinds)

    @property
    def num_parameters(self) -> int:
        """All parameters of the layer."""
        return sum(self.parameters_by_class().values())

    @property
    def num_active_parameters(self) -> int:
        """Parameters that one token uses: of the experts, only those that it is sent to."""
        idle = sum(
            (linear.num_weights + linear.num_biases)
            * (linear.num_experts - linear.active)
            // linear.num_experts
            for linear in self.linears
        )
        return self.num_parameters - idle

    @property
    def num_experts(self) -> int:
        """Experts of the layer; 0 in a dense one."""
        return max((x.num_experts for x in self.linears if x.group == "experts"), default=0)

    @property
    def experts_per_token(self) -> int:
        """Experts that one token is sent to; 0 in a dense layer."""
        return max((x.active for x in self.linears if x.group == "experts"), default=0)


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelFacts:
    """A causal language model: embedding, layers, norm, head."""

    model_type: str
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int
    tie_word_embeddings: bool
    layers: tuple[LayerFacts, ...]

    @property
    def num_layers(self) -> int:
        """Decoder layers."""
        return len(self.layers)

    @property
    def embedding_parameters(self) -> int:
        """Weights of the token embedding."""
        return self.vocab_size * self.hidden_size

    @property
    def head_parameters(self) -> int:
        """Weights of the head that are not the embedding's."""
        return 0 if self.tie_word_embeddings else self.vocab_size * self.hidden_size

    @property
    def final_norm_parameters(self) -> int:
        """Weights of the norm before the head."""
        return self.hidden_size

    @property
    def _outer_parameters(self) -> int:
        return self.embedding_parameters + self.head_parameters + self.final_norm_parameters

    @property
    def num_parameters(self) -> int:
        """All parameters of the model."""
        return self._outer_parameters + sum(layer.num_parameters for layer in self.layers)

    @property
    def num_active_parameters(self) -> int:
        """Parameters that one token uses."""
        return self._outer_parameters + sum(layer.num_active_parameters for layer in self.layers)


# ---------------------------------------------------------------------------------------------
# Adapters


@dataclass(frozen=True, kw_only=True, slots=True)
class AdapterSpec:
    """A LoRA adapter with its targets resolved to module names, and what trains whole beside it.

    Attributes:
        rank: LoRA rank.
        targets: Names of linear modules, such as q_proj; fused experts are not modules.
        experts: Whether the fused expert matrices are adapted too.
        rank_pattern: Projections with a rank of their own, by `Linear.key`.
        alpha_pattern: Projections with an alpha of their own: no bytes, but their names must be.
        is_dora: Whether adapted linears learn a magnitude per output feature.
        modules: What is trained whole: see `offload.plan.trained`.
    """

    rank: int
    targets: tuple[str, ...]
    experts: bool
    rank_pattern: tuple[tuple[str, int], ...] = ()
    alpha_pattern: tuple[str, ...] = ()
    is_dora: bool = False
    modules: tuple[str, ...] = ()

    def rank_of(self, linear: Linear) -> int:
        """Return the rank of one projection."""
        return dict(self.rank_pattern).get(linear.key, self.rank)


def adapted_linears(layer: LayerFacts, spec: AdapterSpec) -> tuple[Linear, ...]:
    """Return the matrices of a layer that get an adapter."""
    return tuple(
        linear
        for linear in layer.linears
        if (spec.experts if linear.group == "experts" else linear.name in spec.targets)
        and linear.group != "router"
    )


def nearest(name: str, known: Iterable[str]) -> str:
    """Return the known name that a misspelt one is most like."""
    return difflib.get_close_matches(name, list(known), n=1, cutoff=0.0)[0]


def linear_names(facts: ModelFacts) -> tuple[str, ...]:
    """Return the names of the linear modules that can be adapter targets, in order of use."""
    names = (
        linear.name
        for layer in facts.layers
        for linear in layer.linears
        if linear.group not in ("experts", "router")
    )
    return tuple(dict.fromkeys(names))


# ---------------------------------------------------------------------------------------------
# From a config


def model_facts(config: Mapping[str, object]) -> ModelFacts:
    """Read a model's shapes from its Hugging Face config, the parsed config.json.

    Raises:
        UnsupportedModelError: Unknown model type, or a key is missing or of the wrong type.
    """
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        near = difflib.get_close_matches(str(model_type), FAMILIES, n=3, cutoff=0.0)
        raise UnsupportedModelError(
            f"model_type {model_type!r} is not known to the planner",
            limit=f"known are {', '.join(sorted(FAMILIES))}",
            hint=f"nearest: `{'`, `'.join(near)}`",
        )
    family, read = FAMILIES[model_type], Config(config, model_type)
    hidden, num_heads = read.size("hidden_size"), read.size("num_attention_heads")
    kv_heads = num_heads if read.is_null("num_key_value_heads") else family.kv_heads or num_heads
    model = ModelFacts(
        model_type=model_type,
        hidden_size=hidden,
        num_heads=num_heads,
        num_kv_heads=read.size_or("num_key_value_heads", kv_heads),
        head_dim=read.size_or("head_dim", family.head_dim or hidden // num_heads),
        vocab_size=read.size("vocab_size"),
        max_position_embeddings=read.size_or("max_position_embeddings", family.max_positions),
        tie_word_embeddings=read.flag("tie_word_embeddings", default=family.is_tied),
        layers=(),
    )
    num_layers = read.size("num_hidden_layers")
    return replace(model, layers=tuple(_layer(i, family, read, model) for i in range(num_layers)))


def _layer(i: int, family: Family, read: Config, model: ModelFacts) -> LayerFacts:
    is_moe = _is_moe(i, family, read)
    window = _window(i, family, read)
    norms_width = family.norms * model.hidden_size
    q_width, kv_width = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    qk_parameters = {None: 0, "head": 2 * model.head_dim, "whole": q_width + kv_width}
    return LayerFacts(
        attention="full" if window is None else "sliding",
        mlp="moe" if is_moe else "dense",
        window=window,
        linears=(
            *_attention_linears(family, read, model),
            *(_moe_linears(family, read, model) if is_moe else _mlp_linears(read, model)),
        ),
        norm_parameters=norms_width + qk_parameters[family.qk_norm],
        num_norms=family.norms + (2 if family.qk_norm else 0),
        normed_features=norms_width + (q_width + kv_width if family.qk_norm else 0),
        sink_parameters=model.num_heads if family.has_sinks else 0,
    )


def _is_moe(i: int, family: Family, read: Config) -> bool:
    if family.expert_width is None or i in read.names("mlp_only_layers"):
        return False
    return (i + 1) % read.size_or("decoder_sparse_step", 1) == 0


def _window(i: int, family: Family, read: Config) -> int | None:
    if family.has_window_switch and not read.flag("use_sliding_window", default=False):
        return None
    if read.is_null("sliding_window"):
        return None
    types = read.names("layer_types")
    slides = types[i] == "sliding_attention" if types else family.slides(i, read)
    return read.size_or("sliding_window", family.window or 0) or None if slides else None


def _attention_linears(family: Family, read: Config, model: ModelFacts) -> tuple[Linear, ...]:
    hidden = model.hidden_size
    q_width, kv_width = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    has_bias = family.has_bias
    if family.bias_key is not None:
        has_bias = read.flag(family.bias_key, default=family.has_bias)
    linear = partial(Linear, group="attention")
    return (
        linear(name="q_proj", d_in=hidden, d_out=q_width, has_bias=has_bias),
        linear(name="k_proj", d_in=hidden, d_out=kv_width, has_bias=has_bias),
        linear(name="v_proj", d_in=hidden, d_out=kv_width, has_bias=has_bias),
        linear(
            name="o_proj", d_in=q_width, d_out=hidden, has_bias=has_bias and family.is_output_biased
        ),
    )


def _mlp_linears(read: Config, model: ModelFacts) -> tuple[Linear, ...]:
    has_bias = model.model_type == "llama" and read.flag("mlp_bias", default=False)
    return _gated("mlp", model.hidden_size, read.size("intermediate_size"), has_bias=has_bias)


def _gated(group: Group, hidden: int, width: int, *, has_bias: bool) -> tuple[Linear, ...]:
    linear = partial(Linear, group=group, has_bias=has_bias)
    return (
        linear(name="gate_proj", d_in=hidden, d_out=width),
        linear(name="up_proj", d_in=hidden, d_out=width),
        linear(name="down_proj", d_in=width, d_out=hidden),
    )


def _moe_linears(family: Family, read: Config, model: ModelFacts) -> tuple[Linear, ...]:
    hidden, has_bias = model.hidden_size, family.is_moe_biased
    assert family.expert_width is not None
    width = read.size(family.expert_width)
    num_experts = read.size("num_experts", "num_local_experts")
    expert = partial(
        Linear,
        group="experts",
        num_experts=num_experts,
        active=read.size("num_experts_per_tok"),
        has_bias=has_bias,
    )
    router = Linear(name="gate", group="router", d_in=hidden, d_out=num_experts, has_bias=has_bias)
    shared: tuple[Linear, ...] = ()
    if model.model_type == "qwen2_moe":
        shared_width = read.size("shared_expert_intermediate_size")
        shared = (
            *_gated("shared_experts", hidden, shared_width, has_bias=False),
            Linear(name="shared_expert_gate", group="shared_experts", d_in=hidden, d_out=1),
        )
    return (
        router,
        expert(name="gate_up_proj", d_in=hidden, d_out=2 * width),
        expert(name="down_proj", d_in=width, d_out=hidden),
        *shared,
    )
