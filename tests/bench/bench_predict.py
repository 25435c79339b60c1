"""Step times and arenas that were predicted before step 1, against runs of drawn configurations.

    python -m tests.bench.bench_predict [--device cuda] [--seed N] [--draws 12] [--out FILE.jsonl]

Each configuration is a checkpoint of random weights, rows that fill every sequence, and a recipe;
`cli.py finetune` trains it in a process of its own, on a CPU with one thread. What is compared is
read from its run directory: the calibrated prediction that was sealed before step 1, and the steps
after it. One that fails or takes too long is a row with its error, and misses the goals.

Configurations are drawn from SPACES: each axis runs through all its values in an order of its own,
again and again, so that as many draws as its longest axis has values miss none. Sequences per
micro-batch follow from the drawn work of a step, which keeps steps well above the timer's noise;
where one sequence is too much for it, sequences get shorter, down to MIN_SEQ_LEN.

An error is (predicted - median) / median. Beside it stands the noise floor: by how much one step
differs from the median of its run, at the median: the prediction rests on one of a few timed steps.
`within` says whether it lies between the 20th and the 80th percentile of the steps, and `others`
how many cores other processes kept busy meanwhile: on a quiet machine none.
"""

import argparse
import json
import os
import platform
import random
import statistics
import string
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from rich.table import Table
from transformers import AutoConfig, PreTrainedConfig

from finetune.report.explain import METRICS, explain
from finetune.report.prediction import read_predictions
from finetune.run.run_files import read_rows
from tests.bench.configurations import (
    NUM_EXPERTS_PER_TOKEN,
    SPACES,
    Configuration,
    draw,
)
from tests.bench.record import cpu_name, git
from tests.checkpoints import write_checkpoint
from tests.doubles import tiny_tokenizer

ROOT = Path(__file__).parents[2]
SEED, NUM_DRAWS, NUM_STEPS = 20261121, 12, 12
# What the engine takes once and keeps; the plan prices each by this name.
ARENAS = ("slots", "decoded layer", "slab", "staging", "stashed layer inputs")
PACKAGES = ("torch", "transformers", "peft", "bitsandbytes")
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, kw_only=True, slots=True)
class Goals:
    """What errors have to stay below."""

    median_error: float
    worst_error: float
    memory_error: float


GOALS = {
    "cpu": Goals(median_error=0.10, worst_error=0.25, memory_error=0.05),
    "cuda": Goals(median_error=0.05, worst_error=0.10, memory_error=0.03),
}


# --------------------------------------------------------------------------------------- running


def model_config(c: Configuration) -> PreTrainedConfig:
    """Return the model's config."""
    mlp_width = c.mlp_ratio * c.hidden
    fields: dict[str, Any] = {"intermediate_size": mlp_width}
    if c.has_experts:
        name = "num_local_experts" if c.model_type == "mixtral" else "num_experts"
        width = "moe_intermediate_size" if c.model_type == "qwen3_moe" else "intermediate_size"
        fields[width] = mlp_width // NUM_EXPERTS_PER_TOKEN
        fields |= {name: c.num_experts, "num_experts_per_tok": NUM_EXPERTS_PER_TOKEN}
    head_dim = 128 if c.hidden >= 1024 else 64 if c.hidden >= 256 else 32
    return AutoConfig.for_model(
        c.model_type,
        hidden_size=c.hidden,
        num_hidden_layers=c.num_layers,
        num_attention_heads=c.hidden // head_dim,
        num_key_value_heads=c.hidden // head_dim // 2,
        head_dim=head_dim,
        vocab_size=c.vocabulary,
        max_position_embeddings=8192,
        tie_word_embeddings=False,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        **fields,
    )


