"""The size of one micro-batch and of what is trained on it."""

from dataclasses import dataclass, replace
from typing import Literal

from offload.plan.facts.codec import CODECS, NATIVE, aligned
from offload.plan.facts.facts import AdapterSpec, LayerFacts, ModelFacts
from offload.plan.facts.linears import (
    Attention,
    Linear,
    Norm,
    SoftmaxAttention,
    can_join_rows,
    has_fused_kernel,
    output_bytes,
)
from offload.plan.facts.trainable import (
    EMBEDDING,
    HEAD,
    NORMS,
    VIRTUAL,
    outer_module_sizes,
    unread_linears,
)
from offload.plan.schedule.schedule import NUM_ROW_BUFFERS

FusedPart = Literal["norms", "rotary", "gates", "loss"]
"""What is computed by fused operators, or by the model's own code: each by itself."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FusedParts:
    """The parts of one layer that are one operator each."""

    norms: tuple[Norm, ...] = ()  # norms
    has_rotary: bool = False  # whether queries and keys are rotated in one
    head_norms: tuple[Norm, ...] = ()  # the norms, of queries and keys, that the rotation computes
    downs: tuple[Linear, ...] = ()  # the last linears of MLPs whose gated activation is one

    def without(self, plain: frozenset[FusedPart]) -> "FusedParts":
        """Return the same but for parts that the model's own code computes."""
        return FusedParts(
            norms=() if "norms" in plain else self.norms,
            has_rotary=self.has_rotary and "rotary" not in plain,
            head_norms=() if plain & {"norms", "rotary"} else self.head_norms,
            downs=() if "gates" in plain else self.downs,
        )


NOTHING = FusedParts()


def fused_parts(layer: LayerFacts, spec: AdapterSpec) -> FusedParts:
    """Return what the fused operators compute of a layer with an adapter.

    The engine proves it on the model's own modules (`offload.engine.pointwise.recognise`), and the
    facts say what it proved. Fused norms have no gradient by their weights, and of an MLP whose
    linears train whole the model's own code computes the gate.
    """
    is_frozen = spec.whole is None and NORMS not in spec.modules
    norms = tuple(norm for norm in layer.norms if norm.is_fusable and is_frozen)
    trained = {linear.group for linear in layer.linears if linear.name in spec.modules}
    return FusedParts(
        norms=norms,
        has_rotary=layer.is_rotation_fusable,
        head_norms=tuple(norm for norm in norms if norm.is_in_rotation),
        downs=tuple(x for x in layer.linears if x.is_gate_fusable and x.group not in trained),
    )


def compiled_parts(layer: LayerFacts) -> FusedParts:
    """Return what torch makes one kernel each of in a compiled layer."""
    return FusedParts(
        norms=layer.norms,
        has_rotary=isinstance(layer.attention, SoftmaxAttention),
        downs=tuple(x for x in layer.linears if x.reads == "gated" and x.group != "experts"),
    )


# ---------------------------------------------------------------------------------------------
# The size of a layer as one flat record, byte for byte.
#
# Its tensors are stored one after another, each in the codec or in the compute dtype. Each part of
# a tensor starts at a multiple of `ALIGN_BYTES`, and a record is padded to whole pages. In a tiny
# layer this padding is a tenth of the record. Small parameters that the facts do not distinguish
# are counted as one tensor.

PAGE_BYTES = 4096


