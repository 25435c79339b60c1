"""What of a layer fused operators compute, as far as facts tell before a model is built.

The engine proves it on the model's own modules (`offload.engine.pointwise.recognise`); a test holds
this to it, family by family. What facts leave open counts as the model's own code, which moves and
keeps more. An activation other than SiLU or GELU is not in the facts.
"""

from dataclasses import dataclass
from typing import Literal

from offload.plan.facts.attention import DeltaAttention, SoftmaxAttention
from offload.plan.facts.facts import AdapterSpec, LayerFacts, ModelFacts
from offload.plan.facts.linears import Linear, Norm
from offload.plan.facts.trainable import NORMS

FusedPart = Literal["norms", "rotary", "gates", "loss"]
"""What is computed by fused operators, or by the model's own code: each by itself."""
MAX_NORM_WEIGHTS = 16384  # a kernel's program holds whole rows
# Families whose attention rotates the halves of a head by one function of queries and keys.
ROTATES_HALVES = frozenset(
    (
        *("llama", "mistral", "ministral", "ministral3", "mixtral", "qwen2", "qwen2_moe", "qwen3"),
        *("qwen3_moe", "gemma", "gemma2", "gemma3_text", "phi3", "olmoe", "granite", "granitemoe"),
        *("glm4_moe", "olmo", "olmo2", "olmo3"),
    )
)
# Of these, whose attention rotates what it normed head by head, and nothing else reads that.
NORMS_HEADS = frozenset(("qwen3", "qwen3_moe", "gemma3_text"))


@dataclass(frozen=True, kw_only=True, slots=True)
class FusedParts:
    """The parts of one layer that are one operator each.

    Attributes:
        norms: Norms.
        has_rotary: Whether queries and keys are rotated in one.
        head_norms: Those of the norms, of queries and keys, that the rotation computes.
        downs: The last linears of MLPs whose gated activation is one.
    """

    norms: tuple[Norm, ...] = ()
    has_rotary: bool = False
    head_norms: tuple[Norm, ...] = ()
    downs: tuple[Linear, ...] = ()

    def without(self, plain: frozenset[FusedPart]) -> "FusedParts":
        """Return the same but for parts that the model's own code computes."""
        return FusedParts(
            norms=() if "norms" in plain else self.norms,
            has_rotary=self.has_rotary and "rotary" not in plain,
            head_norms=() if plain & {"norms", "rotary"} else self.head_norms,
            downs=() if "gates" in plain else self.downs,
        )


NOTHING = FusedParts()


def fused_parts(facts: ModelFacts, layer: LayerFacts, spec: AdapterSpec) -> FusedParts:
    """Return what the fused operators compute of a layer with an adapter."""
    if facts.grade != "config":
        return NOTHING
    norms = layer.norms
    if isinstance(layer.attention, DeltaAttention):  # its norm is multiplied by a gate
        norms = norms[:-1]
    fused = tuple(norm for norm in norms if _is_frozen(spec) and _is_rms(norm))
    return FusedParts(
        norms=fused,
        has_rotary=isinstance(layer.attention, SoftmaxAttention)
        and facts.model_type in ROTATES_HALVES,
        head_norms=fused[-2:] if facts.model_type in NORMS_HEADS else (),
        downs=tuple(linear for linear in layer.linears if _is_gated_mlp(layer, linear, spec)),
    )


def compiled_parts(layer: LayerFacts) -> FusedParts:
    """Return what torch makes one kernel each of in a compiled layer."""
    return FusedParts(
        norms=layer.norms,
        has_rotary=isinstance(layer.attention, SoftmaxAttention),
        downs=tuple(x for x in layer.linears if x.reads == "gated" and x.group != "experts"),
    )


def _is_frozen(spec: AdapterSpec) -> bool:
    """Return whether the layers' norms are frozen: fused ones have no gradient by their weights."""
    return spec.whole is None and NORMS not in spec.modules


def _is_rms(norm: Norm) -> bool:
    """Return whether a norm of a known family is an RMSNorm with weights."""
    return 0 < norm.num_weights <= MAX_NORM_WEIGHTS and not norm.num_biases


def _is_gated_mlp(layer: LayerFacts, down: Linear, spec: AdapterSpec) -> bool:
    """Return whether a linear ends an MLP of three linears, none of which is trained whole."""
    names = ("gate_proj", "up_proj", "down_proj")
    group = {linear.name for linear in layer.linears if linear.group == down.group}
    return (
        down.group in ("mlp", "shared_experts")
        and (down.name, down.reads) == ("down_proj", "gated")
        and group >= set(names)
        and not set(names) & set(spec.modules)
    )
