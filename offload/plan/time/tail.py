"""The predicted work of what comes after the layers: norm, head and loss, in chunks of tokens.

Each chunk runs the model's own forward, whose mask code reads a number from the device: the host
waits for the chunk before, and the device then for the host.
"""

import math

from offload.plan.facts.linears import FP32_BYTES
from offload.plan.facts.trainable import outer_module_sizes, trains_head
from offload.plan.time.pointwise import NORM, NORM_WEIGHT
from offload.plan.time.pricer import Pricer
from offload.plan.time.work import Work

TAIL_OPS, TAIL_LOGIT_PASSES = 40, 9
# One operator reads the logits twice and writes their gradient, in place of TAIL_LOSS_OPS others.
FUSED_LOGIT_PASSES, TAIL_LOSS_OPS = 3, 8
# As of the tail, of what runs without a gradient.
SCORE_OPS, SCORE_LOGIT_PASSES, FUSED_SCORE_PASSES = 24, 4, 1


def _loss(at: Pricer, *, num_chunks: int, is_fused: bool) -> Work:
    """The passes over logits, and the operators of all chunks that are no product."""
    tokens, vocab = at.workload.label_tokens, at.facts.num_outputs
    if is_fused:
        num_bytes = FUSED_LOGIT_PASSES * at.workload.dtype_bytes * tokens * vocab
        num_ops = (TAIL_OPS - TAIL_LOSS_OPS) * num_chunks
        calls = Work(num_calls=num_chunks)
        return at.traffic(num_bytes, num_ops=num_ops, is_fused=True) + calls
    return at.new_memory(
        TAIL_LOGIT_PASSES * FP32_BYTES * tokens * vocab,
        num_ops=TAIL_OPS * num_chunks,
        tensor_bytes=FP32_BYTES * min(tokens, at.workload.head_chunk_tokens) * vocab,
    )


def has_fused_loss(at: Pricer) -> bool:
    """Return whether one operator computes the loss of logits and its gradient."""
    return at.workload.fuses_loss(at.machine.device)


def tail_work(at: Pricer, *, is_fused: bool) -> Work:
    """Return the work of norm, head and loss, forward and backward."""
    tokens, hidden, vocab = at.workload.label_tokens, at.facts.hidden_size, at.facts.num_outputs
    num_chunks = math.ceil(tokens / at.workload.head_chunk_tokens)
    head = at.gemm(tokens, hidden, vocab) + at.gemm(tokens, vocab, hidden)
    norm_passes = NORM.forward + NORM.backward + NORM_WEIGHT.forward + NORM_WEIGHT.backward
    norm = at.traffic(norm_passes * FP32_BYTES * tokens * hidden, num_ops=0)
    tail = head + norm + _loss(at, num_chunks=num_chunks, is_fused=is_fused)
    trained = outer_module_sizes(at.facts, at.workload.adapter)
    if trains_head(at.facts, trained):
        sums = at.added_up(at.facts.num_outputs * hidden, num_tensors=1)
        tail = tail + at.gemm(hidden, tokens, vocab) + sums.times(num_chunks)
    return tail


def score_work(at: Pricer, *, is_fused: bool) -> Work:
    """Return the work of the tail's forward, and of the log-probabilities of the labels."""
    tokens, hidden, vocab = at.workload.label_tokens, at.facts.hidden_size, at.facts.num_outputs
    num_chunks = math.ceil(tokens / at.workload.head_chunk_tokens)
    norm_passes = NORM.forward + NORM_WEIGHT.forward
    norm = at.traffic(norm_passes * FP32_BYTES * tokens * hidden, num_ops=0)
    products = at.gemm(tokens, hidden, vocab) + norm
    if is_fused:
        num_bytes = FUSED_SCORE_PASSES * at.workload.dtype_bytes * tokens * vocab
        calls = Work(num_calls=num_chunks)
        return products + at.traffic(num_bytes, num_ops=SCORE_OPS * num_chunks) + calls
    return products + at.new_memory(
        SCORE_LOGIT_PASSES * FP32_BYTES * tokens * vocab,
        num_ops=SCORE_OPS * num_chunks,
        tensor_bytes=FP32_BYTES * min(tokens, at.workload.head_chunk_tokens) * vocab,
    )