def write_run(folder: Path, c: Configuration, *, device: str, num_steps: int) -> Path:
    """Write a checkpoint, its tokenizer, rows and a recipe; return the recipe."""
    import torch

    model, rows = folder / "model", folder / "rows.jsonl"
    write_checkpoint(model, model_config(c), dtype=getattr(torch, c.dtype))
    tiny_tokenizer().save_pretrained(model)
    letters = random.Random(0)
    rows.write_text("".join(_row(letters, c.seq_len) for _ in range(2 * c.num_sequences + 16)))
    recipe = {
        "model": {"path": str(model), "dtype": c.dtype},
        "adapter": {
            "rank": 8,
            "alpha": 16,
            "targets": c.targets,
            "experts": c.has_experts and c.targets == "all-linear",
        },
        "data": {
            "path": str(rows),
            "format": "prompt_completion",
            "columns": {"prompt": "question", "completion": "answer"},
            "num_workers": 0,
        },
        "train": {
            "seq_len": c.seq_len,
            "micro_batch_size": c.num_sequences,
            "grad_accum_steps": c.num_micro_batches,
            "steps": num_steps,
        },
        "offload": {
            "device": device,
            "tier": c.tier,
            "codec": c.codec,
            "num_slots": c.num_slots,
            "stash": c.stash,
        },
        "output": {"name": "drawn", "dir": str(folder / "run")},
    }
    file = folder / "recipe.yaml"
    file.write_text(yaml.safe_dump(recipe))
    return file


def _row(letters: random.Random, seq_len: int) -> str:
    """Return a row that is cut to `seq_len`, one token a letter."""
    answer = "".join(letters.choices(string.ascii_lowercase, k=seq_len))
    return json.dumps({"question": answer[:8], "answer": answer}) + "\n"


def sluice(
    *words: object, folder: Path, device: str, limit_s: float
) -> subprocess.CompletedProcess[str]:
    """Run the program; on a CPU with one thread."""
    settings = [f"XDG_CACHE_HOME={folder / 'cache'}", "HF_HUB_OFFLINE=1"]
    settings += ["OMP_NUM_THREADS=1", "MKL_NUM_THREADS=1"] if device == "cpu" else []
    program = [sys.executable, str(ROOT / "cli.py"), *map(str, words)]
    return subprocess.run(
        ["env", *settings, *program],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=limit_s,
        check=False,
    )


def measure(
    c: Configuration,
    machine_file: Path,
    *,
    device: str,
    num_steps: int = NUM_STEPS,
    limit_s: float,
) -> dict[str, Any]:
    """Run one configuration and return what was predicted and measured, or how it failed."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        recipe = write_run(folder, c, device=device, num_steps=num_steps)
        before = (time.perf_counter(), busy_s(), own_s())
        try:
            done = sluice(
                "finetune",
                recipe,
                "--machine",
                machine_file,
                folder=folder,
                device=device,
                limit_s=limit_s,
            )
        except subprocess.TimeoutExpired:
            return {"error": f"took more than {limit_s:g} s"}
        if done.returncode:
            said = (done.stderr.strip() or done.stdout.strip()).splitlines()
            return {"error": f"exit status {done.returncode}: {' / '.join(said[-3:])}"}
        wall_s, all_s, ours_s = (
            now - then
            for now, then in zip((time.perf_counter(), busy_s(), own_s()), before, strict=True)
        )
        conditions = {"wall_s": wall_s, "others_cores": max(0.0, all_s - ours_s) / wall_s}
        return figures(folder / "run", is_cuda=device == "cuda") | conditions


def busy_s() -> float:
    """Return for how long all cores together have been busy since the system started."""
    user, nice, system, _, _, irq, softirq, steal = map(
        int, Path("/proc/stat").read_text().split(maxsplit=9)[1:9]
    )
    return (user + nice + system + irq + softirq + steal) / TICKS_PER_S


def own_s() -> float:
    """Return for how long this process and its ended children have kept cores busy."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def figures(run_dir: Path, *, is_cuda: bool) -> dict[str, Any]:
    """Return what the files of a finished run say."""
    explanation = explain(run_dir)
    if explanation.changes or len(explanation.sections) != 1:
        return {"error": f"not one sealed prediction: {explanation.changes}"}
    (section,) = explanation.sections
    step = section.comparison[0]
    steps_s = [row["phases_s"]["step"] for row in read_rows(run_dir / METRICS)]
    (prediction,) = read_predictions(run_dir)
    predicted = prediction.calibrated["predicted"]
    measured = json.loads((run_dir / "measured.json").read_text())
    peak = next(row for row in explanation.memory if row.name.startswith("peak"))
    return {
        "metric": "step time",
        "unit": "s",
        "grade": section.grade,
        "predicted": step.predicted,
        "p20": step.p20,
        "p50": step.p50,
        "p80": step.p80,
        "n": section.pace.num_steps,
        "num_cold": section.num_cold,
        "steps_s": steps_s,
        "time_error": step.predicted / step.p50 - 1,
        "noise": noise(steps_s),
        "is_within_spread": step.is_within_spread,
        "first_grade": section.first_grade,
        "first_predicted": section.first_step_s,
        "misses": [
            {"term": miss.term, "name": miss.name, "difference_s": miss.difference_s}
            for miss in section.misses[:5]
        ],
        "arenas": (terms := arena_terms(predicted, measured["memory"])),
        "memory_error": peak.error if is_cuda else arena_error(terms),
        "peak": {"name": peak.name, "predicted": peak.predicted, "measured": peak.measured},
    }


