"""Traced memory of plain transformers + peft steps, against what others measured on their cards.

    python -m tests.bench.bench_memory [--runs FILE] [--only TEXT] [--out FILE]

`--runs` names a CSV file of measured runs, one per row: source, model, gpu, quant, optimizer,
seq_len, micro_batch, checkpointing, peak_vram_gb (GiB reserved) and notes with `peak_allocated`,
the adapter's rank and targets, the compute type and the attention kernel. Rows are compared one by
one; those of one configuration are traced once. A row is left out if its model's shape is not
below, or if it does not say what it measured; each is printed with the reason.
"""

import argparse
import csv
import json
import re
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.table import Table

from offload.engine.tracing.cuda_kernels import Capability
from tests.bench.plain_step import Peaks, PlainRun, trace_plain_run
from tests.bench.record import git

RUNS = Path("measured_runs.csv")
GIB = 2**30
CAPABILITY: Mapping[str, Capability] = {"Tesla T4": (7, 5), "RTX 4080": (8, 9)}
QUANT = {"nf4 (no DQ)": "nf4", "nf4+DQ": "nf4+dq", "none (fp16)": "none", "none (bf16)": "none"}
OPTIMIZER = {"torch AdamW fp32 states": "adamw", "paged_adamw_8bit": "paged_adamw_8bit"}
ATTENTION = {"eager": "eager", "SDPA mem-efficient": "efficient", "sdpa": None}
DTYPE = {"fp16": torch.float16, "bf16": torch.bfloat16}
CHECKPOINTING = {"HF full, non-reentrant": True, "HF full": True, "off": False}
# Sources whose loop holds a step's output until the next forward returns: read in their code. The
# others run a step in a function of its own.
BARE_LOOPS = ("github.com/DaoyuanLi2816/can-i-finetune-this",)
TARGETS = {"q": "q_proj", "k": "k_proj", "v": "v_proj", "o": "o_proj"}

# Hidden size, MLP width, layers, heads, key-value heads, vocabulary, tied head.
SHAPES: Mapping[str, tuple[str, int, int, int, int, int, int, bool]] = {
    "TinyLlama/TinyLlama-1.1B-Chat-v1.0": ("llama", 2048, 5632, 22, 32, 4, 32000, False),
    "HuggingFaceTB/SmolLM2-135M": ("llama", 576, 1536, 30, 9, 3, 49152, True),
    "HuggingFaceTB/SmolLM2-360M": ("llama", 960, 2560, 32, 15, 5, 49152, True),
    "HuggingFaceTB/SmolLM2-1.7B": ("llama", 2048, 8192, 24, 32, 32, 49152, True),
    "meta-llama/Llama-3.2-1B-Instruct": ("llama", 2048, 8192, 16, 32, 8, 128256, True),
    "meta-llama/Llama-3.2-3B-Instruct": ("llama", 3072, 8192, 28, 24, 8, 128256, True),
    "deepseek-ai/deepseek-coder-1.3b-instruct": ("llama", 2048, 5504, 24, 16, 16, 32256, False),
    "mistralai/Mistral-7B-Instruct-v0.3": ("mistral", 4096, 14336, 32, 32, 8, 32768, False),
    "Qwen/Qwen2.5-0.5B-Instruct": ("qwen2", 896, 4864, 24, 14, 2, 151936, True),
    "Qwen/Qwen2.5-1.5B-Instruct": ("qwen2", 1536, 8960, 28, 12, 2, 151936, True),
    "Qwen/Qwen2.5-Coder-1.5B-Instruct": ("qwen2", 1536, 8960, 28, 12, 2, 151936, True),
    "Qwen/Qwen2.5-3B-Instruct": ("qwen2", 2048, 11008, 36, 16, 2, 151936, True),
    "Qwen/Qwen2.5-7B-Instruct": ("qwen2", 3584, 18944, 28, 28, 4, 152064, False),
}


class LeftOutError(Exception):
    """A row that cannot be compared, and why."""


def config_of(model: str) -> dict[str, Any]:
    """Return a model's config."""
    if model not in SHAPES:
        raise LeftOutError(f"the shape of {model} is not known")
    kind, hidden, width, layers, heads, kv_heads, vocabulary, is_tied = SHAPES[model]
    return {
        "model_type": kind,
        "hidden_size": hidden,
        "intermediate_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocabulary,
        "tie_word_embeddings": is_tied,
        "max_position_embeddings": 32768,
    }


