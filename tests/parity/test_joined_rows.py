"""Attention of packed rows in one call gives what it gives row by row, within rounding."""

import copy
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from finetune.adapter.linear_lora import compute_in_base_dtype
from offload.engine.bound import EngineOptions
from offload.engine.engine import Engine
from offload.engine.model.layers import LayeredModel
from offload.engine.model.packed_rows import JoinedRows, call_operator, joined_attention
from offload.engine.streams import device_named
from tests.parity.architectures import rel_error
from tests.parity.packed_rows import LENS, packed, plain_alone, rows_of
from tests.parity.steps import OPTIONS, assert_equal, gradients
from tests.parity.tiny_models import tiny_model, with_adapters
from tests.tiers import mostly_slow
from tests.variable_length import VariableLength, variable_length

pytestmark = pytest.mark.usefixtures("one_thread")

JOINS = replace(OPTIONS, joins_rows=True)
KEPT = replace(JOINS, num_kept_graphs=0, num_kept_outputs=1, num_sent_outputs=1)


@pytest.fixture(name="operator")
def operator_fixture() -> Iterator[VariableLength]:
    with variable_length() as operator:
        yield operator


def model_of(name: str) -> Any:
    model = tiny_model(name)
    return with_adapters(model, LayeredModel(model).layers)


def halved(model: nn.Module) -> nn.Module:
    half = copy.deepcopy(model).bfloat16()
    compute_in_base_dtype(half)
    return half


def step(
    model: nn.Module, options: EngineOptions, device: str = "cpu"
) -> tuple[float, dict[str, torch.Tensor], frozenset[int]]:
    model = copy.deepcopy(model)
    engine = Engine(model, device=device_named(device), options=options)
    try:
        batches = [packed(*rows_of(*lens, seed=m)) for m, lens in enumerate(LENS)]
        loss = engine.forward_backward(batches, dropout_seed=0).loss
        return loss, gradients(model), engine.rows_joined  # type: ignore[arg-type]
    finally:
        engine.detach()


@pytest.mark.parametrize(
    "name", mostly_slow(("qwen3", "gemma3_text", "mistral", "llama", "qwen3_moe"), "qwen3")
)
def test_rounding_joined_rows_have_the_gradients_of_rows_taken_one_by_one(
    name: str, operator: VariableLength
) -> None:
    model = model_of(name)
    truth = plain_alone(model)[1]
    _, apart, none = step(halved(model), OPTIONS)
    assert not none
    assert not operator.windows
    _, found, joined = step(halved(model), JOINS)
    assert len(joined) == model.config.get_text_config().num_hidden_layers
    assert operator.num_backwards == len(LENS) * len(joined)
    assert rel_error(found, truth) <= 1.3 * rel_error(apart, truth)  # two roundings of one model


@pytest.mark.thorough
def test_a_window_is_passed_on_as_a_number(operator: VariableLength) -> None:
    config = tiny_model("gemma3_text").config
    step(halved(model_of("gemma3_text")), JOINS)
    windows = {"full_attention": (-1, 0), "sliding_attention": (config.sliding_window - 1, 0)}
    assert config.sliding_window < 17
    # the first rows that are tried are shorter than the window
    assert set(operator.windows) == {(-1, 0), *(windows[kind] for kind in config.layer_types)}


@pytest.mark.thorough
def test_move_no_bit_differs_where_joined_attention_is_not_computed_again(
    operator: VariableLength,
) -> None:
    model = halved(model_of("qwen3"))
    expected = step(model, replace(JOINS, num_kept_graphs=0))
    num_all = len(operator.windows)
    operator.windows.clear()
    found = step(model, KEPT)
    assert_equal(found[:2], expected[:2])
    assert found[2] == expected[2]
    assert len(operator.windows) == num_all - 2 * len(LENS)  # of two layers each


@pytest.mark.thorough
def test_an_operator_that_does_not_keep_rows_apart_is_not_used() -> None:
    model = halved(model_of("qwen3"))
    expected = step(model, OPTIONS)
    with variable_length(leaks=True) as operator:
        found = step(model, JOINS)
    assert operator.windows  # it was tried
    assert operator.num_backwards == 0
    assert not found[2]
    assert_equal(found[:2], expected[:2])


@pytest.mark.thorough
def test_rows_in_float32_are_taken_one_by_one(operator: VariableLength) -> None:
    model = model_of("qwen3")
    found, expected = step(model, JOINS), step(model, OPTIONS)
    assert_equal(found[:2], expected[:2])
    assert not found[2]
    assert not operator.windows


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["qwen3", "gemma3_text", "mistral", "llama", "qwen3_moe"])
def test_rounding_joined_rows_on_a_card_are_as_near_as_rows_taken_one_by_one(name: str) -> None:
    model = model_of(name)
    truth = plain_alone(model)[1]
    apart = step(halved(model), OPTIONS, "cuda")
    found = step(halved(model), JOINS, "cuda")
    assert not apart[2]
    assert len(found[2]) == model.config.get_text_config().num_hidden_layers
    errors = (rel_error({n: g.cpu() for n, g in x[1].items()}, truth) for x in (found, apart))
    assert next(errors) <= 1.3 * next(errors)  # two roundings of one model


