"""Memory of ranks that each hold a part of the model, against one process that holds it all.

`python -m tests.bench.bench_fsdp2` makes a random Qwen3 of some 200 million weights in fp32, trains
LoRA and all weights on it in one process and in two parts, and prints a line of JSON for each: what
each process holds in RAM between its last steps, by the system's own counters, and what the plan
has said of a rank. A machine's other load does not matter: bytes are counted, not timed.
"""

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import yaml
from transformers import Qwen3Config, Qwen3ForCausalLM

from tests.doubles import tiny_tokenizer

ROOT = Path(__file__).parents[2]
MIB = 2**20
NUM_STEPS, NUM_SETTLED = 5, 3  # by then everything is there that a step needs
PORT = 29577
COUNTERS = ("VmRSS", "VmHWM", "RssAnon", "RssShmem")


def main() -> None:
    """Run all, and print a line for each."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_model(folder / "model")
        for what in ("adapter", "all"):
            for parallel, num in (("stream", 1), ("fsdp2", 2)):
                found = measured(folder, what=what, parallel=parallel, num_ranks=num)
                sys.stdout.write(json.dumps(found) + "\n")
                sys.stdout.flush()


def make_model(folder: Path) -> None:
    """Save a model with random weights, and rows to train on."""
    tokenizer = tiny_tokenizer()
    config = Qwen3Config(
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=16,
        num_attention_heads=16,
        num_key_value_heads=16,
        head_dim=64,
        vocab_size=len(tokenizer),
        max_position_embeddings=128,
    )
    torch.manual_seed(0)
    Qwen3ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    rows = [{"prompt": f"what follows {n}", "completion": f"{n + 1}"} for n in range(32)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def measured(folder: Path, *, what: str, parallel: str, num_ranks: int) -> dict[str, Any]:
    """Train, and return what each process holds after some steps, with the plan's figures."""
    run_dir = folder / f"{what}-{parallel}"
    recipe = folder / "recipe.yaml"
    content: dict[str, Any] = {
        "model": {"path": str(folder / "model"), "dtype": "float32"},
        "data": {"path": str(folder / "model" / "rows.jsonl"), "num_workers": 0, "packing": "off"},
        "train": {
            "what": what,
            "parallel": parallel,
            "seq_len": 64,
            "grad_accum_steps": 2,
            "steps": NUM_STEPS,
        },
        "offload": {"device": "cpu"},
        "output": {"name": "memory", "dir": str(run_dir)},
    }
    if parallel == "stream":
        content["offload"]["num_slots"] = "all"
    recipe.write_text(yaml.safe_dump(content))
    launcher = [sys.executable, "cli.py"]
    if num_ranks > 1:
        launch = ["torch.distributed.run", "--nproc-per-node", str(num_ranks)]
        launcher = [sys.executable, "-m", *launch, "--master-port", str(PORT), "cli.py"]
    words = ["env", "OMP_NUM_THREADS=1", f"XDG_CACHE_HOME={folder / 'cache'}", f"PYTHONPATH={ROOT}"]
    started = subprocess.Popen([*words, *launcher, "finetune", str(recipe), "--quiet"], cwd=ROOT)
    metrics, found = run_dir / "metrics.jsonl", dict[int, dict[str, float]]()
    while started.poll() is None:
        if metrics.exists() and metrics.read_text().count("\n") >= NUM_SETTLED:
            now = {pid: status_of(pid) for pid in trainers(started.pid, num_ranks=num_ranks)}
            found |= {pid: counters for pid, counters in now.items() if counters}
        time.sleep(0.05)
    assert started.returncode == 0
    said = json.loads((run_dir / "measured.json").read_text())
    predicted = json.loads((run_dir / "predicted.json").read_text())["calibrated"]["predicted"]
    return {
        "what": what,
        "parallel": parallel,
        "num_ranks": num_ranks,
        "mib": [found[pid] for pid in sorted(found)],
        "predicted_rank_mib": predicted["peak_vram_bytes"] / MIB,
        "predicted_mib": {n: size / MIB for n, size in predicted["device_memory"].items()},
        "measured_rank_mib": {term["name"]: term["num_bytes"] / MIB for term in said["memory"]},
        "measured_peak_mib": said["peak_bytes"] / MIB,
    }


def trainers(pid: int, *, num_ranks: int) -> list[int]:
    """Return the processes that train: the one that was started, or the launcher's own."""
    if num_ranks == 1:
        return [pid]
    children = Path(f"/proc/{pid}/task/{pid}/children")
    return [int(child) for child in children.read_text().split()] if children.exists() else []


def status_of(pid: int) -> dict[str, float]:
    """Return a process's counters in MiB; none once it has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return {}
    named = dict(line.split(":", 1) for line in lines if ":" in line)
    if "VmRSS" not in named:  # it has ended, and has not been waited for
        return {}
    return {name: int(named[name].split()[0]) / 1024 for name in COUNTERS}


if __name__ == "__main__":
    main()
