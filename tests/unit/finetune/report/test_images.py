"""What is said of images: in a plan, at the start of a run, and in the card of what it trained."""

import json
from pathlib import Path

import pytest
import yaml
from transformers import Qwen3VLConfig

from finetune.planning.subject import model_facts
from finetune.recipe.recipe import Recipe
from finetune.report.images import images_line, images_section, shrunk_line
from finetune.report.model_card import merged_card, model_card
from offload.plan.facts.images import Images
from offload.plan.images import ImagePass, image_pass
from offload.plan.machine.machine import named_machine
from tests.builders import recipe_values

SECTION = images_section(
    num_images=1200, num_tokens=600_000, max_tokens=512, processor="Qwen3VLProcessor"
)


def cost_of(images: Images) -> ImagePass:
    facts = model_facts("qwen3-vl-30b-a3b")
    return image_pass(facts, named_machine("rtx4090"), images, dtype_bytes=2)


def test_a_plan_says_at_most_how_large_images_are() -> None:
    cost = cost_of(Images(num_images=10_000, most_tokens=512))
    assert images_line(cost).startswith("10,000 of at most 512 tokens: 78.12 GiB on disk, ")
    assert images_line(cost).endswith(" s before step 1")
    assert shrunk_line(cost) == "(`image.max_tokens: 256` halves it)"


def test_a_run_says_how_large_they_are_and_where_they_lie() -> None:
    cost = cost_of(Images(num_images=10_000, most_tokens=512, num_tokens=3_000_000))
    shown = images_line(cost, folder="/data/images")
    assert shown.startswith("10,000 of 300 tokens: 45.78 GiB of features in /data/images, ")


def test_without_their_number_there_is_the_size_of_one() -> None:
    shown = images_line(cost_of(Images(most_tokens=512)))
    assert shown == "at most 512 tokens, 8.0 MiB on disk each; `--images 10000` says it of all"


@pytest.mark.parametrize("images", [SECTION, ""])
def test_a_card_says_what_images_were_and_what_the_model_is_for(
    images: str, tmp_path: Path
) -> None:
    report = {"adapter_step": 1, "held_out": {}, "exact_match": {"after": 0.5}}
    (tmp_path / "report.json").write_text(json.dumps(report))
    recipe = Recipe.model_validate(recipe_values())
    card = model_card(
        recipe,
        tmp_path,
        Qwen3VLConfig(),
        loader="AutoModelForImageTextToText",
        data_hash="0" * 64,
        prompt="",
        form="",
        images=images,
    )
    pipeline = "image-text-to-text" if images else "text-generation"
    assert yaml.safe_load(card.split("---")[1])["pipeline_tag"] == pipeline
    assert ("## Images\n\n1,200 distinct images, 500 tokens in the mean;" in card) is bool(images)
    merged = merged_card(recipe, card, form="")
    assert yaml.safe_load(merged.split("---")[1])["pipeline_tag"] == pipeline
    assert ("### Images\n" in merged) is bool(images)


def test_a_card_says_whose_limit_images_had() -> None:
    assert "of each, at most 512 (`image.max_tokens`)." in SECTION
    assert "(Qwen3VLProcessor)" in SECTION
    own = images_section(num_images=3, num_tokens=9, max_tokens=None, processor="Gemma3Processor")
    assert "of each, as many as the processor makes of it" in own