@pytest.mark.gpu
def test_move_no_bit_differs_on_a_card_where_joined_attention_is_not_computed_again() -> None:
    model = halved(model_of("qwen3"))
    torch.use_deterministic_algorithms(mode=True)
    try:
        expected, found = step(model, JOINS, "cuda"), step(model, KEPT, "cuda")
    finally:
        torch.use_deterministic_algorithms(mode=False)
    assert_equal(found[:2], expected[:2])
    assert found[2] == expected[2]
    assert found[2]


class Attention(nn.Module):
    """A module that calls attention."""

    is_causal = True


def heads(features: int = 16, dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, num, 9, features).to(dtype) for num in (4, 2, 2))
    return {"query": q, "key": k, "value": v}


ROWS = JoinedRows(ends=torch.tensor([0, 5, 9], dtype=torch.int32), longest=5, window=None)


@pytest.mark.parametrize(
    ("given", "options"),
    [
        (heads(), {"dropout": 0.1}),
        (heads(), {"is_causal": False}),
        (heads(), {"softcap": 30.0}),
        (heads(), {"s_aux": torch.zeros(4)}),
        (heads(), {"position_bias": torch.zeros(4)}),
        (heads(12), {}),
        (heads(512), {}),
        (heads(dtype=torch.float32), {}),
        ({**heads(), "value": heads(8)["value"]}, {}),
    ],
)
def test_what_the_operator_does_not_compute_is_taken_row_by_row(
    given: dict[str, torch.Tensor], options: dict[str, Any], operator: VariableLength
) -> None:
    assert joined_attention(Attention(), **given, rows=ROWS, options=options) is None
    assert not operator.windows


def test_what_attention_does_not_read_does_not_matter(operator: VariableLength) -> None:
    options = {"dropout": 0.0, "scaling": 0.3, "sliding_window": 3, "position_ids": torch.arange(9)}
    found = joined_attention(Attention(), **heads(), rows=ROWS, options=options)
    assert found is not None
    expected = []
    for rows in (slice(0, 5), slice(5, 9)):
        q, k, v = (x[:, :, rows].float() for x in heads().values())
        output = nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=0.3, enable_gqa=True
        )
        expected.append(output.transpose(1, 2))
    torch.testing.assert_close(found.float(), torch.cat(expected, dim=1), rtol=1e-2, atol=1e-2)
    assert operator.windows == [(-1, 0)]


@pytest.mark.parametrize("window", [None, 3])
def test_the_call_fits_the_operator_on_a_card(window: int | None) -> None:
    with FakeTensorMode(), torch.no_grad():
        given = (torch.empty(1, n, 9, 16, dtype=torch.bfloat16, device="cuda") for n in (4, 2, 2))
        ends = torch.empty(3, dtype=torch.int32, device="cuda")
        rows = JoinedRows(ends=ends, longest=5, window=window)
        output = call_operator(*given, rows=rows, scale=0.3)
    assert output.shape == (1, 9, 4, 16)
    assert (output.dtype, output.device.type) == (torch.bfloat16, "cuda")


def band(num_tokens: int, window: int) -> torch.Tensor:
    at = torch.arange(num_tokens)
    back = at[:, None] - at
    return ((back >= 0) & (back < window))[None, None]


SEEN = {
    "causal rows": ((None, None), None),
    "a window that both exceed": ((band(5, 3), band(4, 3)), 3),
    "a window that one exceeds": ((band(5, 4), None), 4),
    "masks that are causal": ((band(5, 5), band(4, 4)), None),
    "a row without its window": ((None, band(4, 3)), False),
    "two windows": ((band(5, 3), band(4, 2)), False),
    "a mask that is no window": ((band(5, 3) & (torch.arange(5) != 1), None), False),
    "a mask of floats": ((torch.zeros(1, 1, 5, 5), None), False),
    "a mask for each head": ((band(5, 3).expand(1, 2, 5, 5), None), False),
    "a token that sees none": ((torch.zeros(1, 1, 5, 5, dtype=torch.bool), None), False),
}


@pytest.mark.parametrize(("masks", "window"), SEEN.values(), ids=SEEN)
def test_what_rows_see_is_read_off_their_masks(masks: Any, window: Any) -> None:
    rows = JoinedRows.of((5, 4), torch.device("cpu"))
    assert rows.ends.tolist() == [0, 5, 9]
    assert rows.ends.dtype == torch.int32
    seen = rows.seeing((5, 4), masks)
    assert seen is None if window is False else (seen is not None and seen.window == window)
