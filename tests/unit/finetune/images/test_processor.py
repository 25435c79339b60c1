"""A model's own processor, against its own call of a whole text with its images."""

import json
import math
import pickle
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.nn.functional import pad
from transformers import PixtralImageProcessorPil

from finetune.errors import ConfigError, ModelError, RowError
from finetune.images import processor as processors
from finetune.images.budget import budget_of
from finetune.images.imaging import RowImages
from finetune.images.processor import ImageProcessor, Processed
from tests.image_processors import (
    FAMILIES,
    USABLE,
    Family,
    family_of,
    pixels,
    plain_processor,
)

PUBLISHED_TOKENS = {
    # of images of 512 x 512, 1024 x 768, 1920 x 1080
    "qwen2_5_vl": (18 * 18, 37 * 27, 69 * 39),
    "qwen3_vl": (16 * 16, 32 * 24, 60 * 34),
    "qwen3_5": (16 * 16, 32 * 24, 60 * 34),
    "gemma3": (256, 256, 256),
    "gemma4": (16 * 16, 19 * 14, 22 * 12),
    "mistral3": (19 * 19, 37 * 28, 55 * 31),
    "idefics3": (17 * 169, 13 * 169, 13 * 169),
    "smolvlm": (17 * 81, 13 * 81, 13 * 81),
    "internvl": (256, 13 * 256, 9 * 256),
    "lfm2_vl": (256, 6 * 256 + 18 * 13, 8 * 256 + 21 * 12),
    "glm46v": (18 * 18, 37 * 27, 69 * 39),
}
BUDGETS = {
    # what is asked, and what a square image then has
    "qwen2_5_vl": (150, 144),
    "qwen3_vl": (150, 144),
    "qwen3_5": (150, 144),
    "gemma3": (256, 256),
    "gemma4": (200, 121),
    "mistral3": (150, 144),
    "idefics3": (1000, 5 * 169),
    "smolvlm": (1000, 10 * 81),
    "internvl": (1300, 5 * 256),
    "lfm2_vl": (150, 144),
    "glm46v": (150, 144),
}
SHAPES = (
    (1000, 1000),
    (300, 3000),
    (3000, 300),
    (1, 1),
    (3, 3),
    (40, 3),
    (2600, 2300),
    (640, 480),
)

of_families = pytest.mark.parametrize("family", USABLE, ids=lambda family: family.model_type)


def loaded(family: Family, folder: Path, *, max_tokens: int | None = None) -> ImageProcessor:
    return ImageProcessor.load(family.written(folder), family.tokenizer(), max_tokens=max_tokens)


def joined(parts: list[torch.Tensor], *, dim: int) -> torch.Tensor:
    """Join the inputs of several images as a processor does: padded to the largest."""
    most = [max(part.shape[i] for part in parts) for i in range(parts[0].dim())]
    widths = [
        [n for i in range(part.dim() - 1, dim, -1) for n in (0, most[i] - part.shape[i])]
        for part in parts
    ]
    return torch.cat([pad(part, width) for part, width in zip(parts, widths, strict=True)], dim)


@of_families
@pytest.mark.parametrize("max_tokens", [None, "some"])
def test_equals_the_own_call_of_a_text_with_two_images(
    family: Family, max_tokens: str | None, tmp_path: Path
) -> None:
    budget = BUDGETS[family.model_type][0] if max_tokens else None
    processor = loaded(family, tmp_path, max_tokens=budget)
    tokenizer, (first, second) = family.tokenizer(), (pixels(300, 200), pixels(90, 410, seed=1))
    placed = family.around.format(processor.image_token)
    text = f"Two\n\nof them: {placed}, {placed}\nand words."
    reference = plain_processor(family, tmp_path)
    wanted = budget_of(reference, budget)
    assert wanted is not None
    expected = reference(
        images=[first.image, second.image],
        text=[text],
        images_kwargs=dict(wanted.settings),
        return_mm_token_type_ids=False,
        return_tensors="pt",
    )

    ours = [processor.processed(one) for one in (first, second)]
    before, between, after = text.split(processor.image_token)
    found = tokenizer(before + ours[0].text + between + ours[1].text + after)["input_ids"]

    assert found == expected["input_ids"][0].tolist()
    assert found.count(processor.image_token_id) == sum(one.num_tokens for one in ours)
    names = {name for name in expected if "pixel" in name or "image" in name or "spatial" in name}
    assert {*ours[0].inputs} == {*ours[1].inputs} == names
    for name in names:
        dim = 1 if "Idefics" in family.processor or "Smol" in family.processor else 0
        parts = [one.inputs[name] for one in ours]
        torch.testing.assert_close(joined(parts, dim=dim), expected[name], rtol=0, atol=0)


