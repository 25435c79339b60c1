"""A model larger than the memory that a process may have: it trains from disk, and only from there.

RLIMIT_DATA limits what a process takes for itself. It does not count mapped files, whose pages the
system takes back when it needs them, so it stands for a machine with little memory.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from finetune.model.load import load_model
from finetune.recipe.sections import ModelSection

pytestmark = [pytest.mark.slow, pytest.mark.disk, pytest.mark.timeout(200)]

NUM_LAYERS, HIDDEN, MLP = 24, 768, 2112
LAYER_BYTES = 4 * (4 * HIDDEN * HIDDEN + 3 * HIDDEN * MLP)
LIMIT_BYTES = 8 * LAYER_BYTES  # a third of the layers
LOADING: dict[str, Any] = {
    "codec": "native",
    "device": "cpu",
    "seed": 0,
    "tier": "disk",
    "experts_implementation": "eager",
}

CHILD = """
import json, re, resource, sys
from pathlib import Path
import torch
from peft import LoraConfig, get_peft_model
import offload
from finetune.model.load import load_model
from finetune.recipe.sections import ModelSection

torch.set_num_threads(1)

def used_bytes():
    status = Path("/proc/self/status").read_text()
    return 1024 * int(re.search(r"VmData:\\s+(\\d+)", status).group(1))

def step(engine):
    tokens = torch.arange(2 * 16).view(2, 1, 16)
    return engine.forward_backward([{"input_ids": t, "labels": t} for t in tokens], dropout_seed=0)

# one small product, so that threads and their stacks are there before the limit is
(torch.rand(64, 64, requires_grad=True) @ torch.rand(64, 64)).sum().backward()
limit = used_bytes() + int(sys.argv[2])
resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
try:
    torch.ones(int(sys.argv[3]) // 4)
    sys.exit("the limit does not limit")
except RuntimeError:
    pass
model = load_model(ModelSection(path=sys.argv[1], dtype="float32"), **json.loads(sys.argv[4]))
adapted = get_peft_model(model.model, LoraConfig(target_modules=["q_proj", "v_proj"]))
engine = offload.attach(adapted, num_slots=2, device="cpu", tier="disk", backing=model.backing)
losses = [step(engine).loss for _ in range(2)]
engine.close()
print(losses[0], losses[1], used_bytes() - limit + int(sys.argv[2]))
"""


def test_a_model_trains_from_disk_in_a_third_of_its_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=HIDDEN,
        intermediate_size=MLP,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=16,
        vocab_size=256,
    )
    model = LlamaForCausalLM(config)
    model.save_pretrained(tmp_path / "model", max_shard_size="110MB")
    tokens = torch.arange(2 * 16).view(2, 1, 16)
    with torch.no_grad():
        losses = [float(model(input_ids=t, labels=t, use_cache=False).loss) for t in tokens]
    del model
    section = ModelSection(path=str(tmp_path / "model"), dtype="float32")
    load_model(section, **LOADING)  # writes the store
    sizes = (LIMIT_BYTES, NUM_LAYERS * LAYER_BYTES)
    run = subprocess.run(
        [sys.executable, "-c", CHILD, tmp_path / "model", *map(str, sizes), json.dumps(LOADING)],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
        timeout=150,
    )
    assert run.returncode == 0, run.stderr
    words = run.stdout.split()
    assert float(words[0]) == float(words[1]) == pytest.approx(sum(losses) / 2, rel=1e-5)
    assert int(words[2]) < LIMIT_BYTES
