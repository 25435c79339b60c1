"""What a model is made of: shapes and counts, read off the model that is built without weights.

`finetune.model.facts` reads them; shipped shapes have theirs as JSON, so they need no torch.
"""

import difflib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cache
from itertools import groupby
from typing import Any, Literal

from offload.plan.facts.codec import NATIVE
from offload.plan.facts.linears import (
    FP32_BYTES,
    Attention,
    DeltaAttention,
    Group,
    Linear,
    Norm,
    Recurrence,
    SoftmaxAttention,
)
from offload.plan.facts.optimizer import Shape
from offload.plan.facts.tower import TowerFacts


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """A count that grows with the tokens."""

    fixed: float
    per_token: float

    def at(self, num_tokens: int) -> float:
        """Return the count for so many tokens."""
        return self.fixed + self.per_token * num_tokens


@dataclass(frozen=True, kw_only=True, slots=True)
class PassCounts:
    """What a forward or a backward does, in addition to the frozen layer's product."""

    fp32_flops: Line  # arithmetic of products in float32
    half_flops: Line  # arithmetic of products in 16 bits
    num_bytes: Line  # read and written by operations that are not such products
    num_ops: int  # operations that run a kernel


@dataclass(frozen=True, kw_only=True, slots=True)
class MethodCounts:
    """An adapter on one linear layer."""

    shapes: tuple[Shape, ...]  # the shapes of its tensors that train
    forward: PassCounts  # what a forward adds
    backward: PassCounts  # what a backward adds
    saved: Line  # bytes of what is saved for the backward, but for the layer's own input
    saves_input: bool  # whether the layer's own input is saved too
    live: Line  # bytes that are live at once at most, in addition to what is saved


@dataclass(frozen=True, kw_only=True, slots=True)
class PeftMethod:
    """The counts of a method on all kinds of linear layers of a model."""

    name: str  # the name of the method, such as "loha"
    linears: tuple[tuple[tuple[str, int, int], MethodCounts], ...]  # (name, d_in, d_out) -> counts
    frozen_bytes: int  # bytes of the adapter's tensors that do not train, of the whole model

    def of(self, name: str, d_in: int, d_out: int) -> MethodCounts:
        """Return the counts of a linear layer."""
        return dict(self.linears)[name, d_in, d_out]


# ---------------------------------------------------------------------------------------------
# DoRA's magnitudes: how many rows of a matrix are computed on at once, in fp32.
#
# On a CPU a chunk fits into the cache. On a GPU it is larger, so that launches are few: weights are
# cast for their norms; products of outputs and gradients are added up. What is only scaled is cast
# by a GPU's kernel as it reads, in one; on a CPU by the chunk.

Device = Literal["cpu", "cuda"]
NORM_ELEMENTS = {"cpu": 2**18, "cuda": 2**23}
SUM_ELEMENTS = {"cpu": 2**18, "cuda": 2**21}