def to_pages(num_bytes: int) -> int:
    """Round a size up to whole pages."""
    return -(-num_bytes // PAGE_BYTES) * PAGE_BYTES


def record_bytes(layer: LayerFacts, codec: str, dtype_bytes: int) -> int:
    """Return the size of a layer in a codec: in memory, on the link and in a slot.

    Args:
        layer: Its tensors.
        codec: Of its matrices; `native` is the compute dtype.
        dtype_bytes: Bytes of a weight in the compute dtype.
    """

    def written(size: int, form: str) -> int:
        return sum(map(aligned, CODECS[form].sizes(size, dtype_bytes)))

    of_others = NATIVE if CODECS[codec].published else codec
    matrices = (
        written(x.num_weights, codec if x.is_kept else of_others)
        for x in layer.linears
        if x.is_encodable
    )
    return to_pages(sum(matrices) + sum(written(size, NATIVE) for size in layer.other_sizes))


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
        plain_parts: The parts of these, or the loss, that the model's own code computes although
            others are fused.
        mlp_chunk_tokens: Tokens that an MLP computes at a time; None for the whole micro-batch.
        packed_tokens: Tokens of a micro-batch whose rows are packed; None where they are not.
        embeddings: Where the input embedding's weight is; on the host, a step brings rows of it.
        head: Where the output head's weight is; on the host, it is copied to the slots once a step.
        has_images: Whether rows have images, whose features are there from the front on.
    """

    micro_batch_size: int
    seq_len: int
    label_tokens: int
    head_chunk_tokens: int
    adapter: AdapterSpec
    optimizer: str
    dtype_bytes: int
    codec: str
    has_router_loss: bool = False
    leaves_out: bool = True
    layer_code: LayerCode = "plain"
    plain_parts: frozenset[FusedPart] = frozenset()
    mlp_chunk_tokens: int | None = None
    packed_tokens: int | None = None
    embeddings: WeightPlace = "device"
    head: WeightPlace = "device"
    has_images: bool = False

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
            and kind.is_even
            and can_join_rows(kind.qk_dim)
        )

    def num_attention_calls(self, kind: Attention, *, is_cuda: bool) -> int:
        """Return how often a layer calls attention: once, or once for each packed row."""
        return 1 if self.joins_rows(kind, is_cuda=is_cuda) else self.num_rows

    @property
    def is_encoded(self) -> bool:
        """Whether layers are decoded before they compute; 16-bit weights may be bfloat16."""
        is_same = CODECS[self.codec].same_as == "bfloat16" and self.dtype_bytes == HALF_BYTES
        return self.codec != NATIVE and not is_same

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

    def kept_fused(self, layer: LayerFacts, device: Literal["cuda", "cpu"]) -> FusedParts:
        """Return the parts of a layer that keep what fused operators keep for the backward.

        What torch's compiler keeps is not known before it has run: the model's own code keeps more.
        """
        if self.code_on(device) != "fused":
            return NOTHING
        parts = fused_parts(layer, self.adapter).without(self.plain_parts)
        tiled = self.tiled(layer)  # in tiles an MLP's own code computes its gate
        return replace(parts, downs=tuple(x for x in parts.downs if x not in tiled))

    def fused(self, layer: LayerFacts, device: Literal["cuda", "cpu"]) -> FusedParts:
        """Return the parts of a layer that read and write each operand once."""
        is_compiled = self.code_on(device) == "compiled"
        return compiled_parts(layer) if is_compiled else self.kept_fused(layer, device)

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


TOKEN_BYTES = 8


def rows_bytes(num_rows: int, row_bytes: int) -> int:
    """Return the bytes of some rows of the embedding on their way to the device.

    With them go their tokens, in order, and one row for a token that is not among them.
    """
    return aligned(TOKEN_BYTES * num_rows) + (num_rows + 1) * row_bytes


def most_rows_bytes(facts: ModelFacts, workload: Workload) -> int:
    """Return what the rows of a micro-batch take at most: if no token of it is there twice."""
    num_rows = min(workload.num_tokens, facts.vocab_size)
    return sum(
        rows_bytes(num_rows, size // facts.vocab_size * workload.dtype_bytes)
        for size in (facts.embedding_parameters, facts.layer_table_parameters)
        if size
    )


def row_buffers_bytes(facts: ModelFacts, workload: Workload) -> int:
    """Return what buffers of rows take, on the device and once more page-locked in host memory."""
    is_on_host = workload.embeddings == "host"
    return NUM_ROW_BUFFERS * most_rows_bytes(facts, workload) if is_on_host else 0


def embedding_bytes(facts: ModelFacts, workload: Workload) -> int:
    """Return what embeddings take in host memory; 0 on the device, and of one that a head holds."""
    own = 0 if facts.tie_word_embeddings else facts.embedding_parameters
    is_on_host = workload.embeddings == "host"
    return (own + facts.layer_table_parameters) * workload.dtype_bytes * is_on_host


def why_on_device(facts: ModelFacts, adapter: AdapterSpec) -> str:
    """Return why the embedding has to be on the device; nothing if it may be in host memory.

    Args:
        facts: The model.
        adapter: What trains.
    """
    outer = outer_module_sizes(facts, adapter)
    if outer.get(EMBEDDING):
        return "it trains"
    if VIRTUAL in outer and not adapter.num_past:
        return "virtual tokens train, which it looks up"
    return ""


def head_bytes(facts: ModelFacts, workload: Workload) -> int:
    """Return what the head takes in host memory, and on the link; 0 if it is on the device."""
    is_tied, is_on_host = facts.tie_word_embeddings, workload.head == "host"
    num_parameters = facts.embedding_parameters if is_tied else facts.head_parameters
    return num_parameters * workload.dtype_bytes if is_on_host else 0


def why_head_on_device(facts: ModelFacts, adapter: AdapterSpec) -> str:
    """Return why the head has to be on the device; nothing if it may be in host memory.

    Args:
        facts: The model.
        adapter: What trains.
    """
    if facts.tie_word_embeddings:
        why = why_on_device(facts, adapter)
        return why and f"the embedding has the same weight: {why}"
    if facts.num_classes:
        return f"it has {facts.num_classes} outputs and takes little memory"
    if not facts.head_parameters:
        return "it has no weight"
    if outer_module_sizes(facts, adapter).get(HEAD):
        return "it trains"
    return ""
