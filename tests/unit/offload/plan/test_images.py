"""The pass over images, and their features in a step: bytes and times by hand."""

from dataclasses import replace

import pytest

from finetune.planning.subject import model_facts
from offload.errors import DoesNotFitError
from offload.plan.facts.facts import ModelFacts
from offload.plan.facts.images import Images
from offload.plan.facts.tower import TowerFacts
from offload.plan.images import (
    IMAGE_S,
    ONE_IMAGE,
    PIXEL_S,
    TOWER,
    ImagePass,
    image_pass,
)
from offload.plan.machine.machine import GIB, MIB, Rate, named_machine
from offload.plan.memory.memory import CUBLAS, IMAGES, Scoring, device_needs
from offload.plan.plan import plan
from offload.plan.request import PlanRequest, with_images, with_workload
from offload.plan.scoring import ScoreRequest, plan_scoring
from tests.builders import qwen3_8b, request, workload

MOE = model_facts("qwen3-vl-30b-a3b")  # 2,048 wide, features added after three layers
GEMMA = model_facts("gemma-4-26b-a4b")  # 2,816 wide, none added
CARD = named_machine("rtx4090")
TEN_THOUSAND = Images(num_images=10_000, most_tokens=1024)


def cost_of(images: Images = TEN_THOUSAND) -> ImagePass:
    return image_pass(MOE, CARD, images, dtype_bytes=2)


def term(cost: ImagePass, name: str) -> int:
    (size,) = (one.num_bytes for one in cost.device_memory if one.name == name)
    return size


def test_features_of_qwen3_vl_are_four_rows_of_each_token() -> None:
    cost = cost_of()
    assert cost.token_bytes == (1 + 3) * 2048 * 2
    assert cost.feature_bytes == 10_000 * 1024 * 4 * 2048 * 2
    assert cost.feature_bytes / GIB == 156.25


def test_features_of_gemma_4_are_one_row_of_each_token() -> None:
    cost = image_pass(GEMMA, CARD, Images(num_images=10_000, most_tokens=280), dtype_bytes=2)
    assert cost.feature_bytes == 10_000 * 280 * 2816 * 2
    assert cost.feature_bytes / GIB == pytest.approx(14.69, abs=0.01)


def test_half_the_tokens_are_half_the_bytes_and_less_than_half_the_time_of_the_tower() -> None:
    whole, half = cost_of(), cost_of(Images(num_images=10_000, most_tokens=512))
    assert whole.feature_bytes == 2 * (half.feature_bytes or 0)
    assert whole.compute_s is not None
    assert half.compute_s is not None
    assert half.compute_s < whole.compute_s / 2  # attention grows by the square


def test_the_tower_computes_products_for_patches_and_tokens_and_attention_within_an_image() -> None:
    slow = replace(
        CARD,
        gemm_flops_per_s=Rate(value=1e12, source="drawn"),
        attention_flops_per_s=Rate(value=2e12, source="drawn"),
    )
    cost = image_pass(MOE, slow, TEN_THOUSAND, dtype_bytes=2)
    tower = MOE.tower
    assert tower is not None
    # 27 layers of 4 x 1,152^2 + 2 x 1,152 x 4,304 weights, their biases and two norms
    biases = 3 * 1152 + 1152 + 4304 + 1152
    one = 4 * 1152**2 + 2 * 1152 * 4304 + biases + 4 * 1152
    assert tower.block_parameters == 27 * one
    patches, tokens = 10_000 * 4096, 10_000 * 1024
    products = 2 * 27 * one * patches + 2 * tower.other_parameters * tokens
    attention = 4 * patches * 4096 * 1152 * 27
    assert cost.compute_s == pytest.approx(products / 1e12 + attention / 2e12)


def test_small_images_take_the_time_of_starting_the_operations() -> None:
    cost = cost_of(Images(num_images=1000, most_tokens=4))
    assert cost.compute_s == pytest.approx(1000 * 27 * 16 * CARD.launch_s.value)


