"""A merge that would be wrong, or would harm what is there, is refused, and says why."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import (
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.core_model_loading import revert_weight_conversion

from finetune.errors import CheckpointError, MergeError, ModelError
from finetune.export import adapter_delta
from finetune.export.merge import merge
from finetune.files.shards import INDEX
from tests.unit.finetune.export.adapted import (
    MODELS,
    SHAPE,
    edit,
    publish,
    train,
)

ROOT = Path(__file__).parents[4]


def test_an_adapter_s_tensor_that_finds_no_place_is_named(qwen3: SimpleNamespace) -> None:
    file = qwen3.adapter / "adapter_model.safetensors"
    stray = "base_model.model.model.layers.7.mlp.up_proj.lora_A.weight"
    edit(file, lambda tensors: tensors.update({stray: torch.zeros(4, 32)}))
    with pytest.raises(MergeError, match=r"holds, and the model has no place for, 1 .*layers\.7"):
        merge(qwen3.base, qwen3.adapter, qwen3.out)
    assert not qwen3.out.exists()


def test_an_adapter_that_lacks_a_tensor_is_refused(qwen3: SimpleNamespace) -> None:
    gone = "base_model.model.model.layers.1.mlp.up_proj.lora_B.weight"
    edit(qwen3.adapter / "adapter_model.safetensors", lambda tensors: tensors.pop(gone))
    with pytest.raises(MergeError, match=r"lacks 1 tensors, such as .*layers\.1\.mlp\.up_proj"):
        merge(qwen3.base, qwen3.adapter, qwen3.out)


def test_an_adapter_of_another_model_is_refused(qwen3: SimpleNamespace, tmp_path: Path) -> None:
    config = Qwen3Config(**SHAPE | {"intermediate_size": 56})
    other = publish(Qwen3ForCausalLM(config), tmp_path / "other", torch.float32)
    with pytest.raises(
        MergeError, match=r"adapter has .* of shape \(48, 4\); it has shape \(56, 4\) here"
    ):
        merge(other, qwen3.adapter, qwen3.out)
    assert not qwen3.out.exists()


def test_a_base_that_lacks_a_tensor_is_refused(qwen3: SimpleNamespace) -> None:
    gone = "model.layers.1.mlp.up_proj.weight"
    index = json.loads((qwen3.base / INDEX).read_text())
    edit(qwen3.base / index["weight_map"].pop(gone), lambda tensors: tensors.pop(gone))
    with pytest.raises(ModelError, match=rf"lacks {gone}; {INDEX} says that it is there"):
        merge(qwen3.base, qwen3.adapter, qwen3.out)
    (qwen3.base / INDEX).write_text(json.dumps(index))
    with pytest.raises(ModelError, match=rf"no published tensor becomes {gone}; "):
        merge(qwen3.base, qwen3.adapter, qwen3.out)
    (qwen3.base / next(iter(index["weight_map"].values()))).unlink()
    with pytest.raises(ModelError, match=r"has no model-.*; a model holds"):
        merge(qwen3.base, qwen3.adapter, qwen3.out)


def test_a_base_of_another_shape_than_its_config_is_refused(qwen3: SimpleNamespace) -> None:
    config = json.loads((qwen3.base / "config.json").read_text())
    (qwen3.base / "config.json").write_text(json.dumps(config | {"intermediate_size": 40}))
    with pytest.raises(ModelError, match=r"becomes .* of \(.*48.*the model of config\.json has"):
        merge(qwen3.base, qwen3.adapter, qwen3.out)


def test_a_torn_file_is_refused(qwen3: SimpleNamespace) -> None:
    file = next(qwen3.base.glob("model-*.safetensors"))
    os.truncate(file, file.stat().st_size - 1)
    with pytest.raises(ModelError, match=rf"{file.name} is cut off or damaged: "):
        merge(qwen3.base, qwen3.adapter, qwen3.out)


@pytest.mark.parametrize("method", ["gptq", "fp8", "bitsandbytes"])
def test_other_quantised_bases_are_refused(method: str, qwen3: SimpleNamespace) -> None:
    config = json.loads((qwen3.base / "config.json").read_text())
    config["quantization_config"] = {"quant_method": method, "load_in_8bit": True}
    (qwen3.base / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=f"is quantised, its quant_method is {method}"):
        merge(qwen3.base, qwen3.adapter, qwen3.out)


def test_an_adapter_of_another_kind_is_refused(qwen3: SimpleNamespace) -> None:
    settings = {"peft_type": "BOFT", "target_modules": ["q_proj"]}
    (qwen3.adapter / "adapter_config.json").write_text(json.dumps(settings))
    with pytest.raises(CheckpointError, match=r"an adapter of type BOFT; LORA, .* are understood"):
        merge(qwen3.base, qwen3.adapter, qwen3.out)
    (qwen3.adapter / "adapter_config.json").write_text('{"peft_type": "PROMPT_TUNING"}')
    with pytest.raises(MergeError, match=r"is of type PROMPT_TUNING; LORA, .* can be merged"):
        merge(qwen3.base, qwen3.adapter, qwen3.out)


def test_a_shared_tensor_that_is_published_twice_is_not_parted(tmp_path: Path) -> None:
    base = publish(MODELS["qwen3, tied"](), tmp_path / "base", torch.float32)
    index = json.loads((base / INDEX).read_text())
    file = index["weight_map"]["model.embed_tokens.weight"]
    index["weight_map"]["lm_head.weight"] = file
    (base / INDEX).write_text(json.dumps(index))
    edit(base / file, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"] + 0}))
    merge(base, train(base, tmp_path / "attention"), tmp_path / "out")
    head = train(base, tmp_path / "head", modules_to_save=["lm_head"])
    with pytest.raises(MergeError, match=r"lm_head.weight and .* share a tensor, .* holds both"):
        merge(base, head, tmp_path / "other")


def test_an_adapter_with_biases_is_refused(tmp_path: Path) -> None:
    base = publish(MODELS["gpt2"](), tmp_path / "base", torch.float32)
    adapter = train(base, tmp_path / "adapter", lora_bias=True)
    with pytest.raises(MergeError, match="has a bias; adapters on linear layers"):
        merge(base, adapter, tmp_path / "out")


@pytest.mark.parametrize("damage", ["values", "names", "number"])
def test_a_rule_that_cannot_be_turned_round_is_refused(
    damage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def revert(model: Any, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        tensors = revert_weight_conversion(model, state)
        name = next(iter(tensors))
        if damage == "values":
            tensors[name] = tensors[name].flip(0)
        else:
            values = tensors.pop(name)
            if damage == "names":
                tensors["model.other"] = values
        return tensors

    base = publish(MODELS["mixtral"](), tmp_path / "base", torch.bfloat16)
    adapter = train(base, tmp_path / "adapter")
    monkeypatch.setattr(adapter_delta, "revert_weight_conversion", revert)
    with pytest.raises(ModelError, match=r"rule for .*experts\..* cannot be turned round: "):
        merge(base, adapter, tmp_path / "out")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["adapter", "base"]


@pytest.mark.parametrize(
    ("kind", "message"), [("down", r"becomes .* of \(4, "), ("gate", "and 8 others do not make")]
)
def test_experts_with_a_gap_are_refused(kind: str, message: str, tmp_path: Path) -> None:
    base = publish(MODELS["qwen3_moe"](), tmp_path / "base", torch.bfloat16)
    adapter = train(base, tmp_path / "adapter")
    index = json.loads((base / INDEX).read_text())
    gone = f"model.layers.1.mlp.experts.2.{kind}_proj.weight"
    edit(base / index["weight_map"].pop(gone), lambda tensors: tensors.pop(gone))
    (base / INDEX).write_text(json.dumps(index))
    with pytest.raises(ModelError, match=message):
        merge(base, adapter, tmp_path / "out")


@pytest.mark.parametrize("factor", [1e7, float("nan")])
def test_weights_that_are_not_finite_are_refused_and_named(factor: float, tmp_path: Path) -> None:
    base = publish(MODELS["qwen3"](), tmp_path / "base", torch.float16)
    adapter = train(base, tmp_path / "adapter")
    name = "base_model.model.model.layers.0.mlp.up_proj.lora_B.weight"
    edit(
        adapter / "adapter_model.safetensors",
        lambda tensors: tensors.update({name: tensors[name] * factor}),
    )
    with pytest.raises(
        MergeError, match=r"layers\.0\.mlp\.up_proj\.weight has values that are not"
    ):
        merge(base, adapter, tmp_path / "out")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["adapter", "base"]


def test_a_directory_that_is_there_is_not_touched(qwen3: SimpleNamespace) -> None:
    qwen3.out.mkdir()
    with pytest.raises(MergeError, match="out is there already; "):
        merge(qwen3.base, qwen3.adapter, qwen3.out)
    assert not any(qwen3.out.iterdir())


def test_a_full_disk_is_found_before_anything_is_written(
    qwen3: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = shutil.disk_usage(qwen3.base)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: free)
    with pytest.raises(MergeError, match=r"takes 0\.\d MiB and 0\.0 MiB is free; it is written to"):
        merge(qwen3.base, qwen3.adapter, qwen3.out)
    assert sorted(file.name for file in qwen3.out.parent.iterdir()) == ["adapter", "base"]


def test_what_is_like_a_folder_in_the_making_is_never_touched(qwen3: SimpleNamespace) -> None:
    """A merge emptied any folder called partial-NAME, through a link as well (#16)."""
    home = qwen3.out.parent
    (home / "mine").mkdir()
    (home / "mine" / "thesis.txt").write_text("ten years")
    (home / "partial-out").symlink_to(home / "mine")
    (home / "partial-out-mine").mkdir()
    (home / "partial-out-mine" / "thesis.txt").write_text("ten years")
    (home / "partial-out-link").symlink_to(home / "mine")
    (home / "partial-out-file").write_text("ten years")
    merge(qwen3.base, qwen3.adapter, qwen3.out)
    assert (home / "mine" / "thesis.txt").read_text() == "ten years"
    assert (home / "partial-out-mine" / "thesis.txt").read_text() == "ten years"
    assert (home / "partial-out-file").read_text() == "ten years"
    assert {path.name for path in home.iterdir()} == {
        *("adapter", "base", "mine", "out", "partial-out", "partial-out-mine"),
        *("partial-out-link", "partial-out-file"),
    }


def test_a_link_that_leads_nowhere_is_in_the_way(qwen3: SimpleNamespace) -> None:
    qwen3.out.symlink_to(qwen3.out.parent / "nowhere")
    with pytest.raises(MergeError, match="out is there already; "):
        merge(qwen3.base, qwen3.adapter, qwen3.out)
    assert qwen3.out.is_symlink()


def test_what_a_killed_merge_left_is_cleared_and_a_living_one_is_not(
    qwen3: SimpleNamespace,
) -> None:
    home = qwen3.out.parent
    holder = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import sys\n"
            "from pathlib import Path\n"
            "from finetune.files.atomic import becoming\n"
            "with becoming(Path(sys.argv[1])) as folder:\n"
            "    (folder / 'model.safetensors').write_text('torn')\n"
            "    print('held', flush=True)\n"
            "    sys.stdin.read()",
            str(qwen3.out),
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert holder.stdout is not None
    holder.stdout.readline()
    (left,) = home.glob("partial-out-*")
    with pytest.raises(MergeError, match=r"partial-out-.* is being written by another process"):
        merge(qwen3.base, qwen3.adapter, qwen3.out)
    assert (left / "out" / "model.safetensors").exists()
    holder.kill()
    holder.communicate()
    assert left.exists()
    merge(qwen3.base, qwen3.adapter, qwen3.out)
    assert not left.exists()
    assert {file.name for file in qwen3.out.iterdir()} == {
        *("config.json", "generation_config.json", "model.safetensors")
    }
