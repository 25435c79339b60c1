import json
from pathlib import Path

import pytest

from finetune.errors import ConfigError
from finetune.planning.subject import wanted_model


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ("qwen3-30b-a3b", "Qwen/Qwen3-30B-A3B"),
        ("Qwen3 30B", "Qwen/Qwen3-30B-A3B"),
        ("Qwen/Qwen3-8B", "Qwen/Qwen3-8B"),
        ("llama3.1 8b", "meta-llama/Llama-3.1-8B"),
        ("Mixtral", "mistralai/Mixtral-8x7B-v0.1"),
        ("gpt-oss-20b", "openai/gpt-oss-20b"),
        ("google/gemma-3-27b-it", "google/gemma-3-27b-it"),
        ("unsloth/Qwen3-8B", "unsloth/Qwen3-8B"),  # a copy of a shipped shape
    ],
)
def test_a_model_is_found_by_a_loose_name(text: str, path: str) -> None:
    assert wanted_model(text).settings == {"path": path}


@pytest.mark.parametrize(
    ("text", "what", "near"),
    [
        ("qwen3-9b", "qwen3-9b is no model that is known", "`qwen3-8b`"),
        ("gpt-oss", "gpt-oss means several models", "`gpt-oss-120b`, `gpt-oss-20b`"),
        ("...", "... is no model that is known", "`qwen3-8b`"),
    ],
)
def test_a_miss_names_the_nearest(text: str, what: str, near: str) -> None:
    with pytest.raises(ConfigError) as caught:
        wanted_model(text)
    assert caught.value.what == what
    assert near in caught.value.hint


def test_a_folder_with_weights_is_trained_from_and_a_config_alone_is_only_planned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tmp_path / "My Model" / "config.json"
    config.parent.mkdir()
    config.write_text(json.dumps({"model_type": "llama"}))
    alone = wanted_model(str(config))
    assert alone.settings == {"path": str(config)}
    assert "a config alone" in alone.note
    (config.parent / "model.safetensors").touch()
    monkeypatch.chdir(tmp_path)
    for text in ("My Model", "My Model/config.json"):
        found = wanted_model(text)
        assert (found.settings, found.note) == ({"path": str(config.parent)}, "")
        assert found.name == "my model"


def test_a_toy_has_random_weights() -> None:
    found = wanted_model("tiny-qwen3")
    assert found.settings == {"config": "tiny-qwen3", "init": "random"}


def test_a_hub_id_in_the_cache_is_taken_before_a_shape_of_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = tmp_path / "models--own--qwen3-8b-of-mine" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text(json.dumps({"model_type": "llama"}))
    refs = tmp_path / "models--own--qwen3-8b-of-mine" / "refs"
    refs.mkdir()
    (refs / "main").write_text("abc")
    with pytest.raises(ConfigError, match="no model that is known"):
        wanted_model("own/qwen3-8b-of-mine")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    assert wanted_model("own/qwen3-8b-of-mine").settings == {"path": "own/qwen3-8b-of-mine"}
