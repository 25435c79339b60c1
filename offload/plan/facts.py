"""What a model is made of: shapes and counts from its config, without weights.

A Hugging Face config names the sizes; which tensors follow from them differs by family in a few ways (biases, norms on queries
and keys, attention windows, where the width of an expert stands). `_FAMILIES` lists exactly these differences. The defaults
are those of transformers 5; sizes that make a model what it is have none and must be in the config.
"""

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from offload.errors import UnsupportedModelError

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


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerFacts:
    """One decoder layer.

    Attributes:
        attention: Whether each token sees all before it, or a window.
        mlp: Whether the MLP is one, or a mixture of experts.
        window: Tokens that a sliding layer sees.
        linears: All matrix products but attention's own.
        norm_parameters: Weights of the norms, those on queries and keys included.
        sink_parameters: Attention sinks, one per head where the family has them.
    """

    attention: Literal["full", "sliding"]
    mlp: Literal["dense", "moe"]
    window: int | None
    linears: tuple[Linear, ...]
    norm_parameters: int
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
    """A LoRA adapter with its targets resolved to module names.

    Attributes:
        rank: LoRA rank.
        targets: Names of linear modules, such as q_proj; fused experts are not modules.
        experts: Whether the fused expert matrices are adapted too.
    """

    rank: int
    targets: tuple[str, ...]
    experts: bool


def adapted_linears(layer: LayerFacts, spec: AdapterSpec) -> tuple[Linear, ...]:
    """Return the matrices of a layer that get an adapter."""
    return tuple(
        linear
        for linear in layer.linears
        if (spec.experts if linear.group == "experts" else linear.name in spec.targets)
        and linear.group != "router"
    )


def layer_adapter_parameters(layer: LayerFacts, spec: AdapterSpec) -> int:
    """Count the adapter's parameters at one layer."""
    return sum(linear.adapter_parameters(spec.rank) for linear in adapted_linears(layer, spec))


def adapter_parameters(facts: ModelFacts, spec: AdapterSpec) -> int:
    """Count the adapter's parameters: r * (d_in + d_out) for every target of every layer.

    Raises:
        UnsupportedModelError: A target's name occurs in no layer, or there are no experts to adapt.
    """
    known = linear_names(facts)
    for target in spec.targets:
        if target not in known:
            raise UnsupportedModelError(
                f"adapter target '{target}' is no linear layer of a {facts.model_type} model",
                limit=f"its linear layers are {', '.join(known)}",
                hint=f"`adapter.targets: [{', '.join(_nearest(target, known))}]`",
            )
    if spec.experts and not any(layer.num_experts for layer in facts.layers):
        raise UnsupportedModelError(
            f"adapter.experts is true, but this {facts.model_type} model has no experts",
            limit="only mixture-of-experts layers have them",
            hint="`adapter.experts: false`",
        )
    return sum(layer_adapter_parameters(layer, spec) for layer in facts.layers)


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
# Families


