"""The size of one micro-batch and of what is trained on it."""

from dataclasses import dataclass, replace
from typing import Literal

from offload.plan.facts.attention import (
    Attention,
    SoftmaxAttention,
    can_join_rows,
    has_fused_kernel,
    output_bytes,
)
from offload.plan.facts.codec import CodecName, is_encoded
from offload.plan.facts.facts import AdapterSpec, LayerFacts, ModelFacts
from offload.plan.facts.fused import NOTHING, FusedPart, FusedParts, compiled_parts, fused_parts
from offload.plan.facts.layer_layout import record_bytes
from offload.plan.facts.linears import Linear
from offload.plan.facts.optimizer import Optimizer
from offload.plan.facts.trainable import unread_linears

# What computes norms, rotary embedding and gated activations: the model's own code, one operator
# each, or torch's compiler; `auto` is `fused` on CUDA and `plain` on a CPU.
LayerCode = Literal["auto", "plain", "fused", "compiled"]
WeightPlace = Literal["device", "host"]
HALF_BYTES = 2  # of the types that flash attention computes
TILED_GROUPS = ("mlp", "shared_experts")


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """The size of one micro-batch, and of what is trained on it.

    Attributes:
        micro_batch_size: Sequences.
        seq_len: Tokens of each; of packed rows, those of a row.
        label_tokens: Tokens of the micro-batch that have a loss; only these reach the head.
        head_chunk_tokens: Tokens whose logits exist at once.
        adapter: What is trained, in fp32 as in peft.
        optimizer: The optimizer.
        dtype_bytes: Bytes of a weight in the compute dtype, and of an activation.
        codec: The codec in which the layers' matrices are stored.
        has_router_loss: Whether there is a router loss, over the step.
        leaves_out: Whether recomputes leave out products whose values nothing reads.
        layer_code: What computes norms, rotary embedding and gated activations.
        plain_parts: Of these and the loss, what the model's own code computes although others are
            fused.
        mlp_chunk_tokens: Tokens that an MLP computes at a time; None for the whole micro-batch.
        packed_tokens: Tokens of a micro-batch whose rows are packed; None where they are not.
        embeddings: Where the input embedding's weight is; on the host, a step brings rows of it.
        head: Where the output head's weight is; on the host, it is copied to the slots once a step.
    """

    micro_batch_size: int
    seq_len: int
    label_tokens: int
    head_chunk_tokens: int
    adapter: AdapterSpec
    optimizer: Optimizer
    dtype_bytes: int
    codec: CodecName
    has_router_loss: bool = False
    leaves_out: bool = True
    layer_code: LayerCode = "plain"
    plain_parts: frozenset[FusedPart] = frozenset()
    mlp_chunk_tokens: int | None = None
    packed_tokens: int | None = None
    embeddings: WeightPlace = "device"
    head: WeightPlace = "device"

    @property
    def num_tokens(self) -> int:
        """Tokens of the micro-batch."""
        if self.packed_tokens is not None:
            return self.packed_tokens
        return self.micro_batch_size * self.seq_len

    @property
    def num_keys(self) -> int:
        """Keys of a row: of its tokens, and of a prefix in front of them."""
        return self.seq_len + self.adapter.num_past

    @property
    def size(self) -> str:
        """How large a micro-batch is, in words."""
        if self.packed_tokens is not None:
            return f"{self.packed_tokens:,} packed tokens"
        return f"{self.micro_batch_size} x {self.seq_len}"

    @property
    def num_rows(self) -> int:
        """Packed rows of a micro-batch; 1 where rows are not packed."""
        return 1 if self.packed_tokens is None else -(-self.packed_tokens // self.seq_len)

    def joins_rows(self, kind: Attention, *, is_cuda: bool) -> bool:
        """Return whether attention of packed rows is one call, of torch's variable-length kernel.

        Such a call has no mask, and takes keys and values of fewer heads as they are.
        """
        return (
            self.packed_tokens is not None
            and is_cuda
            and self.dtype_bytes == HALF_BYTES
            and isinstance(kind, SoftmaxAttention)
            and has_fused_kernel(kind, is_cuda=is_cuda)
            and not kind.is_latent
            and can_join_rows(kind.qk_dim)
        )

    def num_attention_calls(self, kind: Attention, *, is_cuda: bool) -> int:
        """Return how often a layer calls attention: once, or once for each packed row."""
        return 1 if self.joins_rows(kind, is_cuda=is_cuda) else self.num_rows

    @property
    def is_encoded(self) -> bool:
        """Whether layers are decoded before they compute."""
        return is_encoded(self.codec, self.dtype_bytes)

    def left_out(self, layer: LayerFacts) -> tuple[Linear, ...]:
        """Return the linears of a layer whose products its recompute leaves out."""
        return unread_linears(layer, self.adapter) if self.leaves_out else ()

    def code_on(self, device: Literal["cuda", "cpu"]) -> Literal["plain", "fused", "compiled"]:
        """Return what computes norms, rotary embedding and gated activations on a device."""
        if self.layer_code == "auto":
            return "fused" if device == "cuda" else "plain"
        return self.layer_code

    def fuses_loss(self, device: Literal["cuda", "cpu"]) -> bool:
        """Return whether one operator computes the loss of logits and its gradient on a device."""
        return self.code_on(device) == "fused" and "loss" not in self.plain_parts

    def kept_fused(
        self, facts: ModelFacts, layer: LayerFacts, device: Literal["cuda", "cpu"]
    ) -> FusedParts:
        """Return the parts of a layer that keep what fused operators keep for the backward.

        What torch's compiler keeps is not known before it has run: the model's own code keeps more.
        """
        if self.code_on(device) != "fused":
            return NOTHING
        parts = fused_parts(facts, layer, self.adapter).without(self.plain_parts)
        tiled = self.tiled(layer)  # in tiles an MLP's own code computes its gate
        return replace(parts, downs=tuple(x for x in parts.downs if x not in tiled))

    def fused(
        self, facts: ModelFacts, layer: LayerFacts, device: Literal["cuda", "cpu"]
    ) -> FusedParts:
        """Return the parts of a layer that read and write each operand once."""
        is_compiled = self.code_on(device) == "compiled"
        return compiled_parts(layer) if is_compiled else self.kept_fused(facts, layer, device)

    def tiled(self, layer: LayerFacts) -> tuple[Linear, ...]:
        """Return the linears of a layer's MLP, if it is computed in tiles of tokens.

        Routed experts never are: their products depend on which rows an expert gets.
        """
        if self.mlp_chunk_tokens is None or self.mlp_chunk_tokens >= self.num_tokens:
            return ()
        return tuple(x for x in layer.linears if x.group in TILED_GROUPS)

    @property
    def num_tiles(self) -> int:
        """Tiles of a micro-batch."""
        return -(-self.num_tokens // (self.mlp_chunk_tokens or self.num_tokens))

    def reads_output(self, mlp: tuple[Linear, ...]) -> bool:
        """Return whether a recompute reads what an MLP returns, as a norm after it does."""
        return not (self.leaves_out and any(x.is_unread for x in mlp if x.is_down))

    def output_bytes(self, layer: LayerFacts, *, is_cuda: bool) -> int:
        """Return what a layer's fused attention leaves for its backward; 0 without such a kernel.

        That is its output and log-sum-exp.
        """
        kind = layer.attention
        if not (isinstance(kind, SoftmaxAttention) and has_fused_kernel(kind, is_cuda=is_cuda)):
            return 0
        num_rows = self.micro_batch_size
        if self.packed_tokens is not None:
            num_rows = self.num_rows  # joined rows leave less: their log-sum-exp is not padded
        return output_bytes(
            num_heads=kind.num_heads,
            head_features=kind.v_dim,
            element_bytes=self.dtype_bytes,
            num_rows=num_rows,
            seq_len=self.seq_len,
        )

    def cargo_bytes(self, layer: LayerFacts) -> int:
        """Return the size of a layer as stored, which is what one load moves."""
        return record_bytes(layer, self.codec, self.dtype_bytes)
