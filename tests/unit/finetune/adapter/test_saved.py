"""Adapters that others saved: computed as peft computes them by all that reads them, or refused."""

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import (
    HiraConfig,
    IA3Config,
    LoHaConfig,
    LoKrConfig,
    LoraConfig,
    MissConfig,
    OFTConfig,
    PeftModel,
    VeraConfig,
    get_peft_model,
)
from transformers import LagunaConfig, LagunaForCausalLM

from finetune.adapter.lora import add_lora, load_adapter, load_into, save_adapter, trained
from finetune.errors import CheckpointError, MergeError
from finetune.export.merge import merge
from finetune.export.vllm import write_vllm_adapter
from finetune.recipe.sections import AdapterSection
from finetune.training.preflight import adapter_to_go_on_from
from tests.unit.finetune.export.adapted import (
    MODELS,
    SHAPE,
    edit,
    load,
    logits,
    publish,
    rel,
    train,
    with_adapter,
)

DOORS: dict[str, Callable[[Path, Path], object]] = {
    "merge": lambda base, adapter: merge(base, adapter, base.parent / "out"),
    "vllm": lambda base, adapter: write_vllm_adapter(
        adapter, base.parent / "out", model_config={"model_type": "qwen3"}
    ),
    "score, chat and generate": lambda base, adapter: load_adapter(load(base), adapter),
    "before training": lambda base, adapter: adapter_to_go_on_from(adapter, model=str(base)),
    "init_from": lambda base, adapter: load_into(
        add_lora(load(base), AdapterSection(rank=4), seed=0), adapter
    ),
}
REFUSED: dict[str, tuple[object, str]] = {
    "bias": ("all", r"biases of the base .*merge_and_unload\(\)\.save_pretrained"),
    "init_lora_weights": ("pissa_niter_4", r"changed the base .*path_initial_model_for_weight_con"),
    "alora_invocation_tokens": ([5, 6], r"activated LoRA.*with plain peft"),
    "layer_replication": ([[0, 2], [1, 2]], r"repeats layers.*merge_and_unload"),
    "trainable_token_indices": ([1, 2], r"rows of the embedding.*merge_and_unload"),
    "kasa_config": ({"beta": 0.0001}, r"not known what that changes.*merge_and_unload"),
    "of_a_later_peft": (True, r"not known what that changes.*merge_and_unload"),
}
OTHERS: dict[str, Any] = {
    "loha": LoHaConfig(r=4, alpha=8),
    "lokr": LoKrConfig(r=4, alpha=8),
    "ia3": IA3Config(feedforward_modules=["down_proj"]),
    "vera": VeraConfig(r=4),
    "oft of blocks": OFTConfig(r=0, oft_block_size=4),
    "oft of a number": OFTConfig(r=4, oft_block_size=0, coft=True, eps=1.0, block_share=True),
    "miss": MissConfig(r=4),
    "bat": MissConfig(r=4, init_weights="bat"),
    "hira": HiraConfig(r=4),
}


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return publish(MODELS["qwen3"](), tmp_path / "base", torch.float32)


def set_to(adapter: Path, **settings: object) -> Path:
    file = adapter / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))
    return adapter


