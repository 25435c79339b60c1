"""What it takes to bring a published checkpoint to where its layers wait, encoded.

    python -m tests.bench.bench_loading --gigabytes 6 --codec nf4

A checkpoint of random bfloat16 weights is written, per-expert tensors in shards as published, of
Qwen3-30B-A3B's layers. Each of these loads it in a fresh process:

- first start: encoded into the store
- next start: from the store, mapped, or for tier `ram` read into the slab
- under a limit: the first start again, in a process that may take `--limit-gigabytes` for itself
- a bf16 copy: all tensors read into memory under the same limit, which is to die of it

Memory is RssAnon + RssShmem above what the process had with its libraries loaded, sampled every
5 ms: mapped files are not in it, as the system takes their pages back when it needs them.
The limit is RLIMIT_DATA for the same reason; it does not count shared memory, so it is set for tier
`disk`, where there is no slab.
"""

import argparse
import json
import re
import select
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from transformers import AutoConfig

from tests.checkpoints import write_checkpoint

ROOT = Path(__file__).parents[2]
GB = 10**9

CHILD = """
import re, resource, sys, time
from pathlib import Path
import torch
from finetune.env import quiet_libraries
quiet_libraries()
import bitsandbytes, offload.engine.model.capture, offload.engine.host.store
from transformers import Qwen3MoeForCausalLM
from finetune.model.load import load_model
from finetune.recipe.sections import ModelSection
from finetune.files.tensors import open_tensors

path, way, codec, tier, limit_bytes = sys.argv[1:6]
# what the first use of these takes once: threads, stacks, tables
torch.ops.bitsandbytes.quantize_4bit.default(torch.ones(64, 64), 64, "nf4", torch.uint8)
(torch.rand(64, 64, requires_grad=True) @ torch.rand(64, 64)).sum().backward()

def used_bytes():
    status = Path("/proc/self/status").read_text()
    return 1024 * int(re.search(r"VmData:\\s+(\\d+)", status).group(1))

if int(limit_bytes):
    limit = used_bytes() + int(limit_bytes)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
print("ready", flush=True)
sys.stdin.readline()
start_s = time.perf_counter()
try:
    if way == "copy":
        tensors = open_tensors([str(file) for file in Path(path).glob("*.safetensors")])
        copies = [tensor[...] for tensor in tensors.values()]
    else:
        loaded = load_model(ModelSection(path=path), codec=codec, device="cpu", seed=0, tier=tier,
                            experts_implementation="eager")
    said = "loaded"
except (MemoryError, RuntimeError) as error:
    said = "died: " + str(error).splitlines()[0]
print(f"{time.perf_counter() - start_s:.3f} {said}", flush=True)
sys.stdin.readline()
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Load:
    """One load in a process of its own.

    Attributes:
        outcome: "loaded", or what it died of.
        seconds: Until then.
        peak_bytes: Memory of its own at most, above what it had before.
        end_bytes: The same at the end.
    """

    outcome: str
    seconds: float
    peak_bytes: int
    end_bytes: int


def load_apart(
    path: Path, *, way: str, codec: str, tier: str, cache: Path, limit_bytes: int = 0
) -> Load:
    """Load a checkpoint in a fresh process and watch its memory."""
    program = [sys.executable, "-c", CHILD, str(path), way, codec, tier, str(limit_bytes)]
    process = subprocess.Popen(
        ["env", f"XDG_CACHE_HOME={cache}", *program],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "ready\n"
        begin_bytes = peak_bytes = own_bytes(process.pid)
        process.stdin.write("\n")
        process.stdin.flush()
        descriptor = process.stdout.fileno()
        while not select.select([descriptor], [], [], 0.005)[0]:
            peak_bytes = max(peak_bytes, own_bytes(process.pid))
        seconds, _, outcome = process.stdout.readline().strip().partition(" ")
        assert outcome, "it ended without a word"
        end_bytes = own_bytes(process.pid)
    finally:
        process.kill()
        process.communicate()
    return Load(
        outcome=outcome,
        seconds=float(seconds),
        peak_bytes=max(peak_bytes, end_bytes) - begin_bytes,
        end_bytes=end_bytes - begin_bytes,
    )


def own_bytes(pid: int) -> int:
    """Return the memory of a process that no file stands behind."""
    status = Path(f"/proc/{pid}/status").read_text()
    found = re.findall(r"Rss(?:Anon|Shmem):\s+(\d+)", status)  # none once it has ended
    return sum(map(int, found)) * 1024


def published_config(
    num_bytes: int, *, hidden: int = 2048, expert_width: int = 768, num_experts: int = 128
) -> Any:
    """Return a config of Qwen3-30B-A3B's layers, as many as make up a size."""
    layer_bytes = 2 * hidden * (num_experts * (3 * expert_width + 1) + 2 * (4096 + 512))
    return AutoConfig.for_model(
        "qwen3_moe",
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        moe_intermediate_size=expert_width,
        num_experts=num_experts,
        num_experts_per_tok=8,
        num_attention_heads=32,
        num_key_value_heads=4,
        head_dim=128,
        num_hidden_layers=max(1, round(num_bytes / layer_bytes)),
        vocab_size=4096,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=6.0)
    parser.add_argument("--limit-gigabytes", type=float, default=2.0)
    parser.add_argument("--codec", default="nf4")
    parser.add_argument("--folder", type=Path, help="kept; a temporary one is removed")
    options = parser.parse_args()
    folder = options.folder or Path(tempfile.mkdtemp())
    try:
        measure(folder, options)
    finally:
        if options.folder is None:
            shutil.rmtree(folder)


def measure(folder: Path, options: argparse.Namespace) -> None:
    model, cache = folder / "model", folder / "cache"
    if not model.exists():
        start_s = time.perf_counter()
        num_bytes = write_checkpoint(model, published_config(int(options.gigabytes * GB)))
        show("written", bytes=num_bytes, seconds=round(time.perf_counter() - start_s, 1))
    num_bytes = sum(file.stat().st_size for file in model.glob("*.safetensors"))
    limit_bytes = int(options.limit_gigabytes * GB)
    codec = options.codec

    for name, way, tier, limit, is_first in (
        ("first start", "own", "disk", 0, True),
        ("next start", "own", "disk", 0, False),
        ("next start", "own", "ram", 0, False),
        ("first start under the limit", "own", "disk", limit_bytes, True),
        ("a bf16 copy under the limit", "copy", "-", limit_bytes, False),
        ("a bf16 copy", "copy", "-", 0, False),
    ):
        if is_first:
            shutil.rmtree(cache, ignore_errors=True)
        load = load_apart(model, way=way, codec=codec, tier=tier, cache=cache, limit_bytes=limit)
        store_bytes = sum(file.stat().st_size for file in cache.rglob("*.store"))
        show(
            name,
            codec=codec if way == "own" else "-",
            tier=tier,
            limit_bytes=limit,
            bf16_bytes=num_bytes,
            store_bytes=store_bytes,
            megabytes_per_s=round(num_bytes / load.seconds / 1e6),
            **asdict(load),
        )


def show(name: str, **figures: Any) -> None:
    sys.stdout.write(json.dumps({"what": name} | figures) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
