"""What is saved of an attached model, and loaded into it: the true weights, to the bit."""

import copy
import io
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import get_peft_model_state_dict, set_peft_model_state_dict
from safetensors.torch import load_file, save_model
from torch import nn

import offload
from tests.parity.attached import (
    UP,
    assert_same,
    attached,
    layer,
    layer_values,
    two_adapters,
    up_proj,
    values,
)
from tests.parity.steps import NUM_LAYERS, gradients, micro_batches, plain, tiny
from tests.tiers import mostly_slow

pytestmark = pytest.mark.usefixtures("one_thread")


def test_move_a_state_dict_holds_the_true_weights() -> None:
    model = tiny("qwen3")
    expected = values(model)
    with attached(model):
        found = model.state_dict()
        assert_same(found, expected)
        assert_same(model.base_model.state_dict(), values(copy_of_base(expected)))
        file = io.BytesIO()
        torch.save(found, file)
        file.seek(0)
        assert_same(torch.load(file), expected)
        assert_same(layer(model).state_dict(), layer_values(expected))
    assert_same(values(model), expected)


def copy_of_base(expected: dict[str, torch.Tensor]) -> nn.Module:
    model = tiny("qwen3")
    model.load_state_dict(expected)
    base: nn.Module = model.base_model
    return base


@pytest.mark.thorough
def test_move_saved_files_are_those_of_the_plain_model(tmp_path: Path) -> None:
    model = two_adapters()
    reference = copy.deepcopy(model)
    reference.save_pretrained(str(tmp_path / "adapters"))
    reference.get_base_model().save_pretrained(str(tmp_path / "base"))
    save_model(reference, str(tmp_path / "whole.safetensors"))
    with attached(model):
        model.save_pretrained(str(tmp_path / "found" / "adapters"))
        model.get_base_model().save_pretrained(str(tmp_path / "found" / "base"))
        save_model(model, str(tmp_path / "found" / "whole.safetensors"))
    files = [f.relative_to(tmp_path) for f in tmp_path.rglob("*.safetensors")]
    files = [file for file in files if file.parts[0] != "found"]
    assert len(files) == 4
    for file in files:
        assert_same(load_file(tmp_path / "found" / file), load_file(tmp_path / file))


@pytest.mark.thorough
@pytest.mark.parametrize("codec", mostly_slow(["int8", "bf16_packed"], "int8"))
def test_of_encoded_layers_adapters_are_saved_and_the_rest_is_refused(
    codec: str, tmp_path: Path
) -> None:
    model: Any = tiny("qwen3").to(torch.bfloat16)
    expected = {n: t.clone() for n, t in get_peft_model_state_dict(model).items()}
    with attached(model, codec=codec):
        model.save_pretrained(str(tmp_path))
        assert_same(load_file(tmp_path / "adapter_model.safetensors"), expected)
        state = model.state_dict()
        with pytest.raises(offload.OffloadError, match=rf"`norm` .*{UP}.*\n\nhint: .*detach"):
            state[UP].norm()
        with pytest.raises(offload.OffloadError, match="whose layer is streamed"):
            torch.save(state, io.BytesIO())
        with pytest.raises(offload.OffloadError, match="whose layer is streamed"):
            model.get_base_model().save_pretrained(str(tmp_path))
    with pytest.raises(offload.OffloadError, match=r"detached since.*\n\nhint: take it again"):
        state[UP].norm()
    assert bool(model.state_dict()[UP].norm())


def test_of_layers_on_disk_adapters_are_saved(tmp_path: Path) -> None:
    model = tiny("qwen3")
    expected = {n: t.clone() for n, t in get_peft_model_state_dict(model).items()}
    with attached(model, tier="disk", store_dir=str(tmp_path)):
        assert_same(get_peft_model_state_dict(model), expected)
        with pytest.raises(offload.OffloadError, match="`clone` would read or change"):
            model.state_dict()[UP].clone()


@pytest.mark.thorough
def test_what_is_written_through_a_state_dict_is_trained_on() -> None:
    """As in the plain model, whose state_dict shares its memory; also where all is resident."""
    model = tiny("qwen3")
    reference = copy.deepcopy(model)
    engine = offload.attach(model, num_slots=NUM_LAYERS, device="cpu")
    engine.forward_backward(micro_batches())
    model.zero_grad()
    with torch.no_grad():
        for written in (model, reference):
            written.state_dict()[UP].mul_(3)
    loss, expected = plain(reference)
    assert engine.forward_backward(micro_batches()).loss == pytest.approx(loss, rel=1e-6)
    found = gradients(model)
    engine.detach()
    assert all(torch.allclose(found[n], g, rtol=1e-3, atol=1e-6) for n, g in expected.items())
    assert torch.equal(up_proj(model).weight, up_proj(reference).weight)


@pytest.mark.thorough
def test_an_adapter_is_loaded_into_an_attached_model() -> None:
    model = tiny("qwen3")
    other = tiny("qwen3", seed=1)
    with attached(model) as engine:
        set_peft_model_state_dict(model, get_peft_model_state_dict(other))
        assert_same(get_peft_model_state_dict(model), get_peft_model_state_dict(other))
        found = engine.forward_backward(micro_batches()).loss
    assert found == pytest.approx(plain(model)[0], rel=1e-5)