def saved(base: Path, folder: Path, config: Any, *, seed: int = 1) -> PeftModel:
    """Write an adapter of peft's with other values than it began with, and return its model."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = get_peft_model(load(base), config)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
        model.save_pretrained(str(folder))
    return model.eval()


@pytest.mark.parametrize("setting", REFUSED)
@pytest.mark.parametrize("door", DOORS)
def test_what_is_not_computed_is_refused_by_name_by_all_readers(
    door: str, setting: str, base: Path, tmp_path: Path
) -> None:
    """Each reader had a list of its own, and most passed over what was not on it (#41)."""
    value, words = REFUSED[setting]
    adapter = set_to(train(base, tmp_path / "adapter"), **{setting: value})
    with pytest.raises(CheckpointError, match=rf"(?s)has {setting}: .*{words}"):
        DOORS[door](base, adapter)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("door", DOORS)
def test_a_setting_of_a_later_peft_that_is_off_is_no_obstacle(
    door: str, base: Path, tmp_path: Path
) -> None:
    adapter = set_to(train(base, tmp_path / "adapter"), new_a=None, new_b=False, new_c={})
    set_to(adapter, base_model_name_or_path="someone/the-same-base")  # peft would warn
    DOORS[door](base, set_to(adapter, lora_alpha=32))  # as a recipe has it


@pytest.mark.parametrize("kind", ["pissa", "olora", "pissa_niter_4"])
def test_what_began_in_the_base_is_merged_once_it_is_converted(
    kind: Any, base: Path, tmp_path: Path
) -> None:
    """Unconverted, it was added to a base that still had what it began with (#41)."""
    config = LoraConfig(
        r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], init_lora_weights=kind
    )
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = get_peft_model(load(base), config)
        model.save_pretrained(str(tmp_path / "initial"))
        with torch.no_grad():
            for parameter in trained(model).values():
                parameter.add_(0.05 * torch.randn_like(parameter))
        wanted = logits(model)
        model.save_pretrained(str(tmp_path / "adapter"))
        model.save_pretrained(
            str(tmp_path / "converted"),
            path_initial_model_for_weight_conversion=str(tmp_path / "initial"),
        )
    with pytest.raises(CheckpointError, match=rf'init_lora_weights: "{kind}", so its training'):
        merge(base, tmp_path / "adapter", tmp_path / "out")
    merge(base, tmp_path / "converted", tmp_path / "out")
    assert rel(logits(load(tmp_path / "out")), wanted) < 1e-5
    assert rel(logits(load_adapter(load(base), tmp_path / "converted")), wanted) < 1e-5


@pytest.mark.parametrize("kind", ["gaussian", "orthogonal", "eva", "mica", False])
def test_no_initialisation_is_run_again_on_a_base_that_others_share(
    kind: object, base: Path, tmp_path: Path
) -> None:
    adapter = train(base, tmp_path / "adapter", target_modules=["q_proj", "v_proj"])
    wanted = logits(with_adapter(base, adapter))
    adapter = set_to(adapter, init_lora_weights=kind)
    model = load(base)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    adapted = load_adapter(model, adapter)
    for name, tensor in adapted.get_base_model().state_dict().items():
        plain = name.replace(".base_layer", "")
        assert plain not in before or torch.equal(tensor, before[plain]), name
    assert torch.equal(logits(adapted.eval()), wanted)
    merge(base, adapter, tmp_path / "out")
    assert rel(logits(load(tmp_path / "out")), wanted) < 1e-5


@pytest.mark.parametrize("name", OTHERS)
def test_other_methods_give_what_peft_gives(name: str, base: Path, tmp_path: Path) -> None:
    """Blocks of OFT that have a size in place of a number were called damaged (#41)."""
    config = OTHERS[name]
    config.target_modules = ["q_proj", "down_proj"]
    config.task_type = "CAUSAL_LM"
    saved(base, tmp_path / "adapter", config)
    wanted = logits(with_adapter(base, tmp_path / "adapter"))
    assert rel(wanted, logits(load(base))) > 1e-3
    assert rel(logits(load_adapter(load(base), tmp_path / "adapter").eval()), wanted) < 1e-6
    merge(base, tmp_path / "adapter", tmp_path / "out")
    assert rel(logits(load(tmp_path / "out")), wanted) < 1e-5


