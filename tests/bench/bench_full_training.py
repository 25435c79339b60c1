"""Full training: step time and RAM, predicted and measured, of three configurations.

    python -m tests.bench.bench_full_training
    python -m tests.bench.bench_full_training states

Random models of some ten million weights are trained by the program itself, in a process each. What
it predicted before its first step (calibrated by a rehearsal, and from probed rates before that) is
compared with its own report, and the plan's bytes per weight in RAM with those that were counted.
With `states` a wider model trains with its optimizer states in RAM and on disk, twice each. Held
memory is RssAnon + RssShmem, sampled every 20 ms: the system takes pages of files back.
"""

import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console

from offload.plan.facts.optimizer import LOW_HALVES
from tests.doubles import tiny_tokenizer

ROOT = Path(__file__).parents[2]
STEPS = 12
SHAPE = {
    "model_type": "qwen3",
    "hidden_size": 384,
    "intermediate_size": 1152,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "num_hidden_layers": 8,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}
CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "fp32, 4 x 128 tokens": {"dtype": "float32", "grad_accum_steps": 4, "seq_len": 128},
    "fp32, 1 x 64 tokens": {"dtype": "float32", "grad_accum_steps": 1, "seq_len": 64},
    "bf16, 2 x 64 tokens": {"dtype": "bfloat16", "grad_accum_steps": 2, "seq_len": 64},
}


def main() -> None:
    """Run the configurations and print a row of each."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tokenizer = tiny_tokenizer()
        tokenizer.save_pretrained(folder / "tokenizer")
        shape = SHAPE | {"vocab_size": len(tokenizer)}
        (folder / "config.json").write_text(json.dumps(shape))
        row = json.dumps({"question": "what follows " * 40, "answer": "this " * 40})
        (folder / "rows.jsonl").write_text(f"{row}\n" * 64)
        for number, (words, configuration) in enumerate(CONFIGURATIONS.items()):
            run_dir = folder / f"run-{number}"
            held = _train(folder, run_dir, **configuration) / 2**20
            shown = f"{words}: {_shown(run_dir)}; held at most {held:.0f} MiB"
            Console(width=200).print(shown, markup=False)


def _train(
    folder: Path,
    run_dir: Path,
    *,
    dtype: str,
    grad_accum_steps: int,
    seq_len: int,
) -> int:
    """Train, and return the most memory that the process held, file pages left out."""
    recipe = {
        "model": {
            "config": str(folder / "config.json"),
            "init": "random",
            "dtype": dtype,
            "tokenizer": str(folder / "tokenizer"),
        },
        "data": {"path": str(folder / "rows.jsonl"), "num_workers": 0, "loss_on": "all"}
        | {"columns": {"prompt": "question", "completion": "answer"}},
        "train": {
            "what": "all",
            "seq_len": seq_len,
            "grad_accum_steps": grad_accum_steps,
            "steps": STEPS,
            "lr": 1e-4,
        },
        "offload": {"device": "cpu", "num_slots": 3, "kept_graphs": 0},
        "output": {"name": "bench", "dir": str(run_dir)},
    }
    file = folder / "recipe.yaml"
    file.write_text(yaml.safe_dump(recipe))
    words = [sys.executable, "cli.py", "finetune", str(file)]
    held = 0
    with subprocess.Popen(words, cwd=ROOT, stdout=subprocess.DEVNULL) as process:
        while process.poll() is None:
            status = Path(f"/proc/{process.pid}/status").read_text()
            found = re.findall(r"(?:RssAnon|RssShmem):\s+(\d+) kB", status)
            held = max(held, 1024 * sum(map(int, found)))
            time.sleep(0.02)
    assert process.returncode == 0
    return held


def _shown(run_dir: Path) -> str:
    report = json.loads((run_dir / "report.json").read_text())
    predicted = json.loads((run_dir / "predicted.json").read_text())
    section = report["sections"][0]
    rows = {row["name"]: row for row in section["comparison"]}
    step, updates = rows["step"], rows["updates"]
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    phases = [json.loads(line)["phases_s"] for line in lines[2:]]
    times = [one["exposed updates"] for one in phases]
    exposed = predicted["calibrated"]["predicted"]["phases_s"]["exposed updates"]
    num_weights = predicted["calibrated"]["model"]["num_module_parameters"]
    memory = {row["name"]: row for row in report["memory"]}
    before_s = predicted["before measuring"]["predicted"]["step_s"]
    terms = "; ".join(
        f"{name} {row['predicted'] / num_weights:.2f} -> {row['measured'] / num_weights:.2f}"
        for name, row in memory.items()
        if row["predicted"] and row["measured"] and ("RAM" in name or name in ("slab", LOW_HALVES))
    )
    peak = memory["peak memory"]
    return (
        f"{num_weights / 1e6:.1f} M weights, step {before_s:.3f} s probed,"
        f" {step['predicted']:.3f} s calibrated, {step['measured']:.3f} s measured"
        f" (p20 {step['p20']:.3f}, p80 {step['p80']:.3f}); updates {updates['predicted']:.3f} ->"
        f" {updates['measured']:.3f} s, exposed {exposed:.3f} ->"
        f" {statistics.mean(times):.3f} s; peak of memory {peak['predicted'] / 2**20:.0f} ->"
        f" {peak['measured'] / 2**20:.0f} MiB; bytes per weight: {terms}"
    )


if __name__ == "__main__":
    main()