class _Config:
    """Typed access to a config, with errors that name the key."""

    def __init__(self, values: Mapping[str, object], model_type: str) -> None:
        self._values = values
        self._model_type = model_type

    def size(self, *keys: str) -> int:
        """Return the first of these keys that is present: a size that must be given."""
        for key in keys:
            if self._values.get(key) is not None:
                return self.size_or(key, 0)
        raise UnsupportedModelError(
            f"the config of a {self._model_type} model has no '{keys[0]}'",
            limit="this size cannot be guessed",
            hint=f'add `"{keys[0]}": ...` to config.json',
        )

    def size_or(self, key: str, default: int) -> int:
        value = self._values.get(key)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise self._wrong(key, value, "a whole number, 0 or more")
        return value

    def flag(self, key: str, *, default: bool) -> bool:
        value = self._values.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self._wrong(key, value, "true or false")
        return value

    def items(self, key: str) -> list[object] | None:
        value = self._values.get(key)
        if value is None or isinstance(value, list):
            return value
        raise self._wrong(key, value, "a list")

    def has(self, key: str) -> bool:
        return key in self._values

    def _wrong(self, key: str, value: object, limit: str) -> UnsupportedModelError:
        return UnsupportedModelError(
            f"'{key}' is {value!r} in the config of a {self._model_type} model",
            limit=f"it must be {limit}",
            hint=f"correct `{key}` in config.json",
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Family:
    """How one model type departs from the plain decoder; numbers are defaults of missing keys.

    `expert_width` is the config key of an expert's width; None means that the family is dense. `slides` tells whether layer i has a
    window when the config lists no layer types; None means that the family has no windows.
    """

    max_positions: int
    kv_heads: int | None = None
    head_dim: int | None = None
    is_tied: bool = False
    bias_key: str | None = "attention_bias"
    has_bias: bool = False
    is_output_biased: bool = True
    qk_norm: Literal["head", "whole"] | None = None
    norms: int = 2
    has_sinks: bool = False
    expert_width: str | None = None
    is_moe_biased: bool = False
    window: int | None = None
    has_window_switch: bool = False
    slides: Callable[[int, _Config], bool] | None = None


def _beyond_max_window_layers(i: int, config: _Config) -> bool:
    return i >= config.size_or("max_window_layers", 28)


_FAMILIES: Mapping[str, _Family] = {
    "llama": _Family(max_positions=2048),
    "mistral": _Family(
        max_positions=131072, kv_heads=8, bias_key=None, window=4096, slides=lambda _i, _c: True
    ),
    "mixtral": _Family(
        max_positions=131072,
        kv_heads=8,
        bias_key=None,
        slides=lambda _i, _c: True,
        expert_width="intermediate_size",
    ),
    "qwen2": _Family(
        max_positions=32768,
        kv_heads=32,
        bias_key=None,
        has_bias=True,
        is_output_biased=False,
        window=4096,
        has_window_switch=True,
        slides=_beyond_max_window_layers,
    ),
    "qwen2_moe": _Family(
        max_positions=32768,
        kv_heads=16,
        bias_key="qkv_bias",
        has_bias=True,
        is_output_biased=False,
        expert_width="moe_intermediate_size",
        window=4096,
        has_window_switch=True,
        slides=lambda i, c: (i + 1) % 2 == 1 and not _beyond_max_window_layers(i, c),
    ),
    "qwen3": _Family(
        max_positions=32768,
        kv_heads=32,
        head_dim=128,
        qk_norm="head",
        window=4096,
        has_window_switch=True,
        slides=_beyond_max_window_layers,
    ),
    "qwen3_moe": _Family(
        max_positions=32768,
        kv_heads=4,
        qk_norm="head",
        expert_width="moe_intermediate_size",
        window=4096,
        has_window_switch=True,
        slides=lambda _i, _c: True,
    ),
    "olmoe": _Family(max_positions=4096, qk_norm="whole", expert_width="intermediate_size"),
    "gemma3_text": _Family(
        max_positions=131072,
        kv_heads=4,
        head_dim=256,
        is_tied=True,
        qk_norm="head",
        norms=4,
        window=4096,
        slides=lambda i, c: (i + 1) % c.size_or("sliding_window_pattern", 6) != 0,
    ),
    "gpt_oss": _Family(
        max_positions=131072,
        kv_heads=8,
        head_dim=64,
        has_bias=True,
        has_sinks=True,
        expert_width="intermediate_size",
        is_moe_biased=True,
        window=128,
        slides=lambda i, _c: (i + 1) % 2 == 1,
    ),
}


def model_facts(config: Mapping[str, object]) -> ModelFacts:
    """Read a model's shapes from its Hugging Face config.

    Args:
        config: The parsed config.json.

    Raises:
        UnsupportedModelError: The model type is not known, or a key is missing or of the wrong type.
    """
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in _FAMILIES:
        raise UnsupportedModelError(
            f"model_type {model_type!r} is not known to the planner",
            limit=f"known are {', '.join(sorted(_FAMILIES))}",
            hint=f"nearest: `{'`, `'.join(_nearest(str(model_type), tuple(_FAMILIES)))}`",
        )
    family, read = _FAMILIES[model_type], _Config(config, model_type)
    hidden, num_heads = read.size("hidden_size"), read.size("num_attention_heads")
    default_kv_heads = num_heads if family.kv_heads is None else family.kv_heads
    default_head_dim = hidden // num_heads if family.head_dim is None else family.head_dim
    outline = ModelFacts(
        model_type=model_type,
        hidden_size=hidden,
        num_heads=num_heads,
        num_kv_heads=num_heads
        if read.has("num_key_value_heads") and config["num_key_value_heads"] is None
        else read.size_or("num_key_value_heads", default_kv_heads),
        head_dim=read.size_or("head_dim", default_head_dim),
        vocab_size=read.size("vocab_size"),
        max_position_embeddings=read.size_or("max_position_embeddings", family.max_positions),
        tie_word_embeddings=read.flag("tie_word_embeddings", default=family.is_tied),
        layers=(),
    )
    layers = tuple(
        _layer(i, family, read, outline) for i in range(read.size("num_hidden_layers"))
    )
    return replace(outline, layers=layers)


def _layer(i: int, family: _Family, read: _Config, model: ModelFacts) -> LayerFacts:
    linears = _attention_linears(family, read, model)
    is_moe = _is_moe(i, family, read)
    linears += _moe_linears(family, read, model) if is_moe else _mlp_linears(read, model)
    window = _window(i, family, read)
    norm_parameters = family.norms * model.hidden_size
    if family.qk_norm == "head":
        norm_parameters += 2 * model.head_dim
    elif family.qk_norm == "whole":
        norm_parameters += (
            model.hidden_size + model.hidden_size // model.num_heads * model.num_kv_heads
        )
    return LayerFacts(
        attention="full" if window is None else "sliding",
        mlp="moe" if is_moe else "dense",
        window=window,
        linears=linears,
        norm_parameters=norm_parameters,
        sink_parameters=model.num_heads if family.has_sinks else 0,
    )