@of_families
def test_counts_the_tokens_of_published_settings(family: Family, tmp_path: Path) -> None:
    processor = loaded(family, tmp_path)
    sizes = ((512, 512), (1024, 768), (1920, 1080))
    found = tuple(processor.processed(pixels(*size)).num_tokens for size in sizes)
    assert found == PUBLISHED_TOKENS[family.model_type]


@of_families
def test_keeps_within_a_budget(family: Family, tmp_path: Path) -> None:
    max_tokens, of_a_square = BUDGETS[family.model_type]
    processor = loaded(family, tmp_path, max_tokens=max_tokens)
    found = [processor.processed(pixels(*shape)).num_tokens for shape in SHAPES]
    assert found[0] == of_a_square
    assert max(found) <= max_tokens
    bound = re.search(r"at most ([\d,]+) tokens", processor.described())
    assert bound is not None
    assert max(found) <= int(bound[1].replace(",", "")) <= max_tokens


@of_families
def test_a_budget_only_lowers_what_was_published(family: Family, tmp_path: Path) -> None:
    published, wide = loaded(family, tmp_path), loaded(family, tmp_path, max_tokens=10**6)
    if family.model_type == "gemma4":  # whose makers meant it to be chosen
        assert "at most 1,120 tokens" in wide.described()
    else:
        assert published.described() == wide.described()
        one, other = (each.processed(pixels(700, 500)) for each in (published, wide))
        assert all(torch.equal(one.inputs[name], other.inputs[name]) for name in one.inputs)


@of_families
def test_names_the_special_tokens_of_images(family: Family, tmp_path: Path) -> None:
    processor, tokenizer = loaded(family, tmp_path), family.tokenizer()
    # a small image is one tile and needs no break within its only row
    unused = {"<|video_pad|>", "<|video|>", "<video>", "<end_of_utterance>", "<|img_thumbnail|>"}
    unused |= {"<|audio|>", "<|audio>", "<audio|>"}
    wanted = {
        token
        for token in family.tokens
        if token not in unused and not re.search("row_|BREAK", token)
    }
    found = {str(tokenizer.convert_ids_to_tokens(one)) for one in processor.special_ids}
    assert wanted <= found <= {*family.tokens}
    assert not found & {"<s>", "</s>", "<pad>"}


def require_same(one: Processed, other: Processed) -> None:
    """Check that two processors make the same of an image."""
    assert (one.text, one.num_tokens) == (other.text, other.num_tokens)
    for name, values in one.inputs.items():
        assert torch.equal(values, other.inputs[name])


@of_families
def test_can_be_sent_to_a_process(family: Family, tmp_path: Path) -> None:
    processor = loaded(family, tmp_path)
    copied = pickle.loads(pickle.dumps(processor))
    one, other = (each.processed(pixels(70, 50)) for each in (processor, copied))
    require_same(one, other)


@of_families
def test_leaves_the_tokenizer_as_it_was(family: Family, tmp_path: Path) -> None:
    section, tokenizer = family.written(tmp_path), family.tokenizer()
    ImageProcessor.load(section, tokenizer, max_tokens=None)
    untouched = family.tokenizer()
    assert tokenizer.backend_tokenizer.to_str() == untouched.backend_tokenizer.to_str()
    assert tokenizer.all_special_tokens == untouched.all_special_tokens


def test_reads_a_processor_in_one_file(tmp_path: Path) -> None:
    family = family_of("internvl")
    section, before = family.written(tmp_path), loaded(family, tmp_path)
    whole = tmp_path / "processor_config.json"
    apart = tmp_path / "preprocessor_config.json"
    values = json.loads(whole.read_bytes()) | {"image_processor": json.loads(apart.read_bytes())}
    whole.write_text(json.dumps(values))
    apart.unlink()
    found = ImageProcessor.load(section, family.tokenizer(), max_tokens=None)
    require_same(found.processed(pixels(70, 50)), before.processed(pixels(70, 50)))


def test_takes_the_class_of_the_type_of_the_model(tmp_path: Path) -> None:
    family = family_of("internvl")
    section, before = family.written(tmp_path), loaded(family, tmp_path)
    (tmp_path / "processor_config.json").write_text('{"image_seq_length": 256}')
    found = ImageProcessor.load(section, family.tokenizer(), max_tokens=None)
    require_same(found.processed(pixels(70, 50)), before.processed(pixels(70, 50)))


def test_the_digest_is_of_all_settings(tmp_path: Path) -> None:
    family = family_of("idefics3")
    section, tokenizer = family.written(tmp_path), family.tokenizer()

    def digest(max_tokens: int | None = None) -> str:
        found = RowImages.of(section, tokenizer, max_tokens=max_tokens)
        assert found is not None
        return found.digest

    before = digest()
    assert digest() == before
    assert digest(200) != before
    for name in ("processor_config.json", "preprocessor_config.json"):
        family.written(tmp_path)
        path = tmp_path / name
        values = json.loads(path.read_bytes())
        path.write_text(json.dumps(values | {"image_seq_len": 4, "image_mean": [0.1, 0.2, 0.3]}))
        assert digest() != before


