"""A model is merged in a part of its size, whatever that is: it streams through a few tensors.

RLIMIT_DATA limits what a process takes for itself. The base is read into memory of the process and
never mapped, so nothing escapes the limit.
"""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import AutoModelForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from finetune.adapter.lora import expert_parameters
from finetune.model.base_weights import BaseWeights

pytestmark = [pytest.mark.slow, pytest.mark.disk, pytest.mark.timeout(280)]

NUM_LAYERS, HIDDEN, EXPERT, NUM_EXPERTS = 5, 512, 768, 32
LAYER_BYTES = 2 * 3 * HIDDEN * EXPERT * NUM_EXPERTS  # 75 MB
LIMIT_BYTES = LAYER_BYTES * 5 // 3

CHILD = """
import re, resource, sys
from pathlib import Path
import torch
from finetune.export import merge

def used_bytes():
    status = Path("/proc/self/status").read_text()
    return 1024 * int(re.search(r"VmData:\\s+(\\d+)", status).group(1))

base, adapter, out, limit_bytes, size_bytes = sys.argv[1:]
torch.set_num_threads(1)
torch.rand(64, 64) @ torch.rand(64, 64)
limit = used_bytes() + int(limit_bytes)
resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
try:
    torch.ones(int(size_bytes) // 4)
    sys.exit("the limit does not limit")
except RuntimeError:
    pass
most = 0
def note(done, total):
    global most
    most = max(most, used_bytes())
merge.merge(Path(base), Path(adapter), Path(out), progress=note)
print(most - limit + int(limit_bytes))
"""


def write(folder: Path) -> int:
    shape: dict[str, Any] = {
        "hidden_size": HIDDEN,
        "intermediate_size": 512,
        "moe_intermediate_size": EXPERT,
        "num_hidden_layers": NUM_LAYERS,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "num_experts": NUM_EXPERTS,
        "num_experts_per_tok": 2,
        "vocab_size": 256,
    }
    torch.manual_seed(0)
    with torch.device("meta"):
        model: Any = Qwen3MoeForCausalLM(Qwen3MoeConfig(**shape))
    model.to(torch.bfloat16)
    model.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.02)
    model.save_pretrained(folder / "base", max_shard_size="300MB")
    config = LoraConfig(
        r=4,
        target_modules=["q_proj", "v_proj"],
        target_parameters=list(expert_parameters(model)),
        task_type="CAUSAL_LM",
    )
    adapted = get_peft_model(model, config)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                nn.init.normal_(parameter, std=0.05)
    adapted.save_pretrained(str(folder / "adapter"))
    merged: Any = adapted.merge_and_unload()
    merged.save_pretrained(folder / "wanted")
    return sum(p.numel() * p.itemsize for p in merged.parameters())


def test_a_model_is_merged_in_a_third_of_its_size(tmp_path: Path) -> None:
    size_bytes = write(tmp_path)
    assert size_bytes > 3 * LIMIT_BYTES
    folders = [tmp_path / name for name in ("base", "adapter", "out")]
    run = subprocess.run(
        [sys.executable, "-c", CHILD, *map(str, (*folders, LIMIT_BYTES, size_bytes))],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
        timeout=250,
    )
    assert run.returncode == 0, run.stderr
    assert int(run.stdout) < LIMIT_BYTES
    found, wanted = BaseWeights(tmp_path / "out"), BaseWeights(tmp_path / "wanted")
    assert found.specs.keys() == wanted.specs.keys()
    for name in wanted.specs:
        ours, theirs = found.read(name).float(), wanted.read(name).float()
        assert (ours - theirs).norm() <= 2**-8 * theirs.norm(), name
    AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.bfloat16)