def test_vera_without_its_projections_is_refused_by_name(base: Path, tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = VeraConfig(r=4, target_modules=["q_proj"], save_projection=False)
    saved(base, tmp_path / "adapter", config)
    for door in ("merge", "score, chat and generate", "before training"):
        with pytest.raises(
            CheckpointError, match=r"save_projection: false, and VeRA's projections"
        ):
            DOORS[door](base, tmp_path / "adapter")


def test_tensors_go_where_they_came_from_whatever_weights_are_called(tmp_path: Path) -> None:
    """By transformers' rules for laguna's weights, peft lost its shared expert's tensors (#41)."""
    sizes: dict[str, Any] = {
        **SHAPE,
        "num_experts_per_tok": 2,
        "num_experts": 5,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16,
        "num_attention_heads_per_layer": [4, 4],
        "layer_types": ["full_attention", "sliding_attention"],
        "mlp_layer_types": ["dense", "sparse"],
        "sliding_window": 8,
    }
    config = LagunaConfig(**sizes)
    base = publish(LagunaForCausalLM(config), tmp_path / "base", torch.float32)
    section = AdapterSection(rank=4, experts=True)
    model = add_lora(load(base), section, seed=0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in trained(model).values():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    save_adapter(model, tmp_path / "adapter")
    wanted = logits(model.eval())
    other = add_lora(load(base), section, seed=5)
    load_into(other, tmp_path / "adapter")
    assert torch.equal(logits(other.eval()), wanted)
    assert torch.equal(logits(load_adapter(load(base), tmp_path / "adapter").eval()), wanted)
    merge(base, tmp_path / "adapter", tmp_path / "out")
    assert rel(logits(load(tmp_path / "out")), wanted) < 1e-5


def test_weights_of_the_base_in_the_file_must_be_those_of_the_base(
    base: Path, tmp_path: Path
) -> None:
    """peft saves an adapted embedding whole, and lets it replace the base's (#41)."""
    adapter = train(base, tmp_path / "adapter", target_modules=["q_proj", "embed_tokens"])
    wanted = logits(with_adapter(base, adapter))
    assert rel(logits(load_adapter(load(base), adapter).eval()), wanted) < 1e-6
    key = "base_model.model.model.embed_tokens.base_layer.weight"
    file = adapter / "adapter_model.safetensors"
    edit(file, lambda tensors: tensors.update({key: tensors[key] * 1.5}))
    with pytest.raises(CheckpointError, match=r"holds .*embed_tokens.*, and the base has other"):
        load_adapter(load(base), adapter)
    with pytest.raises(MergeError, match=r"holds .*embed_tokens.*, and the base has other"):
        merge(base, adapter, tmp_path / "out")
    stray = "base_model.model.lm_head.weight"
    edit(file, lambda tensors: tensors.update({stray: torch.zeros(64, 32)}))
    for door, error in (("merge", MergeError), ("score, chat and generate", CheckpointError)):
        with pytest.raises(error, match=r"no place for, 1 tensors, such as .*lm_head.weight"):
            DOORS[door](base, adapter)


@pytest.mark.parametrize(
    ("method", "setting", "value"),
    [
        ("lora", "lora_alpha", 7),
        ("lora", "use_rslora", True),
        ("ia3", "feedforward_modules", []),
        ("oft", "num_cayley_neumann_terms", 3),
        ("loha", "alpha_pattern", {"q_proj": 3}),
        ("miss", "init_weights", "bat"),
    ],
)
def test_a_run_goes_on_only_from_an_adapter_that_computes_alike(
    method: str, setting: str, value: object, base: Path, tmp_path: Path
) -> None:
    """Of other methods than LoRA only the alpha was compared (#41)."""
    section = AdapterSection.model_validate({"method": method, "rank": 4})
    model = add_lora(load(base), section, seed=0)
    save_adapter(model, tmp_path / "adapter")
    load_into(model, tmp_path / "adapter")
    set_to(tmp_path / "adapter", **{setting: value})
    with pytest.raises(CheckpointError, match=rf"{setting} is .* in .*, and .* in this recipe"):
        load_into(model, tmp_path / "adapter")


def test_no_hint_asks_for_a_copy_where_nothing_is_damaged(base: Path, tmp_path: Path) -> None:
    adapter = train(base, tmp_path / "adapter")
    larger = publish(MODELS["qwen3_moe"](), tmp_path / "larger", torch.float32)
    for door in (DOORS["init_from"], lambda _, folder: load_adapter(load(larger), folder)):
        with pytest.raises(CheckpointError) as caught:
            door(base, adapter)
        assert "from a copy" not in str(caught.value)
