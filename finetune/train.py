"""The main path: recipe -> machine, facts -> rows -> plan -> model, engine -> steps -> report."""

import json
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

import torch
from torch import nn

import offload
from finetune import adapters, plan_report, preflight, report
from finetune.batches import BatchOrder, StepLoader, collate
from finetune.checkpoint import RunDir
from finetune.env import cache_dir
from finetune.files import write_atomically
from finetune.loop import Batch, Loop
from finetune.model import load_model, load_tokenizer
from finetune.planning import facts_of, find_machine, request_for
from finetune.recipe import Recipe
from finetune.recorder import Recorder, profiled
from finetune.sampling import answer, pad_id
from finetune.screen import Screen
from finetune.source import Rows, StepSizes, load_rows, row_order
from offload.engine import meter
from offload.engine.engine import Engine
from offload.plan.plan import Plan, calibrate, plan, with_costs
from offload.plan.timeline import Timeline
from offload.probe import probe

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedTokenizerBase


PROBE_S = 5.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """How a run ended: in its directory, after some steps, perhaps before its last."""

    run_dir: Path
    num_steps: int
    is_interrupted: bool


def finetune(
    recipe: Recipe,
    *,
    screen: Screen,
    machine_file: Path | None,
    is_resume: bool,
    may_overwrite: bool,
) -> Outcome:
    """Run a recipe from its rows to its adapter.

    Args:
        recipe: What to do.
        screen: Where to show it.
        machine_file: A machine that was measured before; None measures this one.
        is_resume: Continue the run in the recipe's directory.
        may_overwrite: Replace a run that is there.

    Raises:
        SluiceError: Anything a user or the machine can cause.
    """
    run_dir = RunDir(recipe.output.run_dir)
    preflight.require_one_process()
    preflight.require_trainable_cargo(recipe.offload)
    if is_resume:
        run_dir.require_same_recipe(recipe)
    elif not may_overwrite:
        run_dir.require_free()

    work = _prepare(recipe, screen, machine_file)
    screen.show(plan_report.plan_tables(work.plan))
    session = _build(recipe, work)
    try:
        predicted = _rehearse(work, session, screen)
        first_step = _start(recipe, run_dir, work, session, is_resume=is_resume)
        screen.note(report.promise(predicted, num_steps=work.order.num_steps - first_step))
        report.write_prediction(run_dir.path, first=work.plan, calibrated=predicted)
        if first_step == 0:
            _sample(recipe, run_dir, work, session, screen, when="before")
        last_step = _train(recipe, run_dir, work, session, screen, first_step=first_step)
        peak_bytes = meter.peak_bytes(work.device)
        if last_step == work.order.num_steps:
            _sample(recipe, run_dir, work, session, screen, when="after")
    finally:
        session.engine.detach()
    if last_step == work.order.num_steps:
        adapters.save_adapter(session.model, run_dir.adapter)
        rows = run_dir.read_metrics()
        screen.show(report.write_report(run_dir.path, predicted, rows, peak_bytes=peak_bytes))
    return Outcome(
        run_dir=run_dir.path,
        num_steps=last_step,
        is_interrupted=last_step < work.order.num_steps,
    )


# ------------------------------------------------------------------------- machine, rows and plan


@dataclass(frozen=True, kw_only=True, slots=True)
class _Work:
    """What is known before the model is loaded."""

    device: torch.device
    tokenizer: "PreTrainedTokenizerBase"
    rows: Rows
    order: BatchOrder
    sizes: StepSizes
    plan: Plan

    @property
    def pad_token_id(self) -> int:
        return pad_id(self.tokenizer)

    def micro_batches(self, step: Sequence[Sequence[int]]) -> list[Batch]:
        """Return the micro-batches of some rows."""
        return [
            collate([self.rows.train[i] for i in part], pad_token_id=self.pad_token_id)
            for part in step
        ]


def _prepare(recipe: Recipe, screen: Screen, machine_file: Path | None) -> _Work:
    device = torch.device(preflight.torch_device_name(recipe.offload))
    facts = facts_of(recipe.model)
    if machine_file is None:
        screen.note("Measuring this machine ...")
        machine = probe(device=device.type, seconds=PROBE_S, dtype=recipe.model.dtype)
    else:
        machine = find_machine(str(machine_file))
    preflight.require_ready(recipe, facts, machine)
    tokenizer = load_tokenizer(recipe.model.tokenizer_source)
    rows = load_rows(
        recipe.data,
        tokenizer,
        seq_len=recipe.train.seq_len,
        seed=recipe.train.seed,
        cache_dir=cache_dir(),
    )
    for note in rows.notes:
        screen.note(note)
    order = row_order(recipe.train, rows.train)
    sizes = StepSizes.of(order, rows.train)
    return _Work(
        device=device,
        tokenizer=tokenizer,
        rows=rows,
        order=order,
        sizes=sizes,
        plan=plan(facts, machine, request_for(recipe, facts, sizes)),
    )


# ------------------------------------------------------------------------------- model and engine


@dataclass(frozen=True, kw_only=True, slots=True)
class _Session:
    """The model on its engine, and what trains."""

    model: "PeftModel"
    engine: Engine
    loop: Loop
    trained: dict[str, nn.Parameter]


