"""Where a model's config is found, and what is said where it is not."""

from pathlib import Path

import pytest
from transformers import CONFIG_MAPPING, AutoConfig

from finetune.errors import ConfigError, ModelError
from finetune.model.config import has_weights, is_hub_reachable, read_config
from finetune.model.empty import config_of
from finetune.recipe.sections import ModelSection


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "no-cache"))


def test_a_shipped_shape_stands_in_for_a_hub_id_that_is_not_here(offline: None) -> None:
    config = read_config(ModelSection(path="Qwen/Qwen3-30B-A3B"))
    assert config["num_experts"] == 128
    assert not has_weights("Qwen/Qwen3-30B-A3B")


def test_a_hub_id_without_a_network_is_an_error_that_says_so(offline: None) -> None:
    with pytest.raises(ModelError, match=r"nobody/nothing is no local directory.*cannot be reach"):
        read_config(ModelSection(path="nobody/nothing"))


def test_a_directory_without_a_config_is_named_as_the_setting_that_it_is(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=rf"model\.path: {tmp_path} holds no config\.json"):
        read_config(ModelSection(path=str(tmp_path)))


def test_a_config_that_is_cut_off_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"')
    with pytest.raises(ConfigError, match=r"config\.json"):
        read_config(ModelSection(path=str(tmp_path)))


@pytest.mark.parametrize(
    "kind", ["bamba", "falcon_h1", "granitemoehybrid", "mamba2", "nemotron_h", "mistral"]
)
def test_a_config_is_read_as_from_pretrained_reads_it(kind: str, tmp_path: Path) -> None:
    """transformers 5 writes an infinity as an object, which no field accepts (#41)."""
    config = CONFIG_MAPPING[kind]()
    if kind == "mistral":  # then transformers takes it for another type
        config.num_hidden_layers = 2
        config.layer_types = ["sliding_attention", "full_attention"]
    config.save_pretrained(tmp_path)
    wanted = AutoConfig.from_pretrained(tmp_path)
    found = config_of(ModelSection(path=str(tmp_path)))
    assert type(found) is type(wanted)
    assert found.to_json_string() == wanted.to_json_string()


def test_a_direct_connection_proves_nothing_behind_a_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setenv("https_proxy", "http://localhost:1")
    assert is_hub_reachable()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert not is_hub_reachable()