def test_the_host_decodes_as_many_pixels_as_tokens_stand_for() -> None:
    cost = cost_of()
    # a token is 2 x 2 patches of 16 x 16 pixels: an image is a megapixel
    pixels = 10_000 * 1024 * 32 * 32
    assert cost.host_s == pytest.approx(10_000 * IMAGE_S + pixels * PIXEL_S)


def test_features_are_written_at_the_rate_of_the_disk_where_it_is_known() -> None:
    disk = CARD.disk_bytes_per_s
    assert disk is not None
    cost = cost_of()
    assert cost.feature_bytes is not None
    assert cost.disk_s == pytest.approx(cost.feature_bytes / disk.value)
    parts = (cost.host_s, cost.compute_s, cost.load_s, cost.disk_s)
    assert cost.pass_s == pytest.approx(sum(part or 0.0 for part in parts))
    unmeasured = image_pass(MOE, replace(CARD, disk_bytes_per_s=None), TEN_THOUSAND, dtype_bytes=2)
    assert unmeasured.disk_s is None
    assert unmeasured.pass_s == pytest.approx((cost.pass_s or 0.0) - (cost.disk_s or 0.0))


def test_counted_tokens_take_the_place_of_the_most_that_images_can_have() -> None:
    counted = Images(num_images=10_000, most_tokens=1024, num_tokens=4_000_000)
    cost = cost_of(counted)
    assert cost.feature_bytes == 4_000_000 * cost.token_bytes
    assert cost.device_memory == cost_of().device_memory  # of the largest image


def test_before_rows_are_known_there_are_bytes_of_a_token_and_the_memory_of_the_pass() -> None:
    cost = cost_of(Images(most_tokens=1024))
    assert (cost.feature_bytes, cost.pass_s) == (None, None)
    assert cost.token_bytes == 4 * 2048 * 2
    assert cost.device_memory == cost_of().device_memory


def test_the_pass_holds_the_tower_and_one_image() -> None:
    cost = cost_of()
    tower = MOE.tower
    assert tower is not None
    assert term(cost, TOWER) == 2 * tower.num_parameters
    assert term(cost, TOWER) / GIB == pytest.approx(1.0, abs=0.01)
    # 4,096 patches: five values in bf16 and nine in fp32 for each of 1,152 features, and the pixels
    patch = 1152 * (5 * 2 + 9 * 4) + 3 * 2 * 16 * 16 * 4
    assert term(cost, ONE_IMAGE) == 4096 * patch
    assert cost.peak_bytes == sum(one.num_bytes for one in cost.device_memory)
    assert term(cost, CUBLAS) == 64 * MIB


