"""Packed rows: how full sequences are, how exact steps are, and what they save, on a CPU.

    python -m tests.bench.bench_packing fill [--data DIR]
    python -m tests.bench.bench_packing exact [--data DIR] [--steps 200] [--free]
    python -m tests.bench.bench_packing speed [--data DIR] [--rounds 5]
    python -m tests.bench.bench_packing plan [--data DIR] [--model qwen3-8b] [--card rtx4090]

DIR has alpaca/, gsm8k/ and qwen3-tokenizer/; without it rows are drawn, with lengths like theirs.

`exact` trains a narrow model of four layers on packed rows; at each step the gradients of the same
rows unpacked are taken at the same weights. With `--free` the run is repeated unpacked, and then
with torch's fused AdamW: how far its losses drift is what the drift of packed ones is held against.
`speed` runs the same rows packed and padded, in micro-batches of several sizes, in turn, and
compares each with its plan's prediction, uncalibrated, of the machine as it is measured first.
`plan` gives the plan's figures for packed and padded micro-batches of a model on a named card.
"""

import argparse
import copy
import json
import tempfile
import time
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, cast

import numpy as np
import torch
from peft import LoraConfig, get_peft_model
from rich.console import Console
from rich.table import Table
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from finetune.data.dataset import ExampleSet, load_rows
from finetune.data.order import BatchOrder, PackedOrder, RowCost
from finetune.data.steps import Steps
from finetune.data.tokenize import Example
from finetune.model.tokenizer import load_tokenizer
from finetune.planning.candidates import choose, requests_for
from finetune.planning.request import facts_of
from finetune.planning.subject import model_subject
from finetune.recipe.recipe import Recipe, with_settings
from finetune.recipe.sections import ModelSection
from finetune.training.ranks import own_micro_batches
from offload.engine.engine import Engine, EngineOptions
from offload.plan.machine.machine import GIB, named_machine
from offload.plan.plan import Plan
from offload.probe.machine import probe

VOCABULARY, SEQ_LEN = 2048, 2048
DRAWN = {"alpaca": (1000, 4.5, 0.7), "gsm8k": (7473, 5.1, 0.4)}  # rows, and of a log-normal length
SHAPE: dict[str, Any] = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": SEQ_LEN,
    "tie_word_embeddings": False,
}
NARROW = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16}
LORA = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear")


class Rows:
    """Rows of a data set, their tokens folded into a small vocabulary."""

    def __init__(self, examples: Sequence[Example]) -> None:
        self._examples = examples
        self.lengths = tuple(len(example.input_ids) for example in examples)
        self.loss_tokens = [int((example.labels[1:] != -100).sum()) for example in examples]

    def __len__(self) -> int:
        return len(self._examples)

    def __getitem__(self, index: int) -> Example:
        return self._examples[index]

    def __iter__(self) -> Iterable[Example]:
        return iter(self._examples)


