"""Counts of peft's modules, against arithmetic by hand."""

import pytest

from finetune.adapter.methods import counted
from offload.plan.facts.facts import MethodCounts, PeftMethod

K, M, R, T = 1024, 512, 8, 300


def method(name: str, *, dtype_bytes: int = 4, number: int = 1) -> PeftMethod:
    size = ("q_proj", K, M)
    return counted(name, R, ((size, number),), model_type="qwen3", dtype_bytes=dtype_bytes)


def counts(name: str, *, dtype_bytes: int = 4) -> MethodCounts:
    return method(name, dtype_bytes=dtype_bytes).of("q_proj", K, M)


def test_loha_makes_a_weight_and_multiplies_by_it() -> None:
    found = counts("loha")
    assert sorted(found.shapes) == sorted([(M, R), (R, K)] * 2)
    weight, product = 2 * (2 * M * R * K), 2 * T * K * M
    assert found.forward.fp32_flops.at(T) == weight + product
    # both factors of either matrix, whose products are made again, and the input and the weight
    assert found.backward.fp32_flops.at(T) == 3 * weight + 2 * product
    assert found.saves_input


def test_in_16_bits_the_product_with_the_weight_is_made_in_fp32() -> None:
    found = counts("loha", dtype_bytes=2)
    assert found.forward.fp32_flops.at(T) == 2 * (2 * M * R * K) + 2 * T * K * M
    assert found.forward.half_flops.at(T) == 0
    assert found.saved.per_token == 4 * K  # the input in fp32
    assert not found.saves_input


def test_vera_trains_two_vectors_and_shares_two_matrices() -> None:
    found = counts("vera")
    assert sorted(found.shapes) == [(R,), (M,)]
    assert found.forward.fp32_flops.at(T) == 2 * T * R * (K + M)
    assert method("vera", number=36).frozen_bytes == 4 * R * (K + M)


def test_oft_holds_indices_for_each_layer() -> None:
    block = K // R
    elements = block * (block - 1) // 2
    assert counts("oft").shapes == ((R, elements),)
    assert method("oft", number=3).frozen_bytes == 3 * 2 * 8 * elements


@pytest.mark.parametrize("name", ["ia3", "miss"])
def test_others_add_no_product_as_large_as_the_layer(name: str) -> None:
    found = counts(name)
    assert found.shapes == (((M, 1),) if name == "ia3" else ((R, M),))
    assert found.forward.fp32_flops.at(T) <= 2 * T * R * M
    assert found.backward.fp32_flops.at(T) <= 4 * T * R * M
    assert found.forward.num_bytes.per_token > 0