def norm_rows(num_features: int, device: Device) -> int:
    """Return the rows of a weight with so many columns whose norms are computed at once."""
    return max(1, NORM_ELEMENTS[device] // num_features)


def sum_rows(num_features: int, device: Device) -> int:
    """Return the rows of so many features that are added up at once."""
    return max(1, SUM_ELEMENTS[device] // num_features)


def num_norms(num_rows: int, num_features: int, device: Device) -> int:
    """Return the chunks of a weight."""
    return math.ceil(num_rows / norm_rows(num_features, device))


def num_sums(num_rows: int, num_features: int, device: Device) -> int:
    """Return the chunks of an output that are added up."""
    return math.ceil(num_rows / sum_rows(num_features, device))


def num_scaled(num_rows: int, num_features: int, device: Device) -> int:
    """Return the chunks of an output that are scaled."""
    return 1 if device == "cuda" else num_sums(num_rows, num_features, device)


TensorClass = Literal[
    "attention",
    "dense MLP",
    "experts",
    "shared experts",
    "router",
    "norms",
    "biases",
    "other in layers",
    "embeddings",
    "head",
    "other",
    "adapters and other trained",
]
"""Classes of parameters, in display order."""


@dataclass(frozen=True, kw_only=True, slots=True)
class InventoryRow:
    """The parameters of one class that are stored in one codec."""

    kind: TensorClass  # their class
    codec: str  # their codec
    is_in_layers: bool  # whether they are in the decoder layers, and not trained on the device
    num_parameters: int  # how many parameters
    decoded_bytes: int  # their size in the compute dtype
    encoded_bytes: int  # their size as stored


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightInventory:
    """All rows of a model."""

    rows: tuple[InventoryRow, ...]

    @property
    def num_parameters(self) -> int:
        """Parameters of the model; shared ones count once."""
        return sum(row.num_parameters for row in self.rows)

    @property
    def decoded_bytes(self) -> int:
        """Size of all parameters in the compute dtype."""
        return sum(row.decoded_bytes for row in self.rows)

    @property
    def encoded_bytes(self) -> int:
        """Size of all parameters as stored."""
        return sum(row.encoded_bytes for row in self.rows)

    @property
    def encoded_frac(self) -> float:
        """Fraction of the parameters that are stored encoded."""
        encoded = sum(row.num_parameters for row in self.rows if row.codec != NATIVE)
        return encoded / self.num_parameters

    @property
    def layers_encoded_frac(self) -> float:
        """Fraction of the decoder layers' bytes, in the compute dtype, that is stored encoded."""
        rows = [row for row in self.rows if row.is_in_layers]
        encoded = sum(row.decoded_bytes for row in rows if row.codec != NATIVE)
        return encoded / sum(row.decoded_bytes for row in rows) if rows else 0.0


ATTENTIONS: Mapping[str, type[Attention]] = {
    kind.__name__: kind for kind in (SoftmaxAttention, DeltaAttention, Recurrence)
}


class HashedOnce:
    """A frozen value that is looked up far more often than it is made: its hash is kept."""

    __slots__ = ("_hash",)
    _hash: int

    def __hash__(self) -> int:
        try:
            found: int = self._hash
        except AttributeError:
            found = hash(tuple(getattr(self, name) for name in type(self).__slots__))
            object.__setattr__(self, "_hash", found)
        return found


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerFacts(HashedOnce):
    """One decoder layer."""

    attention: Attention  # its token mixing
    linears: tuple[Linear, ...]  # all matrix products except those within attention
    norms: tuple[Norm, ...]  # all norms, including those on queries and keys
    num_others: int = 0  # other parameters: attention sinks, convolutions, decays, scales
    # Whether one operator can rotate queries and keys, as the engine proves on the model's code.
    is_rotation_fusable: bool = False

    __hash__ = HashedOnce.__hash__

    @property
    def window(self) -> int | None:
        """Tokens that each token attends to; None for all before it, in any kind of mixing."""
        return self.attention.window if isinstance(self.attention, SoftmaxAttention) else None

    def weights(self, group: Group) -> int:
        """Weights of one group's matrices, without biases."""
        return sum(linear.num_weights for linear in self.linears if linear.group == group)

    def parameters_by_class(self) -> dict[str, int]:
        """Parameter counts that add up to `num_parameters`."""
        biases = sum(linear.num_biases for linear in self.linears)
        return {
            "attention": self.weights("attention"),
            "mlp": self.weights("mlp"),
            "experts": self.weights("experts"),
            "shared_experts": self.weights("shared_experts"),
            "router": self.weights("router"),
            "norm": self.norm_parameters,
            "bias": biases + sum(norm.num_biases for norm in self.norms),
            "other": self.num_others,
        }

    @property
    def norm_parameters(self) -> int:
        """Weights of all norms."""
        return sum(norm.num_weights for norm in self.norms)

    @property
    def normed_features(self) -> int:
        """Elements of one token that pass through a norm, counted once per norm."""
        return sum(norm.num_features for norm in self.norms)

    @property
    def other_sizes(self) -> tuple[int, ...]:
        """Elements of each other tensor; tensors that the facts do not distinguish count as one."""
        steering = (linear.num_weights for linear in self.linears if not linear.is_encodable)
        biases = (linear.num_biases for linear in self.linears)
        normed = (n for norm in self.norms for n in (norm.num_weights, norm.num_biases))
        return tuple(n for n in (*steering, *biases, *normed, self.num_others) if n)

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


@cache
def _one_of(layer: LayerFacts) -> LayerFacts:
    """Return the same object for equal layers, which are then compared at no cost."""
    return layer


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelFacts(HashedOnce):
    """A causal language model: embedding, layers, norm, head.

    Attributes:
        model_type: The type that its config names.
        hidden_size: Features of a hidden state.
        num_streams: Hidden states of a token that pass from layer to layer.
        has_fp32_inputs: Whether they are in fp32, whatever the weights are in.
        vocab_size: Size of the vocabulary.
        max_position_embeddings: Tokens of the longest supported sequence.
        embedding_parameters: Weights of the token embedding.
        head_parameters: Weights of the head that are not the embedding's.
        tie_word_embeddings: Whether the head's weights are the embedding's.
        final_norm_parameters: Weights of the norm before the head.
        num_others: Other parameters before and after the layers: positions, inputs of layers.
        layer_table_parameters: Weights, of these, of a table of such features by token.
        layer_input_features: Features that each layer gets in addition to the hidden state.
        carried_features: Features of a token that layers compute for later ones to read, and that
            are kept from a forward to a backward visit: shared keys and values, states of routers.
        carried_gradient_features: The most of them that have a gradient at one time.
        num_carried_indices: Layers that choose tokens for later ones to attend to.
        index_top_k: The most tokens that one of these chooses for a token.
        layers: The layers in forward order.
        num_classes: Outputs of a head that does not predict tokens: 1 of a reward model, of a
            classifier one for each class; 0 if the head predicts tokens.
        is_memory_tested: Whether the formulas of its layers' memory are tested against the model of
            its type; of others a plan keeps and sends nothing before it is traced.
        own_experts: Why no adapter goes onto its fused experts; empty if one does.
        published: The codec that keeps its published weights to the bit, or else the
            `quant_method` of these; empty if they are plain.
        tower: Its image tower, which is in no other count; None if it has none.
    """

    model_type: str
    hidden_size: int
    vocab_size: int
    max_position_embeddings: int
    embedding_parameters: int
    head_parameters: int
    tie_word_embeddings: bool
    final_norm_parameters: int
    num_others: int = 0
    num_streams: int = 1
    has_fp32_inputs: bool = False
    layer_input_features: int = 0
    carried_features: int = 0
    carried_gradient_features: int = 0
    num_carried_indices: int = 0
    index_top_k: int = 0
    layer_table_parameters: int = 0
    layers: tuple[LayerFacts, ...]
    num_classes: int = 0
    is_memory_tested: bool = False
    own_experts: str = ""
    published: str = ""
    tower: TowerFacts | None = None

    __hash__ = HashedOnce.__hash__

    def __post_init__(self) -> None:
        object.__setattr__(self, "layers", tuple(map(_one_of, self.layers)))

    def to_json(self) -> dict[str, Any]:
        """Write the facts as JSON that `from_json` reads: each kind of layer once, then its runs.

        Values that are a field's default are left out.
        """
        kinds = list(dict.fromkeys(self.layers))
        runs = [[kinds.index(kind), len(list(equal))] for kind, equal in groupby(self.layers)]
        rows = [
            _written(kind)
            | {"attention": [type(kind.attention).__name__, _written(kind.attention)]}
            for kind in kinds
        ]
        return {**_written(self), "kinds": rows, "layers": runs}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "ModelFacts":
        """Read what `to_json` wrote."""
        kinds = [_layer_of(**row) for row in values["kinds"]]
        layers = tuple(kinds[kind] for kind, number in values["layers"] for _ in range(number))
        others = {name: value for name, value in values.items() if name != "kinds"}
        if "tower" in others:
            others["tower"] = TowerFacts(**others["tower"])
        return cls(**others | {"layers": layers})

    @property
    def num_outputs(self) -> int:
        """Outputs of the head for a token."""
        return self.num_classes or self.vocab_size

    @property
    def has_experts(self) -> bool:
        """Whether any layer is a mixture of experts."""
        return any(layer.num_experts for layer in self.layers)

    @property
    def num_layers(self) -> int:
        """Decoder layers."""
        return len(self.layers)

    @property
    def outer_parameters(self) -> int:
        """All weights before and after the layers."""
        tables = self.embedding_parameters + self.head_parameters
        return tables + self.final_norm_parameters + self.num_others

    @property
    def num_parameters(self) -> int:
        """All parameters of the model."""
        return self.outer_parameters + sum(layer.num_parameters for layer in self.layers)

    @property
    def num_active_parameters(self) -> int:
        """Parameters that one token uses."""
        return self.outer_parameters + sum(layer.num_active_parameters for layer in self.layers)


def _written(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_written(part) for part in value]
    if not is_dataclass(value):
        return value
    given = {field.name: (getattr(value, field.name), field.default) for field in fields(value)}
    return {name: _written(part) for name, (part, default) in given.items() if part != default}


def _layer_of(
    attention: tuple[str, Mapping[str, Any]],
    linears: Iterable[Mapping[str, Any]] = (),
    norms: Iterable[Mapping[str, Any]] = (),
    **others: Any,
) -> LayerFacts:
    name, sizes = attention
    return LayerFacts(
        attention=ATTENTIONS[name](**sizes),
        linears=tuple(Linear(**row) for row in linears),
        norms=tuple(Norm(**row) for row in norms),
        **others,
    )


def with_classifier_head(facts: ModelFacts, num_classes: int, *, has_bias: bool) -> ModelFacts:
    """Return the facts of a model whose head is replaced.

    Args:
        facts: Of the model.
        num_classes: Outputs of the new head.
        has_bias: Whether it has a bias.
    """
    return replace(
        facts,
        head_parameters=num_classes * (facts.hidden_size + has_bias),
        tie_word_embeddings=False,
        num_classes=num_classes,
    )


# ---------------------------------------------------------------------------------------------
# Adapters


@dataclass(frozen=True, kw_only=True, slots=True)
class WholeWeights:
    """How many of the model's own weights train, where no adapter does."""

    layers: tuple[int, ...]  # the number in each layer, in forward order
    outer: tuple[tuple[str, int], ...]  # the numbers before and after the layers, by name
    # Bytes that make up the fp32 master of each with it: all of one in float16; None for the bytes
    # by which its type is shorter.
    low_bytes: int | None = None

    @property
    def num_outer(self) -> int:
        """Weights before and after the layers."""
        return sum(number for _, number in self.outer)

    @property
    def num_parameters(self) -> int:
        """All that trains."""
        return sum(self.layers) + self.num_outer

    def frac_of(self, facts: ModelFacts) -> float:
        """Return which part of the layers' weights trains."""
        return sum(self.layers) / sum(layer.num_parameters for layer in facts.layers)


@dataclass(frozen=True, kw_only=True, slots=True)
class AdapterSpec:
    """A LoRA adapter with its targets resolved to module names, and the modules trained in full.

    Or the model's own weights, without any adapter.

    Attributes:
        rank: LoRA rank.
        targets: Names of linear modules, such as q_proj; fused experts are not modules.
        experts: Whether the fused expert matrices are adapted too.
        rank_pattern: Projections with a rank of their own, by `Linear.key`.
        alpha_pattern: Projections with an alpha of their own: takes no bytes; names are checked.
        is_dora: Whether adapted linears learn a magnitude per output feature.
        modules: Modules that are trained in full: see `offload.plan.facts.trainable`.
        is_in_base_dtype: Whether branches of linear layers are computed in the dtype of the
            weights, one function per input; otherwise each in fp32, as peft does.
        has_dropout: Whether branches of linear layers read their input after a dropout, each with
            a mask of its own.
        whole: The model's own weights that train in place of an adapter; None if it is frozen.
        method: The counts of another method than LoRA, whose modules peft computes; else None.
        is_rounded: Whether A and B are kept in bf16, and rounded at random after each update.
        virtual: Shapes of what trains for virtual tokens in front of rows; none without them.
        num_past: Virtual tokens that have keys and values in each layer, and are not in its rows.
    """

    rank: int
    targets: tuple[str, ...]
    experts: bool
    rank_pattern: tuple[tuple[str, int], ...] = ()
    alpha_pattern: tuple[str, ...] = ()
    is_dora: bool = False
    modules: tuple[str, ...] = ()
    is_in_base_dtype: bool = False
    has_dropout: bool = False
    whole: WholeWeights | None = None
    method: PeftMethod | None = None
    is_rounded: bool = False
    virtual: tuple[tuple[int, ...], ...] = ()
    num_past: int = 0

    @classmethod
    def none(cls, whole: WholeWeights) -> "AdapterSpec":
        """Return that there is no adapter, and these weights train."""
        return cls(rank=1, targets=(), experts=False, whole=whole)

    @property
    def are_branches_grouped(self) -> bool:
        """Whether branches are ours, in one function; peft computes DoRA after a dropout."""
        by_peft = self.method is not None or (self.is_dora and self.has_dropout)
        return self.is_in_base_dtype and not by_peft

    def reads_alone(self, linear: Linear) -> bool:
        """Return whether a linear's branch has an input that no other branch reads."""
        return self.has_dropout or linear.reads != "input"

    @property
    def reads_outputs(self) -> bool:
        """Whether gradients read the outputs of adapted linears: DoRA, or a method that may."""
        return self.is_dora or self.method is not None

    def counts_of(self, linear: Linear) -> MethodCounts | None:
        """Return what another method than LoRA adds to a linear; None for LoRA."""
        if self.method is None:
            return None
        return self.method.of(linear.name, linear.d_in, linear.d_out)

    @property
    def past_bytes(self) -> int:
        """Bytes of the keys and values that all layers have of a prefix, in fp32; 0 without one.

        Their features are the last of a table, or of the biases of the MLP that computes them.
        """
        return FP32_BYTES * self.num_past * self.virtual[-1][-1] if self.num_past else 0

    def rank_of(self, linear: Linear) -> int:
        """Return the rank of one projection."""
        return dict(self.rank_pattern).get(linear.key, self.rank)


def adapted_linears(layer: LayerFacts, spec: AdapterSpec) -> tuple[Linear, ...]:
    """Return the matrices of a layer that get an adapter."""
    return tuple(
        linear
        for linear in layer.linears
        if (linear.is_module and linear.name in spec.targets)
        or (linear.group == "experts" and spec.experts)
    )


def nearest(name: str, known: Iterable[str]) -> str:
    """Return the known name that is closest to a misspelt one."""
    return difflib.get_close_matches(name, list(known), n=1, cutoff=0.0)[0]


def linear_names(facts: ModelFacts) -> tuple[str, ...]:
    """Return the names of the linear modules that can be adapter targets, in order of use."""
    names = (linear.name for layer in facts.layers for linear in layer.linears if linear.is_module)
    return tuple(dict.fromkeys(names))