def rows_of(name: str, data: Path | None) -> ExampleSet:
    """Return the rows of a data set as a run tokenises them, or rows like them."""
    if data is None:
        num, mean, deviation = DRAWN[name]
        generator = np.random.default_rng(0)
        lengths = np.clip(generator.lognormal(mean, deviation, num), 8, SEQ_LEN).astype(int)
        texts = [generator.integers(3, VOCABULARY, n, dtype=np.int32) for n in lengths]
        pairs = [(ids, np.where(np.arange(len(ids)) < len(ids) // 2, -100, ids)) for ids in texts]
    else:
        files = {"alpaca": "alpaca/alpaca_en_demo.json", "gsm8k": "gsm8k/train.jsonl"}
        columns = {"columns": {"prompt": "question", "completion": "answer"}}
        section = {"path": str(data / files[name]), **(columns if name == "gsm8k" else {})}
        values = {**_recipe(Path("none")).model_dump(), "data": section}
        with tempfile.TemporaryDirectory() as cache:
            found = load_rows(
                Recipe.model_validate(values).data,
                load_tokenizer(ModelSection(tokenizer=str(data / "qwen3-tokenizer"))),
                seq_len=SEQ_LEN,
                seed=0,
                cache_dir=Path(cache),
            ).train
            pairs = [(row.input_ids % VOCABULARY, row.labels) for row in found]
    examples = [
        Example(
            input_ids=ids,
            labels=np.where(labels == -100, -100, labels % VOCABULARY).astype(np.int32),
            source=name,
            is_truncated=False,
        )
        for ids, labels in pairs
    ]
    return cast("ExampleSet", Rows(examples))


def _recipe(config: Path, **train: Any) -> Recipe:
    values = {
        "model": {"config": str(config), "init": "random", "dtype": "float32"},
        "adapter": {"rank": 16, "alpha": 32},
        "data": {"path": "rows.jsonl", "num_workers": 0},
        "train": {"seq_len": SEQ_LEN, "grad_accum_steps": 1, "steps": 10**6, **train},
        "output": {"name": "bench"},
    }
    return Recipe.model_validate(values)


def steps_of(recipe: Recipe, rows: ExampleSet) -> Steps:
    """Return the steps of a recipe, packed if it says so."""
    order: BatchOrder | PackedOrder = BatchOrder.of(recipe.train, rows)
    if recipe.data.packing == "on":
        cost = RowCost.of(facts_of(recipe.model))
        order = PackedOrder.of(recipe.train, rows, cost=cost)
    return Steps.of(order, rows, own=partial(own_micro_batches, index=0, num=1), pad_token_id=0)


def model_of(**shape: int) -> nn.Module:
    """Return a random model of four layers with an adapter that is not zero."""
    torch.manual_seed(0)
    base = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(**SHAPE | shape), dtype=torch.float32
    )
    model = get_peft_model(base, copy.deepcopy(LORA))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.02)
    return cast("nn.Module", model.train())


def written(folder: str) -> Path:
    """Write the model's config, and return the file."""
    file = Path(folder) / "config.json"
    file.write_text(json.dumps(SHAPE))
    return file


# -------------------------------------------------------------------------------------------- fill


def fill(console: Console, data: Path | None) -> None:
    """Print how full packed and padded sequences are."""
    table = Table(
        "rows", "tokens per step", "fill packed", "padded, 8 a micro-batch", "rows a step"
    )
    with tempfile.TemporaryDirectory() as folder:
        for name in DRAWN:
            rows = rows_of(name, data)
            for tokens in (16_384, 49_152):
                asked = _recipe(written(folder), grad_accum_steps=None, tokens_per_step=tokens)
                start_s = time.perf_counter()
                found = steps_of(with_settings(asked, {"data.packing": "on"}), rows).sizes.packing
                assert found is not None
                took_s = time.perf_counter() - start_s
                padded = steps_of(_recipe(written(folder), micro_batch_size=8), rows)
                shares = [padded.order.step(step) for step in range(50)]
                real = sum(rows.lengths[row] for step in shares for part in step for row in part)
                wide = sum(
                    8 * max(rows.lengths[r] for r in part) for step in shares for part in step
                )
                table.add_row(
                    f"{name} ({took_s:.2f} s for 50 steps)",
                    f"{tokens:,}",
                    f"{found.fill:.1%}",
                    f"{real / wide:.1%}",
                    str(found.rows_per_step),
                )
    console.print(table)


# ------------------------------------------------------------------------------------------- exact


def exact(console: Console, data: Path | None, num_steps: int, *, is_free: bool) -> None:
    """Print the largest difference of gradients at equal weights, and how far free runs drift."""
    rows = rows_of("alpaca", data)
    with tempfile.TemporaryDirectory() as folder:
        recipe = _recipe(written(folder), grad_accum_steps=8)
        packed, alone = (
            steps_of(with_settings(recipe, {"data.packing": "on"}), rows),
            steps_of(recipe, rows),
        )
    free = {"packed": True, **({"unpacked": False, "fused AdamW": False} if is_free else {})}
    losses: dict[str, list[float]] = {name: [] for name in free}
    errors: list[float] = []
    expected: list[torch.Tensor] = []
    for name, is_packed in free.items():
        model = model_of(**NARROW)
        engine = Engine(model, device=torch.device("cpu"), options=_options())
        trained = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=2e-4, fused=name == "fused AdamW", foreach=False)
        for step in range(num_steps):
            steps = packed if is_packed else alone
            if is_packed:
                _step(engine, alone, step)
                expected = [p.grad.clone() for p in trained if p.grad is not None]
                optimizer.zero_grad()
            losses[name].append(_step(engine, steps, step))
            if is_packed:
                found = [p.grad for p in trained if p.grad is not None]
                difference = sum(
                    float((a - b).square().sum()) for a, b in zip(found, expected, strict=True)
                )
                errors.append((difference / sum(float(b.square().sum()) for b in expected)) ** 0.5)
            optimizer.step()
            optimizer.zero_grad()
            if is_packed and step % 20 == 19:
                console.print(f"{step + 1} steps: at most {max(errors):.2e} apart")
        engine.close()
    console.print(f"{num_steps} steps, gradients at equal weights: at most {max(errors):.2e} apart")
    if not is_free:
        return
    apart = {
        name: max(abs(a - b) / b for a, b in zip(losses[name], losses["unpacked"], strict=True))
        for name in ("packed", "fused AdamW")
    }
    for name, value in apart.items():
        console.print(f"losses of {name} against unpacked: at most {value:.2e} apart")


def _options() -> EngineOptions:
    return EngineOptions(
        num_slots=4,
        codec="native",
        tier="ram",
        store_dir=None,
        stash="device",
        trained_weights="device",
        head_chunk_tokens=1024,
        num_kept_graphs=0,
    )


def _step(engine: Engine, steps: Steps, step: int) -> float:
    array = steps.as_array(step)
    share = steps.from_array(step, array)
    batches = [{n: t for n, t in b.items() if n != "attention_mask"} for b in share.micro_batches]
    result = engine.forward_backward(
        batches, dropout_seed=0, num_label_tokens=share.num_label_tokens
    )
    return result.loss


# ------------------------------------------------------------------------------------------- speed


