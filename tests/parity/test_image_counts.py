"""What a plan counts of images, against what a model's tower makes and its front holds."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from finetune.images.features import FeatureStore
from finetune.images.front import ARGUMENTS
from finetune.model.facts import facts_from
from offload.engine.model.layers import LayeredModel
from offload.engine.model.packed_rows import PackedCall
from offload.engine.model.recorders import Call
from offload.plan.facts.facts import ModelFacts
from offload.plan.facts.images import Images
from offload.plan.facts.tower import TowerFacts
from offload.plan.images import image_pass
from offload.plan.machine.machine import named_machine
from offload.plan.memory.memory import image_bytes, image_mask_bytes
from tests.builders import workload
from tests.parity.image_cases import Case, case_of, packed, padded, types
from tests.parity.images import Inputs, Row

pytestmark = pytest.mark.usefixtures("one_thread")

ITEM_BYTES = 8  # of float64
WINDOW, WORD = 8, 20  # tokens that a layer with a window sees; any token of text
FEW = "gemma3", "mistral3", "qwen3_vl"


def facts_and_tower(case: Case) -> tuple[ModelFacts, TowerFacts]:
    base: Any = case.model.get_base_model()  # type: ignore[operator]
    facts = facts_from(base.config.to_dict())
    assert facts.tower is not None
    return facts, facts.tower


def num_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Return the bytes of tensors, of those that share them once."""
    storages = {one.untyped_storage().data_ptr(): one.untyped_storage() for one in tensors}
    return sum(one.nbytes() for one in storages.values())


def num_patches(inputs: Inputs, patch_size: int) -> int:
    """Return the patches of an image, as the processor says how many they are."""
    if "image_grid_thw" in inputs:
        return int(inputs["image_grid_thw"].prod())
    if "spatial_shapes" in inputs:
        return int(inputs["spatial_shapes"].prod())
    if "image_position_ids" in inputs:
        return int((inputs["image_position_ids"][..., 0] >= 0).sum())
    if "image_sizes" in inputs:
        return int(inputs["image_sizes"].prod()) // patch_size**2
    return inputs["pixel_values"].numel() // 3 // patch_size**2


@pytest.mark.parametrize("model_type", types(*FEW))
def test_features_take_as_many_bytes_on_disk_as_planned(model_type: str, tmp_path: Path) -> None:
    case = case_of(model_type)
    facts, tower = facts_and_tower(case)
    store = FeatureStore(folder=tmp_path)
    sizes = [image.num_tokens for image in case.images]
    for number, features in enumerate(case.features):
        store.put(number.to_bytes(16), features)
    images = Images(most_tokens=max(sizes), num_images=len(sizes), num_tokens=sum(sizes))
    cost = image_pass(facts, named_machine("rtx4090"), images, dtype_bytes=ITEM_BYTES)
    for size, file in zip(sizes, sorted(tmp_path.iterdir()), strict=True):
        assert num_bytes(load_file(file).values()) == size * cost.token_bytes
    stored = (num_bytes(load_file(file).values()) for file in tmp_path.iterdir())
    assert sum(stored) == cost.feature_bytes
    patches = [num_patches(image.inputs, tower.patch_size) for image in case.images]
    assert patches == [size * tower.patches_per_token for size in sizes]


def parts_of(call: Call | PackedCall) -> list[Call]:
    if isinstance(call, Call):
        return [call]
    return [*call.rows, *([] if call.together is None else [call.together])]


@pytest.mark.parametrize("batched", [packed, padded])
@pytest.mark.parametrize("model_type", types(*FEW))
def test_a_step_holds_no_more_of_images_than_planned(
    model_type: str, batched: Callable[[Case, Sequence[Row]], dict[str, torch.Tensor]]
) -> None:
    case = case_of(model_type)
    facts, tower = facts_and_tower(case)
    base: Any = case.model.get_base_model()  # type: ignore[operator]
    arguments, layered = getattr(base, ARGUMENTS), LayeredModel(case.model)
    fronts, in_front, largest = [], 0, 0
    for rows in (case.rows[:3], case.rows[3:]):
        batch = batched(case, rows)
        del batch["labels"]
        features = arguments(batch)["mm_encoder_outputs"]["image"].pooler_output
        in_front = max(in_front, num_bytes(features))
        largest = max(largest, batch["input_ids"].numel())
        fronts.append(layered.front(batch))
    parts = [one for front in fronts for call in front.layer_calls for one in parts_of(call)]
    added = [one.kwargs.get("added_features") for one in parts]
    held = num_bytes(one for one in added if one is not None)
    tokens = sum(front.hidden_BTD.shape[:2].numel() for front in fronts)
    assert held == tower.num_added * tokens * facts.hidden_size * ITEM_BYTES
    shape = replace(workload(has_images=True), packed_tokens=largest, dtype_bytes=ITEM_BYTES)
    assert held + in_front <= image_bytes(facts, shape, num_micro_batches=len(fronts))


@pytest.mark.parametrize("model_type", types(*FEW, "gemma4"))
def test_a_short_row_with_an_image_has_masks_where_the_facts_say(model_type: str) -> None:
    case = case_of(model_type)
    facts, tower = facts_and_tower(case)
    layered, num = LayeredModel(case.model), case.images[0].num_tokens
    assert num + 2 < WINDOW
    of_image = [*range(case.first_id, case.first_id + num), WORD, WORD]
    masks = []
    for ids in (of_image, [WORD] * len(of_image)):
        front = layered.front({"input_ids": torch.tensor([ids])})
        masks.append([call.kwargs.get("attention_mask") for call in front.calls])
    for layer, with_image, without in zip(facts.layers, *masks, strict=True):
        is_masked = with_image is not None and without is None
        assert is_masked == tower.is_masked(layer.window)
        if is_masked:
            assert with_image.nbytes == len(of_image) ** 2


def test_masks_of_images_count_where_rows_have_no_other_mask() -> None:
    facts, tower = facts_and_tower(case_of("gemma3"))
    assert tower.seen_whole == "in all"

    def masks(**changes: Any) -> int:
        shape = workload(has_images=True, micro_batch_size=2, **changes)
        return image_mask_bytes(facts, shape, is_padded=False)

    short, long = WINDOW, 10 * WINDOW
    assert masks(seq_len=short) == 2 * (2 * short * short)  # with a window and without
    assert masks(seq_len=long) == 2 * long * long  # windows have a mask of their own
    packed_rows = masks(seq_len=long, packed_tokens=4 * long)
    assert packed_rows == 4 * long * long
    assert image_mask_bytes(facts, workload(has_images=True), is_padded=True) == 0
    assert image_mask_bytes(facts, workload(), is_padded=False) == 0
