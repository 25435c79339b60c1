"""The size of one micro-batch and of what is trained on it."""

from dataclasses import dataclass

from offload.plan.facts.attention import SoftmaxAttention, has_fused_kernel, output_bytes
from offload.plan.facts.codec import CodecName, is_encoded
from offload.plan.facts.facts import AdapterSpec, LayerFacts
from offload.plan.facts.layer_layout import record_bytes
from offload.plan.facts.linears import Linear
from offload.plan.facts.optimizer import Optimizer
from offload.plan.facts.trainable import unread_linears


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """The size of one micro-batch, and of what is trained on it.

    Attributes:
        micro_batch_size: Sequences.
        seq_len: Tokens of each.
        label_tokens: Tokens of the micro-batch that have a loss; only these reach the head.
        head_chunk_tokens: Tokens whose logits exist at once.
        adapter: What is trained, in fp32 as in peft.
        optimizer: The optimizer.
        dtype_bytes: Bytes of a weight in the compute dtype, and of an activation.
        codec: The codec in which the layers' matrices are stored.
        has_router_loss: Whether router logits are kept for the router loss.
        leaves_out: Whether recomputes leave out products whose values nothing reads.
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

    @property
    def num_tokens(self) -> int:
        """Tokens of the micro-batch."""
        return self.micro_batch_size * self.seq_len

    @property
    def is_encoded(self) -> bool:
        """Whether layers are decoded before they compute."""
        return is_encoded(self.codec, self.dtype_bytes)

    def left_out(self, layer: LayerFacts) -> tuple[Linear, ...]:
        """Return the linears of a layer whose products its recompute leaves out."""
        return unread_linears(layer, self.adapter) if self.leaves_out else ()

    def output_bytes(self, layer: LayerFacts, *, is_cuda: bool) -> int:
        """Return what a layer's fused attention leaves for its backward; 0 without such a kernel.

        That is its output and log-sum-exp.
        """
        kind = layer.attention
        if not (isinstance(kind, SoftmaxAttention) and has_fused_kernel(kind, is_cuda=is_cuda)):
            return 0
        return output_bytes(
            num_heads=kind.num_heads,
            head_features=kind.v_dim,
            element_bytes=self.dtype_bytes,
            num_rows=self.micro_batch_size,
            seq_len=self.seq_len,
        )

    def cargo_bytes(self, layer: LayerFacts) -> int:
        """Return the size of a layer as stored, which is what one load moves."""
        return record_bytes(layer, self.codec, self.dtype_bytes)