def speed(console: Console, data: Path | None, num_rounds: int) -> None:
    """Print real tokens per second of each arm, and the seconds that its plan predicts."""
    torch.set_num_threads(1)
    rows, num_rows = rows_of("alpaca", data), 16
    machine = probe(device="cpu", seconds=0.5, dtype="float32")
    arms: dict[str, tuple[Engine, Steps, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        config = written(folder)
        sizes = [("packed", 1), *((f"padded, {n} rows", n) for n in (1, 2, 4, 8, 16))]
        for name, size in sizes:
            recipe = _recipe(config, micro_batch_size=size, grad_accum_steps=num_rows // size)
            recipe = with_settings(recipe, {"data.packing": "on" if name == "packed" else "off"})
            facts, steps = facts_of(recipe.model), steps_of(recipe, rows)
            requests = requests_for(recipe, facts, [(recipe, steps.sizes)], num_ranks=1)
            plan = choose(facts, machine, requests).plan
            options = EngineOptions.planned(plan)
            engine = Engine(model_of(), device=torch.device("cpu"), options=options)
            arms[name] = engine, steps, plan.step_s
    chosen = arms["packed"][1].sizes.typical_steps[0]
    num_tokens = arms["packed"][1].typical()[0].num_tokens
    times: dict[str, list[float]] = {name: [] for name in arms}
    for round_ in range(num_rounds + 1):
        for name, (engine, steps, _) in arms.items():
            start_s = time.perf_counter()
            _step(engine, steps, chosen)
            if round_:
                times[name].append(time.perf_counter() - start_s)
    table = Table("arm", "micro-batches", "step, s", "predicted, s", "real tokens/s")
    for name, (engine, steps, predicted_s) in arms.items():
        step_s = median(times[name])
        table.add_row(
            name,
            f"{len(steps.order.step(chosen))}",
            f"{step_s:.3f} ({min(times[name]):.3f} to {max(times[name]):.3f})",
            f"{predicted_s:.3f}",
            f"{num_tokens / step_s:,.0f}",
        )
        engine.close()
    console.print(f"{num_tokens:,} real tokens in {num_rows} rows, median of {num_rounds}")
    console.print(table)


# -------------------------------------------------------------------------------------------- plan


def plan_figures(console: Console, data: Path | None, model: str, card: str) -> None:
    """Print what a plan predicts of packed and padded steps with the same number of rows."""
    rows, machine = rows_of("alpaca", data), named_machine(card)
    mean = sum(rows.lengths) / len(rows.lengths)

    def planned(**train: Any) -> tuple[int, Plan]:
        subject = model_subject(model, [f"train.{name}={value}" for name, value in train.items()])
        recipe = with_settings(
            subject.recipe, {"data.packing": "off" if "grad_accum_steps" in train else "on"}
        )
        steps = steps_of(recipe, rows)
        requests = requests_for(recipe, subject.facts, [(recipe, steps.sizes)], num_ranks=1)
        found = steps.sizes.packing
        num_rows = recipe.train.global_batch_size if found is None else found.rows_per_step
        return num_rows, choose(subject.facts, machine, requests).plan

    table = Table("arm", "rows", "step, s", "real tokens/s", "peak, GiB", "sent, kept graphs")
    for tokens in (4_096, 16_384, 49_152):
        num_rows, packed = planned(tokens_per_step=tokens, seq_len=SEQ_LEN)
        arms = {f"packed, {tokens:,} tokens": packed}
        for size in (1, 4, 16):
            num = max(1, round(num_rows / size))
            same = {"micro_batch_size": size, "grad_accum_steps": num, "tokens_per_step": "null"}
            arms[f"padded, {size} rows"] = planned(**same, seq_len=SEQ_LEN)[1]
        for name, plan in arms.items():
            size = 1 if name.startswith("packed") else int(name.split()[1])
            whole = num_rows if name.startswith("packed") else max(1, round(num_rows / size)) * size
            table.add_row(
                name,
                str(whole),
                f"{plan.step_s:.2f}",
                f"{whole * mean / plan.step_s:,.0f}",
                f"{plan.peak_bytes / GIB:.1f}",
                f"{plan.residency.num_sent_graphs}, {plan.num_kept_graphs}",
            )
    console.print(f"{model} on {card}, rows of {mean:.0f} tokens in the mean")
    console.print(table)


def main() -> None:
    """Run what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["fill", "exact", "speed", "plan"])
    parser.add_argument("--data", type=Path, help="folder of data sets; rows are drawn without it")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--free", action="store_true", help="let runs drift apart too")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--model", default="qwen3-8b", help="a shipped shape, or a config.json")
    parser.add_argument("--card", default="rtx4090")
    arguments = parser.parse_args()
    console = Console()
    if arguments.what == "fill":
        fill(console, arguments.data)
    elif arguments.what == "exact":
        exact(console, arguments.data, arguments.steps, is_free=arguments.free)
    elif arguments.what == "plan":
        plan_figures(console, arguments.data, arguments.model, arguments.card)
    else:
        speed(console, arguments.data, arguments.rounds)


if __name__ == "__main__":
    main()