def _build(recipe: Recipe, work: _Work) -> _Session:
    base = load_model(
        path=recipe.model.path,
        config=recipe.model.config,
        init=recipe.model.init,
        dtype=recipe.model.dtype,
        device=work.device.type,
        seed=recipe.train.seed,
    )
    model = adapters.add_lora(
        base,
        rank=recipe.adapter.rank,
        alpha=recipe.adapter.alpha,
        dropout=recipe.adapter.dropout,
        targets=recipe.adapter.targets,
        has_experts=recipe.adapter.experts,
        seed=recipe.train.seed,
    )
    model.train()
    trained = adapters.trained(model)
    engine = offload.attach(
        model,
        num_slots=work.plan.num_slots,
        device=str(work.device),
        head_chunk_tokens=work.plan.request.typical.head_chunk_tokens,
    )
    loop = Loop(
        model=model,
        engine=engine,
        parameters=list(trained.values()),
        train=recipe.train,
        num_steps=work.order.num_steps,
    )
    return _Session(model=model, engine=engine, loop=loop, trained=trained)


def _rehearse(work: _Work, session: _Session, screen: Screen) -> Plan:
    """Find out whether the longest batch fits, and how long a typical step takes here."""
    screen.note("Trying the longest batch, then timing a typical step ...")
    meter.reset_peak(work.device)
    record = session.loop.rehearse(
        work.micro_batches(work.order.longest_step()),
        work.micro_batches(work.order.step(work.sizes.typical_step)),
    )
    costs = calibrate(work.plan.costs, record.timeline, optimizer_s=record.optimizer_s)
    return with_costs(work.plan, costs)


def _start(
    recipe: Recipe, run_dir: RunDir, work: _Work, session: _Session, *, is_resume: bool
) -> int:
    """Return the first step to run: 0, or the one behind the newest checkpoint."""
    if not is_resume:
        run_dir.start(recipe)
        return 0
    step = run_dir.newest() or 0
    run_dir.drop_metrics_after(step)
    if step:
        run_dir.load(step, session.trained, session.loop.optimizer, data_hash=work.rows.data_hash)
    return step


# ------------------------------------------------------------------------------------------ steps


def _train(
    recipe: Recipe,
    run_dir: RunDir,
    work: _Work,
    session: _Session,
    screen: Screen,
    *,
    first_step: int,
) -> int:
    """Run the steps that are left; return how many are done, fewer than all after a Ctrl-C."""
    output, num_steps = recipe.output, work.order.num_steps
    done, timeline = first_step, Timeline(spans=())

    def save() -> None:
        run_dir.save(
            done,
            session.trained,
            session.loop.optimizer,
            data_hash=work.rows.data_hash,
            num_kept=output.keep_checkpoints,
        )

    loader = StepLoader(
        work.rows.train,
        work.order,
        start_step=first_step,
        pad_token_id=work.pad_token_id,
        num_workers=recipe.data.num_workers,
    )
    recorder = Recorder(run_dir, log_to=recipe.report.log_to, name=output.name)
    with (
        loader,
        recorder,
        screen.steps(done=first_step, total=num_steps) as bar,
        _interrupts() as interrupts,
    ):
        for batch in loader:
            is_profiled = recipe.report.profile == batch.step + 1
            with profiled(run_dir.path / "profile" if is_profiled else None):
                record = session.loop.step(batch.step, batch.micro_batches)
            done, timeline = batch.step + 1, record.timeline
            row = report.metrics_row(record, step=done, data_wait_s=batch.wait_s)
            if work.rows.held_out and output.eval_every and done % output.eval_every == 0:
                row["eval_loss"] = session.loop.validation_loss(
                    work.rows.held_out, pad_token_id=work.pad_token_id
                )
            recorder.write(row)
            bar.advance(
                loss=record.loss,
                num_tokens=record.num_tokens,
                seconds=record.step_s + batch.wait_s,
            )
            is_due = bool(output.checkpoint_every) and done % (output.checkpoint_every or 1) == 0
            if is_due or interrupts or done == num_steps:
                save()
            if interrupts:
                break
    if timeline.spans:
        write_atomically(run_dir.path / "measured_timeline.json", timeline.to_json())
    return done


@contextmanager
def _interrupts() -> Iterator[list[int]]:
    """Collect the first Ctrl-C, so that the step at hand ends; a second one stops at once."""
    received: list[int] = []

    def note(number: int, _frame: FrameType | None) -> None:
        if received:
            raise KeyboardInterrupt
        received.append(number)

    before = signal.signal(signal.SIGINT, note)
    try:
        yield received
    finally:
        signal.signal(signal.SIGINT, before)


def _sample(
    recipe: Recipe,
    run_dir: RunDir,
    work: _Work,
    session: _Session,
    screen: Screen,
    *,
    when: str,
) -> None:
    """Answer held-out rows, show some, and write all of them down."""
    asked = work.rows.held_out_rows[: recipe.report.samples]
    if not asked:
        return
    answers = answer(asked, model=session.model, engine=session.engine, tokenizer=work.tokenizer)
    screen.show(report.samples_table(when, answers))
    file = run_dir.path / f"samples_{when}.json"
    write_atomically(file, json.dumps(report.samples_json(answers), indent=1))
