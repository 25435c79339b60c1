"""A published model with its adapter."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.unit.finetune.export.adapted import MODELS, publish, train


@pytest.fixture
def qwen3(tmp_path: Path) -> SimpleNamespace:
    base = publish(MODELS["qwen3"](), tmp_path / "base", torch.bfloat16)
    adapter = train(base, tmp_path / "adapter")
    return SimpleNamespace(base=base, adapter=adapter, out=tmp_path / "out")
