"""Runs that are made up, so that every figure is known."""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from finetune.files.manifest import sealed_json
from finetune.report.plan import plan_json
from finetune.report.prediction import write_prediction
from finetune.training.loop import StepRecord
from finetune.training.report import metrics_row
from offload.plan.plan import Plan, with_costs
from offload.plan.schedule.op import Kind, Op, Route
from offload.plan.schedule.simulate import simulate
from offload.plan.step import duration_of
from offload.plan.time.costs import Speed
from tests.unit.finetune.report.sealed import tiny_plan
from tests.unit.finetune.report.seen import begun

NUM_STEPS = 12


def exact(plan: Plan) -> Plan:
    """Put a plan at prices whose sums are exact: each visit 1/4 s, each load 1/8 s."""
    layers = tuple(replace(layer, forward_s=0.25, backward_s=0.25) for layer in plan.costs.layers)
    costs = replace(
        plan.costs,
        grade="calibrated",
        layers=layers,
        front_s=0.25,
        tail_s=0.25,
        optimizer_s=0.5,
        speeds={**plan.costs.speeds, Route.LOAD: Speed(layers[0].weight_bytes * 8)},
    )
    return with_costs(plan, costs)


def record(plan: Plan, *, slow_layer_s: float = 0.0, optimizer_s: float = 0.5) -> StepRecord:
    """Return a step in which layer 2's backward takes longer."""
    usual_s = duration_of(plan.costs)

    def duration_s(op: Op) -> float:
        is_slow = op.kind is Kind.BACKWARD and op.layer == 2 and op.micro_batch == 0
        return usual_s(op) + slow_layer_s * is_slow

    timeline = simulate(plan.schedule, duration_s)
    return StepRecord(
        loss=1.0,
        grad_norm=1.0,
        lr=0.1,
        num_tokens=100,
        num_label_tokens=50,
        num_loads=plan.schedule.num_loads,
        optimizer_s=optimizer_s,
        step_s=timeline.step_s + optimizer_s + 0.125,  # 1/8 s outside the pass
        timeline=timeline,
    )


@dataclass(frozen=True, kw_only=True)
class Written:
    """A prediction that was written."""

    plan: Plan
    seal: str


def predict(folder: Path, plan: Plan, *, first_step: int) -> Written:
    priced, steps = plan_json(tiny_plan()), (first_step, NUM_STEPS)
    return Written(
        plan=plan, seal=write_prediction(folder, plan, priced=priced, steps=steps, choice={})
    )


def write_run(folder: Path, *, slow_s: list[float], wait_s: float = 0.0625) -> Written:
    """Write a run's prediction, and a row for each step."""
    promised = predict(folder, exact(tiny_plan()), first_step=0)
    write_rows(folder, promised, slow_s=slow_s, wait_s=wait_s)
    return promised


def write_rows(
    folder: Path, promised: Written, *, slow_s: list[float], first: int = 1, wait_s: float = 0.0625
) -> None:
    with (folder / "metrics.jsonl").open("a") as file:
        for step, seconds in enumerate(slow_s, start=first):
            row = metrics_row(
                record(promised.plan, slow_layer_s=seconds),
                step=step,
                data_wait_s=wait_s,
                seal=promised.seal,
            )
            file.write(json.dumps(row) + "\n")


NUM_ROUNDS = 5
EVALUATED = {3: 0.5, 5: 0.75}


def a_run_of_rounds(folder: Path, **more: Any) -> Path:
    """Write a run of five rounds of 16 answers: 2 s of sampling, 1/4 s of rewards, 1/16 s else."""
    folder.mkdir(exist_ok=True)
    begun(
        folder,
        objective__method="grpo",
        objective__rewards=["exact_match", "rewards.py:short"],
        objective__num_answers=4,
        data__format="prompt",
        train__micro_batch_size=4,
    )
    write_run(folder, slow_s=[1.0] * NUM_ROUNDS, wait_s=2.3125)
    metrics = folder / "metrics.jsonl"
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    for row in rows:
        step = row["step"]
        row |= {
            "reward": step / 10,
            "frac_reward_zero_std": 0.25,
            "completions/mean_length": 8.0,
            "completions/clipped_ratio": 0.5,
            "rewards/exact_match/mean": step / 20,
            "rewards/short/mean": 1.0,
            "sample_s": 2.0,
            "predicted_sample_s": 1.0,
            "reward_s": 0.25,
            **more,
        }
        if step in EVALUATED:
            row |= {"eval_loss": -EVALUATED[step], "eval_reward": EVALUATED[step]}
    metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    before = {"eval_loss": -0.25, "eval_reward": 0.25}
    (folder / "evaluation_before.json").write_text(sealed_json(json.dumps(before, indent=1)))
    (folder / "rounds").mkdir(exist_ok=True)
    return folder


def write_round(folder: Path, step: int, answers: list[tuple[str, str, float | None]]) -> Path:
    lines = [
        {
            "row": prompt,
            "prompt": prompt,
            "answer": answer,
            "reward": reward,
            "is_cut": answer == "cut",
        }
        for prompt, answer, reward in answers
    ]
    file = folder / "rounds" / f"{step:06d}.jsonl"
    file.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))
    return file
