"""A model of each family, as published: planned, trained on text, merged, loaded by others."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import AutoPeftModel, AutoPeftModelForCausalLM
from safetensors.torch import load_file
from torch import nn
from transformers import AutoConfig

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
WITH_EXPERTS = {name for name in CAUSAL if re.search("moe|mixtral|oss|nemotron", name)}
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
    has_experts = model_type in WITH_EXPERTS
    recipe = write_recipe(
        model={"path": str(base), "dtype": "float32"},
        adapter={"rank": 4, "alpha": 8, "targets": "all-linear", "experts": has_experts},
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
