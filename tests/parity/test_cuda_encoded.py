"""Encoded layers on a card: the bits of a resident step over what the codec makes of the weights.

Run with `pytest -m gpu`; with REQUIRE_GPU=1 a machine without a card fails them.
"""

import copy
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest
import torch
from peft import PeftModel

import offload
from offload.engine.codecs.codec import codec_named
from offload.plan.facts.codec import CodecName
from tests.parity.on_card import MID_MODELS, Found, long_micro_batches, tiny
from tests.parity.rounding import matrices
from tests.parity.steps import assert_equal, gradients

pytestmark = pytest.mark.gpu

NUM_LAYERS = 6
CODECS = [name for name in get_args(CodecName) if name not in ("native", "bf16")]


@pytest.fixture(autouse=True)
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def rounded_on_card(model: PeftModel, codec: CodecName) -> PeftModel:
    """Return a copy whose weights were written and read back on the card."""
    model, form = copy.deepcopy(model), codec_named(codec)
    for parameter in matrices(model, codec).values():
        values = parameter.data.cuda()
        num_bytes = form.num_bytes(values.shape, values.dtype)
        written = torch.empty(num_bytes, dtype=torch.uint8, device="cuda")
        form.encode(values, written)
        form.decode(written, values)
        parameter.data = values.cpu()
    return model


def stepped(model: PeftModel, codec: CodecName, *, num_slots: int) -> Found:
    model = copy.deepcopy(model)
    engine = offload.attach(model, num_slots=num_slots, codec=codec, device="cuda")
    try:
        engine.forward_backward(long_micro_batches(), dropout_seed=0)
        model.zero_grad()
        result = engine.forward_backward(long_micro_batches(), dropout_seed=0)
        return result.loss, gradients(model)
    finally:
        engine.detach()


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("name", ["qwen3", "qwen3_moe"])
def test_move_encoded_layers_compute_as_resident_rounded_ones(name: str, codec: CodecName) -> None:
    model = tiny(name, torch.bfloat16, models=MID_MODELS)
    expected = stepped(rounded_on_card(model, codec), "native", num_slots=NUM_LAYERS)
    assert_equal(stepped(model, codec, num_slots=2), expected)
    assert_equal(stepped(model, codec, num_slots=NUM_LAYERS), expected)


@pytest.mark.parametrize("codec", CODECS)
def test_a_card_reads_what_was_written_on_the_host_as_the_host_does(codec: CodecName) -> None:
    torch.manual_seed(0)
    values, form = torch.randn(3, 130, 64, dtype=torch.bfloat16), codec_named(codec)
    written = torch.empty(form.num_bytes(values.shape, values.dtype), dtype=torch.uint8)
    form.encode(values, written)
    on_host, on_card = torch.empty_like(values), torch.empty_like(values, device="cuda")
    form.decode(written, on_host)
    form.decode(written.cuda(), on_card)
    torch.testing.assert_close(on_card.cpu(), on_host, rtol=2**-8, atol=0)


@pytest.mark.parametrize("codec", CODECS)
def test_the_host_does_not_wait_for_decoding(codec: CodecName) -> None:
    engine = offload.attach(
        tiny("qwen3", torch.bfloat16, models=MID_MODELS), num_slots=2, codec=codec, device="cuda"
    )
    engine.forward_backward(long_micro_batches(), dropout_seed=0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        caught.clear()
        engine.forward_backward(long_micro_batches(), dropout_seed=0)
        torch.cuda.set_sync_debug_mode("default")
    found = {Path(wait.filename).name for wait in caught if "synchroniz" in str(wait.message)}
    assert found <= {"masking_utils.py"}
    engine.detach()
