"""Worked cases of lectures on training large models, each within 1 % of what they state.

A row is a case: what it is called, what a function of `offload.plan` gives for its inputs, and what
the lecture says. Where a slide differs from the lecture's own formula, the formula counts, and the
slide's figure is in a comment. The functions are those that plans and what-if tables are made by.
"""

from dataclasses import replace

import pytest

from offload.plan.facts.facts import ModelFacts
from offload.plan.facts.workload import to_pages
from offload.plan.machine.machine import GIB, Machine, Rate, named_machine
from offload.plan.memory.memory import MemoryTerm, total_bytes
from offload.plan.time.costs import price
from offload.plan.time.roofline import (
    attention_flops,
    elementwise,
    gemm,
    layer_elementwise_bytes,
    layer_flops,
    tensor_parallel_bytes,
    unfused_softmax_bytes,
)
from offload.plan.what_if import activation_bytes, full_training_terms
from tests.builders import llama_7b, qwen3_30b, workload

WITHIN = 0.01
US, MS, GB = 1e-6, 1e-3, 10**9
NVLINK = 400e9
BF16, FP32 = 2, 4
# "H100 as measured": tensor cores 800 TFLOP/s, CUDA cores 25 TFLOP/s, HBM 2.4 TB/s.
# The lecture's operations read and write at the rate of large copies.
H100 = replace(named_machine("h100"), memory_bytes_per_s=Rate(value=2.4e12, source="ARITHMETIC.md"))
# 250 TFLOP/s, and a link of 64 GB/s.
RTX_5090 = named_machine("rtx5090", link_bytes_per_s=64e9)
LECTURE_5090_FLOPS_PER_S = 250e12

LLAMA_7B = llama_7b()
LLAMA_70B = llama_7b(
    hidden_size=8192,
    intermediate_size=28672,
    num_hidden_layers=80,
    num_attention_heads=64,
    num_key_value_heads=4,
)
QWEN_30B = qwen3_30b()
QWEN_WORKLOAD = workload(seq_len=8192)


def test_the_machine_is_the_lecture_s() -> None:
    rates = (H100.gemm_flops_per_s, H100.vector_flops_per_s, H100.memory_bytes_per_s)
    assert [rate.value for rate in rates] == [800e12, 25e12, 2.4e12]


# ---------------------------------------------------------------------------------------------
# Operations on the H100: time in memory traffic, time in arithmetic, and which of them bounds


@pytest.mark.parametrize(
    ("roof", "memory_s", "compute_s", "verdict"),
    [
        pytest.param(
            elementwise(H100, num_elements=8192**2, num_passes=3, dtype_bytes=BF16),
            167.8 * US,
            2.68 * US,
            "memory",
            id="C = A + B, 8192 x 8192",
        ),
        pytest.param(
            gemm(H100, m=1024, k=1024, n=1024, dtype_bytes=BF16),
            2.62 * US,
            2.68 * US,
            "balanced",
            id="C = A @ B, 1024 x 1024",
        ),
        pytest.param(
            gemm(H100, m=4, k=8192, n=8192, dtype_bytes=BF16),
            56.0 * US,
            0.67 * US,
            "memory",
            id="C = A @ B, A 4 x 8192, B 8192 x 8192",
        ),
    ],
)
def test_an_operation_on_the_roofline(roof, memory_s, compute_s, verdict) -> None:
    assert roof.memory_s == pytest.approx(memory_s, rel=WITHIN)
    assert roof.compute_s == pytest.approx(compute_s, rel=WITHIN)
    is_balanced = abs(roof.memory_s - roof.compute_s) <= 0.1 * roof.time_s
    bound = "memory" if roof.memory_s > roof.compute_s else "compute"
    assert verdict == ("balanced" if is_balanced else bound)


def at_gemm_rate(machine: Machine, flops: float) -> float:
    return flops / machine.gemm_flops_per_s.value


def through_memory(machine: Machine, num_bytes: float) -> float:
    return num_bytes / machine.memory_bytes_per_s.value


