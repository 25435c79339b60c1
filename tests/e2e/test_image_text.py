"""A model for images and text, as published: planned, trained on text, merged, loaded again."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING, AutoModelForImageTextToText

from finetune.export.merge import merge
from tests.chat_templates import PARTS
from tests.doubles import tiny_tokenizer
from tests.e2e.conftest import RecipeWriter
from tests.e2e.runs import adapter, losses, run
from tests.parity.tiny_models import SPECIAL, small
from tests.tiers import mostly_slow

TYPES = (
    "glm4v",
    "glm5_next",
    "idefics3",  # its decoder is called `text_model`
    "internvl",  # its root says tied, its text config not
    "kimi_k25",
    "lfm2_vl",
    "minimax_m3_vl",
    "mistral3",
    "mistral4",
    "qwen2_5_vl",
    "qwen3_vl",
    "qwen3_vl_moe",
    "step3p7",
)
MIXTURES = ("glm5_next", "kimi_k25", "minimax_m3_vl", "mistral4", "qwen3_vl_moe")


def publish(model_type: str, folder: Path) -> None:
    """Write a random model by transformers, and a tokenizer whose template loops over parts."""
    tokenizer = tiny_tokenizer(chat_template=PARTS)
    special = {**SPECIAL.get(model_type, {}), "vocab_size": len(tokenizer)}
    special["max_position_embeddings"] = 128
    torch.manual_seed(0)
    config = small(CONFIG_MAPPING[model_type], special)
    AutoModelForImageTextToText.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def logits(model: Any, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model.eval()(input_ids=ids).logits
    return found


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("model_type", mostly_slow(TYPES, "mistral3"))
def test_its_text_is_trained_and_its_towers_stay_as_published(
    model_type: str,
    tmp_path: Path,
    write_recipe: RecipeWriter,
    machine_file: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    base, merged = tmp_path / "base", tmp_path / "merged"
    publish(model_type, base)
    recipe = write_recipe(
        model={"path": str(base), "dtype": "float32"},
        adapter={"targets": "all-linear", "experts": model_type in MIXTURES},
        train={"steps": 5},
        output={"checkpoint_every": 5},
        report={"samples": 1, "log_to": []},
    )
    assert run("plan", recipe, "--machine", machine_file) == 0
    assert "it fits" in capsys.readouterr().out
    assert run("finetune", recipe, "--machine", machine_file) == 0
    assert run("merge", tmp_path / "run", "--out", merged) == 0

    shown = losses(tmp_path / "run")
    assert shown[-1] < shown[0]
    names = adapter(tmp_path / "run")
    assert not any(re.search("vision|visual|tower|projector", name) for name in names)

    published, written = (load_file(folder / "model.safetensors") for folder in (base, merged))
    assert written.keys() == published.keys()
    changed = {name for name in published if not torch.equal(published[name], written[name])}
    assert all(re.search(r"\.(layers|blocks)\.\d+\.", name) for name in changed)
    assert not any(re.search("vision|visual|tower|projector", name) for name in changed)

    ids = torch.randint(5, 100, (2, 12), generator=torch.Generator().manual_seed(1))
    plain, again = (AutoModelForImageTextToText.from_pretrained(f) for f in (base, merged))
    before = logits(plain, ids)
    expected = logits(PeftModel.from_pretrained(plain, tmp_path / "run" / "adapter"), ids)
    assert (expected - before).abs().max() > 1e-3
    torch.testing.assert_close(logits(again, ids), expected, rtol=0, atol=2e-5)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.thorough
@pytest.mark.parametrize("whole", ["lm_head", "embed_tokens"])
def test_a_head_of_its_own_is_merged_though_the_config_says_tied(
    whole: str, tmp_path: Path
) -> None:
    base = tmp_path / "base"
    publish("mistral3", base)
    file = base / "model.safetensors"
    tensors = load_file(file)
    embedding = tensors["language_model.model.embed_tokens.weight"]
    tensors["language_model.lm_head.weight"] = embedding + torch.randn_like(embedding)
    save_file(tensors, file, metadata={"format": "pt"})
    plain: Any = AutoModelForImageTextToText.from_pretrained(base)
    assert plain.config.tie_word_embeddings
    config = LoraConfig(r=2, target_modules=r".*language_model.*q_proj", modules_to_save=[whole])
    adapted = get_peft_model(plain, config)
    for parameter in adapted.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.1)
    adapted.save_pretrained(str(tmp_path / "adapter"))
    merge(base, tmp_path / "adapter", tmp_path / "merged")
    again = AutoModelForImageTextToText.from_pretrained(tmp_path / "merged")
    ids = torch.arange(5, 20).view(1, -1)
    torch.testing.assert_close(logits(again, ids), logits(adapted, ids), rtol=0, atol=2e-5)