def test_a_large_tower_is_copied_for_each_image_a_layer_at_a_time() -> None:
    small = replace(CARD, vram_bytes=CARD.context_bytes + 2 * GIB)
    tower = MOE.tower
    assert tower is not None
    num_bytes = 2 * tower.num_parameters
    assert num_bytes > small.vram_bytes // 2 - small.context_bytes // 2
    cost, resident = image_pass(MOE, small, TEN_THOUSAND, dtype_bytes=2), cost_of()
    rate = CARD.h2d_bytes_per_s.value
    assert resident.load_s == pytest.approx(num_bytes / rate)
    assert cost.load_s == pytest.approx(10_000 * num_bytes / rate)
    assert term(cost, TOWER) == 2 * (tower.block_parameters // 27)


def test_a_cpu_computes_with_the_weights_where_they_are() -> None:
    cpu = replace(CARD, device="cpu", vram_bytes=CARD.context_bytes + 2 * GIB)
    cost = image_pass(MOE, cpu, TEN_THOUSAND, dtype_bytes=2)
    assert MOE.tower is not None
    assert (cost.load_s, term(cost, TOWER)) == (0, 2 * MOE.tower.num_parameters)


def test_a_wide_mlp_takes_more_than_the_rotation() -> None:
    tower = TowerFacts(
        num_parameters=52_000_000,
        block_parameters=2 * (4 * 1000**2 + 3 * 1000 * 7000),
        num_blocks=2,
        width=1000,
        patch_size=16,
        patches_per_token=1,
    )
    images = Images(num_images=1, most_tokens=100)
    cost = image_pass(replace(MOE, tower=tower), CARD, images, dtype_bytes=2)
    patch = 2 * (2 * 1000 + 3 * 7000) + 3 * 2 * 16 * 16 * 4
    assert term(cost, ONE_IMAGE) == 100 * patch


def test_an_image_that_does_not_fit_names_the_tokens_that_do() -> None:
    large = Images(num_images=1, most_tokens=65_536)
    limit = 4 * GIB
    with pytest.raises(DoesNotFitError) as caught:
        image_pass(MOE, CARD, large, dtype_bytes=2, limit_bytes=limit)
    assert "one image of 65,536 tokens" in caught.value.what
    fitting = int(caught.value.hint.strip("`").rpartition(" ")[2])
    fits = image_pass(MOE, CARD, Images(most_tokens=fitting), dtype_bytes=2, limit_bytes=limit)
    assert limit - fits.peak_bytes < 1 * MIB
    with pytest.raises(DoesNotFitError, match="rtx4090") as caught:
        image_pass(MOE, CARD, large, dtype_bytes=2, limit_bytes=GIB // 2)
    assert caught.value.hint == "a card with more memory"


# ------------------------------------------------------------------------------------ in a step


def of_step(*, num_slots: int = 2) -> PlanRequest:
    return with_workload(request(workload(), num_slots=num_slots), codec="nf4")


def features_of(made: PlanRequest, facts: ModelFacts = MOE) -> int:
    found = plan(facts, CARD, made)
    return sum(one.num_bytes for one in found.device_memory if one.name == IMAGES)


def test_what_layers_add_stays_for_all_micro_batches_of_a_step() -> None:
    asked = of_step()
    assert features_of(asked) == 0
    rows = with_images(asked, Images(most_tokens=1024))
    # three layers of 8 micro-batches, and what takes the places of tokens in the front, of one
    assert features_of(rows) == (8 * 3 + 1) * 2048 * 2048 * 2
    assert features_of(rows) / MIB == 200


def test_where_no_layer_adds_any_there_is_one_micro_batch_in_the_front() -> None:
    rows = with_images(of_step(), Images(most_tokens=280))
    assert features_of(rows, GEMMA) == 2048 * 2816 * 2


def test_rows_that_are_only_scored_hold_theirs_too() -> None:
    def scored_bytes(*, has_images: bool) -> int:
        needs = device_needs(
            MOE,
            CARD,
            workload(has_images=has_images),
            num_micro_batches=8,
            is_reduced=False,
            is_padded=False,
            is_stashed=False,
            traced=None,
            scoring=Scoring(extra_passes=1.0, num_top=0),
        )
        return sum(row.num_bytes for row in needs.rows if row.name == "rows that are only scored")

    more = scored_bytes(has_images=True) - scored_bytes(has_images=False)
    assert more == (8 * 3 + 1) * 2048 * 2048 * 2


def test_lines_under_two_adapters_hold_theirs_twice() -> None:
    def hidden_bytes(*, has_images: bool) -> int:
        asked = ScoreRequest(
            workload=workload(has_images=has_images),
            lengths=(512,) * 4,
            num_labels=40,
            num_adapters=2,
            adapter_bytes=0,
            num_slots=2,
            vram_budget_bytes=None,
            is_on_disk=False,
        )
        terms = plan_scoring(MOE, named_machine("h100"), asked).device_memory
        return sum(one.num_bytes for one in terms if one.name == "hidden states")

    more = hidden_bytes(has_images=True) - hidden_bytes(has_images=False)
    assert more == 2 * 4 * 512 * (3 + 1) * 2048 * 2


def test_runs_of_a_shared_step_say_for_themselves_whether_their_rows_have_images() -> None:
    plain = request()
    rows = with_images(plain, Images(most_tokens=16))
    assert plain.with_run(rows) == rows
    assert rows.with_run(plain) == plain


def test_a_model_without_a_tower_has_no_features() -> None:
    asked = with_images(request(), Images(most_tokens=16))
    found = plan(qwen3_8b(), named_machine("rtx5090"), asked)
    assert IMAGES not in {one.name for one in found.device_memory}