def test_refuses_budgets_below_what_a_processor_makes(tmp_path: Path) -> None:
    for model_type, least in (
        ("gemma3", 256),
        ("gemma4", 70),
        ("idefics3", 169),
        ("internvl", 256),
    ):
        family = family_of(model_type)
        with pytest.raises(ConfigError, match=f"{family.images.removesuffix('Fast')}") as caught:
            loaded(family, tmp_path, max_tokens=least - 1)
        assert caught.value.hint == f"`image.max_tokens: {least}` or more"
        assert loaded(family, tmp_path, max_tokens=least).processed(pixels(900, 900))


def test_refuses_images_that_are_too_thin(tmp_path: Path) -> None:
    family = family_of("qwen3_vl")
    with pytest.raises(RowError, match=r"has 113 image tokens, and `image\.max_tokens` is 64"):
        loaded(family, tmp_path, max_tokens=64).processed(pixels(4000, 20))
    with pytest.raises(RowError, match="4100 x 20 pixels: Qwen2VLImageProcessorPil: absolute"):
        loaded(family, tmp_path).processed(pixels(4100, 20))


def test_a_budget_of_the_longer_side() -> None:
    images = PixtralImageProcessorPil(patch_size=28, size={"longest_edge": 1540})
    processor = SimpleNamespace(image_processor=images, patch_size=14, spatial_merge_size=2)
    for max_tokens in (1, 64, 100, 3024, 3025, 10**6):
        budget = budget_of(processor, max_tokens)
        assert budget is not None
        assert budget.num_tokens == min(math.isqrt(max_tokens), 55) ** 2
        for size in ((2000, 2000), (2000, 150), (30, 20)):
            height, width = images([pixels(*size).image], **budget.settings)["image_sizes"][0]
            assert height // 28 * (width // 28) <= budget.num_tokens


def test_a_budget_of_tiles_with_a_small_image() -> None:
    published = {
        "tile_size": 512,
        "encoder_patch_size": 16,
        "downsample_factor": 2,
        "min_tiles": 2,
        "max_tiles": 10,
        "use_thumbnail": True,
        "do_image_splitting": True,
        "min_image_tokens": 64,
        "max_image_tokens": 256,
    }
    images = type("Lfm2VlImageProcessor", (), published)()
    processor = SimpleNamespace(image_processor=images)
    few = {"do_image_splitting": False, "max_image_tokens": 50, "min_image_tokens": 50}
    expected = {
        None: (2816, {}),
        2816: (2816, {}),
        2815: (2560, {"max_tiles": 9}),
        768: (768, {"max_tiles": 2}),
        767: (256, few | {"max_image_tokens": 256, "min_image_tokens": 64}),
        50: (50, few),
    }
    for max_tokens, (num_tokens, settings) in expected.items():
        budget = budget_of(processor, max_tokens)
        assert budget is not None
        assert (budget.num_tokens, budget.settings) == (num_tokens, settings)


def test_refuses_a_budget_of_an_unknown_processor() -> None:
    processor = SimpleNamespace(image_processor=type("OtherImageProcessor", (), {})())
    assert budget_of(processor, None) is None
    with pytest.raises(ConfigError, match=r"image\.max_tokens: 5 with OtherImageProcessor"):
        budget_of(processor, 5)


def test_names_the_package_that_a_processor_needs(tmp_path: Path) -> None:
    for family in FAMILIES:
        if not family.is_usable:
            with pytest.raises(ModelError, match=f"is a {family.processor}, which needs") as caught:
                loaded(family, tmp_path)
            assert caught.value.hint == f"`pip install {family.package}`"


def test_names_the_extra_without_pillow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processors, "find_spec", lambda _: None)
    with pytest.raises(ModelError, match="Pillow is not installed") as caught:
        loaded(family_of("gemma3"), tmp_path)
    assert caught.value.hint == "`pip install 'sluice-finetune[images]'`"


def test_refuses_models_without_images_by_name(tmp_path: Path) -> None:
    family = family_of("gemma3")
    section = family.written(tmp_path)
    for name in ("processor_config.json", "preprocessor_config.json"):
        (tmp_path / name).unlink()
    with pytest.raises(ModelError, match="no processor in"):
        ImageProcessor.load(section, family.tokenizer(), max_tokens=None)
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    with pytest.raises(ModelError, match="is no model for them"):
        ImageProcessor.load(section, family.tokenizer(), max_tokens=None)


def test_refuses_the_processor_of_another_model(tmp_path: Path) -> None:
    family = family_of("qwen3_vl")
    section = family.written(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "qwen3_vl", "image_token_id": 5}')
    with pytest.raises(ModelError, match="Qwen3VLProcessor writes no tokens 5"):
        ImageProcessor.load(section, family.tokenizer(), max_tokens=None)