def run_of(row: Mapping[str, str]) -> PlainRun:
    """Return how a row was set up.

    Raises:
        LeftOutError: It does not say, or it is nothing that is known here.
    """
    notes = row["notes"]
    adapter = re.search(r"\br=(\d+) ([qkvo](?:,[qkvo])*)", notes)
    dtype = re.search(r"compute (\w+)", notes) or re.search(r"none \((\w+)\)", row["quant"])
    attention = re.search(r"attn=([^;]+)", notes) or re.search(r"; (sdpa);", notes)
    if adapter is None or attention is None:
        raise LeftOutError("it does not name its adapter or its attention")
    try:
        return PlainRun(
            config=config_of(row["model"]),
            dtype=DTYPE[dtype[1] if dtype else "bf16"],
            quant=QUANT[row["quant"]],
            rank=int(adapter[1]),
            targets=tuple(TARGETS[name] for name in adapter[2].split(",")),
            optimizer=OPTIMIZER[row["optimizer"]],
            batch_size=int(row["micro_batch"]),
            seq_len=int(row["seq_len"]),
            is_checkpointed=CHECKPOINTING[row["checkpointing"]],
            attention=ATTENTION[attention[1]],
            capability=CAPABILITY[row["gpu"]],
            keeps_output=row["source"].startswith(BARE_LOOPS),
        )
    except KeyError as error:
        raise LeftOutError(f"{error} is nothing that is known here") from error


def measured_of(row: Mapping[str, str]) -> Peaks:
    """Return what was measured."""
    allocated = re.search(r"peak_allocated=([\d.]+) GiB", row["notes"])
    if allocated is None or "metric=peak_reserved" not in row["notes"]:
        raise LeftOutError("it does not say which peak it measured")
    return Peaks(
        allocated_bytes=int(float(allocated[1]) * GIB),
        reserved_bytes=int(float(row["peak_vram_gb"]) * GIB),
    )


def compare(rows: Sequence[Mapping[str, str]], note: Callable[[str], None]) -> list[dict[str, Any]]:
    """Trace the configuration of each row; return predictions beside measurements."""
    results: list[dict[str, Any]] = []
    traced: dict[str, tuple[Peaks, float]] = {}
    for row in rows:
        name = f"{row['source'].split('/')[-1]} {row['model']}"
        try:
            run, measured = run_of(row), measured_of(row)
        except LeftOutError as error:
            note(f"left out: {name}: {error}")
            continue
        if repr(run) not in traced:
            start_s = time.perf_counter()
            traced[repr(run)] = trace_plain_run(run), time.perf_counter() - start_s
        peaks, trace_s = traced[repr(run)]
        result = {
            "bench": "memory",
            "row": name,
            "gpu": row["gpu"],
            "quant": run.quant,
            "attention": run.attention or "sdpa",
            "micro_batch_size": run.batch_size,
            "seq_len": run.seq_len,
            "allocated_bytes": measured.allocated_bytes,
            "allocated_predicted_bytes": peaks.allocated_bytes,
            "allocated_error": peaks.allocated_bytes / measured.allocated_bytes - 1,
            "reserved_bytes": measured.reserved_bytes,
            "reserved_predicted_bytes": peaks.reserved_bytes,
            "reserved_error": peaks.reserved_bytes / measured.reserved_bytes - 1,
            "trace_s": trace_s,
        }
        results.append(result)
        note(
            f"{name[:70]:70} {run.quant:6} {result['attention']:9} {run.batch_size:2} x"
            f" {run.seq_len:4}: allocated {result['allocated_error']:+7.2%},"
            f" reserved {result['reserved_error']:+7.2%}, {trace_s:.1f} s"
        )
    return results


def show(results: Sequence[Mapping[str, Any]], print_line: Callable[[object], None]) -> None:
    """Print errors by group and over all rows."""
    groups: dict[tuple[str, ...], list[Mapping[str, Any]]] = defaultdict(list)
    for result in results:
        groups[result["gpu"], result["quant"], result["attention"]].append(result)
    groups["all", "", ""] = list(results)
    table = Table("card", "weights", "attention", "rows")
    for kind in ("allocated", "reserved"):
        table.add_column(f"{kind}: mean", justify="right")
        table.add_column("worst", justify="right")
    for key, members in groups.items():
        cells = [*key, f"{len(members)}"]
        for kind in ("allocated_error", "reserved_error"):
            errors = [member[kind] for member in members]
            cells.append(f"{statistics.mean(map(abs, errors)):.2%}")
            cells.append(f"{max(errors, key=abs):+.2%}")
        table.add_row(*cells)
    print_line(table)


def main() -> None:
    """Run the benchmark and print its table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=Path, default=RUNS)
    parser.add_argument("--only", default="", help="rows whose text contains this")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with options.runs.open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if options.only in str(row)]
    results = compare(rows, Console(width=200, highlight=False).print)
    show(results, Console(width=110).print)
    stamp = {
        "git_sha": git("rev-parse", "--short", "HEAD"),
        "dirty": bool(git("status", "--porcelain")),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    if options.out is not None:
        options.out.write_text("".join(json.dumps(stamp | row) + "\n" for row in results))


if __name__ == "__main__":
    main()
