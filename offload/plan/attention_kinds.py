"""How tokens of a layer see each other: the kinds, and what each computes.

Softmax attention compares every token with all before it, or with those in a window, so its work
grows with the square of the sequence. Latent attention (MLA) is softmax attention whose keys and
values are made for every head out of a few features; queries and keys are then wider than values.
A delta rule keeps a matrix for each head in place of all keys and values; it is computed in chunks
of tokens, so its work per token does not depend on the sequence.
"""

from dataclasses import dataclass
from typing import Literal

Scores = Literal["fused", "sinks", "capped"]
DELTA_CHUNK_TOKENS = 64  # of the delta rule in transformers and in flash-linear-attention


@dataclass(frozen=True, kw_only=True, slots=True)
class SoftmaxAttention:
    """Queries, keys and values.

    Attributes:
        num_heads: Heads of queries.
        num_kv_heads: Heads of keys and values.
        qk_dim: Features of a head of queries and keys.
        v_dim: Features of a head of values.
        rotary_dim: Features of a head that its position turns.
        num_rotated_heads: Heads that are turned; of latent attention one is for all keys.
        window: Tokens that each one sees, itself included; None for all before it.
        has_output_gate: Whether what it returns is multiplied by a sigmoid.
        is_fused: Whether queries, keys and values are cut out of one product.
        scores: Whether a fused kernel makes them; none knows sinks or soft caps.
    """

    num_heads: int
    num_kv_heads: int
    qk_dim: int
    v_dim: int
    rotary_dim: int
    num_rotated_heads: int
    window: int | None = None
    has_output_gate: bool = False
    is_fused: bool = False
    scores: Scores = "fused"

    @property
    def width(self) -> float:
        """Features of one token in a product of all heads, the mean of both products."""
        return self.num_heads * (self.qk_dim + self.v_dim) / 2

    @property
    def is_latent(self) -> bool:
        """Whether queries and keys are put together of two parts, and values cut out."""
        return self.qk_dim != self.v_dim

    def flops_per_token(self, context_tokens: int) -> float:
        """Count both products for each pair of a token and one that it sees."""
        return 4.0 * self.width * seen_tokens(context_tokens, self.window)


@dataclass(frozen=True, kw_only=True, slots=True)
class DeltaAttention:
    """A gated delta rule behind a short convolution.

    Attributes:
        num_key_heads: Heads of queries and keys.
        num_value_heads: Heads of values, each with a state of its own.
        key_dim: Features of a head of queries and keys.
        value_dim: Features of a head of values.
        conv_tokens: Tokens that the convolution reaches over.
    """

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    conv_tokens: int

    @property
    def conv_features(self) -> int:
        """Features that pass through the convolution: queries, keys and values."""
        return 2 * self.num_key_heads * self.key_dim + self.num_value_heads * self.value_dim

    def flops_per_token(self, context_tokens: int) -> float:
        """Count the products within chunks and with the state, and the convolution.

        For each value head and token, in chunks of c: two products of keys (2 c k each), two
        triangular systems (c k and c v), attention within the chunk (2 c v), and the state read
        twice and written once (2 k v each). A last chunk is filled up.
        """
        k, v, c = self.key_dim, self.value_dim, DELTA_CHUNK_TOKENS
        head = 4 * c * k + c * (k + v) + 2 * c * v + 6 * k * v
        filled = -(-context_tokens // c) * c / context_tokens
        return self.num_value_heads * head * filled + 2 * self.conv_tokens * self.conv_features


@dataclass(frozen=True, kw_only=True, slots=True)
class Recurrence:
    """Another recurrence: a state space, an RNN, a convolution. Its products are counted elsewhere.

    Attributes:
        width: Features that go through it.
        state_size: Numbers of state for each of them; 0 if there is none that the config names.
    """

    width: int
    state_size: int

    def flops_per_token(self, context_tokens: int) -> float:
        """Count three products per number of state: it decays, is added to, and is read."""
        del context_tokens
        return 6.0 * self.width * self.state_size


Attention = SoftmaxAttention | DeltaAttention | Recurrence


def seen_tokens(context_tokens: int, window: int | None) -> float:
    """Return how many tokens one sees, in the mean over a sequence, exact up to the diagonal."""
    if window is not None and window < context_tokens:
        return window - window * window / (2 * context_tokens)
    return context_tokens / 2