def noise(steps_s: Sequence[float]) -> float:
    """Return by how much a step differs from the median, at the median, as a share of it."""
    middle = statistics.median(steps_s)
    return statistics.median(abs(step_s - middle) for step_s in steps_s) / middle


def arena_terms(
    predicted: Mapping[str, Mapping[str, int]], measured: Iterable[Mapping[str, Any]]
) -> dict[str, dict[str, int]]:
    """Return predicted and measured bytes of each arena that either has."""
    planned = {**predicted["device_memory"], **predicted["host_memory"]}
    found = {term["name"]: int(term["num_bytes"]) for term in measured}
    return {
        name: {"predicted": planned.get(name, 0), "measured": found.get(name, 0)}
        for name in ARENAS
        if name in planned or name in found
    }


def arena_error(terms: Mapping[str, Mapping[str, int]]) -> float:
    """Return the relative error of all arenas together."""
    predicted, measured = (
        sum(term[kind] for term in terms.values()) for kind in ("predicted", "measured")
    )
    return predicted / measured - 1


# ------------------------------------------------------------------------------------- reporting


@dataclass(frozen=True, kw_only=True, slots=True)
class Summary:
    """Of all configurations; errors without their signs, of those that ran.

    Attributes:
        num: Configurations.
        num_failed: Those without a measurement.
        num_within: Those whose prediction is within the spread of their steps.
        median_error: Of step times.
        worst_error: Likewise.
        median_noise: By how much a step differs from its run's median.
        worst_memory_error: Of the arenas, or of peak VRAM.
        misses_goals: Which goals were not reached.
    """

    num: int
    num_failed: int
    num_within: int
    median_error: float
    worst_error: float
    median_noise: float
    worst_memory_error: float
    misses_goals: tuple[str, ...]


def summarise(rows: Sequence[Mapping[str, Any]], goals: Goals) -> Summary:
    """Sum up the rows; one that failed misses the goals."""
    ran = [row for row in rows if "error" not in row]
    errors = [abs(row["time_error"]) for row in ran] or [float("inf")]
    median_error, worst_error = statistics.median(errors), max(errors)
    worst_memory = max((abs(row["memory_error"]) for row in ran), default=float("inf"))
    misses = []
    if len(ran) < len(rows):
        misses.append(f"{len(rows) - len(ran)} failed")
    for name, error, goal in (
        ("median", median_error, goals.median_error),
        ("worst", worst_error, goals.worst_error),
        ("memory", worst_memory, goals.memory_error),
    ):
        if error >= goal:
            misses.append(f"{name} {error:.1%} is not under {goal:.0%}")
    return Summary(
        num=len(rows),
        num_failed=len(rows) - len(ran),
        num_within=sum(row["is_within_spread"] for row in ran),
        median_error=median_error,
        worst_error=worst_error,
        median_noise=statistics.median(row["noise"] for row in ran) if ran else float("nan"),
        worst_memory_error=worst_memory,
        misses_goals=tuple(misses),
    )


def table_of_rows(rows: Sequence[Mapping[str, Any]], *, title: str) -> Table:
    """Return a line for each configuration."""
    table = Table(title=title)
    for column in ("", "model", "layers", "step", "weights", "slots", "stash", "predicted"):
        table.add_column(column)
    for column in (
        "p20 / p50 / p80",
        "error",
        "noise",
        "within",
        "others",
        "probed",
        "memory",
        "miss",
    ):
        table.add_column(column, justify="right", overflow="fold")
    for number, row in enumerate(rows, 1):
        c = Configuration(**row["configuration"])
        cells = [
            f"{number}",
            c.model_type + (f" {c.num_experts}e" if c.has_experts else ""),
            f"{c.num_layers} x {c.hidden}",
            f"{c.num_micro_batches} x {c.num_sequences} x {c.seq_len}",
            f"{c.dtype} {c.codec} {c.tier}",
            f"{c.num_slots}",
            c.stash,
        ]
        table.add_row(*cells, *_figures_shown(row))
    return table


