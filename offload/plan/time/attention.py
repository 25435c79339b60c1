"""The time of token mixing, by kind of attention.

Passes and launches are counted in the code that transformers runs without other packages: a fused
kernel for softmax attention, if it has one, and plain operations in fp32 for the rest.
"""

import math
from dataclasses import replace

from offload.plan.facts.linears import (
    DELTA_CHUNK_TOKENS,
    Attention,
    DeltaAttention,
    SoftmaxAttention,
    has_fused_kernel,
)
from offload.plan.machine.machine import Machine
from offload.plan.time.roofline import Work

RECURRENT_BYTES = 4  # fp32, in which delta rules and recurrences compute
FLASH_BACKWARD_FORWARDS = 2.5
PAST_OPS = 4  # the prefix's keys and values in the type of a row's, and both joined
ATTENTION_OPS = 1  # of a fused kernel; of softmax attention as many backward as forward
# Materialized scores: mask, caps or sinks, a softmax in fp32, its cast.
SCORE_PASSES, SCORE_OPS = 10, 16
# Over queries, keys and values of all heads, the products within a chunk, the convolved features.
DELTA_PASSES, DELTA_CHUNK_PASSES, CONV_PASSES = 18, 16, 6
DELTA_OPS, DELTA_OPS_PER_CHUNK = 60, 9
RECURRENCE_PASSES, RECURRENCE_OPS = 12, 40


def block_factor(seq_len: int) -> float:
    """Return how much more a CPU's kernel computes than the triangle below the diagonal.

    It computes whole blocks of queries, with all keys up to the block's end.

    Source: pytorch aten/src/ATen/native/cpu/FlashAttentionKernel.cpp, flash_attention_kernel_impl.
    """
    block = next(size for least, size in ((768, 256), (192, 64), (0, 32)) if seq_len >= least)
    return (seq_len + min(block, seq_len)) / (seq_len + 1)


def causal_flops(*, width: int, seq_len: int, is_cpu: bool) -> float:
    """Count the attention of one sequence as a fused kernel of this device computes it."""
    triangle = 2.0 * width * seq_len * (seq_len + 1)
    return triangle * (block_factor(seq_len) if is_cpu else 1)


def attention_work(
    kind: Attention,
    machine: Machine,
    *,
    num_tokens: int,
    seq_len: int,
    dtype_bytes: int,
    num_past: int = 0,
) -> Work:
    """Price one layer's forward; without a fused kernel all scores are computed.

    With keys of a prefix in front, `num_past`, the mask is a tensor, and all are computed too.

    Unfused operations write new tensors, which on a CPU outgrow caches and the allocator's free
    list. There the median time of a delta rule was 0.7 to 1.5 times this price, that of
    materialized scores 0.4 times (at 53 tokens) to 1.7 times (at 1,024). No fused CPU kernel
    supports queries that are wider than values.
    """
    flops = num_tokens * kind.flops_per_token(seq_len)
    is_cuda = machine.device == "cuda"
    memory = (machine.memory_bytes_per_s if is_cuda else machine.host_memory_bytes_per_s).value
    if isinstance(kind, SoftmaxAttention):
        num_keys = seq_len + num_past
        all_flops = 4.0 * kind.width * num_tokens * num_keys
        copied = num_keys * kind.num_kv_heads * (kind.qk_dim + kind.v_dim) * bool(num_past)
        copied_bytes = 2 * num_tokens / seq_len * copied * dtype_bytes  # to where the prefix is
        past_ops = PAST_OPS * bool(num_past)
        if has_fused_kernel(kind, is_cuda=is_cuda):
            flops *= 1 if is_cuda else block_factor(seq_len)
            flops = all_flops if num_past else flops
            return Work(
                compute_s=flops / machine.attention_flops_per_s.value,
                memory_s=copied_bytes / memory,
                flops=flops,
                num_ops=ATTENTION_OPS + past_ops,
            )
        num_bytes = SCORE_PASSES * kind.num_heads * num_tokens * num_keys * dtype_bytes
        return Work(
            compute_s=all_flops / machine.gemm_flops_per_s.value,
            memory_s=(num_bytes + copied_bytes) / memory,
            flops=all_flops,
            num_ops=SCORE_OPS + past_ops,
        )
    compute_s = flops / machine.vector_flops_per_s.value
    if isinstance(kind, DeltaAttention):
        head = DELTA_PASSES * (2 * kind.key_dim + kind.value_dim)
        head += DELTA_CHUNK_PASSES * DELTA_CHUNK_TOKENS
        num_bytes = RECURRENT_BYTES * kind.num_value_heads * head
        num_bytes += CONV_PASSES * kind.conv_features * dtype_bytes
        num_ops = DELTA_OPS + DELTA_OPS_PER_CHUNK * math.ceil(seq_len / DELTA_CHUNK_TOKENS)
    else:
        num_bytes = RECURRENT_BYTES * kind.width * (RECURRENCE_PASSES + kind.state_size)
        num_ops = RECURRENCE_OPS
    memory_s = num_tokens * num_bytes / memory
    return Work(compute_s=compute_s, memory_s=memory_s, flops=flops, num_ops=num_ops)


def attention_backward(kind: Attention, forward: Work) -> Work:
    """Price the backward of a layer's token mixing, given its forward."""
    backward = forward.times(FLASH_BACKWARD_FORWARDS)
    is_softmax = isinstance(kind, SoftmaxAttention)
    return replace(backward, num_ops=forward.num_ops) if is_softmax else backward
