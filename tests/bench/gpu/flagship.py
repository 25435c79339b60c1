"""The flagship whole: recipes/qwen30b_lora_5090.yaml by its command, all 48 layers, three steps.

Only what the recipe fetches is replaced: random weights of that shape, a tokenizer and rows that
are made here. The card may have what an RTX 5090 has for a plan. What it predicted before it timed
a step (blind), what it predicted after (calibrated) and what it measured are read from its run.
"""

import json
import random
import string
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from transformers import AutoConfig

from finetune.errors import FinetuneError
from finetune.report.explain import METRICS, explain
from finetune.report.prediction import read_predictions
from finetune.run.run_files import read_rows
from offload.plan.facts.facts import AdapterSpec
from offload.plan.machine.machine import GIB, named_machine
from tests.bench.gpu import models, moe30b
from tests.bench.gpu.ceiling import once_flops
from tests.bench.gpu.journal import Journal
from tests.bench.gpu.peers import watched
from tests.bench.gpu.settings import Settings
from tests.bench.record import ROOT, quantiles
from tests.builders import model_facts
from tests.doubles import tiny_tokenizer

PART, RECIPE, CARD = "qwen30b_lora_5090", ROOT / "recipes/qwen30b_lora_5090.yaml", "rtx5090"
NUM_STEPS, MARGIN_S, LAST_LINES = 3, 6.0, 3
REHEARSED_SHAPE = "tiny-qwen3-moe"
REHEARSED = (
    "train.seq_len=64",
    "train.tokens_per_step=384",
    "offload.device=cpu",
    "offload.num_slots=2",
    "model.dtype=float32",
    "train.optimizer=adamw",
)


def run(settings: Settings, journal: Journal) -> None:
    """Run the command to its end, or to the end of this case's time, and say what it left."""
    journal.expect([PART])
    if journal.has(PART):
        return
    folder = settings.scratch / "flagship"
    folder.mkdir(parents=True, exist_ok=True)
    fields = models.fields(REHEARSED_SHAPE if settings.is_rehearsal else moe30b.SHAPE)
    recipe = yaml.safe_load(RECIPE.read_text())
    seq_len, tokens = recipe["train"]["seq_len"], recipe["train"]["tokens_per_step"]
    if settings.is_rehearsal:
        seq_len, tokens = 64, 384
    write_inputs(folder, fields, seq_len=seq_len, num_rows=NUM_STEPS * tokens // seq_len)
    run_dir = folder / "run"
    command = [sys.executable, "-m", "tests.bench.gpu.flagship_program"]
    command += ["finetune", str(RECIPE), *overrides(folder, settings)]
    log = settings.out / "flagship.txt"
    ended = watched.run(command, cwd=ROOT, log=log, limit_s=settings.left_s - MARGIN_S)
    lines = log.read_text(errors="replace").strip().splitlines()
    row = {"exit_status": ended.status, "wall_s": ended.seconds, "command": command[3:]}
    row |= {"peak_host_bytes": ended.peak_host_bytes, "last_lines": lines[-20:]}
    found = found_in(run_dir, fields, seq_len=seq_len)
    if "tokens_per_s" not in found:
        why = f"exit status {ended.status}" if ended.status is not None else "its time was over"
        journal.add(PART, **row, error=" / ".join([why, *lines[-LAST_LINES:]])[:400])
        return
    journal.add(PART, **row, **found)


def write_inputs(folder: Path, fields: Mapping[str, Any], *, seq_len: int, num_rows: int) -> None:
    """Write a config, a tokenizer with a token for each letter, and rows of full length."""
    given = dict(fields)
    AutoConfig.for_model(given.pop("model_type"), **given).save_pretrained(folder / "model")
    tiny_tokenizer().save_pretrained(folder / "model")
    letters = random.Random(0)
    with (folder / "rows.jsonl").open("w") as file:
        for _ in range(num_rows):
            text = "".join(letters.choices(string.ascii_lowercase, k=seq_len))
            file.write(json.dumps({"prompt": text[:8], "completion": text}) + "\n")


def overrides(folder: Path, settings: Settings) -> list[str]:
    """Return what is given beside the recipe."""
    given = [
        f"model.path={folder / 'model'}",
        "model.init=random",
        f"data.path={folder / 'rows.jsonl'}",
        "data.format=prompt_completion",
        "data.loss_on=all",
        "data.eval_frac=null",
        "train.epochs=null",
        f"train.steps={NUM_STEPS}",
        "train.warmup_steps=0",
        "output.eval_every=null",
        f"output.dir={folder / 'run'}",
    ]
    if settings.is_rehearsal:
        settings.machine("float32")
        file = settings.out / "machine-float32.json"
        return [*given, *REHEARSED, "--machine", str(file)]
    vram_gib = named_machine(CARD).vram_bytes / GIB
    return [*given, f"offload.vram_budget={vram_gib:.2f}"]


def found_in(run_dir: Path, fields: Mapping[str, Any], *, seq_len: int) -> dict[str, Any]:
    """Return what a run's files say: all of it, or of the steps that were done."""
    if not (run_dir / METRICS).exists():
        return {}
    rows = list(read_rows(run_dir / METRICS))
    if not rows:
        return {}
    tokens = rows[-1]["num_tokens"]
    steps_s = [row["phases_s"]["step"] for row in rows]
    newest = read_predictions(run_dir)[-1]
    step_s = quantiles(steps_s)
    blind, calibrated = (
        p["predicted"]["step_s"] for p in (newest.before_measuring, newest.calibrated)
    )
    facts = model_facts(fields)
    adapter = AdapterSpec(rank=moe30b.RANK, targets=models.ATTENTION, experts=True)
    once = once_flops(facts, adapter, num_tokens=tokens, seq_len=seq_len)
    found: dict[str, Any] = {
        "n": len(rows),
        "num_layers": facts.num_layers,
        "step_s": step_s,
        "each_step_s": steps_s,
        "tokens_per_step": tokens,
        "tokens_per_s": quantiles([tokens / s for s in steps_s]),
        "once_flops_per_s": quantiles([once / s for s in steps_s]),
        "predicted_probed_s": blind,
        "predicted_s": calibrated,
        "blind_error": blind / step_s["p50"] - 1,
        "calibrated_error": calibrated / step_s["p50"] - 1,
        "data_waits_s": [row["phases_s"]["data wait"] for row in rows],
        "phases_s": rows[-1]["phases_s"],
        "path": path_of(run_dir),
        "schedule": newest.calibrated["schedule"],
        "note": f"{len(rows)} of {NUM_STEPS} steps, blind {blind / step_s['p50'] - 1:+.1%}",
    }
    try:
        memory = explain(run_dir).memory
    except FinetuneError:  # it was ended before it wrote how it went
        return found
    peaks = {row.name: [row.predicted, row.measured] for row in memory}
    found["memory_bytes"] = peaks
    peak = next((row for row in memory if row.name.startswith("peak")), None)
    if peak is not None and peak.measured:
        found |= {"peak_bytes": peak.measured, "predicted_peak_bytes": peak.predicted}
        found |= {"memory_error": peak.error}
    return found


def path_of(run_dir: Path) -> str:
    """Say which code path the run took, by the recipe that it settled on."""
    settled = yaml.safe_load((run_dir / "recipe.yaml").read_text())["model"]
    kernels = settled["layer_kernels"]
    layers = {"fused": "fused", "plain": "the model's own"}.get(kernels, f"({kernels})")
    return (
        f"branches in the base's dtype, {layers} norms, rotations, gates and loss,"
        f" experts by {settled['experts_implementation']}"
    )
