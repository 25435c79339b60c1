"""Checkpoints of models for text and images: their text part trains, the towers stay away."""

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

import offload
from finetune.adapter.lora import add_lora
from finetune.errors import ModelError
from offload.engine.model import placement
from offload.engine.model.layers import LayeredModel, find_towers
from tests.builders import adapter
from tests.checkpoints import loaded
from tests.parity.architectures import gradients, micro_batches, plain, rel_error, streamed
from tests.parity.tiny_models import SPECIAL, small, with_adapters
from tests.tiers import mostly_slow

WHOLE = ("gemma3", "gemma4")  # AutoModelForCausalLM builds them with their towers
TEXT_PART = ("qwen3_5", "qwen3_5_moe", "llama4")  # and of these the text part alone


@pytest.fixture(autouse=True)
def quiet(one_thread: None) -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def composite(model_type: str) -> Any:
    config_class = CONFIG_MAPPING[model_type]
    model_class: Any = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[config_class]
    torch.manual_seed(0)
    model = model_class._from_config(small(config_class, SPECIAL.get(model_type, {})))
    assert isinstance(model, PreTrainedModel)
    return model.requires_grad_(False)


def published(model_type: str, folder: Path) -> Any:
    """Return what `AutoModelForCausalLM` makes of a checkpoint as such models are published."""
    composite(model_type).save_pretrained(folder)
    loaded: Any = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    model, report = loaded
    assert not report["missing_keys"]
    return model.requires_grad_(False).train()


@pytest.mark.parametrize("model_type", mostly_slow([*WHOLE, *TEXT_PART], TEXT_PART[0]))
def test_the_text_of_a_published_composite_trains_exactly(model_type: str, tmp_path: Path) -> None:
    base = published(model_type, tmp_path)
    layered = LayeredModel(base)
    assert bool(layered.towers) is (model_type in WHOLE)
    model = with_adapters(base, layered.layers)
    batches = micro_batches()
    loss, ours = streamed(model, batches, num_slots=2)
    resident_loss, resident = streamed(model, batches, num_slots=8)
    plain_loss, reference = plain(model, batches)
    assert loss == resident_loss
    assert all(torch.equal(ours[name], resident[name]) for name in ours)
    assert loss == pytest.approx(plain_loss, rel=2e-6)
    assert rel_error(ours, reference) < 2e-6


@pytest.mark.parametrize("model_type", mostly_slow(TEXT_PART, TEXT_PART[0]))
def test_a_text_part_has_the_weights_of_the_whole(model_type: str, tmp_path: Path) -> None:
    base = published(model_type, tmp_path)
    whole = {
        name.replace("language_model.", "").replace("model.", ""): tensor
        for name, tensor in composite(model_type).state_dict().items()
    }
    for name, tensor in base.state_dict().items():
        assert torch.equal(tensor, whole[name.replace("model.", "")]), name


@pytest.mark.parametrize("model_type", WHOLE)
def test_towers_stay_where_they_are_when_the_rest_moves(model_type: str) -> None:
    layered = LayeredModel(composite(model_type))
    towers = {id(p) for tower in layered.towers for p in tower.parameters()}
    moved = placement.modules_on_device(layered)
    on_device = {id(p) for module in moved for p in module.parameters(recurse=False)}
    assert towers
    assert not towers & on_device
    assert towers | on_device == {id(parameter) for parameter in layered.model.parameters()}
    names = [name for name, p in layered.model.named_parameters() if id(p) in towers]
    assert not any("language_model" in name or "lm_head" in name for name in names)


@pytest.mark.thorough
@pytest.mark.parametrize("tier", mostly_slow(["ram", "disk"], "disk"))
def test_a_loaded_composite_keeps_no_tower_in_memory_and_trains(
    tier: Literal["ram", "disk"], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "model"
    composite("gemma3").save_pretrained(folder)
    base = loaded(folder, tier)
    towers = find_towers(base.model)
    assert towers
    assert {p.device.type for tower in towers for p in tower.parameters()} == {"meta"}
    model = add_lora(base.model, adapter(), seed=0)
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    assert all(".layers." in name and "vision_tower" not in name for name in trained)
    engine = offload.attach(model, num_slots=2, device="cpu", backing=base.backing)
    batches = micro_batches()
    loss = engine.forward_backward(batches).loss
    found = gradients(model)
    engine.detach()
    plain_loss, reference = plain(model.train(), batches)
    assert loss == pytest.approx(plain_loss, rel=2e-6)
    assert rel_error(found, reference) < 2e-6


@pytest.mark.thorough
@pytest.mark.parametrize("model_type", mostly_slow([*WHOLE, *TEXT_PART], WHOLE[0], TEXT_PART[0]))
def test_weights_of_towers_are_no_error_and_others_that_are_unknown_are(
    model_type: str, tmp_path: Path
) -> None:
    composite(model_type).save_pretrained(tmp_path)
    base = loaded(tmp_path)
    assert base.backing is not None
    base.backing.close()
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    name = next(name for name in tensors if "language_model" in name)
    tensors[f"{name}.unknown"] = torch.zeros(1)
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(ModelError, match="unknown to the model, 1 tensors"):
        loaded(tmp_path)


def test_a_model_without_towers_has_none() -> None:
    base = composite("gemma3")
    text = AutoModelForCausalLM.from_config(base.config.get_text_config())
    assert LayeredModel(text).towers == []