@pytest.mark.parametrize(
    ("seconds", "expected_s"),
    [
        pytest.param(
            4 * gemm(H100, m=8192, k=4096, n=4096, dtype_bytes=BF16).time_s,
            1.37 * MS,
            id="linear layers: S 8192, H 4096",
        ),
        pytest.param(
            at_gemm_rate(
                H100,
                attention_flops(
                    num_tokens=8192, context_tokens=8192, width=4096, count="lecture_full"
                ),
            ),
            2.06 * MS,
            id="QK^T, PV and scaling: 3 * 2 * H * S^2",
        ),
        pytest.param(
            through_memory(
                H100, unfused_softmax_bytes(num_heads=64, seq_len=8192, dtype_bytes=BF16)
            ),
            7.16 * MS,
            id="softmax and scaling, unfused: nh 64, S 8192",
        ),
    ],
)
def test_attention_in_parts(seconds: float, expected_s: float) -> None:
    assert seconds == pytest.approx(expected_s, rel=WITHIN)


# ---------------------------------------------------------------------------------------------
# The forward of a layer


def matmuls_s(facts: ModelFacts, *, num_tokens: int, context_tokens: int) -> float:
    flops = layer_flops(
        facts,
        facts.layers[0],
        num_tokens=num_tokens,
        context_tokens=context_tokens,
        count="lecture",
    )
    return at_gemm_rate(H100, flops)


def memory_bound_s(facts: ModelFacts, *, num_tokens: int, mlp_width: int) -> float:
    """Two norms, two additions, one SwiGLU."""
    num_bytes = layer_elementwise_bytes(
        num_tokens=num_tokens,
        hidden_size=facts.hidden_size,
        mlp_width=mlp_width,
        dtype_bytes=BF16,
    )
    return through_memory(H100, num_bytes)


def gathered_bytes(facts: ModelFacts) -> int:
    return facts.layers[0].num_parameters * BF16


@pytest.mark.parametrize(
    ("seconds", "expected_s"),
    [
        pytest.param(
            matmuls_s(LLAMA_7B, num_tokens=8192, context_tokens=8192),
            5.18 * MS,
            id="7B: matmuls",
        ),
        pytest.param(
            memory_bound_s(LLAMA_7B, num_tokens=8192, mlp_width=11008),
            0.505 * MS,
            id="7B: memory-bound operations",
        ),
        pytest.param(  # slide: 1.34 ms
            gathered_bytes(LLAMA_7B) / NVLINK, 1.01 * MS, id="7B: FSDP all-gather"
        ),
        # Two ranks share a sequence of 8192, so each attends from 4096 tokens to all of it.
        pytest.param(
            matmuls_s(LLAMA_70B, num_tokens=4096, context_tokens=8192),
            9.71 * MS,
            id="70B, TP 2: matmuls",
        ),
        pytest.param(
            memory_bound_s(LLAMA_70B, num_tokens=4096, mlp_width=28672),
            0.573 * MS,
            id="70B, TP 2: memory-bound operations",
        ),
        pytest.param(
            gathered_bytes(LLAMA_70B) / NVLINK, 4.24 * MS, id="70B, TP 2: FSDP all-gather"
        ),
        pytest.param(  # slide: 1.3 ms
            tensor_parallel_bytes(num_tokens=4096, hidden_size=8192, dtype_bytes=BF16) / NVLINK,
            0.67 * MS,
            id="70B, TP 2: tensor-parallel",
        ),
    ],
)
def test_the_forward_of_a_llama_layer(seconds: float, expected_s: float) -> None:
    assert seconds == pytest.approx(expected_s, rel=WITHIN)


@pytest.mark.parametrize(
    ("num_bytes", "expected_mb"),
    [
        pytest.param(gathered_bytes(LLAMA_7B), 405, id="7B"),  # slide: 540 MB
        pytest.param(gathered_bytes(LLAMA_70B), 1694, id="70B"),  # slide: 1,560 MB
    ],
)
def test_the_bytes_of_an_fsdp_all_gather(num_bytes: int, expected_mb: float) -> None:
    assert num_bytes / 1e6 == pytest.approx(expected_mb, rel=WITHIN)