def _figures_shown(row: Mapping[str, Any]) -> list[str]:
    if "error" in row:
        return ["failed", row["error"]]
    miss = row["misses"][0]
    return [
        f"{row['predicted'] * 1e3:.0f} ms",
        " / ".join(f"{row[p] * 1e3:.0f}" for p in ("p20", "p50", "p80")),
        f"{row['time_error']:+.1%}",
        f"{row['noise']:.1%}",
        "yes" if row["is_within_spread"] else "no",
        f"{row['others_cores']:.1f}",
        f"{row['first_predicted'] / row['p50'] - 1:+.0%}",
        f"{row['memory_error']:+.1%}",
        f"{miss['name']} {miss['difference_s'] * 1e3:+.0f} ms",
    ]


def summary_text(summary: Summary, goals: Goals, *, device: str) -> str:
    """Return the summary in three lines."""
    what = "peak VRAM" if device == "cuda" else "arenas"
    verdict = "; ".join(summary.misses_goals) or "all goals reached"
    return (
        f"step time: median error {summary.median_error:.1%} (goal {goals.median_error:.0%}),"
        f" worst {summary.worst_error:.1%} (goal {goals.worst_error:.0%}),"
        f" a step's own noise {summary.median_noise:.1%};"
        f" {summary.num_within} of {summary.num} within p20..p80\n"
        f"{what}: worst error {summary.worst_memory_error:.1%} (goal {goals.memory_error:.0%})\n"
        f"{summary.num} configurations, {summary.num_failed} failed: {verdict}"
    )


def common_fields(device: str, seed: int) -> dict[str, Any]:
    """Return what every line says of the code, the machine and the draw."""
    return {
        "git_sha": git("rev-parse", "HEAD"),
        "dirty": bool(git("status", "--porcelain")),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": device,
        "cpu": cpu_name(),
        "python": platform.python_version(),
        **{name: version(name) for name in PACKAGES},
        "seed": seed,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=sorted(SPACES), default="cpu")
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--draws", type=int, default=NUM_DRAWS)
    parser.add_argument("--out", type=Path, help="JSON lines, one for each configuration")
    options = parser.parse_args()
    space, goals, device = SPACES[options.device], GOALS[options.device], options.device
    drawn = draw(space, seed=options.seed, num=options.draws)
    common = common_fields(device, options.seed)
    console = Console()
    console = console if console.is_terminal else Console(width=190)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        machines = probed_machines({c.dtype for c in drawn}, Path(name), device=device)
        for c in drawn:
            file = machines[c.dtype]
            found = measure(c, file, device=device, limit_s=space.limit_s)
            machine = json.loads(file.read_text())["name"]
            rows.append(common | {"machine": machine, "configuration": asdict(c)} | found)
            if options.out is not None:
                with options.out.open("a") as out:
                    out.write(json.dumps(rows[-1]) + "\n")
            said = found.get("error") or f"{found['time_error']:+.1%}"
            console.print(f"{len(rows)} of {len(drawn)}: {said}", markup=False)
    title = f"{rows[0]['machine']}, {common['cpu']}, seed {options.seed}, {common['git_sha'][:9]}"
    console.print(table_of_rows(rows, title=title + (" + changes" if common["dirty"] else "")))
    text = summary_text(summarise(rows, goals), goals, device=device)
    console.print(text, markup=False, highlight=False)


def probed_machines(dtypes: Iterable[str], folder: Path, *, device: str) -> dict[str, Path]:
    """Measure this machine once for each type of weights, as a user would."""
    files = {}
    for dtype in sorted(dtypes):
        files[dtype] = folder / f"{dtype}.json"
        words = ("probe", "--dtype", dtype, "--save", files[dtype])
        sluice(*words, folder=folder, device=device, limit_s=120.0).check_returncode()
    return files


if __name__ == "__main__":
    main()
