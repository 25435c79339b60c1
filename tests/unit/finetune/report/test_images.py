"""What is said of images: in a plan, at the start of a run, and in the card of what it trained."""

import json
from pathlib import Path

import pytest
import yaml
from transformers import Qwen3VLConfig

from finetune.errors import CheckpointError
from finetune.files.manifest import sealed_json
from finetune.planning.subject import model_facts
from finetune.recipe.recipe import Recipe
from finetune.report.compare_pages import compare_page
from finetune.report.compared_runs import read_runs
from finetune.report.explain import details_of, explain
from finetune.report.images import (
    ImageFigures,
    images_line,
    images_section,
    read_images,
    shrunk_line,
    write_images,
)
from finetune.report.model_card import merged_card, model_card
from finetune.report.pages import run_page
from offload.plan.facts.images import Images
from offload.plan.images import ImagePass, image_pass
from offload.plan.machine.machine import named_machine
from tests.builders import recipe_values
from tests.unit.finetune.report.made_up import write_run
from tests.unit.finetune.report.seen import Seen, begun

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


FIGURES = ImageFigures(
    num_images=1200,
    num_tokens=600_000,
    feature_bytes=3 * 2**30,
    predicted_bytes=2 * 2**30,
    num_encoded=1000,
    pass_s=50.0,
    predicted_pass_s=40.0,
)


def a_run(folder: Path, figures: ImageFigures | None) -> Path:
    folder.mkdir()
    write_run(begun(folder), slow_s=[1.0] * 2)
    if figures is not None:
        write_images(folder, figures)
    return folder


def test_the_page_of_a_run_says_what_its_images_took(tmp_path: Path) -> None:
    run = a_run(tmp_path / "seen", FIGURES)
    page = Seen(run_page(run)).text
    assert "images 1,200 distinct, 500 tokens each, 3.00 GiB on disk" in page
    assert "encoding 1,000 of them took 50.00 s predicted 40.00 s, error -20%" in page
    line = (
        "Images: 1,200 distinct, 500 tokens each in the mean, 3.00 GiB on disk (predicted 2.00"
        " GiB); 1,000 encoded in 50.00 s (predicted 40.00 s)"
    )
    assert line in page
    assert line in details_of(explain(run))
    assert explain(run).to_json()["images"]["pass_s"] == 50.0
    without = a_run(tmp_path / "text", None)
    assert "distinct" not in Seen(run_page(without)).text
    assert "images" not in explain(without).to_json()


def test_images_that_had_features_have_no_time(tmp_path: Path) -> None:
    run = a_run(tmp_path / "seen", FIGURES.model_copy(update={"num_encoded": 0, "pass_s": 0.0}))
    page = Seen(run_page(run)).text
    assert "their features were there before" in page
    assert "encoding" not in page
    write_images(run, FIGURES)  # resumed, where they are computed again
    write_images(run, FIGURES.model_copy(update={"num_encoded": 0}))  # and resumed once more
    assert read_images(run) == FIGURES


def test_runs_are_compared_by_their_images_where_one_has_some(tmp_path: Path) -> None:
    seen, text = a_run(tmp_path / "seen", FIGURES), a_run(tmp_path / "text", None)
    both = Seen(compare_page(read_runs([seen, text]))).text
    assert "images encoded in" in both
    assert "1,200 50.00 s" in both
    other = a_run(tmp_path / "other", None)
    assert "encoded in" not in Seen(compare_page(read_runs([text, other]))).text


@pytest.mark.parametrize(
    ("was", "now", "reason"),
    [
        ('"num_images": 1200', '"num_images": 0', "num_images is 0"),
        ('"pass_s": 50.0', '"pass_s": -1', "pass_s is -1"),
        ('"pass_s": 50.0', '"pass_s": 49.0', "not what was written"),
    ],
)
def test_damaged_figures_are_refused(was: str, now: str, reason: str, tmp_path: Path) -> None:
    run = a_run(tmp_path / "seen", FIGURES)
    file = run / "images.json"
    file.write_text(file.read_text().replace(was, now))
    with pytest.raises(CheckpointError, match=reason):
        explain(run)


def test_answers_are_shown_with_the_images_of_their_rows(tmp_path: Path) -> None:
    run = a_run(tmp_path / "seen", FIGURES)
    uri = "data:image/jpeg;base64,AAAA"
    rows = [
        {"prompt": "p0", "wanted": "w", "got": "g", "images": [uri, uri]},
        {"prompt": "p1", "wanted": "w", "got": "g"},
    ]
    answers = json.dumps({"exact_match": 0.5, "prompts": {"": 2}, "rows": rows}, indent=1)
    (run / "samples_after.json").write_text(sealed_json(answers))
    text = run_page(run)
    shown = f'<img src="{uri}" alt="image 1"><img src="{uri}" alt="image 2"></span>p0</td>'
    assert shown in text
    assert "<td>p1</td>" in text
    assert "img-src data:" in text
