"""Every architecture: its published checkpoint becomes the model that transformers loads."""

from pathlib import Path

import pytest
import torch
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM

from finetune.model.checkpoint import load_published
from tests.parity.tiny_models import tiny_model

pytestmark = [pytest.mark.exhaustive]

TYPES = sorted({config.model_type for config in MODEL_FOR_CAUSAL_LM_MAPPING})
NOT_SAVED = {"gemma4_assistant", "gemma4_unified_assistant"}  # their tiny configs are not valid
PARTS_ONLY = {"emu3", "mllama", "musicgen", "musicgen_melody"}  # no AutoModel loads what they save


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "model_type", [name for name in TYPES if name not in PARTS_ONLY | NOT_SAVED]
)
def test_move_a_checkpoint_is_loaded_as_transformers_loads_it(
    model_type: str, tmp_path: Path
) -> None:
    tiny_model(model_type).bfloat16().save_pretrained(tmp_path, max_shard_size="30KB")
    expected = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    found = load_published(str(tmp_path), "bfloat16")
    assert type(found) is type(expected)
    assert found.config.to_dict() == expected.config.to_dict()
    for kind in ("named_parameters", "named_buffers"):
        ours, theirs = dict(getattr(found, kind)()), dict(getattr(expected, kind)())
        assert ours.keys() == theirs.keys()
        for name, tensor in theirs.items():
            assert ours[name].dtype == tensor.dtype, name
            assert torch.equal(ours[name], tensor), name
            assert ours[name].requires_grad == tensor.requires_grad, name