@pytest.mark.parametrize(
    ("count", "forward_s"),
    [
        pytest.param("lecture", 5.36 * MS, id="attention as 3 products of S x H"),
        pytest.param("causal", 5.93 * MS, id="attention counted exactly: 181 MFLOP per token"),
    ],
)
def test_the_forward_of_a_qwen_30b_layer_on_a_5090(count, forward_s: float) -> None:
    layer = QWEN_30B.layers[0]
    flops = layer_flops(QWEN_30B, layer, num_tokens=8192, context_tokens=8192, count=count)
    assert flops / LECTURE_5090_FLOPS_PER_S == pytest.approx(forward_s, rel=WITHIN)
    if count == "causal":
        assert flops / 8192 == pytest.approx(181e6, rel=WITHIN)


def test_the_load_of_a_qwen_30b_layer_on_a_5090() -> None:
    layer = QWEN_30B.layers[0]
    num_bytes = BF16 * (layer.weights("attention") + layer.weights("experts"))
    assert num_bytes / 1e6 == pytest.approx(1245.7, rel=1e-4)
    assert RTX_5090.h2d_bytes_per_s == Rate(value=64e9, source="given")
    costs = price(QWEN_30B, RTX_5090, QWEN_WORKLOAD)
    assert costs.load_s(0) == pytest.approx(19.46 * MS, rel=WITHIN)
    assert costs.layers[0].weight_bytes == to_pages(BF16 * layer.num_parameters)


# ---------------------------------------------------------------------------------------------
# The memory of training all weights


def full_training(*, num_parameters: int, dtype_bytes: int, **others: int) -> dict[str, int]:
    terms: tuple[MemoryTerm, ...] = full_training_terms(
        num_parameters=num_parameters, dtype_bytes=dtype_bytes, **others
    )
    found = {term.name: term.num_bytes for term in terms if term.num_bytes}
    return found | {"all": total_bytes(terms)}


def activations_of_1_5b(*, features: int, batch: int, dtype_bytes: int) -> int:
    """`features * h * S * B * L` elements, of h 1600, S 1024, L 48."""
    return activation_bytes(
        features=features,
        num_tokens=1024 * batch,
        hidden_size=1600,
        num_layers=48,
        dtype_bytes=dtype_bytes,
    )


@pytest.mark.parametrize(
    ("num_bytes", "unit", "expected"),
    [
        pytest.param(
            full_training(
                num_parameters=7 * GB, dtype_bytes=FP32, activation_bytes=0, context_bytes=0
            ),
            GIB,
            {"weights": 26.1, "gradients": 26.1, "optimizer states": 52.2, "all": 104.3},
            id="7 B, fp32, Adam: GiB",
        ),
        pytest.param(  # slide: about 84 GB
            full_training(
                num_parameters=1_500_000_000,
                dtype_bytes=FP32,
                activation_bytes=activations_of_1_5b(features=12, batch=16, dtype_bytes=FP32),
                context_bytes=GB,
            ),
            GB,
            {
                "weights": 6,
                "gradients": 6,
                "optimizer states": 12,
                "activations": 60.4,
                "context": 1,
                "all": 85.4,
            },
            id="1.5 B, fp32, Adam, batch 16: GB",
        ),
        pytest.param(  # slide: 26.8 GB
            full_training(
                num_parameters=1_500_000_000,
                dtype_bytes=BF16,
                activation_bytes=activations_of_1_5b(features=6, batch=2, dtype_bytes=BF16),
                context_bytes=GB,
            ),
            GB,
            {
                "weights": 3,
                "fp32 copy": 6,
                "gradients": 3,
                "optimizer states": 12,
                "activations": 1.9,
                "context": 1,
                "all": 26.9,
            },
            id="1.5 B, mixed precision, batch 2: GB",
        ),
    ],
)
def test_the_memory_of_training_all_weights(num_bytes, unit: int, expected) -> None:
    found = {name: value / unit for name, value in num_bytes.items()}
    assert found == pytest.approx(expected, rel=WITHIN)
