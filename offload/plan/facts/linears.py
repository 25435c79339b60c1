"""The parts of a decoder layer: matrix products and norms."""

from dataclasses import dataclass
from typing import Literal

FP32_BYTES = 4

Group = Literal["attention", "mlp", "experts", "shared_experts", "router"]
Reads = Literal["input", "inside", "gated", "clamped", "plain"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Linear:
    """One matrix product of a layer, or a fused stack of one per expert."""

    name: str  # last part of the module's (or fused parameter's) name, such as q_proj
    group: Group  # part of the layer that it belongs to
    d_in: int  # features in
    d_out: int  # features out
    num_experts: int = 1  # matrices in the stack
    active: int = 1  # matrices of the stack that one token passes through
    has_bias: bool = False  # whether each matrix has a bias of d_out elements
    # What its input is: the input of its part of the layer, which others read too; something that
    # the part computed from it; or an activation, either of one projection times another, perhaps
    # both of them clamped, or of one alone.
    reads: Reads = "input"
    # Whether it is a linear module of its own, which an adapter can target by name.
    is_module: bool = True
    # Whether it was published in a form that `ModelFacts.published`, a codec, keeps.
    is_kept: bool = False
    # Whether nothing but the layer's output depends on its value: a layer that is recomputed for
    # its gradients can leave it out.
    is_unread: bool = False
    # Whether it ends an MLP whose gated activation one operator can compute.
    is_gate_fusable: bool = False

    @property
    def num_weights(self) -> int:
        """Weights of the whole stack, without biases."""
        return self.num_experts * self.d_in * self.d_out

    @property
    def num_biases(self) -> int:
        """Biases of the whole stack."""
        return self.num_experts * self.d_out if self.has_bias else 0

    @property
    def is_down(self) -> bool:
        """Whether it is the last product of an MLP, after the activation."""
        return self.reads in ("gated", "clamped", "plain")

    @property
    def is_encodable(self) -> bool:
        """Whether a codec encodes it; routers and gates of one output are not encoded."""
        return self.group != "router" and self.d_out > 1

    def adapter_parameters(self, rank: int) -> int:
        """LoRA parameters as peft shapes them: A (rank * E, d_in) and B (d_out, rank * E)."""
        return rank * self.num_experts * (self.d_in + self.d_out)

    @property
    def key(self) -> str:
        """Name that an adapter's patterns match; others may share its last part."""
        return f"experts.{self.name}" if self.group == "experts" else self.name


@dataclass(frozen=True, kw_only=True, slots=True)
class Norm:
    """One norm of a layer."""

    num_features: int  # elements of one token that pass through it, over all heads
    num_weights: int  # its weights: those of one head, or none
    num_biases: int = 0  # its biases
    is_fusable: bool = False  # whether one operator can compute it
    is_in_rotation: bool = False  # whether the operator that rotates its output can compute it too


# ---------------------------------------------------------------------------------------------
# The kinds of token mixing in a layer, and what each computes.
#
# Softmax attention compares every token with all before it, or with those in a window. Without a
# window its work grows with the square of the sequence length. Latent attention (MLA) is softmax
# attention whose keys and values are projected for every head from a few features; queries and keys
# are then wider than values. A delta rule keeps a matrix for each head in place of all keys and
# values; it is computed in chunks of tokens, so its work per token does not depend on the sequence
# length.

Scores = Literal["fused", "sinks", "capped"]
FLASH_MULTIPLE, FLASH_FEATURES = 8, 256  # what flash attention's heads are, and the widest
DELTA_CHUNK_TOKENS = 64  # of the delta rule in transformers and in flash-linear-attention


@dataclass(frozen=True, kw_only=True, slots=True)
class SoftmaxAttention:
    """Queries, keys and values."""

    num_heads: int  # heads of queries
    num_kv_heads: int  # heads of keys and values
    qk_dim: int  # features of a head of queries and keys
    v_dim: int  # features of a head of values
    rotary_dim: int  # features of a head that the rotary embedding rotates
    num_rotated_heads: int  # heads that are rotated; in latent attention all keys share one
    # Tokens that each token attends to, itself included; None for all before it.
    window: int | None = None
    has_output_gate: bool = False  # whether the output is multiplied by a sigmoid
    is_fused: bool = False  # whether queries, keys and values are slices of one product
    # Whether queries and keys are concatenated from two parts, and values are a slice.
    is_latent: bool = False
    # Whether a fused kernel computes them; none supports sinks or soft caps.
    scores: Scores = "fused"
    reads_shared: bool = False  # whether keys and values are another layer's

    @property
    def width(self) -> float:
        """Features of one token in a product of all heads, averaged over the two products."""
        return self.num_heads * (self.qk_dim + self.v_dim) / 2

    @property
    def is_even(self) -> bool:
        """Whether values are as wide as queries and keys, as a CPU's fused kernel has them."""
        return self.qk_dim == self.v_dim

    def flops_per_token(self, context_tokens: int) -> float:
        """Count both products for each pair of a token and one that it attends to."""
        return 4.0 * self.width * seen_tokens(context_tokens, self.window)


@dataclass(frozen=True, kw_only=True, slots=True)
class DeltaAttention:
    """A gated delta rule after a short convolution."""

    num_key_heads: int  # heads of queries and keys
    num_value_heads: int  # heads of values, each with a state of its own
    key_dim: int  # features of a head of queries and keys
    value_dim: int  # features of a head of values
    conv_tokens: int  # kernel size of the convolution

    @property
    def conv_features(self) -> int:
        """Features that pass through the convolution: queries, keys and values."""
        return 2 * self.num_key_heads * self.key_dim + self.num_value_heads * self.value_dim

    def flops_per_token(self, context_tokens: int) -> float:
        """Count the products within chunks and with the state, and the convolution.

        For each value head and token, in chunks of c: two products of keys (2 c k each), two
        triangular systems (c k and c v), attention within the chunk (2 c v), and the state read
        twice and written once (2 k v each). The last chunk is padded.
        """
        k, v, c = self.key_dim, self.value_dim, DELTA_CHUNK_TOKENS
        head = 4 * c * k + c * (k + v) + 2 * c * v + 6 * k * v
        filled = -(-context_tokens // c) * c / context_tokens
        return self.num_value_heads * head * filled + 2 * self.conv_tokens * self.conv_features


@dataclass(frozen=True, kw_only=True, slots=True)
class Recurrence:
    """Another recurrence: a state space, an RNN, a convolution; its products are elsewhere."""

    width: int  # features that go through it
    state_size: int  # state elements per feature; 0 if the config names none
    # Features in fp32 that are kept of a token where chunks of tokens share a state; 0 if none do.
    kept_features: int = 0

    def flops_per_token(self, context_tokens: int) -> float:
        """Count three products per state element: it decays, is added to, and is read."""
        del context_tokens
        return 6.0 * self.width * self.state_size


Attention = SoftmaxAttention | DeltaAttention | Recurrence


def has_fused_kernel(kind: Attention, *, is_cuda: bool) -> bool:
    """Return whether one kernel computes it; a CPU's has queries as wide as values."""
    if not isinstance(kind, SoftmaxAttention) or kind.scores != "fused":
        return False
    return is_cuda or kind.is_even


def can_join_rows(head_features: int) -> bool:
    """Return whether flash attention computes heads of this size, for packed rows in one call."""
    return head_features % FLASH_MULTIPLE == 0 and head_features <= FLASH_FEATURES


def output_bytes(
    *, num_heads: int, head_features: int, element_bytes: int, num_rows: int, seq_len: int
) -> int:
    """Return what a fused kernel's output and log-sum-exp take, as the largest kernel pads them.

    Heads have a multiple of 8 features, and rows of the log-sum-exp, in fp32, a multiple of 32.

    Source: pytorch aten/src/ATen/native/transformers/attention.cpp (pad_last_dim) and
    cuda/attention.cu (_efficient_attention_forward, ceil_div(max_seqlen_q, 32)).
    """
    features, padded_len = -(-head_features // 8) * 8, -(-seq_len // 32) * 32
    return num_rows * num_heads * (seq_len * features * element_bytes + 4 * padded_len)


def seen_tokens(context_tokens: int, window: int | None) -> float:
    """Return how many tokens one attends to, averaged over a sequence, exact up to the diagonal."""
    if window is not None and window < context_tokens:
        return window - window * window / (2 * context_tokens)
    return context_tokens / 2
