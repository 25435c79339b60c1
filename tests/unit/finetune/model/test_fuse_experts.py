"""Experts that are published apart are joined as transformers joins them, and each exists once."""

from pathlib import Path
from typing import Literal

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from finetune.errors import ModelError
from finetune.files.tensors import open_tensors
from finetune.model.checkpoint import join_experts
from tests.checkpoints import assert_same_model, load, published_shapes, write_checkpoint
from tests.parity.tiny_models import tiny_config
from tests.tiers import mostly_slow

JOINED = ("mixtral", "deepseek_v3", "glm4_moe", "phimoe")
NOT_JOINED = ("gpt_oss", "granitemoe", "llama")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "tier", "dtype"),
    mostly_slow(
        [
            (name, *how)
            for name in ("mixtral", "qwen3_next", "granitemoe")
            for how in (("ram", "bfloat16"), ("disk", "float32"))
        ],
        ("mixtral", "ram", "bfloat16"),
        ("granitemoe", "disk", "float32"),
    ),
)
def test_move_a_published_mixture_is_loaded_as_transformers_loads_it(
    name: str, tier: Literal["ram", "disk"], dtype: str, tmp_path: Path
) -> None:
    write_checkpoint(tmp_path, tiny_config(name), shard_bytes=40_000)
    expected = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=getattr(torch, dtype))
    assert_same_model(load(tmp_path, tier, dtype), expected)


@pytest.mark.thorough
@pytest.mark.parametrize("name", mostly_slow([*JOINED, *NOT_JOINED], "mixtral", "gpt_oss", "llama"))
def test_experts_are_joined_before_transformers_sees_them(name: str, tmp_path: Path) -> None:
    config = tiny_config(name)
    write_checkpoint(tmp_path, config)
    model = AutoModelForCausalLM.from_config(config)
    published = open_tensors([str(file) for file in tmp_path.glob("*.safetensors")])
    joined = join_experts(published, model, str(tmp_path))
    assert published.keys() == published_shapes(config).keys()
    state = model.state_dict()
    made = joined.keys() - published.keys()
    if name not in JOINED:
        assert joined == published
        return
    assert {key.rpartition(".")[2] for key in made} == {"gate_up_proj", "down_proj"}
    assert all(joined[key][...].shape == state[key].shape for key in made)
    assert not any(".experts.0." in key for key in joined)


def test_a_tensor_that_is_read_may_be_written_to(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, tiny_config("llama"))
    model = load(tmp_path, "ram", "bfloat16")
    for parameter in model.parameters():
        with torch.no_grad():
            parameter.add_(1)


@pytest.mark.parametrize("num_lost", [1, 5000])
def test_a_file_that_is_cut_off_is_told(num_lost: int, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, tiny_config("llama"))
    (file,) = tmp_path.glob("*.safetensors")
    file.write_bytes(file.read_bytes()[:-num_lost])
    with pytest.raises(ModelError, match=r"safetensors is cut off or damaged"):
        open_tensors([str(file)])


@pytest.mark.parametrize("content", [b"", b"\x05", b"\xff" * 8 + b"{}", b"\x02" + bytes(7) + b"[]"])
def test_what_is_no_safetensors_file_is_told(content: bytes, tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(content)
    with pytest.raises(ModelError, match=r"model.safetensors is cut off or damaged"):
        open_tensors([str(file)])


def test_tensors_that_are_not_aligned_are_read(tmp_path: Path) -> None:
    header = b'{"a":{"dtype":"U8","shape":[3],"data_offsets":[0,3]},'
    header += b'"b":{"dtype":"F32","shape":[2],"data_offsets":[3,11]}}'
    values = torch.tensor([1.5, -2.0])
    content = len(header).to_bytes(8, "little") + header + b"xyz" + values.numpy().tobytes()
    (tmp_path / "x").write_bytes(content)
    tensors = open_tensors([str(tmp_path / "x")])
    assert torch.equal(tensors["b"][...], values)


def test_an_expert_of_another_shape_than_the_first_is_named(tmp_path: Path) -> None:
    """Its rows would run over into the next expert's."""
    write_checkpoint(tmp_path, tiny_config("mixtral"))
    (file,) = tmp_path.glob("*.safetensors")
    tensors = load_file(file)
    name = "model.layers.1.block_sparse_moe.experts.2.w1.weight"
    tensors[name] = torch.cat([tensors[name], tensors[name][:1]])
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(ModelError, match=rf"unlike the first expert's, 1 tensors, such as {name}"):
        load(tmp_path, "ram", "bfloat16")
