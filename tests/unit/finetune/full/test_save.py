"""Models whose own weights were trained, as plain transformers loads them."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from finetune.data.stops import Stops
from finetune.full.save import save_model
from tests.parity.steps import SHAPE


class _Tokenizer:
    def save_pretrained(self, folder: str) -> None:
        (Path(folder) / "tokenizer.json").write_text("{}")


def test_tied_weights_trained_on_the_host_are_saved_once(tmp_path: Path) -> None:
    """On a card the trained tensor is not the one that the model computes with."""
    config: Any = Qwen3Config(**SHAPE, tie_word_embeddings=True)
    model: Any = Qwen3ForCausalLM(config)
    trained = {name: p.detach() + 1 for name, p in model.named_parameters()}
    tokenizer: Any = _Tokenizer()
    save_model(model, trained, tokenizer, tmp_path / "model", stops=Stops(trained=(), base=()))
    assert set(load_file(tmp_path / "model" / "model.safetensors")) == set(trained)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    assert all(torch.equal(p, trained[name]) for name, p in loaded.named_parameters())
