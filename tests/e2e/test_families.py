"""A model of each family, as published: planned, trained on text, merged, loaded by others."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import AutoPeftModel, AutoPeftModelForCausalLM, LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoConfig, AutoModelForImageTextToText

from finetune.export.merge import merge
from finetune.model.empty import model_class
from tests.chat_templates import PARTS
from tests.doubles import tiny_tokenizer
from tests.e2e.conftest import RecipeWriter
from tests.e2e.runs import adapter, losses, run
from tests.published import publish
from tests.tiers import mostly_slow
from tests.vllm_classes import SERVED

IMAGE_TEXT = (
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
CAUSAL = (
    "gemma3",
    "gemma4",
    "glm4_moe_lite",
    "gpt_oss",
    "lfm2_moe",
    "mixtral",
    "nemotron_h",
    "qwen3_5",  # published for images and text, trained as text alone
    "qwen3_5_moe",
)
MIXTURES = (
    *("glm4_moe_lite", "gpt_oss", "lfm2_moe", "mixtral", "nemotron_h", "qwen3_5_moe"),
    *("glm5_next", "kimi_k25", "minimax_m3_vl", "mistral4", "qwen3_vl_moe"),
)
CHANGES = {"gemma4": {"hidden_size_per_layer_input": 0}}
TOWER = re.compile("vision|visual|vit_|tower|projector")


def logits(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model.eval()(input_ids=ids).logits
    return found


def by_card(run_dir: Path, base: Path) -> Any:
    """Return the model that the call in an adapter's card loads."""
    call = (run_dir / "adapter" / "README.md").read_text().split("```python\n")[1].split("```")[0]
    for shown, place in ((base.name, base), ("ADAPTER", run_dir / "adapter")):
        assert f'"{shown}"' in call
        call = call.replace(f'"{shown}"', repr(str(place)))
    names: dict[str, Any] = {}
    exec(call, names)
    return names["model"]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("model_type", mostly_slow((*CAUSAL, *IMAGE_TEXT), "mistral3"))
def test_a_published_model_is_trained_and_what_is_written_loads_elsewhere(
    model_type: str,
    tmp_path: Path,
    write_recipe: RecipeWriter,
    machine_file: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    base, merged, run_dir = (tmp_path / name for name in ("base", "merged", "run"))
    tokenizer = tiny_tokenizer(chat_template=PARTS)
    sizes = {"vocab_size": len(tokenizer), "max_position_embeddings": 128}
    publish(model_type, base, **sizes, **CHANGES.get(model_type, {}))
    tokenizer.save_pretrained(base)
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
    assert run("merge", run_dir, "--out", merged) == 0

    shown = losses(run_dir)
    assert shown[-1] < shown[0]
    assert not any(TOWER.search(name) for name in adapter(run_dir))

    published, written = (load_file(folder / "model.safetensors") for folder in (base, merged))
    assert written.keys() == published.keys()
    changed = {name for name in published if not torch.equal(published[name], written[name])}
    assert changed
    assert all(re.search(r"\.layers\.\d+\.", name) for name in changed)
    assert not any(TOWER.search(name) for name in changed)

    ids = torch.randint(5, 100, (2, 12), generator=torch.Generator().manual_seed(1))
    loader = model_class(AutoConfig.from_pretrained(base), source=str(base))
    before = logits(loader.from_pretrained(base), ids)
    expected = logits(by_card(run_dir, base), ids)
    assert (expected - before).abs().max() > 1e-3
    again = logits(loader.from_pretrained(merged), ids)
    torch.testing.assert_close(again, expected, rtol=0, atol=2e-5)
    automatic = AutoPeftModel if model_type in IMAGE_TEXT else AutoPeftModelForCausalLM
    assert torch.equal(logits(automatic.from_pretrained(run_dir / "adapter"), ids), expected)

    if model_type in SERVED:
        assert run("adapter", run_dir, "--format", "vllm", "--out", tmp_path / "vllm") == 0
        keys = load_file(tmp_path / "vllm" / "adapter_model.safetensors")
        lost = {key for key in keys if SERVED[model_type].module(key) is None}
        assert all(key.split(".lora_")[0].endswith("shared_expert_gate") for key in lost), lost


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
