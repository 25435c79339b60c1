"""An adapter is what is in its folder, and is looked for nowhere else."""

import json
from pathlib import Path

import peft.config
import peft.utils.save_and_load
import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file

from finetune.adapter.lora import load_adapter
from finetune.errors import CheckpointError, ModelError
from finetune.export.adapter_delta import Changes
from finetune.files.adapter import require_adapter_files
from finetune.run.run_dir import RunDir
from tests.parity.tiny_models import tiny_model

NAME = "base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight"


@pytest.fixture
def adapter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return an adapter, on a machine on which the hub may not be asked for anything."""
    folder = tmp_path / "run" / "adapter"
    config = LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False)
    get_peft_model(tiny_model("qwen3"), config).save_pretrained(str(folder))
    (tmp_path / "run" / "recipe.yaml").write_text("model: {}")

    def ask(*_args: object, **_kwargs: object) -> str:
        pytest.fail("the hub is asked")

    for module in (peft.config, peft.utils.save_and_load):
        for name in ("hf_hub_download", "file_exists"):
            if hasattr(module, name):
                monkeypatch.setattr(module, name, ask)
    return folder


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
def test_a_file_that_is_missing_is_not_looked_for_on_the_hub(
    name: str, adapter: Path, tmp_path: Path
) -> None:
    """peft asked the hub for a repository that is called like the run (#16)."""
    (adapter / name).unlink()
    for read in (
        lambda: RunDir(tmp_path / "run").require_adapter(),
        lambda: load_adapter(tiny_model("qwen3"), adapter),
        lambda: Changes(tiny_model("qwen3"), adapter),
    ):
        with pytest.raises(CheckpointError, match=rf"adapter.*{name}"):
            read()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("r", value) for value in (0, "4", None, 1.5, 2**40)),
        *(("lora_alpha", value) for value in ("x", None, float("nan"), 1e300)),
        *(("target_modules", value) for value in (3, [1], {"a": 1})),
        *(("rank_pattern", value) for value in ({"q_proj": 0}, ["q_proj"])),
        *(("use_rslora", value) for value in ("no", 1)),
        ("lora_dropout", 7),
        ("modules_to_save", "lm_head"),
        ("peft_type", None),
    ],
)
def test_a_setting_of_another_type_is_named(key: str, value: object, adapter: Path) -> None:
    file = adapter / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {key: value}))
    with pytest.raises(CheckpointError, match=rf"adapter_config\.json cannot be read: {key}"):
        require_adapter_files(adapter)


def test_an_answer_is_not_given_with_half_an_adapter(adapter: Path) -> None:
    """peft warns of tensors that are missing, and answers with the ones that it drew (#16)."""
    file = adapter / "adapter_model.safetensors"
    tensors = load_file(file)
    load_adapter(tiny_model("qwen3"), adapter)
    save_file({name: t for name, t in tensors.items() if name != NAME}, file)
    with pytest.raises(CheckpointError, match=rf"adapter lacks 1 tensors, such as {NAME}"):
        load_adapter(tiny_model("qwen3"), adapter)
    save_file(tensors | {f"{NAME}.x": torch.ones(1)}, file)
    with pytest.raises(CheckpointError, match=r"the model has no place for, 1 tensors, such as "):
        load_adapter(tiny_model("qwen3"), adapter)
    save_file(tensors | {NAME: torch.ones(3, 4)}, file)
    with pytest.raises(
        CheckpointError, match=r"lora_B\.default\.weight of shape \(3, 4\); it has shape"
    ):
        load_adapter(tiny_model("qwen3"), adapter)


def test_damaged_weights_of_an_adapter_are_named(adapter: Path) -> None:
    file = adapter / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(ModelError, match=r"adapter_model\.safetensors is cut off or damaged: "):
        require_adapter_files(adapter)
    file.rename(adapter / "adapter_model.bin")  # as peft before safetensors
    with pytest.raises(CheckpointError, match=r"hint: load it with peft and save it again"):
        require_adapter_files(adapter)
