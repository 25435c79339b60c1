"""The pictures of recipes/quickstart and the model that sees them."""

import base64
import io
import json
import random
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForImageTextToText, AutoProcessor

from finetune.recipe.load import load_recipe
from finetune.recipe.recipe import recipes_dir
from tests.bench import draw_pictures
from tests.bench.draw_pictures import HELDOUT_PAIRS, make_rows
from tests.bench.pretrain_quickstart_images import build_processor, draw_batch

DIR = recipes_dir() / "quickstart"
EYES = DIR / "eyes"


def shown(line: str) -> tuple[str, str, np.ndarray[Any, Any]]:
    """Return question, answer and pixels (H, W, 3) of a row."""
    asked, told = json.loads(line)["messages"]
    picture, question = asked["content"]
    content = base64.b64decode(picture["image_url"]["url"].partition(",")[2])
    pixels_HWC = np.asarray(Image.open(io.BytesIO(content)).convert("RGB"))
    return question["text"], told["content"], pixels_HWC


@pytest.fixture(scope="module")
def train() -> list[str]:
    return (DIR / "pictures.jsonl").read_text(encoding="ascii").splitlines()


@pytest.fixture(scope="module")
def heldout() -> list[str]:
    return (DIR / "pictures_heldout.jsonl").read_text(encoding="ascii").splitlines()


def test_the_script_reproduces_the_committed_rows(train: list[str], heldout: list[str]) -> None:
    # Pixel by pixel: the bytes of a PNG are those of a version of zlib.
    for lines, seed, is_heldout in ((train, 0, False), (heldout, 1, True)):
        made = make_rows(seed=draw_pictures.SEED + seed, num=len(lines), heldout=is_heldout)
        for line, again in zip(lines, made.splitlines(), strict=True):
            *words, pixels_HWC = shown(line)
            *words_again, pixels_again_HWC = shown(again)
            assert words == words_again
            assert np.array_equal(pixels_HWC, pixels_again_HWC)


def test_no_heldout_picture_is_a_training_picture(train: list[str], heldout: list[str]) -> None:
    seen, unseen = ({shown(line)[2].tobytes() for line in lines} for lines in (train, heldout))
    assert (len(seen), len(unseen)) == (600, 120)
    assert seen.isdisjoint(unseen)


def test_pairs_of_colour_and_shape_are_kept_for_heldout_rows(
    train: list[str], heldout: list[str]
) -> None:
    def num_with_pair(lines: list[str]) -> int:
        answers = [shown(line)[1] for line in lines]
        return sum(any(" ".join(pair) in told for pair in HELDOUT_PAIRS) for told in answers)

    assert num_with_pair(train) == 0
    assert num_with_pair(heldout) >= 6


def test_an_answer_names_the_colours_that_the_picture_has(train: list[str]) -> None:
    for line in train[:100]:
        question, told, pixels_HWC = shown(line)
        found = np.unique(pixels_HWC.reshape(-1, 3), axis=0)
        named = [name for name in draw_pictures.COLOURS if name in told]
        for name in named:
            distance = np.abs(found - np.array(draw_pictures.COLOURS[name])).max(axis=1)
            assert distance.min() <= 15, question


def test_the_committed_processor_is_the_one_that_the_script_builds(train: list[str]) -> None:
    built, committed = build_processor(), AutoProcessor.from_pretrained(EYES)
    assert built.tokenizer.get_vocab() == committed.tokenizer.get_vocab()
    assert built.chat_template == committed.chat_template
    pixels_HWC = shown(train[0])[2]
    given = {"text": "see <start_of_image>", "images": [Image.fromarray(pixels_HWC)]}
    inputs = committed(**given, return_tensors="pt")
    assert inputs["input_ids"].tolist() == built(**given, return_tensors="pt")["input_ids"].tolist()
    # What pretraining gave the tower.
    scaled_CHW = torch.from_numpy(pixels_HWC.copy()).permute(2, 0, 1).float() / 127.5 - 1
    torch.testing.assert_close(inputs["pixel_values"][0], scaled_CHW)


def test_the_model_is_a_gemma3_of_a_few_million_parameters() -> None:
    config = AutoConfig.from_pretrained(EYES)
    tokenizer = build_processor().tokenizer
    with safe_open(EYES / "model.safetensors", framework="pt") as weights:
        names = list(weights.keys())
        assert {weights.get_slice(name).get_dtype() for name in names} == {"BF16"}
        assert 1e6 <= sum(weights.get_tensor(name).numel() for name in names) <= 2e6
    assert config.model_type == "gemma3"
    assert config.image_token_id == tokenizer.image_token_id
    assert config.text_config.vocab_size >= len(tokenizer)
    assert config.text_config.eos_token_id == tokenizer.eos_token_id


def test_the_model_sees_new_pictures_and_says_so_in_its_code() -> None:
    processor = AutoProcessor.from_pretrained(EYES)
    model = AutoModelForImageTextToText.from_pretrained(EYES, dtype=torch.float32)
    batch = draw_batch(random.Random(7), processor, num=64, seq_len=80, max_scribbles=0)
    with torch.no_grad():
        logits_BTV = model(
            input_ids=batch.tokens_BT,
            token_type_ids=batch.types_BT,
            pixel_values=batch.pixels_BCHW,
            use_cache=False,
        ).logits
    is_right_BT = logits_BTV[:, :-1].argmax(dim=-1) == batch.labels_BT[:, 1:]
    right = [bool(is_right_BT[row, a - 1 : b - 1].all()) for _, row, a, b in batch.spans]
    assert len(right) > 100
    assert sum(right) / len(right) > 0.9


def test_the_recipe_streams_and_finds_model_and_rows_beside_it() -> None:
    recipe = load_recipe("quickstart_images", [])
    assert str(recipe.model.path) == str(EYES)
    assert str(recipe.data.path) == str(DIR / "pictures.jsonl")
    assert recipe.offload.num_slots == 3
    assert recipe.train.num_micro_batches > 1
    assert recipe.report.samples == 120
